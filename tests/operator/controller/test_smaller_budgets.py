"""Devices have less than before while a job runs, on a real API server, with a real pool."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from pool import read_results, write_items

from controller.jobs import final_events, run_of, status_of, succeeded
from made_models import Tensors, deep
from operator_processes import Operators
from parity_with_whole import TOLERANCE, largest_difference, whole
from shoal_cluster import ControlPlane
from shoal_protocol.v1 import coordinator_pb2 as pb
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
ITEMS = 40
JOB = "deep"
LESS = 6 << 20
"""The model in one fragment takes 6.8 MiB in blocks."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(
    plane: ControlPlane, account: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    """Devices of 48 MiB, with slow links."""
    folder = tmp_path_factory.mktemp("world")
    async with making_world(plane, folder, latency_milliseconds=100) as made:
        yield made


def fragments_of(world: World, device: str) -> list[dict[str, Any]]:
    """What a Device says that plans give to it."""
    found: list[dict[str, Any]] = world.get("device", f"shelf-{device}")["status"].get(
        "fragments", []
    )
    return found


async def test_a_job_goes_on_in_smaller_budgets_without_a_device_that_is_lost(
    world: World, running: Operators
) -> None:
    """The DevicePool says what it said before: what devices report counts."""
    path = deep().save(world.claims / "models").rename(world.claims / "models" / "deep.onnx")
    inputs: list[Tensors] = [
        {"x": np.random.default_rng(item).random((1, 512), np.float32)} for item in range(ITEMS)
    ]
    write_items(world.claims / "lines" / JOB, inputs)
    world.apply_devices()
    world.apply("Model", JOB, source={"uri": f"pvc://models/{JOB}.onnx"})
    spec = job_spec(modelRef={"name": JOB}, inputs={"uri": f"pvc://lines/{JOB}"}, parallelism=1)
    with operating(running, world):
        world.apply("InferenceJob", JOB, **spec)
        await world.until("some have finished", lambda: succeeded(world, JOB) > 0)
        placed = world.get("placement", JOB)["status"]["budgets"]
        assert sorted(name for each in placed for name in each["devices"]) == sorted(DEVICES)
        assert all(LESS < each["leastBudgetBytes"] < LESS + (2 << 20) for each in placed)
        await world.until("Devices say it, too", lambda: bool(fragments_of(world, DEVICES[0])))
        (known,) = fragments_of(world, DEVICES[0])
        assert (known["placement"], known["fragment"]) == (JOB, 0)
        assert known["leastBudgetBytes"] == placed[0]["leastBudgetBytes"]
        await world.pool.end_devices()
        before = await run_of(world, JOB)
        assert before is not None
        assert before.state == pb.JobStatus.RUNNING
        for name in DEVICES[:2]:
            await world.pool.start_device(name, LESS)
        await world.wait("inferencejob", JOB, "Complete", 400)
        events = await final_events(world, JOB)
    status = status_of(world, JOB)
    assert status["finerCut"]["maxFragmentSizeBytes"] == LESS
    assert "now it is cut for 6 MiB" in status["finerCut"]["message"]
    assert (events["CutFiner"], events["CutAnew"]) == ("Warning", "Normal")
    assert status["items"]["succeeded"] == ITEMS
    assert before.succeeded < ITEMS, "it was not over before"
    partition = world.get("partition", JOB)
    assert partition["spec"]["maxFragmentSize"] in {LESS, str(LESS), "6Mi"}
    results = read_results(world.claims / "lines" / "out")
    for given, right in zip(results, whole(path, inputs), strict=True):
        assert largest_difference(given, right) <= TOLERANCE
