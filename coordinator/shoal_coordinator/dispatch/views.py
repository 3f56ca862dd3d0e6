"""What the server may read of a dispatcher's state, until the next step, and not store: jobs, and
the devices that are there or ever were.
"""

from enum import StrEnum
from typing import NamedTuple

from shoal_coordinator.dispatch.device import Device, Tally
from shoal_coordinator.dispatch.events import ItemStored
from shoal_coordinator.dispatch.state import Job, State
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


def time_of_item(state: State, event: ItemStored) -> Nanoseconds | None:
    """How long the item took, from its first task's start, whose results this event reports as
    stored. None: they are not, or the item has ended before."""
    running = state.jobs.get(event.job)
    item = None if running is None else running.active.get(event.item)
    if item is None or not item.storing or event.failure is not None or item.started_at is None:
        return None
    return Nanoseconds(event.at - item.started_at)


def devices(state: State) -> list[KnownDevice]:
    """Every device that ever joined, by name."""
    tallies = sorted(state.tallies.items())
    return [KnownDevice(name, tally, state.devices.get(name)) for name, tally in tallies]
