"""`shoal run` and `shoal plan` with cuts that the plan chooses, for devices that are unequal."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import yaml

from cli.local.workbench import Workbench
from made_models import deep
from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.known_cuts import find_known
from shoal_cli.local.manifests import manifests_of
from shoal_cli.local.orders import OrderRefused, read_orders
from shoal_cli.local.preparation import cut_into_store, partition_path
from shoal_planner.devices import PoolDevice
from shoal_planner.goal import Goal
from shoal_planner.outcome import Plan
from shoal_planner.placement import plan
from shoal_planner.sharing import Taken, left_over
from shoal_protocol.choices import Objective
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.partition import PartitionDocument, document_from_json
from shoal_protocol.units import Bytes

MIB = 1 << 20
ITEMS = 4
MANIFEST = """\
apiVersion: shoal.dev/v1alpha1
kind: Model
metadata: {name: deep}
spec:
  source: {uri: model.onnx}
---
apiVersion: shoal.dev/v1alpha1
kind: Partition
metadata: {name: deep}
spec: {modelRef: {name: deep}, cutting: Planned}
---
apiVersion: shoal.dev/v1alpha1
kind: DevicePool
metadata: {name: shelf}
spec:
  local:
    devices:
    - {name: small, memory: 13Mi, cpus: 250m}
    - {name: middle, memory: 16Mi, cpus: 500m}
    - {name: large, memory: 20Mi, cpus: "1"}
  budget: {memory: 20Mi}
---
apiVersion: shoal.dev/v1alpha1
kind: Placement
metadata: {name: deep}
spec:
  partitionRef: {name: deep}
  poolRef: {name: shelf}
---
apiVersion: shoal.dev/v1alpha1
kind: InferenceJob
metadata: {name: job}
spec:
  placementRef: {name: deep}
  inputs: {uri: in}
  outputs: {uri: out}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deep().save(tmp_path_factory.mktemp("model"))


def cut(
    model: Path,
    store: Path,
    devices: tuple[PoolDevice, ...],
    *,
    planned: bool,
    beside: tuple[PoolDevice, ...] = (),
) -> PartitionDocument:
    order = CutOrder(
        name="deep", model="deep", path=model, devices=devices, planned=planned, beside=beside
    )
    cut_into_store(order, store, lambda done, total: None)
    return document_from_json(partition_path(store, "deep").read_bytes())


def unequal(*devices: tuple[int, int]) -> tuple[PoolDevice, ...]:
    """Devices of so many MiB, so many times as fast as the slowest."""
    return tuple(
        PoolDevice(
            name=f"d{number}", budget_bytes=Bytes(size * MIB), flops_per_second=times * 10**9
        )
        for number, (size, times) in enumerate(devices)
    )


@pytest.mark.parametrize(
    "devices",
    [
        unequal((13, 1), (13, 1), (13, 1)),
        unequal((13, 1), (16, 2), (20, 4)),
        unequal((10, 4), (20, 1)),
        unequal((8, 1), (8, 2)),
        unequal((64, 1), (64, 1)),
    ],
)
def test_a_planned_cut_is_never_worse_than_one_that_only_fits(
    model: Path, tmp_path: Path, devices: tuple[PoolDevice, ...]
) -> None:
    goal = Goal(Objective.THROUGHPUT)

    @functools.cache
    def value(*, planned: bool) -> int:
        document = cut(model, tmp_path / str(planned), devices, planned=planned)
        found = plan(document, devices, goal.objective)
        assert isinstance(found, Plan)
        assert found.period_nanoseconds is not None
        assert found.latency_nanoseconds is not None
        return goal.value(found.period_nanoseconds, found.latency_nanoseconds)

    assert value(planned=True) <= value(planned=False)


def test_a_fast_device_gets_more_of_the_model_than_a_slow_one(model: Path, tmp_path: Path) -> None:
    document = cut(model, tmp_path, unequal((20, 1), (20, 2)), planned=True)
    sizes = sorted(each.weight_bytes for each in document.fragments)
    assert len(sizes) == 2
    assert sizes[1] > 1.5 * sizes[0]


def test_beside_another_model_a_device_gets_less_of_the_model(model: Path, tmp_path: Path) -> None:
    """The first of two equal devices is busy three quarters of the time, and so has a quarter."""
    pool = unequal((20, 4), (20, 4))
    beside = left_over(pool, {"d0": Taken(held_bytes=0, busy=0.75)})
    document = cut(model, tmp_path, pool, planned=True, beside=beside)
    assert len(document.fragments) == 2
    parts = sorted(each.weight_bytes for each in document.fragments)
    assert parts[1] > 1.5 * parts[0]
    found = plan(document, beside, Objective.THROUGHPUT)
    assert isinstance(found, Plan)
    larger = max(document.fragments, key=lambda each: each.weight_bytes)
    assert found.homes()[larger.index] == ("d1",)


def test_what_fits_not_beside_another_model_is_cut_as_if_it_were_alone(
    model: Path, tmp_path: Path
) -> None:
    pool = unequal((20, 1), (20, 2))
    full = left_over(pool, {name: Taken(held_bytes=18 * MIB, busy=0.0) for name in ("d0", "d1")})
    beside = cut(model, tmp_path / "beside", pool, planned=True, beside=full)
    assert beside == cut(model, tmp_path / "alone", pool, planned=True)


def test_a_planned_cut_is_used_again_until_the_devices_change(model: Path, tmp_path: Path) -> None:
    def is_warm(*devices: tuple[int, int]) -> object:
        order = CutOrder(
            name="deep", model="deep", path=model, devices=unequal(*devices), planned=True
        )
        return cut_into_store(order, tmp_path, lambda done, total: None)["warm"]

    pools = [((20, 1), (20, 1)), ((20, 1), (20, 1)), ((20, 1), (20, 3))]
    assert [is_warm(*pool) for pool in pools] == [False, True, False]


def test_a_cut_for_a_makespan_is_planned_anew_for_another_number_of_inputs(
    model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    order = CutOrder(
        name="deep",
        model="deep",
        path=model,
        sample=folder,
        devices=unequal((20, 1), (20, 1)),
        planned=True,
        objective=Objective.MAKESPAN,
    )
    store = FragmentStore(tmp_path)
    path = partition_path(tmp_path, "deep")
    for number in (None, 1, 2):  # the first time there are none, which nobody can count
        if number is not None:
            np.save(folder / f"{number}.npy", np.zeros((1, 512), np.float32))
        assert find_known(path, order, store) is None
        assert cut_into_store(order, tmp_path, lambda done, total: None)["warm"] is False
        assert json.loads(path.with_name("source.json").read_bytes())["items"] == number
    assert find_known(path, order, store) is not None


def test_pins_and_planned_cuts_do_not_go_together(tmp_path: Path) -> None:
    text = MANIFEST.replace(
        "  poolRef: {name: shelf}\n---",
        "  poolRef: {name: shelf}\n  pins: [{fragment: 0, device: small}]\n---",
    )
    (tmp_path / "in").mkdir()
    with pytest.raises(OrderRefused, match=r"cutting: Planned.*; remove the pins, or write"):
        read_orders(_manifests(tmp_path, text), {})


def _manifests(folder: Path, text: str) -> Any:
    return manifests_of(str(folder / "job.yaml"), list(yaml.safe_load_all(text)))


@pytest.mark.real
@pytest.mark.timeout(150)
def test_a_run_on_unequal_devices_is_cut_by_its_plan_and_gives_the_whole_models_results(
    tmp_path: Path,
) -> None:
    path = deep().save(tmp_path)
    (tmp_path / "in").mkdir()
    inputs = [np.random.default_rng(item).random((1, 512), np.float32) for item in range(ITEMS)]
    for item, x in enumerate(inputs):
        np.savez(tmp_path / "in" / f"{item}.npz", x=x)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "NO_COLOR": "1"}
    bench = Workbench(folder=tmp_path, environment=environment)
    bench.manifest.write_text(MANIFEST)
    ran = bench.run("run", bench.manifest, "--report", bench.report)
    assert ran.status == 0, ran.err
    document = json.loads(next(tmp_path.rglob("partition.json")).read_bytes())
    assert len(document["fragments"]) > 1
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for item, x in enumerate(inputs):
        with np.load(tmp_path / "out" / f"{item}.npz") as results:
            expected = session.run(None, {"x": x})[0]
            np.testing.assert_allclose(results["y"], expected, rtol=0, atol=1e-5)


@pytest.mark.real
@pytest.mark.timeout(150)
def test_the_plan_of_a_second_model_says_what_the_first_leaves(tmp_path: Path) -> None:
    deep().save(tmp_path)
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in" / "0.npz", x=np.zeros((1, 512), np.float32))
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "NO_COLOR": "1"}
    bench = Workbench(folder=tmp_path, environment=environment)
    first = MANIFEST.replace("16Mi", "32Mi").replace("20Mi", "40Mi")
    model, partition, _, placement, job = first.split("---\n")
    second = "---\n".join([model, partition, placement, job])
    second = second.replace("name: deep", "name: other").replace("name: job", "name: next")
    second = second.replace("uri: out", "uri: there")
    bench.manifest.write_text(f"{first}---\n{second}")
    shown = bench.command("plan", bench.manifest, "--output", "json")
    assert shown.status == 0, shown.err
    plans = {each["name"]: each for each in json.loads(shown.out)["plans"]}
    ours, theirs = (plans[f"InferenceJob {name}"]["plan"] for name in ("job", "next"))
    budgets = {"small": 13 * MIB, "middle": 32 * MIB, "large": 40 * MIB}
    for each in (each for stage in ours["stages"] for each in stage["devices"]):
        budgets[each["device"]] -= each["held_bytes"]
    for each in (each for stage in theirs["stages"] for each in stage["devices"]):
        assert each["budget_bytes"] == budgets[each["device"]]
    table = bench.command("plan", bench.manifest)
    assert "other models leave" in " ".join(table.out.split())
