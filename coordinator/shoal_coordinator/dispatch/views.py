"""What the server may read of a dispatcher's state: jobs as they are until the next step, and the
devices that are there or ever were.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.instructions import Tier
from shoal_coordinator.dispatch.state import Job, State
from shoal_protocol.digests import Digest
from shoal_protocol.units import Bytes


class DevicePhase(StrEnum):
    """Whether a device is there."""

    READY = "Ready"
    SILENT = "Silent"
    DRAINING = "Draining"
    LOST = "Lost"


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


def job(state: State, name: str) -> Job | None:
    """One job, running or ended of late: to be read before the next step, and not stored."""
    return state.jobs.get(name) or state.ended.get(name)


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
