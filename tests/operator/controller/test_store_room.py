"""A model is cut anew while a job runs by the old cut, and the store has no room for both: on a
real API server, with a real pool."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from pool import read_results, write_items

from controller.jobs import events_of, final_events, status_of, succeeded
from made_models import Tensors, deep
from operator_processes import Operators
from parity_with_whole import TOLERANCE, largest_difference, whole
from shoal_cluster import ControlPlane
from simulated_world import World, job_spec, making_world, operating
from small_disk import small_disk

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.own_plane,
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.minutes,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]
ITEMS = 300
LAYERS = 24
"""Of a MiB each."""
DISK = "56m"
"""16 MiB of it are kept free, and one cut takes 24 of the others."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    plane: ControlPlane, account: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """Devices with slow links, and a coordinator with a small disk."""
    folder = tmp_path_factory.mktemp("world")
    with small_disk(folder / "pool" / "store", DISK):
        async with making_world(plane, folder, latency_milliseconds=50) as made:
            yield made


def job_by(partition: str, inputs: str, **more: object) -> dict[str, object]:
    spec = job_spec(
        partitionRef={"name": partition},
        inputs={"uri": f"pvc://lines/{inputs}"},
        outputs={"uri": f"pvc://lines/{inputs}-out"},
        **more,
    )
    del spec["modelRef"]
    return spec


async def test_the_run_ends_by_the_old_cut_and_the_next_job_has_the_new_one(
    world: World, running: Operators
) -> None:
    path = deep(LAYERS).save(world.claims / "models").rename(world.claims / "models" / "deep.onnx")
    inputs: list[Tensors] = [
        {"x": np.random.default_rng(item).random((1, 512), np.float32)} for item in range(ITEMS)
    ]
    write_items(world.claims / "lines" / "many", inputs)
    write_items(world.claims / "lines" / "few", inputs[:3])
    world.apply_devices()
    world.apply("Model", "deep", source={"uri": "pvc://models/deep.onnx"})
    world.apply("Partition", "deep", modelRef={"name": "deep"}, fragments=2)

    def planned(name: str) -> str:
        return str(world.condition("inferencejob", name, "Planned").get("reason"))

    def complete(name: str) -> str:
        return str(world.condition("inferencejob", name, "Complete").get("reason"))

    with operating(running, world):
        world.apply("InferenceJob", "old", **job_by("deep", "many", parallelism=1))
        await world.until("some have finished", lambda: succeeded(world, "old") > 0, 500)
        world.patch("partition", "deep", fragments=3)
        await world.until("it waits for room", lambda: planned("old") == "WaitingForRoom", 500)
        said = world.condition("inferencejob", "old", "Planned")
        assert said["status"] == "True"
        assert "Partition deep would need 24" in said["message"]
        assert "raise spec.coordinator.storage.size of DevicePool shelf" in said["message"]
        assert status_of(world, "old")["items"]["succeeded"] < ITEMS, "it was not over before"
        world.apply("InferenceJob", "new", **job_by("deep", "few"))
        await world.until("the next waits too", lambda: complete("new") == "WaitingForRoom")
        await world.wait("inferencejob", "old", "Complete", 600)
        await world.wait("inferencejob", "new", "Complete", 400)
        events = await final_events(world, "old")
    assert events["WaitingForRoom"] == events_of(world, "new")["WaitingForRoom"] == "Warning"
    assert "CutAnew" not in events
    for name, given in (("many", inputs), ("few", inputs[:3])):
        results = read_results(world.claims / "lines" / f"{name}-out")
        for one, right in zip(results, whole(path, given), strict=True):
            assert largest_difference(one, right) <= TOLERANCE
