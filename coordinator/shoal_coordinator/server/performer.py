"""Performs the effects of the jobs' machine: each method returns the event that answers it."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import assert_never

from shoal_coordinator.dispatch import views
from shoal_coordinator.jobs import effects as do
from shoal_coordinator.jobs import events as ev
from shoal_coordinator.jobs.values import NOTHING, End, Outcome
from shoal_coordinator.server import wire
from shoal_coordinator.server.driver import Driver
from shoal_coordinator.server.lives import Life, Work
from shoal_coordinator.server.runs import RETRY_SECONDS, JobRun, open_run
from shoal_coordinator.server.statuses import job_status, run_end
from shoal_coordinator.server.submissions import request_of
from shoal_coordinator.storage.inputs import InputsRefused
from shoal_coordinator.storage.job_records import JobRecord, Ledger
from shoal_coordinator.storage.locations import LocationRefused
from shoal_coordinator.storage.results import OutputsRefused
from shoal_coordinator.storage.volume import Volume
from shoal_protocol.durable_files import is_transient
from shoal_protocol.units import Nanoseconds, nanoseconds

logger = logging.getLogger(__name__)


class Performer:
    """What the jobs' machine acts on: the ledger, the runs, the dispatcher and the volume."""

    def __init__(self, driver: Driver, ledger: Ledger, volume: Volume) -> None:
        self._driver = driver
        self._ledger = ledger
        self._volume = volume
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

    async def open(self, life: Life) -> ev.Opened | ev.OpenFailed:
        name = life.job.name
        try:
            while life.run is None:
                try:
                    life.run = await asyncio.to_thread(self._open_run, life.work, life.job.epoch)
                except OSError as error:
                    if not is_transient(error):
                        raise
                    if life.job.stop is not None:
                        return ev.OpenFailed(job=name, end=life.job.stop)
                    logger.warning("job %s waits: %s", name, error)
                    await asyncio.sleep(RETRY_SECONDS)
        except (LocationRefused, InputsRefused, OutputsRefused) as error:
            return ev.OpenFailed(job=name, end=_failed("FolderRefused", str(error)))
        except Exception as error:
            logger.exception("job %s", name)
            message = f"the coordinator failed while it opened the job's folders: {error!r}"
            return ev.OpenFailed(job=name, end=_failed("CoordinatorFailed", message))
        return ev.Opened(job=name, items=len(life.run.inputs), completed=len(life.run.completed))

    def _open_run(self, work: Work, epoch: int) -> JobRun:
        crashes = self._ledger.crash_count(work.request.name)
        return open_run(work.request, work.document, epoch, crashes)

    def dispatch(self, effect: do.Dispatch | do.Amend, life: Life) -> None:
        assert life.run is not None, "it was opened"
        driver, run, name = self._driver, life.run, life.job.name
        request = request_of(life.work.request, effect.submission)
        driver.deadlines.pop(name, None)
        if request.active_deadline_seconds:
            deadline = life.submitted_at + nanoseconds(request.active_deadline_seconds)
            driver.deadlines[name] = Nanoseconds(deadline)
        spec = wire.job_spec(
            request,
            life.work.document,
            items=len(run.inputs),
            epoch=effect.epoch,
            deadline=driver.deadlines.get(name),
        )
        run.begin_epoch(effect.epoch)
        match effect:
            case do.Dispatch():
                driver.runs[name] = run
                run.start(driver.feed, lambda error: driver.contain("results", error, name))
                driver.submit(spec, run.completed)
            case do.Amend():
                logger.info("job %s: plan %d, epoch %d", name, request.epoch, effect.epoch)
                driver.amend(spec)
            case _:
                assert_never(effect)

    def work_ended(self, life: Life) -> ev.WorkEnded:
        """The dispatcher has ended a job: how, and with what counts."""
        name, view = life.job.name, life.view()
        if view is None or life.run is None:
            end = _failed("CoordinatorFailed", "the dispatcher has lost the job")
            return ev.WorkEnded(job=name, end=end, whole=False, tally=NOTHING)
        place = life.run.inputs.place
        life.counts = job_status(view, place)
        whole = view.phase is views.JobPhase.COMPLETE
        return ev.WorkEnded(job=name, end=run_end(view, place), whole=whole, tally=life.tally())

    async def close(self, life: Life, *, complete: bool) -> ev.Closed:
        name, run, life.run = life.job.name, life.run, None
        assert run is not None, "it was opened"
        self._driver.runs.pop(name, None)
        self._driver.deadlines.pop(name, None)
        try:
            return ev.Closed(job=name, problem=await run.close(complete=complete))
        except Exception as error:
            logger.exception("job %s", name)
            return ev.Closed(job=name, problem=f"the coordinator failed: {error!r}")

    async def stop(self, lives: Iterable[Life]) -> None:
        """End every run, but no job: its results stay as they are."""
        runs = [life.run for life in lives if life.run is not None]
        for run in runs:
            self._driver.runs.pop(run.name, None)
            self._driver.withdraw(run.name, "the coordinator stops")
        closed = (run.close(complete=False) for run in runs)
        await asyncio.gather(*closed, return_exceptions=True)
        await asyncio.to_thread(self._writer.shutdown)


def _failed(reason: str, message: str) -> End:
    return End(outcome=Outcome.FAILED, reason=reason, message=message)
