"""What the jobs' machine does not hold of a job: its messages, its run, and who waits for it."""

import asyncio
import contextlib
from dataclasses import dataclass
from time import monotonic_ns, time

from shoal_coordinator.dispatch import views
from shoal_coordinator.jobs.effects import Record
from shoal_coordinator.jobs.state import Job, Phase
from shoal_coordinator.jobs.values import NOTHING, Tally
from shoal_coordinator.server.driver import Driver
from shoal_coordinator.server.runs import JobRun
from shoal_coordinator.server.statuses import job_status, run_tally, with_end, with_tally
from shoal_coordinator.server.submissions import as_submitted, request_of
from shoal_coordinator.storage.job_records import JobRecord
from shoal_protocol.digests import Digest
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import Nanoseconds, nanoseconds
from shoal_protocol.v1 import coordinator_pb2 as pb


@dataclass(frozen=True, slots=True)
class Work:
    """The part of a submission that never changes; `request` is the first one's."""

    request: pb.SubmitJobRequest
    document: PartitionDocument


class Signal(asyncio.Event):
    """An event that can be waited for with patience."""

    async def within(self, timeout_seconds: float) -> None:
        """Wait until it is set, or the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self.wait()


class Life:
    """One life of a job outside the machine. `submitted_at` is by this process's clock."""

    def __init__(self, job: Job, work: Work | None, driver: Driver) -> None:
        """`work` is None where an earlier coordinator has ended the job."""
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

    @property
    def has_ended(self) -> bool:
        return self.job.has_ended

    @property
    def work(self) -> Work:
        assert self._work is not None, "a job that has not ended has its work"
        return self._work

    @property
    def request(self) -> pb.SubmitJobRequest:
        """What the job was submitted with, as amended since."""
        return request_of(self.work.request, self.job.submission)

    @property
    def fragments_in_use(self) -> frozenset[Digest]:
        """Its fragments, until it has ended."""
        if self.job.has_ended or self._work is None:
            return frozenset()
        return frozenset(fragment.digest for fragment in self._work.document.fragments)

    def view(self) -> views.JobView | None:
        """The run under way, as the dispatcher sees it."""
        if self.job.phase not in {Phase.RUNNING, Phase.WITHDRAWING}:
            return None
        return views.job(self._driver.state, self.job.name)

    def tally(self) -> Tally:
        """The statistics of the run under way, or of the last one."""
        if self.job.phase not in {Phase.RUNNING, Phase.WITHDRAWING}:
            return self.job.run
        view = self.view()
        return NOTHING if view is None else run_tally(view, Nanoseconds(monotonic_ns()), time())

    def status(self) -> pb.JobStatus:
        """The job's status; that it has ended is shown when its end is recorded."""
        job = self.job
        if job.has_ended and self.last is not None:
            return self.last
        status = pb.JobStatus(name=job.name, epoch=job.epoch)
        if self.counts is not None:
            status.CopyFrom(self.counts)
        elif self.run is not None and (view := self.view()) is not None:
            status = job_status(view, self.run.inputs.place)
        status.completing = job.completes
        return as_submitted(with_tally(status, job.past.plus(self.tally())), job.submission)

    def record(self, effect: Record) -> JobRecord:
        """The record that an effect asks for; a job that ends gets its last status."""
        assert effect.submission is not None, "it is not removed"
        request = status = None
        if effect.end is None:
            request = request_of(self.work.request, effect.submission)
        else:
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
            submitted_seconds=effect.submitted_seconds,
            tally=effect.tally,
        )
