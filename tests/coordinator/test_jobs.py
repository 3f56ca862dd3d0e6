"""Jobs over real gRPC, with scripted devices."""

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc
import numpy as np
import pytest

from coordinator.scripted import STAGES, connected
from coordinator.world import World, refusal
from shoal_protocol.partition import document_to_json
from shoal_protocol.v1 import coordinator_pb2 as api


async def test_a_job_streams_through_three_devices(world: World) -> None:
    rows = world.inputs(5, 1, 4)
    devices = [world.device(name, budget=1500) for name in ("a", "b", "c")]
    async with connected(*devices):
        status = await world.submit()
        assert status.items == 10
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE, last.message
    assert (last.succeeded, last.failed, last.resumed) == (10, 0, 0)
    assert last.seconds > 0
    assert last.items_per_second > 0
    assert last.latency.p50_seconds > 0
    assert [stage.finished for stage in last.stages] == [10, 10, 10]
    assert last.stages[0].compute_seconds == pytest.approx(0.001, rel=0.1)
    world.check_results(rows)
    done = [task for device in devices for task in device.executed]
    assert sorted(done) == [(item, stage) for item in range(10) for stage in range(3)]


async def test_large_activations_are_relayed_in_many_frames(world: World) -> None:
    rows = world.inputs(3, size=1_000_000)
    devices = [world.device(name, budget=1500, frame_bytes=1 << 18) for name in ("a", "b", "c")]
    async with connected(*devices):
        await world.submit()
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE, last.message
    world.check_results(rows)


async def test_an_item_that_does_not_suit_fails_and_the_others_finish(world: World) -> None:
    rows = world.inputs(2)
    np.savez(world.folder / "in" / "bad.npz", x=np.zeros((2, 2, 3, 7)))
    async with connected(world.device("a")):
        await world.submit()
        last = await world.ended()
    assert (last.items, last.succeeded, last.failed) == (3, 2, 1)
    (failure,) = last.failures
    # As with a batch/v1 Job: complete means that every item succeeded.
    assert (last.state, last.reason) == (api.JobStatus.FAILED, "ItemsFailed")
    assert last.message == f"1 of 3 items failed; first: {failure.reason}"
    assert (failure.item, failure.input) == (2, "bad.npz")
    assert "has rank 4 in x: the array is [2, 2, 3, 7]" in failure.reason
    listed = json.loads((world.folder / "out" / "failures.json").read_text())
    assert listed["failures"] == [{"item": 2, "input": "bad.npz", "reason": failure.reason}]
    world.check_results(rows)


async def test_a_task_that_keeps_failing_fails_its_item(world: World) -> None:
    def picky(tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        if tensors["a"][0, 0] > 99:
            raise ValueError("too large")
        return STAGES[1](tensors)

    world.inputs(4)
    np.save(world.folder / "in" / "large.npy", np.full((1, 3), 50, np.float32))
    async with connected(world.device("a", stages=(STAGES[0], picky, STAGES[2]))):
        await world.submit(backoff_limit=1)
        last = await world.ended()
    assert (last.succeeded, last.failed) == (4, 1)
    assert last.state == api.JobStatus.FAILED
    assert last.message.startswith("1 of 5 items failed; first: large.npy: ")
    assert last.failures[0].input == "large.npy"
    assert "too large" in last.failures[0].reason
    assert last.retries >= 1


def with_a_file_as_outputs(folder: Path) -> None:
    (folder / "in").mkdir()
    np.save(folder / "in" / "a.npy", np.zeros((1, 3), np.float32))
    (folder / "out").write_text("a file")


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (lambda folder: None, "in: does not exist"),
        (lambda folder: (folder / "in").mkdir(), "in: is empty: it has no .npz or .npy"),
        (with_a_file_as_outputs, "out: cannot be written"),
    ],
)
async def test_a_job_whose_folders_will_not_do_fails_at_once(
    world: World, prepare: Callable[[Path], object], text: str
) -> None:
    prepare(world.folder)
    status = await world.submit()
    assert (status.state, status.reason) == (api.JobStatus.FAILED, "FolderRefused")
    assert text in status.message


async def test_what_is_no_job_is_refused_with_the_reason(world: World) -> None:
    world.inputs(1)
    refused = grpc.StatusCode.INVALID_ARGUMENT
    assert await refusal(world.submit(partition=b"{}")) == (
        refused,
        "partition document, version: is missing",
    )
    code, text = await refusal(world.submit(name="../../etc"))
    assert (code, text) == (refused, "'../../etc' is no name for a job, such as ocr-1")
    code, text = await refusal(world.submit(name="a" * 246))
    assert (code, text.partition(" is ")[2]) == (
        refused,
        "no name for a job, such as ocr-1, of at most 245 characters",
    )
    code, text = await refusal(world.submit(stages=[api.StagePlacement(devices=["a"])]))
    assert (code, text) == (refused, "the plan has 1 stages, the partition 3")
    code, text = await refusal(world.submit(active_deadline_seconds=float("nan")))
    assert (code, text) == (refused, "active_deadline_seconds is nan")
    digest = world.document.fragments[1].digest.removeprefix("sha256:")
    (world.folder / "store/fragments" / digest / "model.onnx").unlink()
    code, text = await refusal(world.submit())
    assert code == grpc.StatusCode.FAILED_PRECONDITION, "they can be brought, and it given again"
    assert text.startswith(f"the fragment store lacks fragment 1 (sha256:{digest[:12]})")
    code, text = await refusal(world.stub.CancelJob(api.CancelJobRequest(name="x"), timeout=60))
    assert (code, text) == (grpc.StatusCode.NOT_FOUND, "there is no job 'x' here")


async def test_a_job_may_have_the_longest_name_that_its_files_can_have(world: World) -> None:
    world.inputs(1)
    async with connected(world.device("pi-4")):
        status = await world.submit(name="a" * 245)
        done = await world.ended(status.name)
    assert done.state == api.JobStatus.COMPLETE


async def test_the_same_job_is_joined_and_another_of_its_name_refused(world: World) -> None:
    rows = world.inputs(3)
    gate = asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        await world.submit(epoch=3)
        again = await world.submit(epoch=4)
        assert again.epoch == 3
        code, text = await refusal(world.submit(lossy=True))
        assert code == grpc.StatusCode.ALREADY_EXISTS
        assert text.startswith("job job runs already, with another content")
        for _ in range(9):
            gate.release()
        first = await world.ended()
        assert first.state == api.JobStatus.COMPLETE
        # Running it again finds everything done, in a newer epoch.
        await world.submit()
        second = await world.ended()
    assert (second.state, second.resumed, second.succeeded) == (api.JobStatus.COMPLETE, 3, 3)
    assert second.epoch == 4
    world.check_results(rows)


async def test_a_job_that_is_to_run_in_another_way_goes_on_so_when_it_was_cancelled(
    world: World,
) -> None:
    """As with other fragments: its results are the same."""
    rows = world.inputs(4)
    gate = asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        await world.submit()
        for _ in range(9):  # of 12 tasks: one item is through for sure, and not four
            gate.release()
        await world.until(lambda status: status.succeeded > 0)
        code, text = await refusal(world.submit(epoch=2, mode=api.BARRIER))
        assert code == grpc.StatusCode.ABORTED
        assert text.startswith("job job runs already, with another content")
        before = await world.stub.CancelJob(api.CancelJobRequest(name="job"), timeout=60)
        assert before.succeeded < 4, "it went on, and was stopped on its way"
        for _ in range(20):
            gate.release()
        await world.submit(epoch=2, mode=api.BARRIER)
        ended = await world.ended()
    assert (ended.state, ended.succeeded) == (api.JobStatus.COMPLETE, 4)
    assert ended.resumed >= 1, "what was finished stays"
    world.check_results(rows)


async def test_several_jobs_share_the_devices(world: World) -> None:
    rows = world.inputs(4)
    names = ["one", "two", "three"]
    async with connected(world.device("a"), world.device("b")):
        for name in names:
            await world.submit(name=name, outputs_uri=f"{world.folder}/{name}")
        for name in names:
            assert (await world.ended(name)).state == api.JobStatus.COMPLETE
    for name in names:
        world.check_results(rows, name)


async def test_two_jobs_do_not_write_into_one_folder(world: World) -> None:
    world.inputs(1)
    gate = asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        await world.submit(name="one")
        other = await world.submit(name="two")
    assert other.state == api.JobStatus.FAILED
    assert "hold results of another job, 'one'" in other.message


async def test_a_cancelled_job_leaves_no_half_result_and_can_go_on(world: World) -> None:
    rows = world.inputs(4, 1)
    gate = asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        await world.submit()
        for _ in range(11):  # of 15 tasks: one item is through for sure, and not four
            gate.release()
        await world.until(lambda status: status.succeeded >= 1)
        status = await world.stub.CancelJob(
            api.CancelJobRequest(name="job", reason="no need"), timeout=60
        )
        assert (status.state, status.message) == (api.JobStatus.CANCELLED, "no need")
        assert status.reason == "Cancelled"
        assert not (world.folder / "out" / "000.npz").exists()
        for _ in range(100):
            gate.release()
        again = await world.submit()
        last = await world.ended()
    assert again.resumed == last.resumed >= 1
    assert last.state == api.JobStatus.COMPLETE
    world.check_results(rows)


async def test_a_small_result_has_its_file_while_the_next_item_still_runs(world: World) -> None:
    world.inputs(1, 1)
    gate = asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        await world.submit(parallelism=1)
        for _ in range(4):  # of 6 tasks
            gate.release()
        await world.until(lambda status: status.succeeded == 1)
        async with asyncio.timeout(60):
            while not (world.folder / "out" / "000.npz").exists():
                await asyncio.sleep(0.05)
        status = await world.stub.CancelJob(api.CancelJobRequest(name="job"), timeout=60)
    assert (status.state, status.succeeded) == (api.JobStatus.CANCELLED, 1)


async def test_a_cancelled_job_has_a_file_of_each_result_that_was_stored(world: World) -> None:
    world.inputs(*[1] * 5)
    gate = asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        await world.submit(parallelism=1)
        for _ in range(10):  # of 15 tasks
            gate.release()
        await world.until(lambda status: status.succeeded == 3)
        status = await world.stub.CancelJob(api.CancelJobRequest(name="job"), timeout=60)
        assert status.succeeded == 3
    assert len(list((world.folder / "out").glob("*.npz"))) == 3


async def test_a_deadline_ends_a_job(world: World) -> None:
    world.inputs(2)
    async with connected(world.device("a", gate=asyncio.Semaphore(0))):
        await world.submit(active_deadline_seconds=0.3)
        last = await world.ended()
    assert (last.state, last.reason) == (api.JobStatus.FAILED, "DeadlineExceeded")
    assert "the deadline passed with 2 of 2 items not ended" in last.message


async def test_a_running_job_takes_other_terms(world: World) -> None:
    world.inputs(2)
    async with connected(world.device("a", gate=asyncio.Semaphore(0))):
        first = await world.submit(active_deadline_seconds=1000, priority=1)
        await world.until(lambda status: status.active > 0)
        status = await world.submit(active_deadline_seconds=900, priority=2, parallelism=1)
        assert status.terms == api.Terms(priority=2, parallelism=1, active_deadline_seconds=900)
        assert (status.epoch, status.active) == (first.epoch, 2), "nothing starts over"
        await world.submit(active_deadline_seconds=0.3, priority=2, parallelism=1)
        last = await world.ended()
    assert (last.state, last.reason) == (api.JobStatus.FAILED, "DeadlineExceeded")
    assert last.terms == api.Terms(priority=2, parallelism=1, active_deadline_seconds=0.3)


async def test_a_partition_in_other_words_is_the_same_job(world: World) -> None:
    world.inputs(2)
    words = json.dumps(json.loads(document_to_json(world.document)), indent=2).encode()
    async with connected(world.device("a", gate=asyncio.Semaphore(0))):
        await world.submit(epoch=3)
        await world.until(lambda status: status.active > 0)
        stages = [api.StagePlacement(devices=["a"]) for _ in world.document.fragments]
        status = await world.submit(epoch=4, stages=stages, partition=words)
    assert (status.epoch, status.plan) == (4, 4)


async def test_a_newer_plan_is_taken_by_a_job_whose_epoch_is_higher_already(world: World) -> None:
    world.inputs(2)
    stages = [api.StagePlacement(devices=["a"]) for _ in world.document.fragments]
    async with connected(world.device("a", gate=asyncio.Semaphore(0))):
        await world.submit(epoch=1)
        await world.stub.CancelJob(api.CancelJobRequest(name="job"), timeout=60)
        again = await world.submit(epoch=1)
        assert (again.epoch, again.plan) == (2, 1)
        status = await world.submit(epoch=2, stages=stages)
        assert (status.epoch, status.plan) == (3, 2)
