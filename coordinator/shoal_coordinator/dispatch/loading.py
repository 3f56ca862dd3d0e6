"""The instructions that move fragments: Load, Unload, Prefetch; and the ledger's side of them."""

from itertools import islice

from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.instructions import Load, Prefetch, Tier, Unload
from shoal_coordinator.dispatch.servers import review
from shoal_coordinator.dispatch.services import can_host, size_on
from shoal_coordinator.dispatch.state import Loading, Prefetching, Service, State, Unloading
from shoal_protocol.digests import Digest
from shoal_protocol.units import Bytes

_PEERS = 4
_COPIES = 2
"""Disk copies of a fragment that prefetching aims at, so that a loss costs no download."""


def start_load(state: State, service: Service, device: Device, tier: Tier) -> None:
    """Give Load; the ledger counts the fragment from now on."""
    digest = service.digest
    number = state.next_number()
    size = Bytes(size_on(device, service))
    loading = Loading(device, digest, size, tier, state.now)
    device.memory.begin_load(loading)
    state.pending[number] = loading
    for user in state.by_digest.get(digest, ()):
        user.loading[device] = None
    state.out.append(
        Load(
            instruction=number,
            device=device.name,
            digest=digest,
            resident=size,
            tier=tier,
            peers=_peers(state, device, digest),
        )
    )


def end_load(state: State, device: Device) -> None:
    """A device's load was answered, or is void."""
    loading = device.memory.end_load()
    for user in state.by_digest.get(loading.digest, ()):
        user.loading.pop(device, None)


def plan_load(state: State, service: Service, device: Device, victims: list[Digest]) -> None:
    """Make room first; the load follows when that is answered."""
    device.memory.next_load = service
    service.loading[device] = None
    for digest in victims:
        unload(state, device, digest)


def take_plan(device: Device) -> Service | None:
    """The load that was to follow: the caller starts it now, or it is given up."""
    service, device.memory.next_load = device.memory.next_load, None
    if service is not None:
        service.loading.pop(device, None)
    return service


def unload(state: State, device: Device, digest: Digest) -> None:
    """Give Unload; the ledger counts the fragment until that is answered."""
    number = state.next_number()
    device.memory.unloading[digest] = None
    device.memory.loaded_as.pop(digest, None)
    state.pending[number] = Unloading(device, digest, state.now)
    review(state, device)
    state.out.append(Unload(instruction=number, device=device.name, digest=digest))


def drop_fragment(state: State, device: Device, digest: Digest) -> None:
    """A fragment is not resident any more."""
    if device.memory.drop(digest):
        device.tally.evictions += 1
    review(state, device)


def evict_excess(state: State, device: Device) -> None:
    """The device has more than it may: unload what was used least recently."""
    memory, work = device.memory, device.work
    excess = memory.resident_bytes - memory.budget
    if memory.single and len(memory.resident) - len(memory.unloading) > 1:
        excess = max(excess, 1)
    for digest in sorted(memory.resident, key=lambda digest: work.used_at.get(digest, 0)):
        if digest in memory.unloading:
            excess -= memory.resident[digest]
        elif excess > 0 and not work.in_use.get(digest):
            excess -= memory.resident[digest]
            unload(state, device, digest)


def note_cached(state: State, device: Device, digest: Digest) -> None:
    """The device has the fragment on disk."""
    device.disk.cached[digest] = None
    state.holders.setdefault(digest, {})[device] = None


def note_dropped(state: State, device: Device, digest: Digest) -> None:
    """The device does not have it on disk any more."""
    device.disk.cached.pop(digest, None)
    holders = state.holders.get(digest)
    if holders is not None:
        holders.pop(device, None)
        if not holders:
            del state.holders[digest]


def _peers(state: State, device: Device, digest: Digest) -> tuple[str, ...]:
    """Devices that have the fragment on disk, by load, then by round trip; an unknown round trip
    counts as the mean of the others.
    """
    if digest in device.disk.cached:
        return ()
    others = (holder for holder in state.holders.get(digest, ()) if holder is not device)
    holders = list(islice(others, 4 * _PEERS))
    trips = [holder.telemetry.round_trip for holder in holders]
    known = [trip for trip in trips if trip is not None]
    mean = sum(known) / max(len(known), 1)
    near = sorted(
        (holder.work.load, mean if trip is None else trip, holder.name)
        for holder, trip in zip(holders, trips, strict=True)
    )
    return tuple(name for _, _, name in near[:_PEERS])


# ---- prefetch ------------------------------------------------------------------------------------


def prefetch_idle(state: State) -> None:
    """Bring to disk what an idle device may have to load: its own stages, and second copies."""
    if not state.services:
        return
    coming: dict[Digest, int] = {}
    for device in state.devices.values():
        if device.disk.prefetching is not None:
            coming[device.disk.prefetching] = coming.get(device.disk.prefetching, 0) + 1
    for device in state.devices.values():
        if _may_prefetch(state, device):
            digest = _to_prefetch(state, device, coming)
            if digest is not None:
                coming[digest] = coming.get(digest, 0) + 1
                _prefetch(state, digest, device)


def _may_prefetch(state: State, device: Device) -> bool:
    disk = device.disk
    if device.draining or device.work.queued or device.memory.moving:
        return False
    return disk.prefetching is None and max(disk.prefetch_after, disk.full_until) <= state.now


def _to_prefetch(state: State, device: Device, coming: dict[Digest, int]) -> Digest | None:
    """What the device will have to load itself; else what only one other device has."""
    spare: Digest | None = None
    for service in state.services.values():
        digest = service.digest
        if digest in device.disk.cached or not can_host(state, service, device):
            continue
        if device.name in service.homes:
            return digest
        copies = len(state.holders.get(digest, ()))
        if copies and copies + len(service.loading) + coming.get(digest, 0) < _COPIES:
            spare = spare or digest
    return spare


def _prefetch(state: State, digest: Digest, device: Device) -> None:
    number = state.next_number()
    device.disk.prefetching = digest
    state.pending[number] = Prefetching(device, digest, state.now)
    state.out.append(
        Prefetch(
            instruction=number,
            device=device.name,
            digest=digest,
            peers=_peers(state, device, digest),
        )
    )
