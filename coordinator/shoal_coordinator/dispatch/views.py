"""What the shell may read of a dispatcher's state: counts of jobs and devices, histories of tasks.

Every view is a value of its own; none holds a part of the state.
"""

from dataclasses import dataclass
from enum import StrEnum

from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.events import (
    ActivationForwarded,
    Event,
    Failure,
    InstructionFailed,
    TaskFinished,
)
from shoal_coordinator.dispatch.instructions import (
    Execute,
    FailItem,
    FinishItem,
    Forward,
    Instruction,
    Release,
    Tier,
)
from shoal_coordinator.dispatch.state import Job, StageQueue, State
from shoal_protocol.digests import Digest
from shoal_protocol.units import Bytes, Nanoseconds


class JobPhase(StrEnum):
    """Where a job is: no task given yet, under way, or ended in one of three ways."""

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
    """One stage of a job: tasks by state; the median time in the runtime; who serves it, or served
    it at its end.
    """

    index: int
    digest: Digest
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
    priority: int
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
    """One device: its ledger now, and what it has done over all its sessions."""

    name: str
    phase: DevicePhase
    session: int | None
    budget: Bytes
    resident: dict[Digest, Bytes]
    resident_bytes: Bytes
    loading: Digest | None
    cached: frozenset[Digest]
    queued: int
    tasks: int
    loads: int
    evictions: int
    tier_hits: dict[Tier, int]
    seen_at: Nanoseconds | None


@dataclass(frozen=True, slots=True)
class Chapter:
    """One thing that happened to a task: when, the event that caused it, the instruction given."""

    at: Nanoseconds
    cause: Event
    instruction: Instruction | None


def jobs(state: State) -> tuple[JobView, ...]:
    """Every job that runs, then those that ended of late."""
    return tuple(_job(job) for job in [*state.jobs.values(), *state.ended.values()])


def job(state: State, name: str) -> JobView | None:
    """One job, running or ended of late."""
    found = state.jobs.get(name) or state.ended.get(name)
    return None if found is None else _job(found)


def devices(state: State) -> tuple[DeviceView, ...]:
    """Every device that ever joined, by name."""
    return tuple(_device(state, name) for name in sorted(state.tallies))


def device(state: State, name: str) -> DeviceView | None:
    """One device; None if it never joined."""
    return _device(state, name) if name in state.tallies else None


def story(state: State, job: str, item: int) -> tuple[Chapter, ...]:
    """What happened to one item, as far back as the dispatcher's bounded memory goes.

    A chapter is an instruction about the item with the event that caused it, or an event about it
    that caused none. It is read from the log of steps, so recording it costs nothing.
    """
    numbers: set[int] = set()
    chapters: list[Chapter] = []
    for event, instructions in state.log:
        seen = False
        for instruction in instructions:
            if _is_about(instruction, job, item):
                seen = True
                chapters.append(Chapter(event.at, event, instruction))
                if isinstance(instruction, Execute | Forward):
                    numbers.add(instruction.instruction)
        if not seen and _answers(event, numbers):
            chapters.append(Chapter(event.at, event, None))
    return tuple(chapters)


def _is_about(instruction: Instruction, job: str, item: int) -> bool:
    match instruction:
        case Execute() | Forward() | Release() | FinishItem() | FailItem():
            return instruction.job == job and instruction.item == item
        case _:
            return False


def _answers(event: Event, numbers: set[int]) -> bool:
    match event:
        case TaskFinished() | ActivationForwarded() | InstructionFailed():
            return event.instruction in numbers
        case _:
            return False


def _job(found: Job) -> JobView:
    return JobView(
        name=found.spec.name,
        phase=_phase(found),
        failure=found.failure,
        epoch=found.spec.epoch,
        priority=found.spec.priority,
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
    p50, p90, p99 = (found.latency.quantile(fraction) for fraction in (0.5, 0.9, 0.99))
    if p50 is None or p90 is None or p99 is None:
        return None
    return Latency(
        p50=Nanoseconds(p50),
        p90=Nanoseconds(p90),
        p99=Nanoseconds(p99),
        maximum=Nanoseconds(found.latency.maximum),
    )


def _stage(queue: StageQueue) -> StageView:
    median = queue.times.quantile(0.5)
    return StageView(
        index=queue.stage,
        digest=queue.spec.digest,
        ready=queue.waiting,
        running=queue.running,
        finished=queue.finished,
        compute=None if median is None else Nanoseconds(median),
        devices=queue.served_by or tuple(server.name for server in queue.service.servers),
    )


def _device(state: State, name: str) -> DeviceView:
    tally = state.tallies[name]
    found = state.devices.get(name)
    return DeviceView(
        name=name,
        phase=_device_phase(found),
        session=None if found is None else found.session,
        budget=tally.budget,
        resident={} if found is None else dict(found.memory.resident),
        resident_bytes=Bytes(0 if found is None else found.memory.resident_bytes),
        loading=None
        if found is None or found.memory.loading is None
        else found.memory.loading.digest,
        cached=frozenset() if found is None else frozenset(found.disk.cached),
        queued=0 if found is None else found.work.queued,
        tasks=tally.tasks,
        loads=tally.loads,
        evictions=tally.evictions,
        tier_hits=dict(zip(Tier, tally.tiers, strict=True)),
        seen_at=None if found is None else found.health.seen_at,
    )


def _device_phase(found: Device | None) -> DevicePhase:
    if found is None:
        return DevicePhase.LOST
    if found.draining:
        return DevicePhase.DRAINING
    return DevicePhase.READY if found.health.probed_at is None else DevicePhase.SILENT
