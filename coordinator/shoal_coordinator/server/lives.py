"""What the jobs' machine does not hold of a job: its messages, its run, and who waits for it."""

import asyncio
from dataclasses import dataclass, field
from time import monotonic_ns, time
from weakref import WeakKeyDictionary, WeakValueDictionary

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

    @property
    def digests(self) -> frozenset[Digest]:
        return frozenset(fragment.digest for fragment in self.document.fragments)


@dataclass(slots=True, eq=False, kw_only=True)
class Life:
    """One life of a job outside the machine. `work` is None where an earlier coordinator has ended
    it. `submitted_at` is by this process's clock. `counts` are the last that the dispatcher gave,
    `last` is the status of a job that has ended.
    """

    work: Work | None
    submitted_at: int = field(default_factory=monotonic_ns)
    run: JobRun | None = None
    counts: pb.JobStatus | None = None
    last: pb.JobStatus | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the job runs or has ended."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has ended, or the coordinator stops."""


class Lives:
    """The lives of all jobs that are known, and of those that somebody still watches."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lives: WeakKeyDictionary[Job, Life] = WeakKeyDictionary()
        self._present: WeakValueDictionary[str, Job] = WeakValueDictionary()

    def begin(self, job: Job, work: Work | None) -> Life:
        """The life that belongs to the machine's job."""
        life = self._lives[job] = Life(work=work)
        self._present[job.name] = job
        life.submitted_at -= nanoseconds(max(0.0, time() - job.submitted_seconds))
        return life

    def of(self, job: Job) -> Life:
        return self._lives[job]

    def present(self, name: str) -> Job:
        """The job that the current effect is about. The machine may hold the next life already: the
        effects that begin it follow."""
        return self._present[name]

    def all(self) -> list[Life]:
        return list(self._lives.values())

    def __contains__(self, job: Job) -> bool:
        return job in self._lives

    def request(self, job: Job) -> pb.SubmitJobRequest:
        """What a job was submitted with, as amended since."""
        work = self.of(job).work
        known = pb.SubmitJobRequest(name=job.name) if work is None else work.request
        return request_of(known, job.submission)

    def fragments(self, job: Job) -> frozenset[Digest]:
        """The fragments of a job that has not ended."""
        life = self._lives.get(job)
        if life is None or life.work is None or job.has_ended:
            return frozenset()
        return life.work.digests

    def tally(self, job: Job) -> Tally:
        """The statistics of the run under way, or of the last one."""
        if job.phase not in {Phase.RUNNING, Phase.WITHDRAWING}:
            return job.run
        view = views.job(self._driver.state, job.name)
        return NOTHING if view is None else run_tally(view, Nanoseconds(monotonic_ns()), time())

    def status(self, job: Job) -> pb.JobStatus:
        """The status of a job; that it has ended is shown when its end is recorded."""
        life = self.of(job)
        if job.has_ended and life.last is not None:
            return life.last
        status = pb.JobStatus(name=job.name, epoch=job.epoch)
        if life.counts is not None:
            status.CopyFrom(life.counts)
        elif life.run is not None and job.phase in {Phase.RUNNING, Phase.WITHDRAWING}:
            view = views.job(self._driver.state, job.name)
            status = status if view is None else job_status(view, life.run.inputs.place)
        status.completing = job.completes
        with_tally(status, job.past.plus(self.tally(job)))
        return as_submitted(status, job.submission.plan, job.submission.terms)

    def record(self, effect: Record, job: Job | None) -> JobRecord:
        """The record that an effect asks for; a job that ends gets its last status."""
        if effect.submission is None or job is None:
            return JobRecord(name=effect.job, epoch=effect.epoch)
        life, request, status = self.of(job), None, None
        if effect.end is None:
            assert life.work is not None, "a job that has not ended has its work"
            request = request_of(life.work.request, effect.submission)
        else:
            status = pb.JobStatus(name=job.name, epoch=job.epoch)
            status.CopyFrom(life.counts or status)
            with_end(with_tally(status, effect.tally), effect.end)
            submission = effect.submission
            life.last = as_submitted(status, submission.plan, submission.terms)
        return JobRecord(
            name=effect.job,
            epoch=effect.epoch,
            request=request,
            status=status,
            work=effect.submission.work,
            submitted_seconds=effect.submitted_seconds,
            tally=effect.tally,
        )
