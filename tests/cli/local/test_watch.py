"""The watch of a run against a real coordinator that says nothing for long, or goes and comes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from coordinator.scripted import ScriptedDevice, put_model, submission
from shoal_cli.local import watch as module
from shoal_cli.local.watch import CoordinatorGone, JobTally, Watch
from shoal_coordinator.dispatch import views
from shoal_coordinator.server import Coordinator, CoordinatorSettings, serving
from shoal_protocol.channels import open_channel
from shoal_protocol.coordinator_client import CallFailed
from shoal_protocol.v1 import coordinator_pb2 as pb


def test_a_restarted_coordinator_changes_neither_what_was_there_before_nor_the_retries() -> None:
    tally = JobTally()
    tally.add(pb.JobStatus(epoch=1, items=50, resumed=4, succeeded=4))
    before = tally.add(pb.JobStatus(epoch=1, items=50, resumed=4, succeeded=30, retries=7))
    assert (before.resumed, before.retries) == (4, 7)
    # What was recorded last was older: two retries were not in it.
    restarted = tally.add(pb.JobStatus(epoch=2, items=50, resumed=30, succeeded=30, retries=5))
    assert (restarted.resumed, restarted.retries) == (4, 7)
    last = tally.add(pb.JobStatus(epoch=2, items=50, resumed=30, succeeded=50, retries=6))
    assert (last.resumed, last.succeeded, last.retries) == (4, 50, 8)


QUIET_SECONDS = 10 * module.GIVE_UP_SECONDS


@dataclass
class Clock:
    """The real one, which a test may put forward."""

    ahead_seconds: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "monotonic", made)
    return made


@dataclass(frozen=True)
class Bay:
    """A folder with a store, inputs, and the job that a watch follows."""

    folder: Path
    request: pb.SubmitJobRequest
    away: list[bool] = field(default_factory=list)
    """What the watch has told of its coordinator."""

    @property
    def target(self) -> str:
        return f"unix:{self.folder}/s"

    def coordinator(self) -> contextlib.AbstractAsyncContextManager[Coordinator]:
        settings = CoordinatorSettings(
            listen=self.target, store=self.folder / "store", state=self.folder / "state"
        )
        return serving(settings)


@pytest.fixture
def bay(tmp_path: Path) -> Bay:
    document = put_model(tmp_path / "store")
    (tmp_path / "in").mkdir()
    np.savez(tmp_path / "in" / "0.npz", x=np.ones((3, 1, 8), np.float32))
    return Bay(tmp_path, submission(document, tmp_path / "in", tmp_path / "out"))


@contextlib.asynccontextmanager
async def watching(bay: Bay) -> AsyncIterator[tuple[Watch, asyncio.Task[None]]]:
    async with open_channel(bay.target) as channel:
        watch = Watch(channel)
        watch.take([bay.request])
        running = asyncio.create_task(watch.run(lambda: None, bay.away.append))
        try:
            yield watch, running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@contextlib.asynccontextmanager
async def device(bay: Bay) -> AsyncIterator[None]:
    """A device that does the job."""
    document = put_model(bay.folder / "store")
    running = asyncio.create_task(ScriptedDevice(bay.target, "a", document).run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until(true: Callable[[], bool], running: asyncio.Task[None]) -> None:
    async with asyncio.timeout(60):
        while not true():
            if running.done():
                running.result()
            await asyncio.sleep(0.01)


def count_submissions(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every submission adds its job to the list: the watch submits whenever it opens anew."""
    seen: list[str] = []
    submit = coordinator.jobs.submit

    def counted(request: pb.SubmitJobRequest) -> object:
        seen.append(request.name)
        return submit(request)

    monkeypatch.setattr(coordinator.jobs, "submit", counted)
    return seen


async def test_a_watch_in_which_nothing_changes_is_opened_anew_and_goes_on(
    bay: Bay, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.2)
    async with bay.coordinator() as coordinator:
        submissions = count_submissions(coordinator, monkeypatch)
        async with watching(bay) as (watch, running):
            for opened in range(1, 5):
                await until(lambda opened=opened: len(submissions) >= opened, running)  # type: ignore[misc]
                clock.ahead_seconds += QUIET_SECONDS
            async with device(bay):
                await asyncio.wait_for(running, 20)
            assert watch.jobs["job"].state == pb.JobStatus.COMPLETE


async def test_an_end_that_comes_while_a_job_is_submitted_again_begins_no_further_run(
    bay: Bay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose submission would reach the coordinator first is chance: here it would be the end's."""
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.2)
    bay.request.follow = True
    waiting, ended = asyncio.Event(), asyncio.Event()
    async with bay.coordinator() as coordinator, device(bay), watching(bay) as (watch, running):
        await until(lambda: "job" in watch.jobs and watch.jobs["job"].succeeded == 3, running)
        submit = coordinator.jobs.submit

        async def delayed(request: pb.SubmitJobRequest) -> object:
            if not request.end:
                waiting.set()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), 1)
            answer = await submit(request)
            if request.end:
                await answer.done.wait()
                ended.set()
            return answer

        monkeypatch.setattr(coordinator.jobs, "submit", delayed)
        await asyncio.wait_for(waiting.wait(), 20)
        await watch.end()
        await asyncio.wait_for(running, 20)
        assert watch.jobs["job"].state == pb.JobStatus.COMPLETE
        assert watch.jobs["job"].epoch == 1


async def test_a_watch_that_is_opened_anew_while_a_job_ends_begins_no_further_run(
    bay: Bay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.2)
    bay.request.follow = True
    async with bay.coordinator() as coordinator, device(bay), watching(bay) as (watch, running):
        await until(lambda: "job" in watch.jobs and watch.jobs["job"].succeeded == 3, running)
        submit = coordinator.jobs.submit

        async def late(request: pb.SubmitJobRequest) -> object:
            if request.end:
                await asyncio.sleep(1)  # the watch is over by now, and waits to submit the job
            answer = await submit(request)
            if request.end:
                await answer.done.wait()
            return answer

        monkeypatch.setattr(coordinator.jobs, "submit", late)
        await watch.end()
        await asyncio.wait_for(running, 60)
        assert watch.jobs["job"].state == pb.JobStatus.COMPLETE
        assert watch.jobs["job"].epoch == 1


async def test_a_coordinator_that_dies_after_long_silence_is_waited_for(
    bay: Bay, clock: Clock
) -> None:
    async with contextlib.AsyncExitStack() as first:
        await first.enter_async_context(bay.coordinator())
        async with watching(bay) as (watch, running):
            await until(lambda: "job" in watch.jobs, running)
            clock.ahead_seconds += QUIET_SECONDS
            await first.aclose()
            await until(lambda: bay.away == [True], running)
            async with bay.coordinator():
                await until(lambda: bay.away == [True, False], running)
                async with device(bay):
                    await asyncio.wait_for(running, 20)
            assert watch.jobs["job"].state == pb.JobStatus.COMPLETE


async def test_a_coordinator_that_stays_away_is_given_up(bay: Bay, clock: Clock) -> None:
    async with contextlib.AsyncExitStack() as first:
        await first.enter_async_context(bay.coordinator())
        async with watching(bay) as (watch, running):
            await until(lambda: "job" in watch.jobs, running)
            await first.aclose()

            async def pass_time() -> None:
                while not running.done():
                    clock.ahead_seconds += QUIET_SECONDS
                    await asyncio.sleep(0.05)

            with pytest.raises(CoordinatorGone, match="no coordinator for 60 s"):
                await asyncio.wait_for(asyncio.gather(running, pass_time()), 20)


async def test_a_last_word_that_cannot_be_had_is_done_without(
    bay: Bay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(state: object) -> None:
        raise RuntimeError("a fault of the coordinator")

    async with bay.coordinator(), open_channel(bay.target) as channel:
        watch = Watch(channel)
        monkeypatch.setattr(views, "devices", fail)
        with pytest.raises(CallFailed):
            await watch.poll()
        await watch.last_poll()
