"""A Partition that says no size follows its pool's budgets, on a real API server."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from pool import read_results, write_items

from controller.jobs import final_events, succeeded
from made_models import Tensors, deep
from operator_processes import Operators
from parity_with_whole import TOLERANCE, largest_difference, whole
from shoal_cluster import ControlPlane
from simulated_world import DEVICES, World, job_spec, making_world, operating

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.own_plane,
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.minutes,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]
ITEMS = 30
LESS = 6 << 20
"""The model in one fragment takes 6.8 MiB in blocks."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    plane: ControlPlane, account: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """Devices of 14 MiB, with slow links."""
    folder = tmp_path_factory.mktemp("world")
    async with making_world(plane, folder, "14Mi", latency_milliseconds=100) as made:
        yield made


def apply_job(world: World, name: str) -> None:
    spec = job_spec(
        placementRef={"name": "deep"},
        inputs={"uri": "pvc://lines/deep"},
        outputs={"uri": f"pvc://lines/{name}"},
        parallelism=1,
    )
    del spec["modelRef"], spec["poolRef"]
    world.apply("InferenceJob", name, **spec)


def digests(world: World) -> list[str]:
    fragments = world.get("partition", "deep").get("status", {}).get("fragments", [])
    return [each["digest"] for each in fragments]


async def test_between_jobs_a_partition_is_cut_for_what_devices_have_then(
    world: World, running: Operators
) -> None:
    path = deep().save(world.claims / "models").rename(world.claims / "models" / "deep.onnx")
    inputs: list[Tensors] = [
        {"x": np.random.default_rng(item).random((1, 512), np.float32)} for item in range(ITEMS)
    ]
    write_items(world.claims / "lines" / "deep", inputs)
    world.apply_devices()
    world.apply("Model", "deep", source={"uri": "pvc://models/deep.onnx"})
    world.apply("Partition", "deep", modelRef={"name": "deep"})
    world.apply("Placement", "deep", partitionRef={"name": "deep"}, poolRef={"name": "shelf"})
    with operating(running, world):
        apply_job(world, "first")
        await world.until("some have finished", lambda: succeeded(world, "first") > 0)
        before = digests(world)
        world.patch("DevicePool", "shelf", budget={"memory": "64Mi"})
        await world.wait("inferencejob", "first", "Complete")
        assert "CutAnew" not in await final_events(world, "first")
        await world.until("it is cut anew", lambda: digests(world) not in ([], before))
        after = digests(world)
        apply_job(world, "second")
        await world.wait("inferencejob", "second", "Complete")
        assert digests(world) == after
        await world.pool.end_devices()
        for name in DEVICES:
            await world.pool.start_device(name, LESS)
        world.patch("DevicePool", "shelf", budget={"memory": str(LESS)})
        apply_job(world, "third")
        await world.wait("inferencejob", "third", "Complete")
    assert len(before) > len(after) == 1
    for name in ("first", "second", "third"):
        results = read_results(world.claims / "lines" / name)
        for given, right in zip(results, whole(path, inputs), strict=True):
            assert largest_difference(given, right) <= TOLERANCE
