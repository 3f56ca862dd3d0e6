"""Every model, cut and streamed through real agents, gives what ONNX Runtime gives for the whole of it.

The peer is a default session over the whole model. A difference is measured against the size of the
output, for outputs that are not of order one.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import pytest_asyncio
from pool import Pool, cut, read_results, running_pool, write_items
from real_models import MODELS, PACKAGED, ZOO, Tensors, find

from shoal_protocol.v1 import coordinator_pb2 as pb

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

TOLERANCE = 1e-5
ITEMS = 2
# Half the precision is all that this model's own tensors carry.
HALF_TOLERANCE = 2e-3
SMALL_ZOO = tuple(name for name in ZOO if name not in ("gpt2", "vit_base_16", "yolov3"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    """Three devices with room for anything: here it is about numbers, not about budgets."""
    devices = [{"name": name, "memory": "1Gi"} for name in ("one", "two", "three")]
    async with running_pool(tmp_path_factory.mktemp("pool"), devices, cgroups=False) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def relayed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    """The same, where no agent can reach another."""
    devices = [{"name": name, "memory": "1Gi"} for name in ("one", "two", "three")]
    folder = tmp_path_factory.mktemp("relayed")
    async with running_pool(folder, devices, cgroups=False, relay=True) as running:
        yield running


def whole(path: Path, items: list[Tensors]) -> list[dict[str, np.ndarray]]:
    """What a default session over the whole model gives."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    taken = {value.name for value in session.get_inputs()}
    return [
        dict(zip(names, session.run(names, {n: v for n, v in item.items() if n in taken}), strict=True))
        for item in items
    ]


def largest_difference(given: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Over all outputs, against the size of each (at least one)."""
    assert given.keys() == expected.keys()
    worst = 0.0
    for name, value in expected.items():
        assert given[name].shape == value.shape
        assert given[name].dtype == value.dtype
        if value.size:
            size = max(1.0, float(np.abs(value.astype(np.float64)).max()))
            gap = np.abs(given[name].astype(np.float64) - value.astype(np.float64)).max()
            worst = max(worst, float(gap) / size)
    return worst


async def difference(pool: Pool, name: str, fragments: int, folder: Path) -> float:
    """Cut a model, stream items through the pool, compare."""
    model, path = MODELS[name], find(name)
    document = cut(path, pool.store, fragments, model.shapes())
    assert len(document.fragments) == fragments
    items = [model.inputs(seed) for seed in range(ITEMS)]
    inputs = write_items(folder / "in", items)
    job = f"{name.replace('_', '-')}-{fragments}"
    homes = [[pool.device_names[index % len(pool.device_names)]] for index in range(fragments)]
    status = await pool.run(job, document, inputs, folder / "out", homes=homes)
    assert status.state == pb.JobStatus.COMPLETE, status
    results, expected = read_results(folder / "out"), whole(path, items)
    return max(largest_difference(a, b) for a, b in zip(results, expected, strict=True))


def cuttings(names: tuple[str, ...]) -> list[tuple[str, int]]:
    return [(name, count) for name in names for count in (2, 3, 5) if count <= MODELS[name].finest]


@pytest.mark.parametrize(("name", "fragments"), cuttings(PACKAGED))
async def test_models_out_of_packages(pool: Pool, tmp_path: Path, name: str, fragments: int) -> None:
    tolerance = HALF_TOLERANCE if name.endswith("half") else TOLERANCE
    assert await difference(pool, name, fragments, tmp_path) <= tolerance


@pytest.mark.parametrize(("name", "fragments"), cuttings(SMALL_ZOO))
async def test_models_of_the_zoo(pool: Pool, tmp_path: Path, name: str, fragments: int) -> None:
    assert await difference(pool, name, fragments, tmp_path) <= TOLERANCE


@pytest.mark.parametrize("name", ["gpt2", "vit_base_16", "yolov3"])
async def test_large_models_of_the_zoo(pool: Pool, tmp_path: Path, name: str) -> None:
    assert await difference(pool, name, 5, tmp_path) <= TOLERANCE


@pytest.mark.parametrize("name", ["ppocr_rec", "silero_vad", "squeezenet1_1"])
async def test_activations_through_the_coordinator(relayed: Pool, tmp_path: Path, name: str) -> None:
    assert await difference(relayed, name, 3, tmp_path) <= TOLERANCE


@pytest.mark.parametrize("name", ["minilm_l6", "resnet18"])
async def test_batches_and_lengths_that_differ_between_items(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    model, path = MODELS[name], find(name)
    document = cut(path, pool.store, 3, model.shapes())
    items = [
        {key: np.repeat(value, batch, axis=0) for key, value in model.inputs(seed).items()}
        for seed, batch in enumerate((1, 3, 2))
    ]
    inputs = write_items(tmp_path / "in", items)
    job = f"batches-{name.replace('_', '-')}"
    status = await pool.run(job, document, inputs, tmp_path / "out")
    assert status.succeeded == 3, status
    for given, expected in zip(read_results(tmp_path / "out"), whole(path, items), strict=True):
        assert largest_difference(given, expected) <= TOLERANCE
