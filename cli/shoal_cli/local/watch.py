"""The runner as a client of the coordinator: submits jobs, watches them, polls the devices.

When the supervisor has restarted a coordinator, the watch submits its jobs again, which is
idempotent. A device's counters restart with its session or the coordinator, so `DeviceTally` sums
their growth; `JobTally` does the like for jobs.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from time import monotonic
from typing import Final

import grpc.aio

from shoal_cli.local.orders import JobRefused
from shoal_cli.local.report import TierHits
from shoal_protocol.coordinator_client import ENDED, CallFailed, CoordinatorClient
from shoal_protocol.v1 import coordinator_pb2 as pb

CALL_SECONDS: Final = 10.0
POLL_SECONDS: Final = 0.5
RETRY_SECONDS: Final = 0.25
TIMELINE_SECONDS: Final = 2.0
"""What a coordinator has recorded is read so often: one that is killed takes the rest along."""
WATCH_INTERVAL_SECONDS: Final = 0.25
CANCEL_SECONDS: Final = 2.0
WATCH_SECONDS: Final = 300.0
"""A watch ends after this, and the next one begins: no call is without a deadline."""
GIVE_UP_SECONDS: Final = 60.0
_COUNTERS: Final = (
    *("loads", "evictions", "tasks"),
    *("sent_bytes", "received_bytes", "fetched_bytes"),
)
_TIERS: Final = tuple(field.name for field in fields(TierHits))


class CoordinatorGone(Exception):
    """The coordinator could not be reached for `GIVE_UP_SECONDS`."""


@dataclass(slots=True)
class DeviceTally:
    """What one device has done in the run, over restarts of its agent and of the coordinator."""

    last: pb.DeviceStatus = field(default_factory=pb.DeviceStatus)
    floor_bytes: int = 0
    largest_budget_bytes: int = 0
    peak_bytes: int = 0
    held: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0))
    tiers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_TIERS, 0))

    def add(self, status: pb.DeviceStatus) -> None:
        """Take a newer status in."""
        for name in _COUNTERS:
            self.counts[name] += _growth(getattr(self.last, name), getattr(status, name))
        for name in _TIERS:
            before = getattr(self.last.tier_hits, name)
            self.tiers[name] += _growth(before, getattr(status.tier_hits, name))
        self.floor_bytes = status.floor_bytes or self.floor_bytes
        self.largest_budget_bytes = max(self.largest_budget_bytes, status.budget_bytes)
        self.peak_bytes = max(self.peak_bytes, status.peak_bytes)
        self.held.update(status.resident)
        self.last = status

    @property
    def tier_hits(self) -> TierHits:
        return TierHits(**self.tiers)


@dataclass(slots=True)
class JobTally:
    """What one job has done in the run, over restarts of the coordinator: each begins with the
    results that are there, and with statistics of a few seconds ago."""

    last: pb.JobStatus = field(default_factory=pb.JobStatus)
    resumed: int | None = None
    unrecorded_retries: int = 0

    def add(self, status: pb.JobStatus) -> pb.JobStatus:
        """Take a newer status in; it comes back with the counts of the run."""
        if status.epoch != self.last.epoch:
            self.unrecorded_retries += max(0, self.last.retries - status.retries)
        if self.resumed is None and status.items:
            self.resumed = status.resumed
        self.last = status
        counted = pb.JobStatus()
        counted.CopyFrom(status)
        counted.resumed = self.resumed or 0
        counted.retries += self.unrecorded_retries
        return counted


def _growth(before: int, now: int) -> int:
    """How much a counter grew; one that fell was started over."""
    return now - before if now >= before else now


class Watch:
    """A running coordinator, seen from outside."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._client = CoordinatorClient(channel, seconds=CALL_SECONDS)
        self._requests: dict[str, pb.SubmitJobRequest] = {}
        self._tallies: dict[str, JobTally] = {}
        self._submitting = asyncio.Lock()
        self._away = False
        self.jobs: dict[str, pb.JobStatus] = {}
        self.devices: dict[str, DeviceTally] = {}
        self.timelines: dict[float, pb.Timeline] = {}
        """What the devices did, by when it began: a coordinator that starts again begins anew."""

    def use(self, channel: grpc.aio.Channel) -> None:
        """Make the calls that come over another channel. What is under way stays on its own, which
        is to be closed after `run`."""
        self._client = CoordinatorClient(channel, seconds=CALL_SECONDS)

    def take(self, requests: Sequence[pb.SubmitJobRequest]) -> None:
        """Jobs that `run` submits."""
        self._requests = {request.name: request for request in requests}
        self._tallies = {request.name: JobTally() for request in requests}

    async def wait_for_devices(self, names: Sequence[str], on_ready: Callable[[str], None]) -> None:
        """Until all named devices have a session; `on_ready(name)` once for each."""
        missing = set(names)
        while missing:
            for status in await self.poll():
                if status.name in missing and status.state == pb.DeviceStatus.READY:
                    on_ready(status.name)
                    missing.discard(status.name)
            if missing:
                await asyncio.sleep(0.05)

    async def poll(self) -> Sequence[pb.DeviceStatus]:
        """Ask for the devices once; none while the coordinator is unreachable."""
        try:
            devices = await self._client.devices()
        except CallFailed as error:
            if error.unreachable:
                self._away = True
                return ()
            raise
        self._away = False
        for status in devices:
            self.devices.setdefault(status.name, DeviceTally()).add(status)
        return devices

    async def last_poll(self) -> None:
        """Poll once more, if the coordinator still runs."""
        with contextlib.suppress(CallFailed):
            await self.poll()

    async def failed_loads(self) -> dict[str, pb.HeldFragment]:
        """Of each device that has run nothing the fragment that it could not load, most often; if
        the coordinator still runs."""
        failed: dict[str, pb.HeldFragment] = {}
        with contextlib.suppress(CallFailed):
            for device in (await self._client.overview()).devices:
                absent = [f for f in device.fragments if f.failures and f.state == f.ABSENT]
                if absent and not device.status.tasks:
                    failed[device.status.name] = max(absent, key=lambda held: held.failures)
        return failed

    async def read_timeline(self) -> None:
        """Read what the devices did, if the coordinator still runs."""
        with contextlib.suppress(CallFailed):
            timeline = await self._client.timeline()
            if timeline.began_seconds:
                self.timelines[timeline.began_seconds] = timeline

    async def lost_spans(self) -> tuple[int, int]:
        """Spans that the collector of traces did not take, and all of them; none, if the
        coordinator does not run any more."""
        with contextlib.suppress(CallFailed):
            spans = await self._client.export_traces()
            return spans.lost, spans.lost + spans.delivered
        return 0, 0

    async def run(
        self, on_snapshot: Callable[[], None], on_away: Callable[[bool], None] = lambda away: None
    ) -> None:
        """Submit every job and watch all of them to their ends. `on_away` is called with True when
        the coordinator does not answer any more, with False when it does again."""
        try:
            async with asyncio.TaskGroup() as group:
                poller = group.create_task(self._poll_forever(on_snapshot, on_away))
                requests = self._requests.values()
                for follower in [group.create_task(self._follow(each)) for each in requests]:
                    await follower
                poller.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others were cancelled for it
        await self.last_poll()
        await self.read_timeline()
        on_snapshot()

    @property
    def follows(self) -> bool:
        """Whether a job takes further inputs, and was not told to end that."""
        requests = self._requests.values()
        return any(
            request.follow and not request.end and self._runs(request.name) for request in requests
        )

    async def end(self) -> None:
        """Have the jobs that follow their inputs take no further ones. A coordinator that cannot
        be reached learns it when the jobs are submitted again."""
        for request in self._requests.values():
            if request.follow and self._runs(request.name):
                request.end = True
                with contextlib.suppress(CallFailed):
                    await self._submit(request)

    async def _submit(self, request: pb.SubmitJobRequest) -> None:
        """One at a time: where a job has ended by the end of what it follows, a submission that was
        sent before that and comes after it would begin a further run. So would one that waited
        here meanwhile."""
        async with self._submitting:
            if self._runs(request.name):
                self._take(await self._client.submit(request))

    def _runs(self, name: str) -> bool:
        return name not in self.jobs or self.jobs[name].state not in ENDED

    async def cancel(self, reason: str) -> None:
        """Cancel the jobs that have not ended, if the coordinator still runs."""
        names = [name for name in self._requests if name in self.jobs]
        running = [name for name in names if self.jobs[name].state not in ENDED]
        if running:
            await self.read_timeline()
        for name in running:
            with contextlib.suppress(CallFailed):
                self._take(await self._client.cancel(name, reason, seconds=CANCEL_SECONDS))

    def _take(self, status: pb.JobStatus) -> None:
        self.jobs[status.name] = self._tallies[status.name].add(status)

    async def _poll_forever(
        self, on_snapshot: Callable[[], None], on_away: Callable[[bool], None]
    ) -> None:
        due, away = monotonic() + TIMELINE_SECONDS, False
        while True:
            await self.poll()
            if self._away != away:
                away = self._away
                on_away(away)
            if monotonic() >= due:
                await self.read_timeline()
                due = monotonic() + TIMELINE_SECONDS
            on_snapshot()
            await asyncio.sleep(POLL_SECONDS)

    async def _follow(self, request: pb.SubmitJobRequest) -> None:
        """Watch one job to its end. A coordinator is lost when its calls have failed for
        `GIVE_UP_SECONDS`; one that reports nothing may be busy with a long task."""
        lost_at = math.inf
        while True:
            try:
                await self._submit(request)
                lost_at = math.inf
                async for status in self._client.watch(
                    request.name, WATCH_INTERVAL_SECONDS, seconds=WATCH_SECONDS
                ):
                    self._take(status)
                    if status.state in ENDED:
                        return
            except CallFailed as error:
                if not error.unreachable:
                    raise JobRefused(f"job {request.name} was refused: {error.reason}") from error
                lost_at = min(lost_at, monotonic())
                if monotonic() - lost_at > GIVE_UP_SECONDS:
                    raise CoordinatorGone(
                        f"no coordinator for {GIVE_UP_SECONDS:g} s: {error}"
                    ) from error
            await asyncio.sleep(RETRY_SECONDS)
