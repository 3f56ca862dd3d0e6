"""What the server may read of a dispatcher's state: counts of jobs and devices.

Every view is a value of its own; none holds a part of the state.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.events import Failure
from shoal_coordinator.dispatch.instructions import Tier
from shoal_coordinator.dispatch.state import Job, StageQueue, State
from shoal_protocol.digests import Digest
from shoal_protocol.units import Bytes, Nanoseconds


class JobPhase(StrEnum):
    """Where a job is: no task given yet, under way, or ended in one of two ways."""

    PENDING = "Pending"
    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"


class DevicePhase(StrEnum):
    """Whether a device is there."""

    READY = "Ready"
    SILENT = "Silent"
    DRAINING = "Draining"
    LOST = "Lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Of an item, from its first task's start to its result; to 6 %."""

    p50: Nanoseconds
    p90: Nanoseconds
    p99: Nanoseconds
    maximum: Nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """One stage of a job. `compute` is the median of its tasks; `devices` serve it, or served it
    at its end.
    """

    index: int
    ready: int
    running: int
    finished: int
    compute: Nanoseconds | None
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job. `resumed` are items whose results existed before, counted in `succeeded` too."""

    name: str
    phase: JobPhase
    failure: Failure | None
    epoch: int
    items: int
    active: int
    succeeded: int
    failed: int
    resumed: int
    retries: int
    started_at: Nanoseconds | None
    ended_at: Nanoseconds | None
    latency: Latency | None
    tier_hits: dict[Tier, int]
    stages: tuple[StageView, ...]
    failures: tuple[tuple[int, Failure], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """One device: its ledger now (empty while it is lost), and counts over all its sessions."""

    name: str
    phase: DevicePhase = DevicePhase.LOST
    budget: Bytes
    resident: frozenset[Digest] = frozenset()
    resident_bytes: int = 0
    cached: frozenset[Digest] = frozenset()
    queued: int = 0
    tasks: int
    loads: int
    evictions: int
    tier_hits: dict[Tier, int]


def job(state: State, name: str) -> JobView | None:
    """One job, running or ended of late."""
    found = state.jobs.get(name) or state.ended.get(name)
    if found is None:
        return None
    return JobView(
        name=name,
        phase=_phase(found),
        failure=found.failure,
        epoch=found.spec.epoch,
        items=found.spec.items,
        active=len(found.active),
        succeeded=found.succeeded + len(found.completed),
        failed=found.failed,
        resumed=len(found.completed),
        retries=found.retries,
        started_at=found.started_at,
        ended_at=found.ended_at,
        latency=_latency(found),
        tier_hits=dict(zip(Tier, found.tiers, strict=True)),
        stages=tuple(_stage(queue) for queue in found.queues),
        failures=tuple(found.failures),
    )


def _phase(found: Job) -> JobPhase:
    if found.ended_at is not None:
        return JobPhase.COMPLETE if found.failure is None else JobPhase.FAILED
    return JobPhase.PENDING if found.started_at is None else JobPhase.RUNNING


def _latency(found: Job) -> Latency | None:
    times = found.latency
    if not times.total:
        return None
    p50, p90, p99 = (times.quantile(fraction) for fraction in (0.5, 0.9, 0.99))
    return Latency(p50=p50, p90=p90, p99=p99, maximum=times.maximum)


def _stage(queue: StageQueue) -> StageView:
    return StageView(
        index=queue.stage,
        ready=queue.waiting,
        running=queue.running,
        finished=queue.finished,
        compute=queue.times.quantile(0.5) if queue.times.total else None,
        devices=queue.served_by or tuple(server.name for server in queue.service.servers),
    )


def devices(state: State) -> tuple[DeviceView, ...]:
    """Every device that ever joined, by name."""
    views = []
    for name, tally in sorted(state.tallies.items()):
        view = DeviceView(
            name=name,
            budget=tally.budget,
            tasks=tally.tasks,
            loads=tally.loads,
            evictions=tally.evictions,
            tier_hits=dict(zip(Tier, tally.tiers, strict=True)),
        )
        found = state.devices.get(name)
        views.append(view if found is None else _with_session(view, found))
    return tuple(views)


def _with_session(view: DeviceView, device: Device) -> DeviceView:
    phase = DevicePhase.READY if device.health.probed_at is None else DevicePhase.SILENT
    return replace(
        view,
        phase=DevicePhase.DRAINING if device.draining else phase,
        resident=frozenset(device.memory.resident),
        resident_bytes=device.memory.resident_bytes,
        cached=frozenset(device.disk.cached),
        queued=device.work.queued,
    )
