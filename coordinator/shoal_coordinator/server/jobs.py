"""The coordinator's jobs: performs the effects of the jobs' machine, and feeds their outcomes back.

    SubmitJob --> submit --+                     +--> ledger    (records)
    driver ----> ended ----+--> jobs.machine ----+--> runs      (inputs and results)
    ledger, runs, volume --+                     +--> driver    (the dispatcher), volume

`shoal_coordinator.jobs` decides what follows from what. Here belongs what waits and what blocks.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from itertools import count
from time import time
from typing import Final, assert_never

from shoal_coordinator.jobs import effects as do
from shoal_coordinator.jobs import events as ev
from shoal_coordinator.jobs.machine import State, step
from shoal_coordinator.jobs.state import Job, Phase
from shoal_coordinator.jobs.values import End, Outcome, Refusal
from shoal_coordinator.server import wire
from shoal_coordinator.server.driver import Driver
from shoal_coordinator.server.lives import Life, Work
from shoal_coordinator.server.messages import end_of, submission_as, submission_of, with_end
from shoal_coordinator.server.metrics import CoordinatorMetrics
from shoal_coordinator.server.refusals import JobRefused
from shoal_coordinator.storage.job_records import JobRecord, Ledger
from shoal_coordinator.storage.volume import Volume
from shoal_coordinator.storage.volume_paths import INPUTS, OUTPUTS, PathRefused
from shoal_protocol.digests import Digest
from shoal_protocol.durable_files import is_transient
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.partition import DocumentRefused, PartitionDocument, document_from_json
from shoal_protocol.v1 import coordinator_pb2 as pb

logger = logging.getLogger(__name__)

MAXIMUM_JOBS: Final = 256
"""Jobs that have not ended, at most."""
SHOWN_ENDED: Final = 1000
"""Ended jobs that are listed; and removed ones whose epochs are remembered."""
STATISTICS_SECONDS: Final = 5.0
"""How often the statistics of running jobs are recorded."""
CRASHES: Final = 3
"""A job is quarantined when so many coordinators in a row have died while they processed it."""
CLOSE_SECONDS: Final = 10.0
"""How long a stopping coordinator waits for jobs that open or end just now."""


class Jobs:
    """All jobs by name."""

    def __init__(
        self,
        driver: Driver,
        store: FragmentStore,
        ledger: Ledger,
        volume: Volume,
        metrics: CoordinatorMetrics,
    ) -> None:
        self._driver = driver
        driver.on_job_ended.append(self._work_ended)
        driver.on_job_broken.append(
            lambda job, message: self._feed(ev.Broke(job=job, message=message))
        )
        driver.on_results_unwritable = lambda job, message: self._feed(
            ev.ResultsUnwritable(job=job, message=message)
        )
        self._store = store
        self._ledger = ledger
        self._volume = volume
        self._metrics = metrics
        self._state = State(maximum_jobs=MAXIMUM_JOBS, shown_ended=SHOWN_ENDED)
        self._writer = ThreadPoolExecutor(1, "job records")
        """One thread: records reach the disk in the order given."""
        self._lives: dict[Job, Life] = {}
        """In the order in which they began."""
        self._callers: dict[int, tuple[asyncio.Future[Job | None], Work | None]] = {}
        self._found: dict[str, Work] = {}
        self._numbers = count(1)
        self._events: list[ev.Event] = []
        self._stepping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed = False

    # ---- requests --------------------------------------------------------------------------------

    def resume(self) -> None:
        """Take over the jobs that the last coordinator recorded. Raises `OSError` where that is
        impossible for now: the next one will."""
        for name, record in self._ledger.load().items():
            quarantined = record.status is None and record.crashes >= CRASHES
            try:
                found = _quarantined(record) if quarantined else self._found_job(record)
            except Exception as error:
                if isinstance(error, OSError) and is_transient(error):
                    raise
                logger.exception("job %s cannot be resumed", name)
                found = _not_resumed(record, "NotResumed", str(error))
            self._feed(found)
            if found.end is not None:
                life = self._begin(self._state.jobs[name], None)
                life.recorded = record.request
                status = pb.JobStatus(name=name, epoch=record.epoch)
                life.last = record.status or with_end(status, found.end)
                life.settled.set()
                life.done.set()
                if quarantined:
                    self._metrics.count_job(life.job, time())
                    ended = replace(record, status=life.last)
                    self._start(self._write(name, self._ledger.put, ended), feed=False)

    async def submit(self, request: pb.SubmitJobRequest) -> Life:
        """Submit a job, join one that runs already, or give that other terms or a newer plan. The
        submission is durable on return. Raises `JobRefused`."""
        try:
            request = self._with_folders(request)
        except PathRefused as error:
            raise JobRefused(str(error)) from error
        document, missing = await self.checked_now(request)
        caller, future = self._call(Work(request, document))
        self._feed(
            ev.Submitted(
                job=request.name,
                caller=caller,
                at_seconds=time(),
                submission=submission_of(request, document),
                missing=missing,
            )
        )
        return await self._accepted(future)

    async def retry(self, name: str, items: Sequence[int]) -> Life:
        """Run a job that has ended once more: the items that failed, or these of them. The request
        is durable on return. Raises `JobRefused`."""
        life = self.get(name)
        if life.request is None:
            known = "was recorded by an older version; submit it again"
            if life.job.end is not None and life.job.end.outcome is Outcome.COMPLETE:
                known = "is complete: no item of it has failed"
            raise JobRefused(f"job {name} {known}", Refusal.COMPLETE)
        document, missing = await self.checked_now(life.request)
        if self.find(name) is not life:
            raise JobRefused(f"job {name} was submitted anew just now", Refusal.RUNS)
        caller, future = self._call(Work(life.request, document))
        self._feed(
            ev.RetryRequested(
                job=name, caller=caller, at_seconds=time(), items=tuple(items), missing=missing
            )
        )
        return await self._accepted(future)

    async def end(self, name: str) -> Life:
        """Have a job that follows its inputs take no further ones, which is durable on return; one
        that ends already stays as it is. Raises `JobRefused`."""
        caller, future = self._call(None)
        self._feed(ev.EndRequested(job=name, caller=caller))
        return await self._accepted(future)

    async def remove(self, name: str) -> None:
        """Forget a job that has ended, with its files on the volume; its epoch is remembered, so
        that devices do not take a later job of the name for an older one. Raises `JobRefused`.
        """
        try:
            self._volume.job_folder(name, INPUTS)
        except PathRefused as error:
            raise JobRefused(str(error)) from error
        caller, future = self._call(None)
        self._feed(ev.RemovalRequested(job=name, caller=caller))
        await future

    def cancel(self, name: str, reason: str) -> None:
        if self.runs(name):
            self._feed(ev.CancelRequested(job=name, reason=reason))

    def find(self, name: str) -> Life | None:
        job = self._state.jobs.get(name)
        return None if job is None else self._lives[job]

    def get(self, name: str) -> Life:
        """Raises `JobRefused` where there is none of the name."""
        if (life := self.find(name)) is None:
            raise JobRefused(f"there is no job {name[:80]!r} here", Refusal.UNKNOWN)
        return life

    def all(self) -> list[Life]:
        return [self._lives[job] for job in self._state.jobs.values()]

    def runs(self, name: str) -> bool:
        """Whether a job has been submitted and has not ended."""
        job = self._state.jobs.get(name)
        return job is not None and not job.has_ended

    def refuses_inputs(self, name: str) -> bool:
        """Whether a job runs whose inputs stay as they are."""
        return self.runs(name) and not self._lives[self._state.jobs[name]].work.request.follow

    def fragments_in_use(self) -> frozenset[Digest]:
        """The fragments of jobs that have not ended; called from other threads."""
        lives = map(self._lives.get, tuple(self._state.jobs.values()))
        return frozenset().union(*(life.fragments_in_use for life in lives if life is not None))

    async def record_statistics(self) -> None:
        while True:
            await asyncio.sleep(STATISTICS_SECONDS)
            self._feed(self._elapsed())

    async def close(self) -> None:
        """Release everything, without ending any job; those that end just now are recorded."""
        self.closed = True
        for life in self._lives.values():
            life.done.set()
        self._feed(self._elapsed())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                while self._tasks:
                    await asyncio.wait(self._tasks)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        runs = [life.run for life in self._lives.values() if life.run is not None]
        for run in runs:
            self._driver.runs.pop(run.name, None)
            self._driver.withdraw(run.name, "the coordinator stops")
        closed = (run.close(complete=False) for run in runs)
        await asyncio.gather(*closed, return_exceptions=True)
        self._feed(self._elapsed())  # once more: items were stored until now
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._writer.shutdown)
        for future, _ in self._callers.values():
            if not future.done():
                future.set_exception(JobRefused("the coordinator stops", Refusal.STOPPING))

    async def _accepted(self, future: asyncio.Future[Job | None]) -> Life:
        job = await future
        assert job is not None, "an accepted submission has a job"
        return self._lives[job]

    def _call(self, work: Work | None) -> tuple[int, asyncio.Future[Job | None]]:
        if self.closed:
            raise JobRefused("the coordinator stops", Refusal.STOPPING)
        caller = next(self._numbers)
        future: asyncio.Future[Job | None] = asyncio.get_running_loop().create_future()
        self._callers[caller] = (future, work)
        return caller, future

    def _with_folders(self, request: pb.SubmitJobRequest) -> pb.SubmitJobRequest:
        """A request that names no folders is about those of the job on this volume. Raises
        `PathRefused`."""
        whole = deepcopy(request)
        for field, folder in (("inputs_uri", INPUTS), ("outputs_uri", OUTPUTS)):
            if not getattr(request, field):
                place = self._volume.job_folder(request.name, folder)
                setattr(whole, field, str(place.absolute()))
        return whole

    async def checked_now(self, request: pb.SubmitJobRequest) -> tuple[PartitionDocument, str]:
        """As `checked`, in a thread. Raises `JobRefused`."""
        try:
            return await asyncio.to_thread(self.checked, request)
        except (DocumentRefused, wire.Malformed) as error:
            raise JobRefused(str(error)) from error
        except OSError as error:
            reason = f"the fragment store cannot be read now: {error}; try again later"
            raise JobRefused(reason, Refusal.FULL) from error

    def checked(self, request: pb.SubmitJobRequest) -> tuple[PartitionDocument, str]:
        """The partition of a request, and which of its fragments the store lacks. Raises
        `DocumentRefused`, `wire.Malformed`, or `OSError` where the store cannot be read now."""
        document = document_from_json(request.partition)
        wire.check_submission(request, document)
        self._volume.serve([fragment.digest for fragment in document.fragments])
        missing = [
            f"fragment {fragment.index} ({fragment.digest[:19]})"
            for fragment in document.fragments
            if not self._store.has(fragment.digest)
        ]
        if not missing:
            return document, ""
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        return document, (
            f"the fragment store lacks {', '.join(missing[:8])}{more}; "
            f"cut the model into this store first"
        )

    def _found_job(self, record: JobRecord) -> ev.Found:
        submission, missing, work = None, "", record.work
        if record.request is not None and record.status is not None:
            submission = submission_as(work, record.request, record.results)
        elif record.request is not None:
            document, missing = self.checked(record.request)
            submission = submission_of(record.request, document)
            work = submission.work
            self._found[record.name] = Work(record.request, document)
            verb = "waits for its fragments" if missing else "resumes"
            logger.info("job %s %s %s", record.name, verb, missing)
        return ev.Found(
            job=record.name,
            epoch=record.epoch,
            submission=submission,
            work=work,
            results=record.results,
            end=None if record.status is None else end_of(record.status),
            submitted_seconds=time()
            if record.submitted_seconds is None
            else record.submitted_seconds,
            tally=record.tally,
            missing=missing,
        )

    # ---- the machine -----------------------------------------------------------------------------

    def _feed(self, event: ev.Event) -> None:
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events:
                for effect in step(self._state, self._events.pop(0)):
                    logger.debug("effect %s", effect)
                    self._do(effect)
        except Exception as error:
            logger.exception("the jobs' machine failed")
            self._driver.fail(error)
        finally:
            self._stepping = False

    def _do(self, effect: do.Effect) -> None:  # noqa: C901, PLR0912 - one for each kind
        ledger, name = self._ledger, "" if isinstance(effect, do.Refuse) else effect.job
        match effect:
            case do.Record():
                self._start(self._write(name, ledger.put, self._record(effect)), feed=True)
            case do.RecordTally():
                self._start(self._write(name, ledger.put_tally, name, effect.tally), feed=False)
            case do.Forget():
                self._start(self._write(name, ledger.forget, name), feed=False)
            case do.Open():
                self._start(self._life(name).open(), feed=True)
            case do.Dispatch() | do.Amend():
                self._life(name).dispatch(effect)
            case do.Withdraw():
                self._driver.withdraw(name, effect.reason)
            case do.Close():
                self._start(self._life(name).close(complete=effect.complete), feed=True)
            case do.RemoveFiles():
                self._start(self._remove_files(name), feed=True)
            case do.Accept():
                future, _ = self._callers.pop(effect.caller)
                if not future.done():
                    future.set_result(self._state.jobs.get(name))
            case do.Refuse():
                future, _ = self._callers.pop(effect.caller)
                if not future.done():
                    future.set_exception(JobRefused(effect.reason, effect.refusal))
            case do.Notify():
                self._notify(self._life(name))
            case _:
                assert_never(effect)

    def _start(self, work: Coroutine[None, None, ev.Event], *, feed: bool) -> None:
        async def perform() -> None:
            answer = await work
            if feed:
                self._feed(answer)

        task = asyncio.create_task(perform())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(
        self, name: str, write: Callable[..., None], *arguments: object
    ) -> ev.Recorded:
        """Change the ledger, in the order given."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, write, *arguments)
        except Exception as error:
            logger.warning("job %s cannot be recorded: %s", name, error)
            return ev.Recorded(job=name, problem=str(error))
        return ev.Recorded(job=name)

    async def _remove_files(self, name: str) -> ev.FilesRemoved:
        try:
            await asyncio.to_thread(self._volume.remove_job, name)
        except Exception as error:
            return ev.FilesRemoved(job=name, problem=str(error))
        return ev.FilesRemoved(job=name)

    def _life(self, name: str) -> Life:
        """The life that the current effect is about. The machine may hold the next one already: the
        effects that begin it follow."""
        return next(life for job, life in reversed(self._lives.items()) if job.name == name)

    def _begin(self, job: Job, work: Work | None) -> Life:
        known = list(self._state.jobs.values())
        kept = {*known, *(each.earlier for each in known)}
        self._lives = {each: life for each, life in self._lives.items() if each in kept}
        self._lives[job] = life = Life(job, work, self._driver, self._ledger)
        return life

    def _record(self, effect: do.Record) -> JobRecord:
        job = self._state.jobs.get(effect.job)
        if effect.submission is None or job is None:
            return JobRecord(name=effect.job, epoch=effect.epoch)
        if job not in self._lives:
            works = [self._callers[caller][1] for caller in job.callers]
            self._begin(job, works[0] if works else self._found.pop(job.name, None))
        return self._lives[job].record(effect)

    def _work_ended(self, name: str) -> None:
        if name in self._state.jobs and not self.closed:
            self._feed(self._life(name).work_ended())

    def _elapsed(self) -> ev.Elapsed:
        running = [job for job in self._state.jobs.values() if job.phase is Phase.RUNNING]
        return ev.Elapsed(tallies={job.name: self._lives[job].tally() for job in running})

    def _notify(self, life: Life) -> None:
        job = life.job
        life.settled.set()
        if job.has_ended:
            assert job.end is not None, "a job that has ended has an end"
            life.done.set()
            self._metrics.count_job(job, time())
            logger.info("job %s: %s %s", job.name, job.end.outcome.lower(), job.end.message)


def _quarantined(record: JobRecord) -> ev.Found:
    """A recorded job that has ended coordinator after coordinator."""
    assert record.request is not None, "it has not ended"
    message = (
        f"the coordinator died {record.crashes} times in a row while it read this job's inputs or "
        f"wrote its results, so it does not resume the job; other jobs run. Check the files in "
        f"{record.request.inputs_uri} and the coordinator's memory limit, then submit it again"
    )
    logger.error("job %s: %s", record.name, message)
    return _not_resumed(record, "CoordinatorFailed", message)


def _not_resumed(record: JobRecord, reason: str, message: str) -> ev.Found:
    """A recorded job that this coordinator cannot resume."""
    end = End(outcome=Outcome.FAILED, reason=reason, message=message)
    return ev.Found(
        job=record.name, epoch=record.epoch, end=end, submitted_seconds=0.0, tally=record.tally
    )
