"""The coordinator's jobs, from submission to the last word about them.

A job is *pending* while its inputs are counted and its outputs are looked at; then it *runs*, which
is the dispatcher's and its `JobRun`'s affair; it has *ended* when the dispatcher has said so and
its results are brought to their end.
"""

import asyncio
import logging
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from time import monotonic_ns, time
from typing import Final

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import views
from shoal_coordinator.server import wire
from shoal_coordinator.server.driver import Driver
from shoal_coordinator.server.runs import JobRun, open_run
from shoal_coordinator.server.statuses import job_status
from shoal_coordinator.server.submissions import amended, as_submitted, same_work
from shoal_coordinator.storage.inputs import FolderLimits, InputsRefused
from shoal_coordinator.storage.job_records import KEPT_ENDED, Ledger, Submission
from shoal_coordinator.storage.locations import LocationRefused
from shoal_coordinator.storage.results import OutputsRefused
from shoal_coordinator.storage.volume import Volume
from shoal_coordinator.storage.volume_paths import INPUTS, OUTPUTS, PathRefused
from shoal_protocol.digests import Digest
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.partition import DocumentRefused, PartitionDocument, document_from_json
from shoal_protocol.units import Nanoseconds, nanoseconds
from shoal_protocol.v1 import coordinator_pb2 as pb

logger = logging.getLogger(__name__)

MAXIMUM_JOBS: Final = 256
"""That have not ended."""
SHOWN_ENDED: Final = KEPT_ENDED
ENDED: Final = (pb.JobStatus.COMPLETE, pb.JobStatus.FAILED, pb.JobStatus.CANCELLED)


class Refusal(Enum):
    """Why a request about a job is refused: it makes no sense, its fragments are to be brought
    first, another job of the name runs, this one still runs, or not now."""

    MALFORMED = auto()
    LACKING = auto()
    KNOWN = auto()
    RUNS = auto()
    FULL = auto()
    STOPPING = auto()


class JobRefused(Exception):
    """A submission that does not become a job, or a job that cannot be removed."""

    def __init__(self, reason: str, refusal: Refusal = Refusal.MALFORMED) -> None:
        super().__init__(reason)
        self.refusal = refusal


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One submission. `digests` are its fragments. `submitted_at` is when, in nanoseconds of this
    process's clock; `submitted_seconds` the same by the clock on the wall, for the next
    coordinator. `status` is the last word once it has ended.
    """

    request: pb.SubmitJobRequest
    epoch: int
    digests: frozenset[Digest] = frozenset()
    submitted_at: int = field(default_factory=monotonic_ns)
    submitted_seconds: float = field(default_factory=time)
    run: JobRun | None = None
    cancelled: str | None = None
    status: pb.JobStatus | None = None
    task: asyncio.Task[None] | None = None
    prepared: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    stirred: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has ended, or this coordinator stops: those that watch wake up."""


class Jobs:
    """All jobs by name."""

    def __init__(
        self,
        driver: Driver,
        store: FragmentStore,
        ledger: Ledger,
        volume: Volume,
        limits: FolderLimits | None = None,
    ) -> None:
        self._driver = driver
        self._store = store
        self._ledger = ledger
        self._volume = volume
        volume.in_use = self.fragments_in_use
        self._limits = limits or FolderLimits()
        self._jobs: dict[str, Job] = {}
        self._epochs: dict[str, int] = {}
        self.closed = False

    # ---- asked from outside ----------------------------------------------------------------------

    def resume(self) -> None:
        """Go on with the jobs that had not ended when the last coordinator did."""
        for name, submission in self._ledger.load().items():
            self._epochs[name] = submission.epoch
            if submission.status is not None:
                self._jobs[name] = _ended_before(submission, submission.status)
            if submission.request is not None:
                logger.info("going on with job %s", name)
                try:
                    self.submit(submission.request, submission.submitted_seconds)
                except JobRefused as error:
                    logger.warning("job %s cannot go on: %s", name, error)

    def submit(self, request: pb.SubmitJobRequest, submitted_seconds: float | None = None) -> Job:
        """Take a job, join the one that runs already, or give that a newer plan. One that an
        earlier coordinator took was submitted at `submitted_seconds`. Raises `JobRefused`."""
        if self.closed:
            raise JobRefused("the coordinator stops", Refusal.STOPPING)
        request = self._with_folders(request)
        known = self._jobs.get(request.name)
        if known is not None and not known.ended.is_set():
            if not same_work(known.request, request):
                raise JobRefused(
                    f"job {request.name} runs already, with another content; "
                    f"wait for it, cancel it, or choose another name",
                    Refusal.KNOWN,
                )
            self._take_over(known, request)
            return known
        if sum(not job.ended.is_set() for job in self._jobs.values()) >= MAXIMUM_JOBS:
            raise JobRefused(f"{MAXIMUM_JOBS} jobs run already", Refusal.FULL)
        document = self._checked(request)
        epoch = max(request.epoch, self._epochs.get(request.name, 0) + 1)
        digests = frozenset(fragment.digest for fragment in document.fragments)
        job = Job(request=request, epoch=epoch, digests=digests)
        if submitted_seconds is not None:
            job.submitted_seconds = submitted_seconds
            job.submitted_at -= nanoseconds(max(0.0, time() - submitted_seconds))
        self._note(job)
        self._jobs.pop(request.name, None)
        self._jobs[request.name] = job
        job.task = asyncio.create_task(self._live(job, document))
        return job

    def _take_over(self, job: Job, request: pb.SubmitJobRequest) -> None:
        """Go on by other terms, which touches nothing that is under way; or by a newer plan: what
        has ended stays, what is under way begins again."""
        wanted = amended(job.request, request)
        if wanted == job.request:
            return
        document = self._checked(wanted)
        moves = list(wanted.stages) != list(job.request.stages)
        # Devices may know of a higher epoch than the plan's: each restart has one of its own.
        epoch = max(wanted.epoch, job.epoch + 1) if moves else job.epoch
        self._note(replace(job, request=wanted, epoch=epoch))
        job.request, job.epoch = wanted, epoch
        logger.info("job %s goes on by plan %d, in epoch %d", wanted.name, wanted.epoch, epoch)
        if job.run is not None:
            self._set_deadline(job)
            job.run.begin_epoch(epoch)
            self._submit_to_dispatcher(job, document, job.run, frozenset())

    def _note(self, job: Job) -> None:
        name = job.request.name
        noted = Submission(
            name=name,
            epoch=job.epoch,
            request=job.request,
            submitted_seconds=job.submitted_seconds,
        )
        try:
            self._ledger.put(noted)
        except OSError as error:
            raise JobRefused(f"the job cannot be noted: {error}", Refusal.FULL) from error
        self._epochs[name] = job.epoch

    def _with_folders(self, request: pb.SubmitJobRequest) -> pb.SubmitJobRequest:
        """A request that names no folders is about those of the job on this volume."""
        if request.inputs_uri and request.outputs_uri:
            return request
        whole = pb.SubmitJobRequest()
        whole.CopyFrom(request)
        try:
            inputs, outputs = (
                str(self._volume.job_folder(request.name, folder).absolute())
                for folder in (INPUTS, OUTPUTS)
            )
        except PathRefused as error:
            raise JobRefused(str(error)) from error
        whole.inputs_uri = request.inputs_uri or inputs
        whole.outputs_uri = request.outputs_uri or outputs
        return whole

    def find(self, name: str) -> Job | None:
        return self._jobs.get(name)

    def all(self) -> list[Job]:
        """Every job that is known, in the order of submission."""
        return list(self._jobs.values())

    def runs(self, name: str) -> bool:
        """Whether a job has been submitted and has not ended."""
        job = self._jobs.get(name)
        return job is not None and not job.ended.is_set()

    def fragments_in_use(self) -> frozenset[Digest]:
        """The fragments of jobs that have not ended; asked from another thread."""
        return frozenset(
            digest
            for job in tuple(self._jobs.values())
            if not job.ended.is_set()
            for digest in job.digests
        )

    async def remove(self, name: str) -> None:
        """Forget a job that has ended, with its files on the volume; its epoch is remembered, so
        that devices do not take a later job of the name for an older one. Raises `JobRefused`.
        """
        if self.runs(name):
            raise JobRefused(f"job {name} runs; cancel it first", Refusal.RUNS)
        try:
            await asyncio.to_thread(self._volume.remove_job, name)
            if self.runs(name):  # submitted meanwhile, and soon to fail for want of its inputs
                return
            if name in self._jobs:
                self._ledger.put(Submission(name=name, epoch=self._epochs[name]))
        except PathRefused as error:
            raise JobRefused(str(error)) from error
        except OSError as error:
            raise JobRefused(f"job {name} cannot be removed: {error}", Refusal.FULL) from error
        self._jobs.pop(name, None)

    def cancel(self, job: Job, reason: str) -> None:
        """Ask for a job's end; `job.ended` is set when it is there."""
        job.cancelled = reason[:1000] or "cancelled"
        if job.run is not None:
            at = Nanoseconds(monotonic_ns())
            self._driver.feed(ev.JobCancelled(at=at, job=job.request.name, reason=job.cancelled))

    def status(self, job: Job) -> pb.JobStatus:
        """How a job stands."""
        if job.status is not None:
            return job.status
        view = None if job.run is None else views.job(self._driver.state, job.request.name)
        if job.run is None or view is None:
            return as_submitted(pb.JobStatus(name=job.request.name, epoch=job.epoch), job.request)
        status = job_status(view, job.run.inputs.place, Nanoseconds(monotonic_ns()))
        if status.state in ENDED:
            # The dispatcher is done; the last results are still being written.
            status.state = pb.JobStatus.RUNNING
        return as_submitted(status, job.request)

    async def close(self) -> None:
        """Let go of everything, without ending any job."""
        self.closed = True
        for job in self._jobs.values():
            job.stirred.set()
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- one job's life --------------------------------------------------------------------------

    def _checked(self, request: pb.SubmitJobRequest) -> PartitionDocument:
        try:
            document = document_from_json(request.partition)
            wire.check_submission(request, document)
        except (DocumentRefused, wire.Malformed) as error:
            raise JobRefused(str(error)) from error
        self._volume.use(fragment.digest for fragment in document.fragments)
        try:
            missing = [
                f"fragment {fragment.index} ({fragment.digest[:19]})"
                for fragment in document.fragments
                if not self._store.has(fragment.digest)
            ]
        except OSError as error:
            reason = f"the fragment store cannot be read now: {error}"
            raise JobRefused(reason, Refusal.STOPPING) from error
        if missing:
            raise JobRefused(
                f"the fragment store lacks {', '.join(missing[:8])}"
                f"{f' and {len(missing) - 8} more' if len(missing) > 8 else ''}; "
                f"cut the model into this store first",
                Refusal.LACKING,
            )
        return document

    async def _live(self, job: Job, document: PartitionDocument) -> None:
        try:
            run, completed = await asyncio.to_thread(
                open_run, job.request, document, job.epoch, self._limits
            )
            job.run = run
            self._end(job, await self._run(job, document, run, completed))
        except (LocationRefused, InputsRefused, OutputsRefused) as error:
            self._end(job, _failed(job, "FolderRefused", str(error)))
        except Exception as error:
            logger.exception("job %s", job.request.name)
            self._end(job, _failed(job, "CoordinatorFailed", f"the coordinator failed: {error}"))
        finally:
            job.prepared.set()

    async def _run(
        self, job: Job, document: PartitionDocument, run: JobRun, completed: frozenset[int]
    ) -> pb.JobStatus:
        """Run a job to its end; the last word about it."""
        name = job.request.name
        writing = asyncio.create_task(run.run(self._driver.feed))
        try:
            self._begin(job, document, run, completed)
            job.prepared.set()
            await asyncio.shield(writing)
            return self._last_word(job, run)
        finally:
            if not writing.done():
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
            at = Nanoseconds(monotonic_ns())
            self._driver.feed(ev.JobCancelled(at=at, job=name, reason="the coordinator gave it up"))
            self._driver.runs.pop(name, None)
            self._driver.deadlines.pop(name, None)

    def _begin(
        self, job: Job, document: PartitionDocument, run: JobRun, completed: frozenset[int]
    ) -> None:
        """Hand a job to the dispatcher."""
        name = job.request.name
        self._set_deadline(job)
        self._driver.runs[name] = run
        run.begin_epoch(job.epoch)  # a newer one may have come while the inputs were counted
        self._submit_to_dispatcher(job, document, run, completed)
        if job.cancelled is not None:
            self.cancel(job, job.cancelled)

    def _set_deadline(self, job: Job) -> None:
        seconds, name = job.request.active_deadline_seconds, job.request.name
        self._driver.deadlines.pop(name, None)
        if seconds:
            deadline = Nanoseconds(job.submitted_at + nanoseconds(seconds))
            self._driver.deadlines[name] = deadline

    def _submit_to_dispatcher(
        self, job: Job, document: PartitionDocument, run: JobRun, completed: frozenset[int]
    ) -> None:
        spec = wire.job_spec(
            job.request,
            document,
            items=len(run.inputs),
            epoch=job.epoch,
            deadline=self._driver.deadlines.get(job.request.name),
        )
        at = Nanoseconds(monotonic_ns())
        self._driver.feed(ev.JobSubmitted(at=at, job=spec, completed=completed))

    def _last_word(self, job: Job, run: JobRun) -> pb.JobStatus:
        view = views.job(self._driver.state, job.request.name)
        assert view is not None, "the dispatcher remembers a job that ended just now"
        status = job_status(view, run.inputs.place, Nanoseconds(monotonic_ns()))
        if run.problem is not None:
            status.state, status.reason = pb.JobStatus.FAILED, "ResultsUnwritten"
            status.message = run.problem
        return status

    def _end(self, job: Job, status: pb.JobStatus) -> None:
        name = job.request.name
        state = pb.JobStatus.State.Name(status.state).lower()
        logger.info("job %s: %s %s", name, state, status.message)
        job.status, job.run = as_submitted(status, job.request), None
        job.ended.set()
        job.stirred.set()
        try:
            self._ledger.put(Submission(name=name, epoch=job.epoch, status=status))
        except OSError as error:
            logger.warning("the end of job %s cannot be noted: %s", name, error)
        self._forget_old()

    def _forget_old(self) -> None:
        ended = [name for name, job in self._jobs.items() if job.ended.is_set()]
        for name in ended[:-SHOWN_ENDED]:
            del self._jobs[name]
        past = [name for name in self._epochs if name not in self._jobs]
        for name in past[:-KEPT_ENDED]:
            del self._epochs[name]
            self._ledger.forget(name)


def _ended_before(submission: Submission, status: pb.JobStatus) -> Job:
    """A job that ended under an earlier coordinator."""
    request = pb.SubmitJobRequest(name=submission.name)
    job = Job(request=request, epoch=submission.epoch, status=status)
    for event in (job.prepared, job.ended, job.stirred):
        event.set()
    return job


def _failed(job: Job, reason: str, message: str) -> pb.JobStatus:
    status = pb.JobStatus(name=job.request.name, epoch=job.epoch)
    if job.cancelled is not None:
        status.state, status.reason, status.message = (
            pb.JobStatus.CANCELLED,
            "Cancelled",
            job.cancelled,
        )
    else:
        status.state, status.reason, status.message = pb.JobStatus.FAILED, reason, message
    return status
