"""Performs the effects of the jobs' machine: each method returns the event that answers it."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import assert_never

from shoal_coordinator.dispatch import views
from shoal_coordinator.dispatch.state import JobPhase
from shoal_coordinator.jobs import effects as do
from shoal_coordinator.jobs import events as ev
from shoal_coordinator.jobs.state import Job
from shoal_coordinator.jobs.values import NOTHING, End, Outcome
from shoal_coordinator.server import wire
from shoal_coordinator.server.driver import Driver
from shoal_coordinator.server.lives import Lives
from shoal_coordinator.server.runs import open_run
from shoal_coordinator.server.statuses import job_status, run_end
from shoal_coordinator.server.submissions import request_of
from shoal_coordinator.storage.inputs import FolderLimits, InputsRefused
from shoal_coordinator.storage.job_records import JobRecord, Ledger
from shoal_coordinator.storage.locations import LocationRefused
from shoal_coordinator.storage.results import OutputsRefused
from shoal_coordinator.storage.volume import Volume
from shoal_protocol.units import Nanoseconds, nanoseconds

logger = logging.getLogger(__name__)


class Performer:
    """What the jobs' machine acts on: the ledger, the runs, the dispatcher and the volume."""

    def __init__(
        self,
        driver: Driver,
        ledger: Ledger,
        volume: Volume,
        limits: FolderLimits,
        lives: Lives,
    ) -> None:
        self._driver = driver
        self._ledger = ledger
        self._volume = volume
        self._limits = limits
        self._lives = lives
        self._writer = ThreadPoolExecutor(1, "job records")
        """One thread: records reach the disk in the order given."""

    # ---- records ---------------------------------------------------------------------------------

    async def record(self, record: JobRecord) -> ev.Recorded:
        try:
            await self._in_writer(self._ledger.put, record)
        except Exception as error:
            logger.warning("job %s cannot be recorded: %s", record.name, error)
            return ev.Recorded(job=record.name, problem=str(error))
        return ev.Recorded(job=record.name)

    async def record_tally(self, effect: do.RecordTally) -> None:
        try:
            await self._in_writer(self._ledger.put_tally, effect.job, effect.tally)
        except OSError as error:
            logger.warning("the statistics of job %s cannot be recorded: %s", effect.job, error)

    async def forget(self, name: str) -> None:
        try:
            await self._in_writer(self._ledger.forget, name)
        except OSError as error:
            logger.warning("the record of job %s cannot be deleted: %s", name, error)

    async def _in_writer(self, write: Callable[..., None], *arguments: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self._writer, write, *arguments)

    async def remove_files(self, name: str) -> ev.FilesRemoved:
        try:
            await asyncio.to_thread(self._volume.remove_job, name)
        except Exception as error:
            return ev.FilesRemoved(job=name, problem=str(error))
        return ev.FilesRemoved(job=name)

    # ---- a run -----------------------------------------------------------------------------------

    async def open(self, job: Job) -> ev.Opened | ev.OpenFailed:
        life = self._lives.of(job)
        assert life.work is not None, "a job that has not ended has its work"
        try:
            life.run = run = await asyncio.to_thread(
                open_run, life.work.request, life.work.document, job.epoch, self._limits
            )
        except (LocationRefused, InputsRefused, OutputsRefused) as error:
            end = End(outcome=Outcome.FAILED, reason="FolderRefused", message=str(error))
            return ev.OpenFailed(job=job.name, end=end)
        except Exception as error:
            logger.exception("job %s", job.name)
            message = f"the coordinator failed while it opened the job's folders: {error!r}"
            end = End(outcome=Outcome.FAILED, reason="CoordinatorFailed", message=message)
            return ev.OpenFailed(job=job.name, end=end)
        return ev.Opened(job=job.name, items=len(run.inputs), completed=len(run.completed))

    def dispatch(self, effect: do.Dispatch | do.Amend, job: Job) -> None:
        life = self._lives.of(job)
        assert life.run is not None, "it was opened"
        assert life.work is not None, "it has not ended"
        run, request = life.run, request_of(life.work.request, effect.submission)
        self._driver.deadlines.pop(job.name, None)
        if request.active_deadline_seconds:
            deadline = life.submitted_at + nanoseconds(request.active_deadline_seconds)
            self._driver.deadlines[job.name] = Nanoseconds(deadline)
        spec = wire.job_spec(
            request,
            life.work.document,
            items=len(run.inputs),
            epoch=effect.epoch,
            deadline=self._driver.deadlines.get(job.name),
        )
        run.begin_epoch(effect.epoch)
        match effect:
            case do.Dispatch():
                self._driver.runs[job.name] = run
                run.start(
                    self._driver.feed, lambda error: self._driver.results_broke(job.name, error)
                )
                self._driver.submit(spec, run.completed)
            case do.Amend():
                logger.info("job %s: plan %d, epoch %d", job.name, request.epoch, effect.epoch)
                self._driver.amend(spec)
            case _:
                assert_never(effect)

    def work_ended(self, job: Job) -> ev.WorkEnded:
        """The dispatcher has ended a job: how, and with what counts."""
        life = self._lives.of(job)
        view = views.job(self._driver.state, job.name)
        if view is None or life.run is None:
            message = "the dispatcher has lost the job"
            end = End(outcome=Outcome.FAILED, reason="CoordinatorFailed", message=message)
            return ev.WorkEnded(job=job.name, end=end, whole=False, tally=NOTHING)
        place = life.run.inputs.place
        life.counts = job_status(view, place)
        return ev.WorkEnded(
            job=job.name,
            end=run_end(view, place),
            whole=view.phase is JobPhase.COMPLETE,
            tally=self._lives.tally(job),
        )

    async def close(self, job: Job, *, complete: bool) -> ev.Closed:
        life = self._lives.of(job)
        run, life.run = life.run, None
        assert run is not None, "it was opened"
        self._driver.runs.pop(job.name, None)
        self._driver.deadlines.pop(job.name, None)
        try:
            return ev.Closed(job=job.name, problem=await run.close(complete=complete))
        except Exception as error:
            logger.exception("job %s", job.name)
            return ev.Closed(job=job.name, problem=f"the coordinator failed: {error!r}")

    async def stop(self) -> None:
        """End every run, but no job: its results stay as they are."""
        runs = [life.run for life in self._lives.all() if life.run is not None]
        for run in runs:
            self._driver.runs.pop(run.name, None)
            self._driver.withdraw(run.name, "the coordinator stops")
        closed = (run.close(complete=False) for run in runs)
        await asyncio.gather(*closed, return_exceptions=True)
        await asyncio.to_thread(self._writer.shutdown)
