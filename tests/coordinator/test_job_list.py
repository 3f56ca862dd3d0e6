"""The operator's requests about jobs: the list, removal, newer plans, suspending and resuming."""

import asyncio
from pathlib import Path

import grpc
import numpy as np

from coordinator.scripted import connected
from coordinator.world import World, refusal, running_world
from shoal_coordinator.storage.job_records import Ledger
from shoal_protocol.v1 import coordinator_pb2 as api


async def listed(world: World) -> list[tuple[str, "api.JobStatus.State"]]:
    call = world.stub.ListJobs(api.ListJobsRequest(), timeout=60)
    return [(status.name, status.state) async for status in call]


async def remove(world: World, name: str) -> None:
    await world.stub.RemoveJob(api.RemoveJobRequest(name=name), timeout=60)


def put_inputs(world: World, job: str, *rows_of_files: int) -> np.ndarray:
    """The inputs of a job on the coordinator's own volume."""
    rows = world.inputs(*rows_of_files)
    folder = world.folder / "store/jobs" / job
    folder.mkdir(parents=True)
    (world.folder / "in").rename(folder / "in")
    return rows


async def test_all_jobs_are_listed_in_one_call(world: World) -> None:
    world.inputs(2)
    assert await listed(world) == []
    gate = asyncio.Semaphore(6)
    async with connected(world.device("a", gate=gate)):
        await world.submit(name="one", outputs_uri=f"{world.folder}/one")
        await world.ended("one")
        await world.submit(name="two", outputs_uri=f"{world.folder}/two")
        assert await listed(world) == [
            ("one", api.JobStatus.COMPLETE),
            ("two", api.JobStatus.RUNNING),
        ]


async def unsubmitted(world: World) -> list[str]:
    answer = await world.stub.ListFragments(api.ListFragmentsRequest(), timeout=60)
    return list(answer.unsubmitted)


async def test_inputs_of_jobs_that_were_not_submitted_are_told_and_removed(world: World) -> None:
    assert await unsubmitted(world) == []
    put_inputs(world, "left", 2)
    put_inputs(world, "job", 2)
    (world.folder / "store/jobs/.other").mkdir()
    async with connected(world.device("a")):
        await world.submit(inputs_uri="", outputs_uri="")
        assert await unsubmitted(world) == ["left"]
        await world.ended()
    assert await unsubmitted(world) == ["left"]
    await remove(world, "left")
    await remove(world, "left")
    assert await unsubmitted(world) == []
    assert not (world.folder / "store/jobs/left").exists()


async def test_a_job_is_removed_with_its_files_when_it_has_ended(world: World) -> None:
    rows = put_inputs(world, "job", 2)
    folder = world.folder / "store/jobs/job"
    gate = asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        first = await world.submit(inputs_uri="", outputs_uri="")
        code, text = await refusal(remove(world, "job"))
        assert (code, text) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "job job runs; cancel it first",
        )
        for _ in range(6):
            gate.release()
        assert (await world.ended()).state == api.JobStatus.COMPLETE
        world.check_results(rows, "store/jobs/job/out")
        for _ in range(2):  # the second time there is nothing left to do
            await remove(world, "job")
            assert not folder.exists()
            assert await listed(world) == []
    # Devices have heard of the first job's epoch: the next of the name comes after it.
    put_inputs(world, "job", 1)
    second = await world.submit(inputs_uri="", outputs_uri="")
    assert second.epoch > first.epoch


async def test_a_removed_job_stays_removed_but_its_epoch_is_known(world: World) -> None:
    status = await world.submit()
    assert status.state == api.JobStatus.FAILED
    await remove(world, "job")
    await world.coordinator.jobs.close()
    (world.folder / "elsewhere").mkdir()
    (world.folder / "state/jobs").rename(world.folder / "elsewhere/jobs")
    ledger = Ledger(world.folder / "elsewhere")
    (submission,) = ledger.load().values()
    ledger.close()
    assert (submission.epoch, submission.request, submission.status) == (status.epoch, None, None)


async def test_only_names_of_jobs_can_be_removed(world: World) -> None:
    code, _ = await refusal(remove(world, "../fragments"))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert (world.folder / "store/fragments").is_dir()


async def test_a_newer_plan_moves_the_tasks_that_have_not_ended(world: World) -> None:
    rows = world.inputs(8)
    gate = asyncio.Semaphore(0)
    first = world.device("a", gate=gate)
    second = world.device("b")
    plans = {
        name: [api.StagePlacement(devices=[name]) for _ in world.document.fragments]
        for name in ("a", "b")
    }
    async with connected(first, second):
        await world.submit(epoch=5, stages=plans["a"], parallelism=2)
        for _ in range(8):  # of 24 tasks: two items are through, and not three
            gate.release()
        await world.until(lambda status: status.succeeded >= 1)
        # The plan of an older epoch, or of the same, changes nothing.
        for epoch in (4, 5):
            assert (await world.submit(epoch=epoch, stages=plans["b"], parallelism=2)).epoch == 5
        assert second.executed == []
        status = await world.submit(epoch=9, stages=plans["b"], parallelism=2)
        assert status.epoch == 9
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE, last.message
    assert (last.succeeded, last.failed, last.resumed) == (8, 0, 0)
    assert len(first.executed) <= 8
    done = {item for item, stage in first.executed if stage == 2}
    moved = {item for item, _ in second.executed}
    assert set(range(8)) - done <= moved
    assert len(moved) < 8  # what was stored by the first plan was not done again
    world.check_results(rows)


async def test_a_suspended_job_resumes_without_running_anything_twice(world: World) -> None:
    rows = put_inputs(world, "job", *(1 for _ in range(6)))
    gate = asyncio.Semaphore(0)
    before, after = world.device("a", gate=gate), world.device("b")
    async with connected(before):
        await world.submit(inputs_uri="", outputs_uri="", parallelism=1, epoch=3)
        for _ in range(7):
            gate.release()
        await world.until(lambda status: status.succeeded == 2)
        cancel = api.CancelJobRequest(name="job", reason="suspended")
        status = await world.stub.CancelJob(cancel, timeout=60)
        assert (status.state, status.message) == (api.JobStatus.CANCELLED, "suspended")
    async with connected(after):
        again = await world.submit(inputs_uri="", outputs_uri="", epoch=3)
        last = await world.ended()
    assert again.epoch == 4
    assert (last.state, last.resumed, last.succeeded) == (api.JobStatus.COMPLETE, 2, 6)
    assert {item for item, _ in after.executed} == {2, 3, 4, 5}
    assert len(after.executed) == 12
    world.check_results(rows, "store/jobs/job/out")


async def test_the_next_coordinator_has_jobs_in_the_order_in_which_they_came(
    tmp_path: Path,
) -> None:
    names = ["zebra", "ant", "mole"]
    async with running_world(tmp_path) as world:
        world.inputs(1)
        async with connected(world.device("a")):
            for name in names[:2]:
                await world.submit(name=name, outputs_uri=f"{tmp_path}/{name}")
                await world.ended(name)
        await world.submit(name=names[2], outputs_uri=f"{tmp_path}/{names[2]}")
    async with running_world(tmp_path) as world:
        assert [name for name, _ in await listed(world)] == names
        overview = await world.stub.GetOverview(api.GetOverviewRequest(), timeout=60)
        assert [job.status.name for job in overview.jobs] == ["mole", "ant", "zebra"]
