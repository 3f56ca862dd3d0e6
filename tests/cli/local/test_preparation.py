"""Where a model is cut that the devices decide the cut of."""

from pathlib import Path

import pytest

from made_models import Made, weight
from shoal_cli.local.orders import CutOrder
from shoal_cli.local.preparation import cut_into_store, partition_path
from shoal_planner.costs import PoolDevice
from shoal_protocol.partition import PartitionDocument, document_from_json
from shoal_protocol.units import Bytes

MIB = 1 << 20
LAYERS = 24
DEEP = Made(
    text="agraph (float[1, 512] x) => (float[1, 512] y) {\n"
    + "\n".join(
        f"{'y' if layer == LAYERS else f't{layer}'} = MatMul ("
        f"{'x' if layer == 1 else f't{layer - 1}'}, W{layer})"
        for layer in range(1, LAYERS + 1)
    )
    + "\n}",
    weights={f"W{layer}": weight(512, 512, seed=layer) for layer in range(1, LAYERS + 1)},
    shapes={"x": (1, 512)},
)
"""Layers of 1 MiB each."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DEEP.save(tmp_path_factory.mktemp("model"))


def cut(model: Path, folder: Path, *budgets_mib: int, pinned: bool = False) -> PartitionDocument:
    devices = tuple(
        PoolDevice(name=f"d{number}", budget_bytes=Bytes(size * MIB))
        for number, size in enumerate(budgets_mib)
    )
    order = CutOrder(name="deep", model="deep", path=model, devices=devices, pinned=pinned)
    cut_into_store(order, folder, lambda done, total: None)
    return document_from_json(partition_path(folder, "deep").read_bytes())


def test_a_model_that_one_device_cannot_hold_runs_there_whole_in_blocks(
    model: Path, tmp_path: Path
) -> None:
    document = cut(model, tmp_path, 16)
    (fragment,) = document.fragments
    assert fragment.least_bytes <= 16 * MIB < fragment.resident_bytes
    stored = list(tmp_path.glob("fragments/*/fragment.json"))
    assert len(stored) == 1, "what was only tried is not stored"


def test_a_model_that_the_devices_can_hold_together_is_cut_so_that_they_do(
    model: Path, tmp_path: Path
) -> None:
    document = cut(model, tmp_path, 16, 16, 16)
    assert 1 < len(document.fragments) <= 3
    assert all(each.resident_bytes <= 16 * MIB for each in document.fragments)


def test_fragments_that_are_tied_to_devices_stay_as_fine_as_the_budget_asks(
    model: Path, tmp_path: Path
) -> None:
    assert len(cut(model, tmp_path, 16, pinned=True).fragments) > 1


def test_a_cut_that_was_chosen_is_used_again_until_the_devices_change(
    model: Path, tmp_path: Path
) -> None:
    def order(size: int) -> CutOrder:
        devices = (PoolDevice(name="d", budget_bytes=Bytes(size * MIB)),)
        return CutOrder(name="deep", model="deep", path=model, devices=devices)

    def is_warm(size: int) -> object:
        return cut_into_store(order(size), tmp_path, lambda done, total: None)["warm"]

    assert [is_warm(16), is_warm(16), is_warm(17), is_warm(40)] == [False, True, False, False]
