"""Devices and jobs in detail, as one message of bounded size: `GetOverview`.

A list that is longer than the message allows is cut, and what is left out is counted. What costs
much to find, or is long, is in it only for the one job that was asked for.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from time import monotonic_ns, time
from typing import Final, TypeVar

from shoal_coordinator.dispatch import views
from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.state import Job, StageQueue
from shoal_coordinator.dispatch.timings import ItemTiming, TaskTiming, phases
from shoal_coordinator.server.driver import Driver
from shoal_coordinator.server.exchange import ExchangeHub
from shoal_coordinator.server.jobs import Jobs
from shoal_coordinator.server.messages import (
    device_status,
    job_status,
    run_tally,
    set_readings,
    with_tally,
)
from shoal_coordinator.server.sessions import Sessions
from shoal_protocol.digests import Digest
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.units import Nanoseconds, seconds
from shoal_protocol.v1 import coordinator_pb2 as pb

DEVICES: Final = 256
JOBS: Final = 64
PART_BYTES: Final = 1 << 20
"""Of all devices, and of all jobs."""
PAGE_BYTES: Final = 2 << 20
"""Of devices in one answer. A device that has much on its disk and has run all of it takes 100 KiB,
and one that lies 400."""
_NAMES: Final = 32
_FRAGMENTS: Final = 64
_FAILURES: Final = 8
_OLDEST: Final = 4
_TEXT: Final = 1000
"""Characters of a reason."""
_READINGS: Final = (
    *("cpu_fraction", "memory_available_bytes", "temperature_celsius"),
    *("battery_fraction", "round_trip_seconds"),
)

Part = TypeVar("Part", pb.DeviceOverview, pb.JobOverview)


@dataclass(frozen=True, slots=True)
class Overviews:
    """Reads what the parts of a coordinator know, in the thread that owns the dispatcher."""

    jobs: Jobs
    driver: Driver
    sessions: Sessions
    store: FragmentStore
    hub: ExchangeHub

    def get(self, job: str) -> pb.Overview:
        """All of it, with the details of one job; an unknown job has none."""
        overview = pb.Overview(time_seconds=time(), relayed_bytes=self.hub.relayed_bytes)
        known = views.devices(self.driver.state)
        overview.devices.extend(_fitting(map(self._device, known[:DEVICES])))
        overview.omitted_devices = len(known) - len(overview.devices)
        names = self._job_names(job)
        overview.jobs.extend(_fitting(self._job(name, name == job) for name in names[:JOBS]))
        overview.omitted_jobs = len(names) - len(overview.jobs)
        return overview

    def timeline(self) -> pb.Timeline:
        """What the devices did over time."""
        return self.driver.timeline.read(Nanoseconds(monotonic_ns()))

    # ---- devices ---------------------------------------------------------------------------------

    def devices(self, after: str | None) -> pb.ListDevicesResponse:
        """Every device that ever joined, by name; after a name as many as one answer has."""
        known, answer, room = views.devices(self.driver.state), pb.ListDevicesResponse(), PAGE_BYTES
        for view in known:
            if after is not None and view.name <= after:
                continue
            status = self._status(view)
            room -= status.ByteSize()
            if after is not None and answer.devices and room < 0:
                answer.more = True
                break
            answer.devices.append(status)
        return answer

    def _status(self, view: views.KnownDevice) -> pb.DeviceStatus:
        session = self.sessions.last.get(view.name)
        excess = self.driver.excesses.of(view.name)
        status = device_status(view, session, excess, self.store.size_bytes)
        status.peak_bytes = max(status.peak_bytes, self.driver.excesses.highest(view.name))
        if view.device is not None and (loading := view.device.memory.loading) is not None:
            status.loading_seconds = self._seconds_since(loading.since)
        return status

    def _seconds_since(self, since: Nanoseconds) -> float:
        return seconds(Nanoseconds(max(0, self.driver.state.now - since)))

    def _device(self, view: views.KnownDevice) -> pb.DeviceOverview:
        session, status = self.sessions.last.get(view.name), self._status(view)
        del status.resident[_NAMES:], status.times[:]
        overview = pb.DeviceOverview(status=status)
        if view.device is not None:
            held = islice(self._fragments(view.device), _FRAGMENTS)
            overview.fragments.extend(held)
        if session is not None:
            overview.version, overview.address = session.hello.version, session.hello.address
            set_readings(overview, session.telemetry, _READINGS)
            targets = self.driver.relayed_from(view.name)
            overview.relayed_to.extend(targets[:_NAMES])
        return overview

    def _fragments(self, device: Device) -> Iterator[pb.HeldFragment]:
        """What is resident or on its way first, then what it only failed with."""
        memory, loading = device.memory, device.memory.loading
        if loading is not None:
            held = self._held(device, loading.digest, pb.HeldFragment.LOADING)
            held.bytes, held.granted_bytes = loading.size, loading.granted
            held.loading_seconds = self._seconds_since(loading.since)
            yield held
        for digest, size in memory.resident.items():
            leaves = digest in memory.unloading
            state = pb.HeldFragment.UNLOADING if leaves else pb.HeldFragment.RESIDENT
            held = self._held(device, digest, state)
            held.bytes, held.granted_bytes = size, memory.granted.get(digest, 0)
            yield held
        for digest in device.health.backoffs:
            if digest not in memory.resident and (loading is None or digest != loading.digest):
                yield self._held(device, digest, pb.HeldFragment.ABSENT)

    def _held(
        self, device: Device, digest: Digest, state: pb.HeldFragment.State
    ) -> pb.HeldFragment:
        held = pb.HeldFragment(digest=digest, state=state, tasks=device.work.in_use.get(digest, 0))
        if (backoff := device.health.backoffs.get(digest)) is not None:
            left = max(0, backoff.until - self.driver.state.now)
            held.failures = backoff.failures_in_a_row
            held.failure = backoff.failure.message[:_TEXT]
            held.retry_seconds = seconds(Nanoseconds(left))
        return held

    # ---- jobs ------------------------------------------------------------------------------------

    def _job_names(self, asked: str) -> list[str]:
        """The job that was asked for, those that are active, the calls of programs among them, and
        those that have ended, the newest first."""
        lives = self.jobs.all()
        running = [life.job.name for life in lives if not life.has_ended]
        ended = [life.job.name for life in reversed(lives) if life.has_ended]
        known = self.driver.state.jobs.values()
        calls = [job.spec.name for job in known if not job.spec.holds]
        names = dict.fromkeys((*running, *calls, *ended))
        return sorted(names, key=lambda name: name != asked)

    def _job(self, name: str, asked: bool) -> pb.JobOverview:
        life, view = self.jobs.find(name), views.job(self.driver.state, name)
        overview = pb.JobOverview()
        if life is not None:
            overview.status.CopyFrom(life.status())
            if asked:
                overview.explanation.extend(life.job.submission.plan.explanation)
        elif view is not None:  # a call of a program is no job of `jobs`
            status = job_status(view, self._place(name))
            overview.status.CopyFrom(with_tally(status, run_tally(view, _now(), time())))
        del overview.status.failures[_FAILURES:]
        for failure in overview.status.failures:
            failure.reason = failure.reason[:_TEXT]
        stages = list(overview.status.stages)
        del overview.status.stages[:]
        if view is None or view.spec.epoch != overview.status.epoch:
            overview.stages.extend(pb.StageOverview(status=stage) for stage in stages)
            return overview
        overview.window = view.window
        for queue, stage in zip(view.queues, stages, strict=False):
            overview.stages.append(self._stage(queue, stage, asked))
        if asked:
            self._add_items(overview, view)
        return overview

    def _stage(self, queue: StageQueue, status: pb.StageStatus, asked: bool) -> pb.StageOverview:
        service, state = queue.service, self.driver.state
        del status.devices[_NAMES:]
        overview = pb.StageOverview(
            status=status,
            digest=service.digest,
            resident_bytes=service.resident,
            least_bytes=service.least,
            output_bytes=queue.spec.output_bytes or 0,
            planned=service.homes[:_NAMES],
            granted_bytes=[
                service.granted.get(name, service.resident) for name in service.homes[:_NAMES]
            ],
            loading=[device.name for device in islice(service.loading, _NAMES)],
        )
        if service.starving_since is not None:
            starving = Nanoseconds(max(0, state.now - service.starving_since))
            overview.starving_seconds = seconds(starving)
        if asked and service.queues:
            overview.candidates.extend(
                pb.Candidate(
                    device=each.device,
                    need_bytes=each.need,
                    have_bytes=each.have,
                    free_bytes=each.free,
                    reason=each.reason[:_TEXT],
                )
                for each in views.candidates(state, queue)[:_NAMES]
            )
        return overview

    def _add_items(self, overview: pb.JobOverview, view: Job) -> None:
        place = self._place(view.spec.name)
        overview.slowest.extend(_item(each, view, place) for each in view.slowest.items)
        for item in islice(view.active.values(), _OLDEST):
            if (timing := views.under_way(self.driver.state, item)) is not None:
                overview.oldest.append(_item(timing, view, place))

    def _place(self, name: str) -> Callable[[int], str]:
        run = self.driver.runs.get(name)
        return (lambda item: f"item {item}") if run is None else run.place


def _fitting(overviews: Iterable[Part]) -> Iterator[Part]:
    """As many as there is room for; a job that is too large comes without its stages."""
    room = PART_BYTES
    for overview in overviews:
        if overview.ByteSize() > room and isinstance(overview, pb.JobOverview):
            del overview.stages[:], overview.slowest[:], overview.oldest[:]
            overview.stages_omitted = True
        room -= overview.ByteSize()
        if room < 0:
            return
        yield overview


def _item(timing: ItemTiming, job: Job, place: Callable[[int], str]) -> pb.ItemTiming:
    predecessors = [queue.predecessors for queue in job.queues]
    phases_of = phases(timing, predecessors)

    def since_start(at: int) -> float:
        return seconds(Nanoseconds(max(0, at - timing.started_at)))

    def task_of(task: TaskTiming) -> pb.TaskTiming:
        ready_at, given_at, ended_at = phases_of[task.stage]
        return pb.TaskTiming(
            stage=task.stage,
            device=task.device,
            ready_seconds=since_start(ready_at),
            given_seconds=since_start(given_at),
            ended_seconds=0.0 if ended_at is None else since_start(ended_at),
            compute_seconds=seconds(task.compute),
        )

    return pb.ItemTiming(
        item=timing.item,
        input=place(timing.item),
        seconds=seconds(Nanoseconds(max(0, timing.took))),
        retries=timing.retries,
        tasks=map(task_of, timing.tasks),
    )


def _now() -> Nanoseconds:
    return Nanoseconds(monotonic_ns())
