"""Every model, cut and streamed through real agents, gives what ONNX Runtime gives for the whole.

The peer is a default session over the whole model. A difference is measured against the size of the
output, for outputs that are not of order one.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from pool import Pool, cut, read_results, running_pool, write_items

from parity_with_whole import TOLERANCE, difference, largest_difference, whole
from real_models import HEAVY, MODELS, PACKAGED, ZOO, find
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.manifest import BLOCKS

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

# Half the precision is all that this model's own tensors carry.
HALF_TOLERANCE = 2e-3
LIGHT_ZOO = tuple(name for name in ZOO if name not in HEAVY)
# One is compared with batches, one with a relay and on nodes; others are of a kind with these.
OFTEN = {"mobilenet_v2", *PACKAGED} - {"ppocr_rec"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    """Three devices with room for anything: here it is about numbers, not about budgets."""
    devices = [{"name": name, "memory": "1Gi"} for name in ("one", "two", "three")]
    async with running_pool(tmp_path_factory.mktemp("pool"), devices, cgroups=False) as running:
        yield running


def cuttings(names: tuple[str, ...]) -> list[tuple[str, int]]:
    return [(name, count) for name in names for count in (2, 3, 5) if count <= MODELS[name].finest]


def mostly_later(names: tuple[str, ...]) -> list[object]:
    """Into 3 in every check; other numbers, and models that are like those, with `minutes`."""
    return [
        pytest.param(name, count, marks=[] if count == 3 and name in OFTEN else pytest.mark.minutes)
        for name, count in cuttings(names)
    ]


@pytest.mark.parametrize(("name", "fragments"), mostly_later(PACKAGED))
async def test_models_out_of_packages(
    pool: Pool, tmp_path: Path, name: str, fragments: int
) -> None:
    tolerance = HALF_TOLERANCE if name.endswith("half") else TOLERANCE
    assert await difference(pool, name, fragments, tmp_path) <= tolerance


@pytest.mark.parametrize(("name", "fragments"), mostly_later(LIGHT_ZOO))
async def test_models_of_the_zoo(pool: Pool, tmp_path: Path, name: str, fragments: int) -> None:
    assert await difference(pool, name, fragments, tmp_path) <= TOLERANCE


@pytest.mark.minutes
@pytest.mark.parametrize(("name", "fragments"), cuttings(tuple(sorted(HEAVY))))
async def test_heavy_models_of_the_zoo_in_every_number_of_fragments(
    pool: Pool, tmp_path: Path, name: str, fragments: int
) -> None:
    assert await difference(pool, name, fragments, tmp_path) <= TOLERANCE


@pytest.mark.parametrize("name", ["minilm_l6", pytest.param("resnet18", marks=pytest.mark.minutes)])
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


@pytest.mark.minutes
async def test_devices_cache_the_blocks_of_their_fragments(pool: Pool, tmp_path: Path) -> None:
    model, path = MODELS["minilm_l6"], find("minilm_l6")
    document = cut(path, pool.store, 2, model.shapes())
    inputs = write_items(tmp_path / "in", [model.inputs(0)])
    homes = [["one"], ["two"]]
    await pool.run("with-blocks", document, inputs, tmp_path / "out", homes=homes)
    for fragment, (device,) in zip(document.fragments, homes, strict=True):
        stored = FragmentStore(pool.store)
        cached = FragmentStore(pool.workspace.cache(device))
        assert cached.manifest(fragment.digest).blocks
        cached.verify(fragment.digest)
        place = stored.folder(fragment.digest) / BLOCKS
        assert (cached.folder(fragment.digest) / BLOCKS).read_bytes() == place.read_bytes()
