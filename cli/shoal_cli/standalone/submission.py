"""`shoal run --coordinator`: models are cut and planned here, run there, and results come back.

    1. cut and plan, as local mode does, but for the coordinator's devices
    2. send the fragments and inputs that the coordinator lacks
    3. submit, and watch the jobs to their ends
    4. fetch the results
    5. verify

Each phase finds what an earlier run has done, so the same command resumes wherever one broke off.
Whoever stops watching stops nothing: the job runs on.
"""

import asyncio
import contextlib
import datetime
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from typing import Final

from shoal_cli.local.finer_cuts import continued, cut_finer, merged
from shoal_cli.local.job_folders import check_folders, passed_over_note
from shoal_cli.local.observer import Observer, Snapshot
from shoal_cli.local.orders import JobOrder, Orders
from shoal_cli.local.planning import notes_of, plan_jobs, try_finer
from shoal_cli.local.pool import RunOptions
from shoal_cli.local.remote import feeds_of
from shoal_cli.local.report import DeviceReport, Enforcement, JobReport, RunReport
from shoal_cli.local.run_record import timeline_of
from shoal_cli.local.runner import (
    ENDING,
    Interrupted,
    handling,
    verify_job,
)
from shoal_cli.local.watch import DeviceTally, Watch
from shoal_cli.local.workspace import Workspace
from shoal_cli.standalone.remote_devices import device_seen
from shoal_cli.standalone.sent_jobs import (
    Sent,
    carrier,
    drop_failures,
    folder_there,
    name_there,
    other_work_note,
)
from shoal_cli.standalone.watching import watching
from shoal_cli.transfer.coordinators import upload_fragments
from shoal_cli.transfer.copying import Progress, copy
from shoal_cli.transfer.feeds import Feeds
from shoal_cli.transfer.joined import Reachable
from shoal_cli.transfer.places import with_tries
from shoal_protocol.units import format_bytes
from shoal_protocol.v1 import coordinator_pb2 as pb

_SHOWN_SECONDS: Final = 1.0
_ENFORCED_THERE: Final = Enforcement(
    mode="none", reason="each device measures itself; limits are those of its own machine"
)


async def run_on_coordinator(
    coordinator: Reachable,
    orders: Orders,
    workspace: Workspace,
    options: RunOptions,
    observer: Observer,
    *,
    keep: bool,
) -> RunReport:
    """Run the jobs there. `keep`: they stay on the coordinator when their results are here. Raises
    what prevents the whole run; failed items are in the report."""
    run = _Run(coordinator, workspace, options, observer, keep=keep)
    try:
        return await run.run(orders.jobs)
    finally:
        observer.ended()


@dataclass(slots=True)
class _Run:
    coordinator: Reachable
    workspace: Workspace
    options: RunOptions
    observer: Observer
    keep: bool = field(kw_only=True)
    _sent: dict[str, Sent] = field(default_factory=dict)
    _reports: dict[str, JobReport] = field(default_factory=dict)
    _devices: tuple[DeviceReport, ...] = ()
    _notes: list[str] = field(default_factory=list)
    _timelines: dict[float, pb.Timeline] = field(default_factory=dict)
    _interrupted: bool = False
    _carried: dict[str, Feeds] = field(default_factory=dict)
    _feeds: Feeds = field(default_factory=Feeds)
    _watched: Watch | None = None

    async def run(self, orders: Sequence[JobOrder]) -> RunReport:
        started, begun = datetime.datetime.now(datetime.UTC), time.monotonic()
        with self._interruptible():
            try:
                await self._run_jobs(orders)
                await self._verify(orders)
            except asyncio.CancelledError:
                if not self._interrupted:
                    raise
                if not self._sent:
                    raise Interrupted from None
                names = ", ".join(sent.name for sent in self._sent.values())
                self._note(
                    f"{names} may still run on {self.coordinator.target}; `shoal cancel` ends jobs"
                )
        return RunReport(
            shoal_version=metadata.version("shoal"),
            started=started.isoformat(timespec="seconds"),
            seconds=time.monotonic() - begun,
            work=str(self.workspace.root),
            enforcement=_ENFORCED_THERE,
            coordinator_restarts=0,
            interrupted=self._interrupted,
            jobs=tuple(self._reports[each.name] for each in orders if each.name in self._reports),
            devices=self._devices,
            notes=tuple(self._notes),
            timelines=tuple(
                timeline_of(each, started.timestamp(), lambda device: device)
                for each in self._timelines.values()
            ),
        )

    async def _run_jobs(self, orders: Sequence[JobOrder]) -> None:
        """Phases 1 to 4; again for jobs of which a fragment turned out too large."""
        for order in orders:
            check_folders(order)
            if text := passed_over_note(order):
                self._note(text)
        jobs: Sequence[Sent] = await self._plan_jobs(orders)
        while jobs:
            await self._run_planned(jobs)
            reports = ((sent.job, self._reports[sent.order.name]) for sent in jobs)
            jobs = await try_finer(cut_finer(reports), self._plan_jobs, self._note)

    async def _plan_jobs(self, orders: Sequence[JobOrder]) -> list[Sent]:
        jobs = await plan_jobs(orders, self.workspace, self.observer, self._note, alone=True)
        self._notes += notes_of(jobs)
        return [Sent(await asyncio.to_thread(name_there, job), job) for job in jobs]

    async def _run_planned(self, jobs: Sequence[Sent]) -> None:
        for sent in jobs:
            await self._send(sent)
        async with watching(self.coordinator) as watch:
            watch.take([sent.request() for sent in jobs])
            try:
                await self._watch(watch, jobs)
                for sent in jobs:
                    await self._fetch(sent)
                await watch.last_poll()  # devices say what they moved and took a moment later
            finally:
                planned = [sent.job for sent in jobs]
                found = sorted(watch.devices.items())
                seen = (device_seen(planned, name, tally) for name, tally in found)
                self._devices = merged((*self._devices, *seen))

    async def _send(self, sent: Sent) -> None:
        """Phase 2, for one job."""
        self._sent[sent.order.name] = sent
        self.observer.phase(f"sending {sent.order.name} to {self.coordinator.target}")
        digests = [each.digest for each in sent.job.prepared.document.fragments]
        show = _Shown(self.observer, f"sending {sent.order.name}")
        async with self.coordinator.calling() as client:
            if text := other_work_note(sent, [each.name for each in await client.jobs()]):
                self._note(text)
            upload = partial(
                upload_fragments, self.workspace.store, digests, client, self.coordinator.target
            )
            await with_tries(partial(upload, on_bytes=lambda size: None))
            if sent.order.follows:
                if sent.order.job.spec.end:
                    for feed in self._carrier(sent).inputs:
                        await feed.last()
                return
            there = folder_there(self.coordinator, sent.name, "in", client)
            await copy(sent.inputs, there, show)

    def _note_away(self, away: bool) -> None:
        target = self.coordinator.target
        waits = f"{target} does not answer; this command waits, its jobs may still run"
        self.observer.note(waits if away else f"{target} answers again")

    async def _watch(self, watch: Watch, jobs: Sequence[Sent]) -> None:
        """Phase 3. What devices did before this run is not counted."""
        async with self.coordinator.calling() as client:
            for device in await client.devices():
                watch.devices[device.name] = DeviceTally(last=device)

        def show() -> None:
            statuses = tuple(watch.jobs.values())
            devices = tuple(tally.last for _, tally in sorted(watch.devices.items()))
            self.observer.running(Snapshot(jobs=statuses, devices=devices, restarts={}))

        self.observer.phase(f"running on {self.coordinator.target}")
        self._watched = watch
        try:
            async with self._following(jobs):
                await watch.run(show, self._note_away)
        finally:
            self._watched = None
            self._timelines.update(watch.timelines)
            for sent in jobs:
                status = watch.jobs.get(sent.name, pb.JobStatus())
                name = sent.order.name
                found = replace(sent.job.report(status), name=name)
                self._reports[name] = continued(self._reports.get(name), found)

    async def _fetch(self, sent: Sent) -> None:
        """Phase 4, for one job."""
        name = sent.order.name
        self.observer.phase(f"fetching the results of {name}")
        if sent.order.follows:
            for feed in self._carrier(sent).results:
                await feed.copy(follow=False)
            return
        async with self.coordinator.calling() as client:
            source = folder_there(self.coordinator, sent.name, "out", client)
            if await source.entries():
                await copy(source, sent.outputs, _Shown(self.observer, f"fetching {name}"))
            if self._reports[name].complete:
                drop_failures(sent.outputs)
                if not self.keep:
                    await client.remove(sent.name)

    async def _verify(self, orders: Sequence[JobOrder]) -> None:
        """Phase 5, on this machine."""
        if self.options.verify is None:
            return
        for order in orders:
            if self._reports[order.name].refused:
                continue
            found = await verify_job(order, self.workspace, self.options, self.observer)
            self._reports[order.name] = self._reports[order.name].verified(found)

    def _carrier(self, sent: Sent) -> Feeds:
        if sent.name not in self._carried:
            self._carried[sent.name] = carrier(
                self.coordinator, sent.name, sent.inputs, sent.outputs, self._note
            )
        return self._carried[sent.name]

    @contextlib.asynccontextmanager
    async def _following(self, jobs: Sequence[Sent]) -> AsyncIterator[None]:
        """Jobs that follow get inputs as they come and give results back: between an address and a
        folder here, between that and the coordinator."""
        self._feeds = feeds_of([sent.order for sent in jobs], self._note)
        for sent in jobs:
            if sent.order.follows:
                self._feeds.add(self._carrier(sent))
        async with self._feeds.active():
            yield

    async def _end_following(self, watch: Watch) -> None:
        """Send what has come, then have the jobs take no more."""
        await self._feeds.last_inputs()
        await watch.end()

    def _note(self, text: str) -> None:
        self._notes.append(text)
        self.observer.note(text)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """A signal ends the run here; what runs on the coordinator is not touched. Before that,
        the first SIGINT ends the following of inputs, if a job follows."""
        task = asyncio.current_task()
        assert task is not None

        def interrupt() -> None:
            self._interrupted = True
            task.cancel()

        ending: list[asyncio.Task[None]] = []

        def end() -> None:
            watch = self._watched
            if watch is None or not watch.follows or ending:
                interrupt()
                return
            self._note("what has come is the last; once more to leave, and the job runs on")
            ending.append(asyncio.create_task(self._end_following(watch)))

        with handling({**dict.fromkeys(ENDING, interrupt), signal.SIGINT: end}):
            yield


@dataclass(slots=True)
class _Shown:
    """Shows the progress of a copy, when it lasts."""

    observer: Observer
    what: str
    shown: float = field(default_factory=time.monotonic)

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() - self.shown >= _SHOWN_SECONDS:
            self.shown = time.monotonic()
            done, whole = format_bytes(progress.done_bytes), format_bytes(progress.bytes)
            self.observer.phase(f"{self.what}: {done} of {whole}")
