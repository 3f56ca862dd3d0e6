"""`shoal run`: everything from orders to a report, in phases.

1. start a coordinator and the agents of each pool, each agent in its cgroup, 2. while they start,
cut what the orders name (in processes of their own) and plan it on the pools, 3. wait for sessions
and set the limits, 4. submit and watch, 5. stop everything, 6. verify, 7. report.

The first SIGINT or SIGTERM cancels the jobs and stops everything gracefully; a second one kills.
Before that, the first SIGINT ends the following of inputs, if a job follows: what has come is done.
Nothing cancels phase 5: if the first signal arrives in it, only the verification is left out.
Whatever happens, no process, cgroup or socket is left. Results that were written stay, and a later
run resumes.
"""

import asyncio
import contextlib
import datetime
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import Final

from shoal_cli.local import supervisor
from shoal_cli.local.cgroups import (
    Enforce,
    EnforcementImpossible,
    RunGroups,
    Unavailable,
    groups_as_wanted,
)
from shoal_cli.local.finer_cuts import FinerJob, continued, cut_finer, merged
from shoal_cli.local.finished import find_finished, remember
from shoal_cli.local.job_folders import check_folders, passed_over_note
from shoal_cli.local.observer import Observer, Snapshot
from shoal_cli.local.orders import JobOrder, Orders
from shoal_cli.local.planned_jobs import PlannedJob
from shoal_cli.local.planning import notes_of, plan_jobs, try_finer
from shoal_cli.local.pool import PoolRun, RunOptions, Target
from shoal_cli.local.preparation import check_model, partition_path
from shoal_cli.local.remote import feeds_of
from shoal_cli.local.report import (
    DeviceReport,
    Enforcement,
    JobReport,
    RunReport,
    Verification,
)
from shoal_cli.local.run_record import Death, Timeline
from shoal_cli.local.steps import StepCrashed, StepRefused
from shoal_cli.local.supervisor import Supervisor
from shoal_cli.local.verification import VerificationRequest, verify
from shoal_cli.local.workspace import Workspace
from shoal_cli.transfer.feeds import Feeds
from shoal_protocol.units import counted

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to end."""


class Interrupted(Exception):
    """Ended by a signal before anything ran."""


@contextlib.contextmanager
def handling(handlers: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Call these in the event loop when their signals come, instead of ending the process."""
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


async def run_orders(
    orders: Orders, workspace: Workspace, options: RunOptions, observer: Observer
) -> RunReport:
    """Run the jobs. Raises what prevents the whole run; failed items are in the report."""
    run = _Run(workspace, options, observer)
    try:
        return await run.run(orders)
    finally:
        observer.ended()


async def verify_job(
    order: JobOrder,
    workspace: Workspace,
    options: RunOptions,
    observer: Observer,
    threads: int = 1,
) -> Verification | str:
    """Compare a job's results with the whole model's. A verification that failed does not lose the
    report: why it failed is returned. `threads`: those of an agent."""
    observer.phase(f"verifying {order.name} against the whole model")
    request = VerificationRequest(
        model=order.plan.cut.path,
        partition=partition_path(workspace.store, order.plan.cut.name),
        inputs=order.inputs,
        outputs=order.outputs,
        tolerance=options.tolerance,
        most_items=options.verify or None,
        threads=threads,
    )
    try:
        return await verify(request, partial(observer.verifying, order.name))
    except (StepRefused, StepCrashed) as error:
        return str(error)


def snapshot(pools: Sequence[PoolRun]) -> Snapshot:
    """All pools of a run as they are now."""
    return Snapshot(
        jobs=tuple(status for pool in pools for status in pool.job_statuses()),
        devices=tuple(device for pool in pools for device in pool.device_statuses()),
        restarts={name: count for pool in pools for name, count in pool.restarts().items()},
    )


class _Run:
    """One run; its phases share what is here."""

    def __init__(self, workspace: Workspace, options: RunOptions, observer: Observer) -> None:
        self._workspace = workspace
        self._options = options
        self._observer = observer
        self._supervisor = Supervisor(self._on_death)
        self._pools: list[PoolRun] = []
        self._places: dict[str, tuple[PoolRun, PlannedJob]] = {}
        self._feeds = Feeds()
        self._finished: dict[str, JobReport] = {}
        self._before: dict[str, JobReport] = {}
        """Of jobs that run again in another cut."""
        self._devices: list[DeviceReport] = []
        self._notes: list[str] = []
        self._deaths: list[Death] = []
        self._timelines: list[Timeline] = []
        self._coordinator_restarts = self._ended_items = 0
        self._enforcement = Enforcement(mode="none", reason="asked for with --enforce none")
        self._interrupted = False
        self._stopping = False
        self._started = time.monotonic()
        self._start_time = datetime.datetime.now(datetime.UTC)

    async def run(self, orders: Orders) -> RunReport:
        verified: dict[str, Verification | str] = {}
        with self._interruptible(), self._serve_metrics():
            try:
                await self._run_jobs(orders.jobs)
                if self._options.verify is not None and not self._interrupted:
                    verified = await self._verify(orders.jobs)
            except asyncio.CancelledError:
                if not self._interrupted:
                    raise
                if not (self._places or self._finished):
                    raise Interrupted from None
        jobs = self._job_reports(orders.jobs, verified)
        return RunReport(
            shoal_version=metadata.version("shoal"),
            started=self._start_time.isoformat(timespec="seconds"),
            seconds=time.monotonic() - self._started,
            work=str(self._workspace.root),
            enforcement=self._enforcement,
            coordinator_restarts=self._coordinator_restarts,
            interrupted=self._interrupted,
            jobs=jobs,
            devices=merged(self._devices),
            notes=tuple(self._notes),
            deaths=tuple(self._deaths),
            timelines=tuple(self._timelines),
        )

    async def _run_jobs(self, orders: Sequence[JobOrder]) -> None:
        """Phases 1 to 5 for the jobs of which something is left to do; again for those that a finer
        cut may let run."""
        for order in orders:
            check_folders(order)
            if text := passed_over_note(order):
                self._note(text)
            check_model(order.plan.cut)
        left = [order for order in orders if not await self._is_finished(order)]
        if left:
            if trouble := self._workspace.in_memory_note():
                self._note(trouble)
            await self._run_pools(left)
        while not self._interrupted and (finer := self._cut_finer(left)):
            left = list(await try_finer(finer, self._run_again, self._note))

    async def _run_again(self, orders: Sequence[JobOrder]) -> Sequence[JobOrder]:
        self._supervisor = Supervisor(self._on_death)
        await self._run_pools(orders)
        return orders

    async def _is_finished(self, order: JobOrder) -> bool:
        if order.follows:
            return False
        finished = await asyncio.to_thread(find_finished, order, self._workspace)
        if finished is not None:
            self._finished[order.name] = finished
        return finished is not None

    def _job_reports(
        self, orders: Sequence[JobOrder], verified: Mapping[str, Verification | str]
    ) -> tuple[JobReport, ...]:
        """One for each job, in order. Those that have completed are recorded."""
        reports = []
        for order in orders:
            found = verified.get(order.name)
            if (report := self._finished.get(order.name)) is not None:
                reports.append(report.verified(found))
            elif order.name in self._places:
                reports.append(report := self._report(order.name).verified(found))
                if report.complete and not order.follows:
                    remember(order, self._places[order.name][1].prepared, self._workspace)
        return tuple(reports)

    def _report(self, name: str) -> JobReport:
        pool, job = self._places[name]
        return continued(self._before.get(name), pool.job_report(job))

    def _cut_finer(self, orders: Sequence[JobOrder]) -> list[FinerJob]:
        places = (self._places[order.name] for order in orders)
        return cut_finer((job, pool.job_report(job)) for pool, job in places)

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self._observer.note(text)

    async def _run_pools(self, orders: Sequence[JobOrder]) -> None:
        """Phases 1 to 5. Whatever happens, the processes and cgroups are gone afterwards."""
        groups = self._open_groups()
        try:
            self._pools = self._make_pools(orders, groups)
            self._note_unlimited_processors(groups)
            async with asyncio.TaskGroup() as group:
                failure = group.create_task(self._supervisor.wait_for_failure())
                await self._drive(orders)
                failure.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            await self._stop(groups)

    async def _drive(self, orders: Sequence[JobOrder]) -> None:
        for pool in self._pools:
            await pool.start()
        jobs = await plan_jobs(orders, self._workspace, self._observer, self._note)
        self._notes += notes_of(jobs)
        again = [order.name for order in orders if order.name in self._places]
        self._before |= {name: self._report(name) for name in again}
        for pool in self._pools:
            pool.take([job for job in jobs if job.order.plan.pool is pool.pool])
            self._places |= {job.order.name: (pool, job) for job in pool.jobs}
        agents = counted(sum(len(pool.devices) for pool in self._pools), "agent")
        self._observer.phase(f"starting {agents}")
        notes = self._observer.note
        await asyncio.gather(*(pool.wait_for_sessions(notes) for pool in self._pools))
        missing = [
            d.name for pool in self._pools for d in pool.devices if d.name not in pool.limits
        ]
        if self._options.enforce is Enforce.CGROUP and missing:
            raise EnforcementImpossible(f"no limit could be set for {', '.join(missing)}")
        self._observer.phase("running")
        # The coordinator fails an item before it has ended so many agents.
        tries = max(order.job.spec.backoff_limit for order in orders)
        self._supervisor.bear(supervisor.HOPELESS_DEATHS + tries)
        self._feeds = feeds_of(orders, self._observer.note)
        async with self._feeds.active():
            await asyncio.gather(*(pool.watch.run(self._on_snapshot) for pool in self._pools))
        for pool in self._pools:
            for text in await pool.failed_loads():
                self._note(text)

    def _open_groups(self) -> RunGroups | None:
        groups = groups_as_wanted(self._options.enforce, self._workspace.run)
        if isinstance(groups, Unavailable):
            self._enforcement = Enforcement(mode="none", reason=groups.reason)
            return None
        self._enforcement = Enforcement(mode=f"cgroup v{groups.hierarchy.version}", reason="")
        return groups

    def _make_pools(self, orders: Sequence[JobOrder], groups: RunGroups | None) -> list[PoolRun]:
        pools = {order.plan.pool.metadata.name: order.plan.pool for order in orders}
        return [
            PoolRun(
                pool=pool,
                workspace=self._workspace,
                supervisor=self._supervisor,
                groups=groups,
                options=self._options,
                prefix=f"{name}." if len(pools) > 1 else "",
            )
            for name, pool in pools.items()
        ]

    def _note_unlimited_processors(self, groups: RunGroups | None) -> None:
        if groups is not None and groups.hierarchy.cpu is not None:
            return
        named = [d.name for pool in self._pools for d in pool.devices if d.cpus is not None]
        if named:
            self._observer.note(
                f"cpus of {', '.join(named)}: not enforced, there is no cpu cgroup to be had here"
            )

    async def _stop(self, groups: RunGroups | None) -> None:
        """Phase 5: jobs are cancelled, processes stopped, cgroups removed; each step whether or not
        those before it succeeded."""
        self._observer.phase("stopping")
        self._stopping = True
        try:
            async with contextlib.AsyncExitStack() as steps:  # taken in reverse
                if groups is not None:
                    steps.callback(groups.remove)
                for pool in self._pools:
                    steps.push_async_callback(pool.close)
                steps.callback(self._take_readings)
                steps.push_async_callback(self._supervisor.stop)
                steps.push_async_callback(self._stop_agents)
                await asyncio.gather(*(pool.watch.cancel("interrupted") for pool in self._pools))
        finally:
            self._stopping = False

    async def _stop_agents(self) -> None:
        """The agents before the coordinators: each sends its last readings before it goes."""
        agents = [pool.label(device.name) for pool in self._pools for device in pool.devices]
        await self._supervisor.stop(agents)
        for pool in self._pools:
            await pool.watch.last_poll()
            if self._options.otlp is not None:
                lost, spans = await pool.watch.lost_spans()
                if lost:
                    self._note(
                        f"{lost} of {counted(spans, 'span')} were not delivered to "
                        f"{self._options.otlp}; see {self._workspace.log(pool.coordinator)}"
                    )

    def _take_readings(self) -> None:
        for pool in self._pools:
            if not pool.jobs:  # a finer cut was refused: what its devices did before counts
                continue
            self._devices += pool.device_reports()
            self._timelines += pool.timelines(self._start_time.timestamp())
            self._coordinator_restarts += self._supervisor.restarts(pool.coordinator)

    async def _verify(self, orders: Sequence[JobOrder]) -> dict[str, Verification | str]:
        """Phase 6, one job after another: each has the machine's memory for itself."""
        found = {}
        for order in orders:
            threads = 1
            if (place := self._places.get(order.name)) is not None:  # else it was finished before
                pool, job = place
                if pool.job_report(job).refused:
                    continue
                threads = pool.fewest_threads
            found[order.name] = await verify_job(
                order, self._workspace, self._options, self._observer, threads
            )
        return found

    def _on_snapshot(self) -> None:
        for pool in self._pools:
            pool.follow_floors()
        statuses = [status for pool in self._pools for status in pool.job_statuses()]
        ended = sum(status.succeeded + status.failed for status in statuses)
        if ended != self._ended_items:
            self._ended_items = ended
            self._supervisor.progressed()
        self._observer.running(snapshot(self._pools))

    def _on_death(self, death: supervisor.Death) -> None:
        now = round(time.monotonic() - self._started, 3)
        self._deaths.append(Death(seconds=now, process=death.title, cause=death.cause))
        self._observer.note(f"{death.title} {death.cause}; starting it again")

    @contextlib.contextmanager
    def _serve_metrics(self) -> Iterator[None]:
        """Serve those of the processes, if asked. Raises `OSError` where the address is taken."""
        if self._options.metrics is None:
            yield
            return
        from shoal_cli.local import metrics  # noqa: PLC0415 - heavy

        with metrics.serve(self._options.metrics, self._metrics_targets) as server:
            self._observer.note(f"metrics at {server.url}/metrics")
            yield

    def _metrics_targets(self) -> list[Target]:
        return [target for pool in self._pools for target in pool.metrics_targets()]

    async def _end(self, following: Sequence[PoolRun]) -> None:
        await self._feeds.last_inputs()
        await asyncio.gather(*(pool.watch.end() for pool in following))

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first signal cancels the run, which then stops gracefully; the next one kills."""
        task = asyncio.current_task()
        assert task is not None

        def interrupt() -> None:
            if self._interrupted:
                self._supervisor.kill()
                return
            self._interrupted = True
            if not self._stopping:
                task.cancel()

        ending: set[asyncio.Task[None]] = set()

        def end() -> None:
            following = [pool for pool in self._pools if pool.watch.follows]
            if self._stopping or not following or ending:
                interrupt()
                return
            self._observer.note("no further inputs are taken; once more to cancel what is left")
            ending.add(asyncio.ensure_future(self._end(following)))

        with handling({**dict.fromkeys(ENDING, interrupt), signal.SIGINT: end}):
            yield
