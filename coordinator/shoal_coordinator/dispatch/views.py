"""What the server may read of a dispatcher's state, until the next step, and not store: jobs, the
devices that are there or ever were, and why one does not serve a stage.
"""

from enum import StrEnum
from typing import NamedTuple

from shoal_coordinator.dispatch.decisions import LOADING, LoadCase, decide
from shoal_coordinator.dispatch.device import Device, Tally
from shoal_coordinator.dispatch.events import ItemsStored
from shoal_coordinator.dispatch.servers import may_serve
from shoal_coordinator.dispatch.services import size_on
from shoal_coordinator.dispatch.state import (
    RUNNING,
    Item,
    Job,
    Running,
    Service,
    StageQueue,
    State,
    Task,
    Travelling,
)
from shoal_coordinator.dispatch.timings import ItemTiming, TaskTiming
from shoal_protocol.units import Nanoseconds


class DevicePhase(StrEnum):
    """Whether a device is there."""

    READY = "Ready"
    SILENT = "Silent"
    DRAINING = "Draining"
    LOST = "Lost"


class KnownDevice(NamedTuple):
    """A device that joined once: `tally` counts over all its sessions, `device` is the present
    one."""

    name: str
    tally: Tally
    device: Device | None

    @property
    def phase(self) -> DevicePhase:
        if self.device is None:
            return DevicePhase.LOST
        if self.device.draining:
            return DevicePhase.DRAINING
        return DevicePhase.READY if self.device.health.probed_at is None else DevicePhase.SILENT


def job(state: State, name: str) -> Job | None:
    """One job, running or ended of late."""
    return state.jobs.get(name) or state.ended.get(name)


def stored_items(state: State, event: ItemsStored) -> list[tuple[int, Nanoseconds]]:
    """The items whose results this event reports as stored, and how long each took from its first
    task's start. Those that have ended before are not among them."""
    running = state.jobs.get(event.job)
    if running is None or event.failure is not None:
        return []
    active = [(number, running.active.get(number)) for number in event.items]
    return [
        (number, Nanoseconds(event.at - item.started_at))
        for number, item in active
        if item is not None and item.storing and item.started_at is not None
    ]


def devices(state: State) -> list[KnownDevice]:
    """Every device that ever joined, by name."""
    tallies = sorted(state.tallies.items())
    return [KnownDevice(name, tally, state.devices.get(name)) for name, tally in tallies]


class Candidate(NamedTuple):
    """A device that does not serve a fragment: what that would take, what there is, and why."""

    device: str
    need: int
    have: int
    free: int
    reason: str


def candidates(state: State, queue: StageQueue) -> list[Candidate]:
    """The devices that do not serve a stage, in the order in which they joined."""
    service = queue.service
    return [
        Candidate(
            device=device.name,
            need=size_on(device, service),
            have=device.memory.budget,
            free=max(0, device.memory.budget - device.memory.resident_bytes),
            reason=_reason(state, service, device),
        )
        for device in state.devices.values()
        if service not in device.listed
    ]


def _reason(state: State, service: Service, device: Device) -> str:
    backoff = device.health.backoffs.get(service.digest)
    if device.draining:
        return "the device is leaving"
    if size_on(device, service) > device.memory.budget:
        return "the fragment does not fit"
    if backoff is not None and backoff.until > state.now:
        times = backoff.failures_in_a_row
        return f"failed with it {times} times in a row, at last: {backoff.failure.message}"
    if not may_serve(service, device):
        return "the plan gives the fragment to other devices"
    if device in service.loading:
        return "the device loads it"
    rule = decide(LOADING, LoadCase(state, service, device))
    return rule.reason if rule.verdict is None else f"the device can load it: {rule.reason}"


def under_way(state: State, item: Item) -> ItemTiming | None:
    """How it went with an item until now; None before its first task."""
    if item.started_at is None:
        return None
    tasks = (_timing(state, task) for task in item.tasks)
    ran = tuple(timing for timing in tasks if timing is not None)
    return ItemTiming(item.index, item.started_at, state.now, item.retries, ran)


def _timing(state: State, task: Task) -> TaskTiming | None:
    """A task that runs has no end."""
    pending = state.pending.get(task.instruction)
    if task.status is RUNNING and isinstance(pending, Running | Travelling):
        stage, device = task.queue.stage, "" if task.device is None else task.device.name
        return TaskTiming(stage, device, pending.since, None, Nanoseconds(0))
    return task.ran
