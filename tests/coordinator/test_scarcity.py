"""A lack of open files, or a full disk, is met by trying again later: no job fails of it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from coordinator.scripted import connected, put_model, submission
from coordinator.world import World, running_world
from shoal_coordinator.jobs.values import Tally
from shoal_coordinator.server import CoordinatorSettings, serving
from shoal_coordinator.server.refusals import JobRefused
from shoal_coordinator.storage.catalogues import FixedFiles
from shoal_coordinator.storage.inputs import scan_inputs
from shoal_coordinator.storage.job_records import JobRecord, Ledger
from shoal_coordinator.storage.parts import ResultFile
from shoal_coordinator.storage.results import ResultStore
from shoal_protocol.channels import open_channel
from shoal_protocol.partition import TensorSpec
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorStub
from small_disk import small_disk
from troubled_disk import no_descriptors

LACK = "Too many open files"
IMAGE = (TensorSpec(name="x", dtype="float", shape=(1, 3, "height", "width")),)
FILES = (ResultFile("a.npz", 0, 1), ResultFile("b.npz", 1, 2, stacked=True))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A coordinator without metrics: their server polls, which needs a limit above 0."""
    async with running_world(tmp_path) as world:
        yield world


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_lack_of_descriptors_says_nothing_of_the_inputs(tmp_path, save) -> None:  # type: ignore[no-untyped-def]
    rows = np.random.default_rng(1).normal(size=(4, 3, 5, 2)).astype(np.float32)
    save(tmp_path / "a.npz", x=np.asfortranarray(rows))
    np.save(tmp_path / "b.npy", rows)
    inputs = scan_inputs(tmp_path, IMAGE)
    with no_descriptors():
        with pytest.raises(OSError, match="Too many open files"):
            scan_inputs(tmp_path, IMAGE)
        for item in (0, 4):
            with pytest.raises(OSError, match="Too many open files"):
                inputs.read(item)
    for item in range(8):
        np.testing.assert_array_equal(inputs.read(item)["x"], rows[item % 4 :][:1])
    inputs.close()


def test_results_that_find_no_descriptor_are_stored_at_the_next_try(tmp_path: Path) -> None:
    def opened() -> ResultStore:
        return ResultStore(
            tmp_path, job="job", identity="i", catalogue=FixedFiles(FILES), names=("y",)
        )

    with no_descriptors(), pytest.raises(OSError, match=LACK):
        opened()
    store = opened()
    for item in range(3):
        store.add(item, {"y": np.full((1, 2), item, np.float32)})
    with no_descriptors():
        for items in ([0], range(3)):
            with pytest.raises(OSError, match=LACK):
                store.finish(items)
        with pytest.raises(OSError, match=LACK):
            store.complete()
    assert store.finish(range(3)) == {}
    assert store.complete() is None
    store.close()
    with np.load(tmp_path / "b.npz") as made:
        np.testing.assert_array_equal(made["y"][:, 0, 0], [1, 2])


def test_a_large_result_that_finds_no_descriptor_is_stored_at_the_next_try(tmp_path: Path) -> None:
    store = ResultStore(
        tmp_path, job="job", identity="i", catalogue=FixedFiles(FILES), names=("y",)
    )
    large = {"y": np.ones((1, 1 << 20), np.float32)}
    store.add(1, {"y": np.zeros((1, 1 << 20), np.float32)})
    with no_descriptors(), pytest.raises(OSError, match=LACK):
        store.add(2, large)
    store.add(2, large)
    store.add(0, large)
    assert store.finish(range(3)) == {}
    store.close()
    with np.load(tmp_path / "b.npz") as made:
        np.testing.assert_array_equal(made["y"][:, 0, 0], [0, 1])


def test_records_that_cannot_be_read_for_now_are_not_passed_over(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    record = JobRecord(name="a", epoch=3, tally=Tally(stored=2, seconds=1.0))
    ledger.put(record)
    with no_descriptors(), pytest.raises(OSError, match=LACK):
        ledger.load()
    assert ledger.load() == {"a": record}
    ledger.close()


async def test_a_job_waits_for_descriptors_and_completes(world: World) -> None:
    rows = world.inputs(1, 1, size=10_000)
    async with connected(world.device("a")):
        # The first effect of a submission is its record, which needs a descriptor too.
        job = await world.coordinator.jobs.submit(world.request())
        with no_descriptors():
            await asyncio.sleep(0.5)
            waiting = job.status()
        last = await world.ended()
    assert waiting.state in {api.JobStatus.PENDING, api.JobStatus.RUNNING}
    assert (last.state, last.succeeded) == (api.JobStatus.COMPLETE, 2), last.message
    world.check_results(rows)


async def test_a_job_that_waits_for_descriptors_can_be_cancelled(world: World) -> None:
    world.inputs(1)
    job = await world.coordinator.jobs.submit(world.request())
    with no_descriptors():
        world.coordinator.jobs.cancel("job", "no need")
        await job.settled.within(1.0)
    last = await world.ended()
    assert (last.state, last.message) == (api.JobStatus.CANCELLED, "no need")


async def test_a_submission_that_finds_no_descriptor_is_refused_for_now(world: World) -> None:
    world.inputs(1)
    with no_descriptors(), pytest.raises(JobRefused, match=f"now: .*{LACK}.*; try") as caught:
        await world.coordinator.jobs.submit(world.request())
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with connected(world.device("a")):
        await world.submit()
        assert (await world.ended()).state == api.JobStatus.COMPLETE


async def test_jobs_outlive_a_state_disk_that_is_full_at_a_restart(tmp_path: Path) -> None:
    document = put_model(tmp_path / "store")
    target = f"unix:{tmp_path}/s"
    state = tmp_path / "state"
    settings = CoordinatorSettings(listen=target, store=tmp_path / "store", state=state)
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in" / "0.npz", x=np.ones((2, 1, 8), np.float32))
    request = submission(document, tmp_path / "in", tmp_path / "out")
    with small_disk(state, "128k"):
        async with serving(settings), open_channel(target) as channel:
            await CoordinatorStub(channel).SubmitJob(request, timeout=60)
        ballast = state / "ballast"
        with pytest.raises(OSError, match="No space"):
            ballast.write_bytes(bytes(1 << 20))
        for _ in range(2):
            async with serving(settings) as coordinator:
                job = coordinator.jobs.find("job")
                assert job is not None
                assert not job.has_ended
        ballast.unlink()
        async with serving(settings) as coordinator, open_channel(target) as channel:
            world = World(
                coordinator, target, document, CoordinatorStub(channel), channel, tmp_path
            )
            async with connected(world.device("a")):
                assert (await world.ended()).state == api.JobStatus.COMPLETE
