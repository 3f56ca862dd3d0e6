"""Jobs that follow their inputs, on a real API server, with a pool that really runs."""

from collections.abc import Iterator

import pytest
from pool import read_results, write_items

from controller.jobs import status_of, succeeded, workers_of
from operator_processes import Operators
from parity_with_whole import TOLERANCE, largest_difference, whole
from real_models import MODELS, find
from simulated_world import MODEL, World, job_spec, operating

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.own_plane,
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.minutes,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(autouse=True)
def operator(world: World, running: Operators) -> Iterator[None]:
    """What every job refers to, and who serves it."""
    with operating(running, world):
        world.apply_pool()
        yield


async def test_a_job_that_follows_takes_what_comes_until_its_end_is_said(world: World) -> None:
    lines = world.claims / "lines"
    inputs = [MODELS[MODEL].inputs(seed) for seed in range(4)]
    write_items(lines / "film", inputs)
    frames = sorted((lines / "film").glob("*.npz"))
    (lines / "camera").mkdir()
    frames[0].rename(lines / "camera" / frames[0].name)
    spec = job_spec(
        inputs={"uri": "pvc://lines/camera", "follow": True}, outputs={"uri": "pvc://lines/seen"}
    )
    world.apply("InferenceJob", "camera", **spec)
    await world.until("the first is done", lambda: succeeded(world, "camera") == 1)
    for frame in frames[1:3]:
        frame.rename(lines / "camera" / frame.name)
    await world.until("what came is done", lambda: succeeded(world, "camera") == 3)
    await world.until("results come", lambda: len(list((lines / "seen").glob("*.npz"))) == 3)
    assert "3/3+" in world.kubectl("get", "ij", "camera").splitlines()[1].split()
    assert {"follow-inputs", "follow-results"} <= workers_of(world, "camera")
    frames[3].rename(lines / "camera" / frames[3].name)
    world.patch("ij", "camera", end=True)
    await world.wait("inferencejob", "camera", "Complete")
    assert status_of(world, "camera")["items"]["total"] == 4
    results = read_results(lines / "seen")
    for given, right in zip(results, whole(find(MODEL), inputs), strict=True):
        assert largest_difference(given, right) <= TOLERANCE


async def test_a_job_whose_last_inputs_do_not_come_fails_and_a_retry_takes_them(
    world: World,
) -> None:
    lines = world.claims / "lines"
    inputs = [MODELS[MODEL].inputs(seed) for seed in range(3)]
    write_items(lines / "reel", inputs)
    frames = sorted((lines / "reel").glob("*.npz"))
    (lines / "gate").mkdir()
    frames[0].rename(lines / "gate" / frames[0].name)
    spec = job_spec(
        inputs={"uri": "pvc://lines/gate", "follow": True}, outputs={"uri": "pvc://lines/shown"}
    )
    world.apply("InferenceJob", "reel", **spec)
    await world.until("the first is done", lambda: succeeded(world, "reel") == 1)
    (lines / "gate").rename(lines / "shut")
    world.patch("ij", "reel", end=True)
    await world.wait("inferencejob", "reel", "Failed")
    assert world.condition("inferencejob", "reel", "Failed")["reason"] == "InputTransferFailed"
    assert len(list((lines / "shown").glob("*.npz"))) == 1, "the results so far are transferred"
    (lines / "shut").rename(lines / "gate")
    for frame in frames[1:]:
        frame.rename(lines / "gate" / frame.name)
    world.patch("ij", "reel", retry={"number": 1})
    await world.wait("inferencejob", "reel", "Complete")
    assert status_of(world, "reel")["items"]["total"] == 3
    results = read_results(lines / "shown")
    for given, right in zip(results, whole(find(MODEL), inputs), strict=True):
        assert largest_difference(given, right) <= TOLERANCE
