"""Jobs whose inputs arrive in a folder while they run, over real gRPC, with scripted devices."""

import asyncio
import os
from collections.abc import Awaitable
from pathlib import Path

import grpc
import numpy as np
import pytest

from coordinator.scripted import connected, whole_model
from coordinator.test_metrics import measured
from coordinator.world import World, refusal
from shoal_coordinator.server import followed_runs
from shoal_coordinator.storage import following
from shoal_protocol.v1 import coordinator_pb2 as api


@pytest.fixture(autouse=True)
def quick_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_runs, "SCAN_SECONDS", 0.05)


def frame(number: int) -> np.ndarray:
    return np.full((1, 3), number, np.float32)


def drop(folder: Path, *numbers: int) -> None:
    """Put frames into a folder as a camera should: written beside, then renamed."""
    folder.mkdir(exist_ok=True)
    for number in numbers:
        beside = folder / f".{number:04}.part"
        with beside.open("wb") as file:
            np.save(file, frame(number))
        beside.rename(folder / f"{number:04}.npy")


def check_frames(out: Path, *numbers: int) -> None:
    """Each of these frames has its result, and no other."""
    assert sorted(path.stem for path in out.glob("*.npz")) == [f"{n:04}" for n in sorted(numbers)]
    for number in numbers:
        with np.load(out / f"{number:04}.npz") as made:
            np.testing.assert_allclose(made["y"], whole_model(frame(number))["y"])


async def test_files_that_arrive_are_processed_until_the_end(world: World) -> None:
    drop(world.folder / "in", 0, 1)
    async with connected(world.device("a")):
        await world.submit(follow=True)
        await world.until(lambda status: status.succeeded == 2)
        drop(world.folder / "in", 2)
        await world.until(lambda status: status.succeeded == 3 and status.following)
        drop(world.folder / "in", 3, 4)
        ending = await world.submit(follow=True, end=True)
        assert ending.terms.end
        last = await world.ended()
    assert last.state == api.JobStatus.COMPLETE, last.message
    assert (last.items, last.succeeded, last.failed, last.following) == (5, 5, 0, False)
    check_frames(world.folder / "out", *range(5))


async def test_a_folder_without_a_file_is_waited_for(world: World) -> None:
    async with connected(world.device("a")):
        await world.submit(follow=True)
        await world.until(lambda status: status.following)
        drop(world.folder / "in", 0)
        await world.until(lambda status: status.succeeded == 1)
        await world.submit(follow=True, end=True)
        last = await world.ended()
    assert (last.state, last.items) == (api.JobStatus.COMPLETE, 1)


async def test_a_file_that_is_still_being_written_waits(world: World) -> None:
    folder = world.folder / "in"
    drop(folder, 0)
    whole = (folder / "0000.npy").read_bytes()
    (folder / "empty.npy").touch()
    async with connected(world.device("a")):
        await world.submit(follow=True)
        with (folder / "0001.npy").open("wb", buffering=0) as growing:
            for byte in whole:
                growing.write(bytes([byte]))
                os.utime(folder / "0001.npy")
                await asyncio.sleep(0.01)
        await world.until(lambda status: status.succeeded == 2)
        await world.submit(follow=True, end=True)
        last = await world.ended()
    assert (last.state, last.items) == (api.JobStatus.COMPLETE, 2), last.message


async def test_each_file_is_taken_once_also_if_it_changes_afterwards(world: World) -> None:
    async with connected(world.device("a")) as _:
        drop(world.folder / "in", 0)
        await world.submit(follow=True)
        await world.until(lambda status: status.succeeded == 1)
        np.save(world.folder / "in" / "0000.npy", frame(7))
        drop(world.folder / "in", 1)
        await world.until(lambda status: status.succeeded == 2)
        await world.submit(follow=True, end=True)
        last = await world.ended()
        assert (last.items, last.succeeded) == (2, 2)
        check_frames(world.folder / "out", 0, 1)
        # A job that follows again resumes with what has come since.
        drop(world.folder / "in", 2)
        await world.submit(follow=True, end=True)
        last = await world.ended()
    assert (last.state, last.items, last.succeeded) == (api.JobStatus.COMPLETE, 3, 3)
    check_frames(world.folder / "out", 0, 1, 2)


async def test_a_file_that_does_not_suit_fails_alone_and_is_named(world: World) -> None:
    folder = world.folder / "in"
    drop(folder, 0)
    np.savez(folder / "bad.npz", x=np.zeros((2, 2, 3, 7)))
    async with connected(world.device("a")):
        await world.submit(follow=True)
        await world.until(lambda status: status.succeeded == 1 and status.failed == 1)
        np.savez(folder / "0000.npz", x=frame(5))  # would give the result that 0000.npy gave
        drop(folder, 1)
        await world.until(lambda status: status.succeeded == 2 and status.failed == 2)
        await world.submit(follow=True, end=True)
        last = await world.ended()
    assert (last.state, last.reason) == (api.JobStatus.FAILED, "ItemsFailed")
    assert {each.input for each in last.failures} == {"bad.npz", "0000.npz"}
    rival = next(each.reason for each in last.failures if each.input == "0000.npz")
    assert "would give 0000.npz, as 0000.npy did; rename it" in rival
    check_frames(world.folder / "out", 0, 1)


async def test_a_cancelled_job_leaves_its_results_and_resumes(world: World) -> None:
    drop(world.folder / "in", 0, 1)
    async with connected(world.device("a")):
        await world.submit(follow=True)
        await world.until(lambda status: status.succeeded == 2)
        cancelled = await world.stub.CancelJob(api.CancelJobRequest(name="job"), timeout=60)
        assert cancelled.state == api.JobStatus.CANCELLED
        drop(world.folder / "in", 2)
        await world.submit(follow=True)
        await world.until(lambda status: status.succeeded == 3 and status.following)
        await world.submit(follow=True, end=True)
        last = await world.ended()
    assert (last.state, last.items, last.resumed) == (api.JobStatus.COMPLETE, 3, 2)


async def test_more_files_than_are_held_at_once_wait_on_disk(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "LIVE_FILES", 4)
    drop(world.folder / "in", *range(10))
    gate = asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        await world.submit(follow=True)
        await world.until(lambda status: status.items == 4)
        for _ in range(30):
            gate.release()
        await world.until(lambda status: status.succeeded == 10)
        await world.submit(follow=True, end=True)
        last = await world.ended()
    assert (last.state, last.items) == (api.JobStatus.COMPLETE, 10)
    check_frames(world.folder / "out", *range(10))


async def test_a_job_is_ended_by_its_name(world: World) -> None:
    def end() -> Awaitable[api.JobStatus]:
        return world.stub.EndJob(api.EndJobRequest(name="job"), timeout=60)

    assert (await refusal(end()))[0] == grpc.StatusCode.NOT_FOUND
    drop(world.folder / "in", 0)
    gate = asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        await world.submit()
        code, text = await refusal(end())
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert text == "job job does not follow its inputs: it ends by itself"
        await world.stub.CancelJob(api.CancelJobRequest(name="job"), timeout=60)
        for _ in range(9):
            gate.release()
        await world.submit(follow=True, outputs_uri=str(world.folder / "followed"))
        await world.until(lambda status: status.succeeded == 1)
        assert (await end()).terms.end
        last = await world.ended()
        assert (last.state, last.items) == (api.JobStatus.COMPLETE, 1)
        assert (await end()).state == api.JobStatus.COMPLETE


async def test_the_end_of_a_job_that_is_being_cancelled_begins_no_other_run(world: World) -> None:
    drop(world.folder / "in", 0, 1)
    gate = asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        await world.submit(follow=True)
        await world.until(lambda status: status.active > 0)
        world.coordinator.jobs.cancel("job", "no need")
        ended = await world.stub.EndJob(api.EndJobRequest(name="job"), timeout=60)
        assert ended.state == api.JobStatus.CANCELLED
        assert (await world.ended()).state == api.JobStatus.CANCELLED


async def test_a_job_that_follows_streams(world: World) -> None:
    code, text = await refusal(world.submit(follow=True, mode=api.BARRIER))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert text == "a job that follows its inputs needs mode Streaming"


async def test_files_that_wait_are_measured(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "LIVE_FILES", 2)
    drop(world.folder / "in", *range(5))
    gate = asyncio.Semaphore(0)
    async with connected(world.device("a", gate=gate)):
        await world.submit(follow=True)
        await world.until(lambda status: status.items == 2)
        waiting = 5.0  # until the first two are taken
        async with asyncio.timeout(60):
            while waiting in {0, 5}:
                waiting = (await measured(world))["waiting_files"]
                await asyncio.sleep(0.05)
    assert waiting == 3


async def test_a_job_that_does_not_follow_is_another_job(world: World) -> None:
    drop(world.folder / "in", 0)
    async with connected(world.device("a")):
        await world.submit(follow=True)
        _, text = await refusal(world.submit(follow=False))
        assert "runs already, with another content" in text
        await world.submit(follow=True, end=True)
        await world.ended()


async def listed(world: World, *states: api.JobItem.State) -> list[tuple[str, str]]:
    request = api.ListItemsRequest(name="job", states=states)
    pages = world.stub.ListItems(request, timeout=60)
    return [
        (each.input, api.JobItem.State.Name(each.state))
        async for page in pages
        for each in page.items
    ]


async def retried(world: World, *items: int) -> api.JobStatus:
    return await world.stub.RetryJob(api.RetryJobRequest(name="job", items=items), timeout=60)


def spoil(folder: Path, *names: str) -> None:
    """Put files there that do not suit the model."""
    folder.mkdir(exist_ok=True)
    for name in names:
        np.savez(folder / name, x=np.zeros((2, 2, 3, 7)))


async def test_items_are_listed_while_files_come_and_after_the_end(world: World) -> None:
    folder = world.folder / "in"
    drop(folder, 0)
    gate = asyncio.Semaphore(3)
    async with connected(world.device("a", gate=gate)):
        await world.submit(follow=True)
        await world.until(lambda status: status.succeeded == 1)
        spoil(folder, "bad.npz")
        await world.until(lambda status: status.failed == 1)
        drop(folder, 1)
        await world.until(lambda status: status.active == 1)
        now = await listed(world)
        assert now[:2] == [("0000.npy", "SUCCEEDED"), ("bad.npz", "FAILED")]
        assert now[2:] == [("0001.npy", "ACTIVE")]
        assert await listed(world, api.JobItem.FAILED) == [("bad.npz", "FAILED")]
        for _ in range(9):
            gate.release()
        await world.submit(follow=True, end=True)
        await world.ended()
    assert await listed(world) == [
        ("0000.npy", "SUCCEEDED"),
        ("bad.npz", "FAILED"),
        ("0001.npy", "SUCCEEDED"),
    ]


async def test_failed_files_are_tried_again_while_a_job_follows(world: World) -> None:
    folder = world.folder / "in"
    drop(folder, 0)
    spoil(folder, "0001.npz", "0002.npz")
    async with connected(world.device("a")):
        await world.submit(follow=True)
        await world.until(lambda status: (status.succeeded, status.failed) == (1, 2))
        np.savez(folder / "0001.npz", x=frame(1))
        begun = await retried(world)
        assert (begun.retry, begun.items, begun.failed) == (1, 3, 0), "both files are there"
        await world.until(lambda status: (status.succeeded, status.failed) == (2, 1))
        drop(folder, 3)
        await world.until(lambda status: status.succeeded == 3 and status.following)
        (folder / "0002.npz").unlink()
        assert (await retried(world)).retry == 2
        await world.submit(follow=True, end=True)
        last = await world.ended()
    assert (last.items, last.succeeded, last.failed) == (4, 3, 1)
    assert [each.input for each in last.failures] == ["0002.npz"], "it is gone: it stays failed"
    assert "1 of 4 items failed" in last.message
    check_frames(world.folder / "out", 0, 1, 3)


async def test_failed_files_are_tried_again_when_a_job_that_followed_has_ended(
    world: World,
) -> None:
    folder = world.folder / "in"
    drop(folder, 0)
    spoil(folder, "0001.npz", "0002.npz")
    async with connected(world.device("a")):
        await world.submit(follow=True, end=True)
        last = await world.ended()
        assert (last.state, last.failed) == (api.JobStatus.FAILED, 2)
        for number in (1, 2):
            np.savez(folder / f"000{number}.npz", x=frame(number))
        (item,) = [each.item for each in last.failures if each.input == "0002.npz"]
        assert (await retried(world, item)).retry == 1
        last = await world.ended()
        assert (last.state, last.items, last.succeeded) == (api.JobStatus.FAILED, 3, 2)
        check_frames(world.folder / "out", 0, 2)
        await retried(world)
        last = await world.ended()
    assert (last.state, last.items, last.succeeded) == (api.JobStatus.COMPLETE, 3, 3)
    check_frames(world.folder / "out", 0, 1, 2)
    assert not (world.folder / "out" / "failures.json").exists()


async def test_what_has_not_failed_is_not_tried_again_while_a_job_follows(world: World) -> None:
    drop(world.folder / "in", 0)
    async with connected(world.device("a")):
        await world.submit(follow=True)
        await world.until(lambda status: status.succeeded == 1)
        code, text = await refusal(retried(world))
        assert (code, text) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "no item of job job has failed",
        )
        spoil(world.folder / "in", "bad.npz")
        await world.until(lambda status: status.failed == 1)
        _, text = await refusal(retried(world, 0))
        assert text == (
            "item 0 of job job has not failed; 1 of its 2 items have: `shoal items job --failed`"
        )
        await world.submit(follow=True, end=True)
        await world.ended()
