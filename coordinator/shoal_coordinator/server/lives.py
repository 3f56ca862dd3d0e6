"""What the jobs' machine does not hold of a job: its messages, its run, and who waits for it. Here
the machine's effects on a run are performed."""

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from time import monotonic_ns, time
from typing import assert_never

from shoal_coordinator.dispatch import views
from shoal_coordinator.dispatch.state import Job as DispatcherJob
from shoal_coordinator.dispatch.state import JobPhase
from shoal_coordinator.jobs import effects as do
from shoal_coordinator.jobs import events as ev
from shoal_coordinator.jobs.state import Job, Phase
from shoal_coordinator.jobs.values import End, Outcome, Tally
from shoal_coordinator.server import wire
from shoal_coordinator.server.driver import Driver
from shoal_coordinator.server.followed_runs import open_followed_run
from shoal_coordinator.server.messages import (
    as_submitted,
    job_status,
    request_of,
    run_end,
    run_tally,
    with_end,
    with_tally,
)
from shoal_coordinator.server.runs import RETRY_SECONDS, JobRun, OutputsUnwritable, open_run
from shoal_coordinator.storage.inputs import InputsRefused
from shoal_coordinator.storage.job_records import JobRecord, Ledger
from shoal_coordinator.storage.locations import LocationRefused
from shoal_coordinator.storage.results import OutputsRefused
from shoal_protocol.digests import Digest
from shoal_protocol.durable_files import is_transient
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import Nanoseconds, nanoseconds
from shoal_protocol.v1 import coordinator_pb2 as pb

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """The part of a submission that never changes; `request` is the first one's."""

    request: pb.SubmitJobRequest
    document: PartitionDocument


class Signal(asyncio.Event):
    """An event that can be waited for with patience."""

    async def within(self, timeout_seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self.wait()


class Life:
    """One life of a job outside the machine. `submitted_at` is by this process's clock."""

    def __init__(self, job: Job, work: Work | None, driver: Driver, ledger: Ledger) -> None:
        """`work` is None where an earlier coordinator has ended the job."""
        self.recorded: pb.SubmitJobRequest | None = None
        """What that coordinator has recorded of its work."""
        self.job = job
        self.submitted_at = monotonic_ns() - nanoseconds(max(0.0, time() - job.submitted_seconds))
        self.run: JobRun | None = None
        self.counts: pb.JobStatus | None = None
        """The last that the dispatcher gave."""
        self.last: pb.JobStatus | None = None
        """The status of a job that has ended."""
        self.settled = Signal()
        """The job runs or has ended."""
        self.done = Signal()
        """It has ended, or the coordinator stops."""
        self._work = work
        self._driver = driver
        self._ledger = ledger

    @property
    def has_ended(self) -> bool:
        return self.job.has_ended

    @property
    def work(self) -> Work:
        assert self._work is not None, "a job that has not ended has its work"
        return self._work

    @property
    def request(self) -> pb.SubmitJobRequest | None:
        """The part of its submission that never changes; None where that was not recorded."""
        return self.recorded if self._work is None else self._work.request

    def submitted(self) -> pb.SubmitJobRequest:
        """All of the submission, of a job that has not ended."""
        return request_of(self.work.request, self.job.submission)

    @property
    def fragments_in_use(self) -> frozenset[Digest]:
        """Its fragments, until it has ended."""
        if self.job.has_ended or self._work is None:
            return frozenset()
        return frozenset(fragment.digest for fragment in self._work.document.fragments)

    def view(self) -> DispatcherJob | None:
        if self.job.phase not in {Phase.RUNNING, Phase.WITHDRAWING}:
            return None
        return views.job(self._driver.state, self.job.name)

    def tally(self) -> Tally:
        """The statistics of the run under way, or of the last one."""
        if (view := self.view()) is None or self.run is None:
            return self.job.run
        tally = run_tally(view, Nanoseconds(monotonic_ns()), time())
        return replace(tally, stored=self.run.stored)

    def status(self) -> pb.JobStatus:
        """The job's status; that it has ended is shown when its end is recorded."""
        job = self.job
        if job.has_ended and self.last is not None:
            return self.last
        status = pb.JobStatus(name=job.name, epoch=job.epoch)
        if self.counts is not None:
            status.CopyFrom(self.counts)
        elif self.run is not None and (view := self.view()) is not None:
            status = job_status(view, self.run.place, self.run.earlier)
        status.completing = job.completes
        return as_submitted(with_tally(status, job.past.plus(self.tally())), job.submission)

    def record(self, effect: do.Record) -> JobRecord:
        """The record that an effect asks for; a job that ends gets its last status."""
        assert effect.submission is not None, "it is not removed"
        request = status = None
        if self.request is not None and not _is_complete(effect.end):
            request = request_of(self.request, effect.submission)
        if effect.end is not None:
            status = pb.JobStatus(name=self.job.name, epoch=self.job.epoch)
            status.CopyFrom(self.counts or status)
            with_end(with_tally(status, effect.tally), effect.end)
            self.last = as_submitted(status, effect.submission)
        return JobRecord(
            name=effect.job,
            epoch=effect.epoch,
            request=request,
            status=status,
            work=effect.submission.work,
            results=effect.submission.results,
            submitted_seconds=effect.submitted_seconds,
            tally=effect.tally,
        )

    # ---- effects: each returns the event that answers it -----------------------------------------

    async def open(self) -> ev.Opened | ev.OpenFailed:
        name = self.job.name
        try:
            while self.run is None:
                try:
                    self.run = await asyncio.to_thread(self._open_run)
                except OSError as error:
                    if not is_transient(error):
                        raise
                    if self.job.stop is not None:
                        return ev.OpenFailed(job=name, end=self.job.stop)
                    logger.warning("job %s waits: %s", name, error)
                    await asyncio.sleep(RETRY_SECONDS)
        except (LocationRefused, InputsRefused, OutputsRefused) as error:
            return ev.OpenFailed(job=name, end=_failed("FolderRefused", str(error)))
        except Exception as error:
            logger.exception("job %s", name)
            message = f"the coordinator failed while it opened the job's folders: {error!r}"
            return ev.OpenFailed(job=name, end=_failed("CoordinatorFailed", message))
        run = self.run
        return ev.Opened(job=name, items=len(run.inputs), completed=run.first + len(run.completed))

    def _open_run(self) -> JobRun:
        crashes = self._ledger.crash_count(self.job.name)
        request = self.submitted()
        opener = open_followed_run if request.follow else open_run
        run = opener(request, self.work.document, self.job.epoch, crashes)
        run.ask_for_room(self._driver.room_for_results)
        return run

    def dispatch(self, effect: do.Dispatch | do.Amend) -> None:
        assert self.run is not None, "it was opened"
        driver, run, name = self._driver, self.run, self.job.name
        request = request_of(self.work.request, effect.submission)
        run.deadline = None
        if allowed_seconds := request.active_deadline_seconds:
            run.deadline = Nanoseconds(self.submitted_at + nanoseconds(allowed_seconds))
        spec = wire.job_spec(
            request,
            self.work.document,
            items=len(run.inputs),
            epoch=effect.epoch,
            deadline=run.deadline,
            open_ended=run.follows,
        )
        spec = replace(spec, first=run.first)
        run.begin_epoch(effect.epoch)
        run.amend(request)
        match effect:
            case do.Dispatch():
                driver.runs[name] = run
                run.start(driver.feed, self._writing_failed)
                driver.submit(spec, run.completed, run.failed)
            case do.Amend():
                logger.info("job %s: plan %d, epoch %d", name, request.epoch, effect.epoch)
                driver.amend(spec)
            case _:
                assert_never(effect)

    def _writing_failed(self, error: BaseException) -> None:
        match error:
            case OutputsUnwritable():
                self._driver.on_results_unwritable(self.job.name, str(error))
            case _:
                self._driver.contain("results", error, self.job.name, None)

    def work_ended(self) -> ev.WorkEnded:
        try:
            return self._work_ended()
        except Exception as error:
            logger.exception("job %s", self.job.name)
            message = f"the coordinator failed while it worked out the job's end: {error!r}"
            return self._broken_off(message)

    def _work_ended(self) -> ev.WorkEnded:
        name, view = self.job.name, self.view()
        if view is None or self.run is None:
            return self._broken_off("the dispatcher has lost the job")
        self.counts = job_status(view, self.run.place, self.run.earlier)
        end = run_end(view, self.counts, follows=self.run.follows)
        whole = view.phase is JobPhase.COMPLETE
        return ev.WorkEnded(job=name, end=end, whole=whole, tally=self.tally())

    def _broken_off(self, message: str) -> ev.WorkEnded:
        end = _failed("CoordinatorFailed", message)
        return ev.WorkEnded(job=self.job.name, end=end, whole=False, tally=self.job.run)

    async def close(self, *, complete: bool) -> ev.Closed:
        name, run, self.run = self.job.name, self.run, None
        assert run is not None, "it was opened"
        self._driver.runs.pop(name, None)
        try:
            problem = await run.close(complete=complete)
        except Exception as error:
            logger.exception("job %s", name)
            problem = f"the coordinator failed: {error!r}"
        if self.counts is not None:
            self.counts.succeeded = run.earlier.succeeded + run.stored
        return ev.Closed(job=name, stored=run.stored, problem=problem)


def _is_complete(end: End | None) -> bool:
    return end is not None and end.outcome is Outcome.COMPLETE


def _failed(reason: str, message: str) -> End:
    return End(outcome=Outcome.FAILED, reason=reason, message=message)
