"""An overview as values: names for fragments, rates between two overviews, the stage that limits
the others. Pure.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from shoal_cli.local.report import Latency, TierHits
from shoal_protocol.copying import copied
from shoal_protocol.v1 import coordinator_pb2 as pb

_COUNTED: Final = ("tasks", "sent_bytes", "received_bytes", "fetched_bytes")
_DEVICES: Final = pb.DeviceStatus.State
_READINGS: Final = (
    *("cpu_fraction", "memory_available_bytes", "temperature_celsius"),
    *("battery_fraction", "round_trip_seconds"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldView:
    """A fragment on a device. `name` is `JOB/STAGE`, or where no job uses it its digest's
    beginning."""

    name: str
    digest: str
    state: str
    bytes: int
    granted_bytes: int
    in_blocks: bool
    tasks: int
    loading_seconds: float
    failures: int
    failure: str
    retry_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """A device. Rates are None without an earlier overview; readings where it has none."""

    name: str
    state: str
    silent_seconds: float
    architecture: str
    version: str
    budget_bytes: int
    floor_bytes: int
    resident_bytes: int
    used_bytes: int
    peak_bytes: int
    over_budget: bool
    fragments: tuple[HeldView, ...]
    cached_fragments: int
    cached_bytes: int
    queued: int
    tasks: int
    tasks_per_second: float | None
    loads: int
    evictions: int
    tier_hits: TierHits
    sent_bytes_per_second: float | None
    received_bytes_per_second: float | None
    fetched_bytes_per_second: float | None
    round_trip_seconds: float | None
    reachable: bool
    relayed_to: tuple[str, ...]
    cpu_fraction: float | None
    memory_available_bytes: int | None
    temperature_celsius: float | None
    battery_fraction: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateView:
    """A device that does not serve a stage."""

    device: str
    need_bytes: int
    have_bytes: int
    free_bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """A stage. `period_seconds`: an item leaves it every so often at best. `limits`: no other stage
    takes longer."""

    index: int
    digest: str
    resident_bytes: int
    least_bytes: int
    ready: int
    running: int
    finished: int
    compute_seconds: float | None
    period_seconds: float | None
    limits: bool
    devices: tuple[str, ...]
    loading: tuple[str, ...]
    planned: tuple[str, ...]
    granted_bytes: tuple[int, ...]
    starving_seconds: float
    candidates: tuple[CandidateView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemView:
    """Where the time of an item went, along the tasks that it had to wait for: `waited` for a free
    place on a device, `moved`: the inputs travelled, or waited there for their turn, `computed`,
    and `stored` as a result. `stage` took the longest, on `device`. `running` are the devices that
    have a task of it now, where what they compute still counts as `moved`."""

    item: int
    input: str
    seconds: float
    waited_seconds: float
    moved_seconds: float
    computed_seconds: float
    stored_seconds: float
    stage: int | None
    device: str
    running: tuple[str, ...]
    retries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job. `items_per_second` is of the time between two overviews, where there are two; else
    since the job's start."""

    name: str
    state: str
    reason: str
    message: str
    completing: bool
    following: bool
    items: int
    active: int
    window: int
    succeeded: int
    failed: int
    resumed: int
    retries: int
    priority: int
    plan: int
    items_per_second: float | None
    seconds: float
    seconds_left: float | None
    latency: Latency
    tier_hits: TierHits
    stages: tuple[StageView, ...]
    stages_omitted: bool
    failures: tuple[str, ...]
    slowest: tuple[ItemView, ...]
    oldest: tuple[ItemView, ...]
    explanation: tuple[str, ...]

    @property
    def has_ended(self) -> bool:
        return self.state in {"Complete", "Failed", "Cancelled"}


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything of a coordinator."""

    time_seconds: float
    devices: tuple[DeviceView, ...]
    jobs: tuple[JobView, ...]
    omitted_devices: int
    omitted_jobs: int
    relayed_bytes_per_second: float | None

    def jobs_called(self, name: str) -> tuple[JobView, ...]:
        """The job of that name; or those that a cluster or a program has named after it."""
        called = names_called(name, [job.name for job in self.jobs])
        return tuple(job for job in self.jobs if job.name in called)


def names_called(name: str, names: Sequence[str]) -> tuple[str, ...]:
    """Of names of jobs that one; or those that a cluster or a program has made of it."""
    pattern = re.compile(rf"{re.escape(name)}[-.][0-9a-f]{{8}}")
    return (name,) if name in names else tuple(filter(pattern.fullmatch, names))


def view_of(now: pb.Overview, before: pb.Overview | None = None) -> View:
    """What an overview shows; with rates since the one before."""
    past = _Past(now, before)
    uses = _uses(now)
    return View(
        time_seconds=now.time_seconds,
        devices=tuple(_device(each, past, uses) for each in now.devices),
        jobs=tuple(_job(each, past) for each in now.jobs),
        omitted_devices=now.omitted_devices,
        omitted_jobs=now.omitted_jobs,
        relayed_bytes_per_second=past.rate(
            now.relayed_bytes, None if before is None else before.relayed_bytes
        ),
    )


class _Past:
    """The overview before, and the seconds since then."""

    def __init__(self, now: pb.Overview, before: pb.Overview | None) -> None:
        self._seconds = 0.0 if before is None else now.time_seconds - before.time_seconds
        known = pb.Overview() if before is None else before
        self.devices = {each.status.name: each.status for each in known.devices}
        self.jobs = {each.status.name: each.status for each in known.jobs}

    def rate(self, now: int, before: int | None) -> float | None:
        """The growth of a counter; None where it is not known, or was started anew."""
        if before is None or self._seconds <= 0 or now < before:
            return None
        return (now - before) / self._seconds


class _Use(NamedTuple):
    """What a fragment is in a job."""

    name: str
    resident_bytes: int


def _uses(overview: pb.Overview) -> Mapping[str, _Use]:
    """By digest; of several jobs with one fragment the first's."""
    uses: dict[str, _Use] = {}
    for job in overview.jobs:
        for stage in job.stages:
            name = f"{job.status.name}/{stage.status.index}"
            uses.setdefault(stage.digest, _Use(name, stage.resident_bytes))
    return uses


def _device(each: pb.DeviceOverview, past: _Past, fragments: Mapping[str, _Use]) -> DeviceView:
    status = each.status
    before = past.devices.get(status.name)
    rates = {
        f"{name}_per_second": past.rate(
            getattr(status, name), None if before is None else getattr(before, name)
        )
        for name in _COUNTED
    }
    readings = {name: getattr(each, name) if each.HasField(name) else None for name in _READINGS}
    return copied(
        DeviceView,
        status,
        state="Left" if status.has_left else _DEVICES.Name(status.state).capitalize(),
        version=each.version,
        over_budget=status.peak_bytes > status.budget_bytes,
        fragments=tuple(_held(held, fragments) for held in each.fragments),
        tier_hits=copied(TierHits, status.tier_hits),
        reachable=bool(each.address),
        relayed_to=tuple(each.relayed_to),
        **rates,
        **readings,
    )


def _held(held: pb.HeldFragment, fragments: Mapping[str, _Use]) -> HeldView:
    use = fragments.get(held.digest)
    return copied(
        HeldView,
        held,
        name=held.digest[:19] if use is None else use.name,
        state=pb.HeldFragment.State.Name(held.state).capitalize(),
        in_blocks=use is not None and 0 < held.granted_bytes < use.resident_bytes,
    )


def _job(each: pb.JobOverview, past: _Past) -> JobView:
    status = each.status
    before = past.jobs.get(status.name)
    ended = status.succeeded + status.failed
    rate: float | None = None
    if before is not None and before.epoch == status.epoch:
        rate = past.rate(ended, before.succeeded + before.failed)
    if rate is None or status.state != pb.JobStatus.RUNNING:
        rate = status.items_per_second or None
    pace, left = status.items_per_second or rate, status.items - ended
    periods = [period for stage in each.stages if (period := _period(stage)) is not None]
    longest = max(periods, default=None) if len(periods) == len(each.stages) else None
    return copied(
        JobView,
        status,
        state=pb.JobStatus.State.Name(status.state).capitalize(),
        window=each.window,
        priority=status.terms.priority,
        items_per_second=rate,
        seconds_left=left / pace if pace and left > 0 and not status.following else None,
        latency=copied(Latency, status.latency),
        tier_hits=copied(TierHits, status.tier_hits),
        stages=tuple(_stage(stage, longest) for stage in each.stages),
        stages_omitted=each.stages_omitted,
        failures=tuple(map(_failure, status.failures)),
        slowest=tuple(_item(item) for item in each.slowest),
        oldest=tuple(_item(item) for item in each.oldest),
        explanation=tuple(each.explanation),
    )


def _period(stage: pb.StageOverview) -> float | None:
    """At best an item leaves the stage every so many seconds."""
    status = stage.status
    return status.compute_seconds / len(status.devices) if status.devices else None


def _stage(each: pb.StageOverview, longest: float | None) -> StageView:
    status, period = each.status, _period(each)
    return copied(
        StageView,
        status,
        digest=each.digest,
        resident_bytes=each.resident_bytes,
        least_bytes=each.least_bytes,
        compute_seconds=status.compute_seconds or None,
        period_seconds=period or None,
        limits=bool(period) and period == longest,
        devices=tuple(status.devices),
        loading=tuple(each.loading),
        planned=tuple(each.planned),
        granted_bytes=tuple(each.granted_bytes),
        starving_seconds=each.starving_seconds,
        candidates=tuple(copied(CandidateView, candidate) for candidate in each.candidates),
    )


def _failure(failure: pb.ItemFailure) -> str:
    where = failure.input or f"item {failure.item}"
    return failure.reason if failure.reason.startswith(where) else f"{where}: {failure.reason}"


def _item(item: pb.ItemTiming) -> ItemView:
    """Walks back from the task that runs, or else ended last, to the one that it waited for, and so
    on."""
    running = [task for task in item.tasks if not task.ended_seconds]
    ended = sorted(
        (task for task in item.tasks if task.ended_seconds),
        key=lambda task: task.ended_seconds,
        reverse=True,
    )
    # Tasks are given before they are ready, too: those wait for the first one that runs.
    path = [max(running, key=lambda task: task.ready_seconds)] if running else []
    for task in ended:
        if not path or task.ended_seconds == path[-1].ready_seconds:
            path.append(task)
    last = path[0].ended_seconds if path and not running else item.seconds
    longest = max(path, key=lambda task: _until(task, item) - task.ready_seconds, default=None)
    begun = [max(task.given_seconds, task.ready_seconds) for task in path]
    waited = sum(at - task.ready_seconds for at, task in zip(begun, path, strict=True))
    computed = sum(task.compute_seconds for task in path)
    there = sum(_until(task, item) - at for at, task in zip(begun, path, strict=True))
    return ItemView(
        item=item.item,
        input=item.input,
        seconds=item.seconds,
        waited_seconds=waited,
        moved_seconds=max(0.0, there - computed),
        computed_seconds=computed,
        stored_seconds=max(0.0, item.seconds - last),
        stage=None if longest is None else longest.stage,
        device="" if longest is None else longest.device,
        running=tuple(task.device for task in path[:1] if running),
        retries=item.retries,
    )


def _until(task: pb.TaskTiming, item: pb.ItemTiming) -> float:
    return task.ended_seconds or item.seconds
