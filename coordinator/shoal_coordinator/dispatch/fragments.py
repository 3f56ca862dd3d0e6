"""The instructions that move fragments, Load, Unload and Prefetch, and what their answers change.

BUDGET teaches by how much a fragment exceeds its grant on a device: it is tried again with less, in
blocks, down to the least that it needs. A full disk keeps the device from fetching for a while.
Every other failure is tried again later, on each device at most `load_tries` times in a row. When
no device is left to try, the job fails with the last reason.

What no job has a use for any more is cancelled on its way: a device loads one fragment at a time,
over what may be a slow link.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from itertools import islice
from typing import NamedTuple

from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.events import Failure, FailureKind, FragmentCached, FragmentResident
from shoal_coordinator.dispatch.full_devices import make_way
from shoal_coordinator.dispatch.instructions import Load, Prefetch, Tier, Unload
from shoal_coordinator.dispatch.jobs import end_job
from shoal_coordinator.dispatch.servers import review
from shoal_coordinator.dispatch.services import (
    awaits_homes,
    can_host,
    end_preemption,
    has_shrunk_just_now,
    impossible,
    of_fragment,
    record_failure,
    request_provisioning,
    size_on,
)
from shoal_coordinator.dispatch.state import Loading, Prefetching, Service, State, Unloading
from shoal_protocol.digests import Digest
from shoal_protocol.units import Bytes, Nanoseconds

_PEERS = 4
_COPIES = 2
"""Disk copies of a fragment that prefetching aims at, so that a loss costs no download."""


def start_load(state: State, service: Service, device: Device, tier: Tier) -> None:
    """Give Load; the ledger counts the fragment from now on."""
    digest = service.digest
    number = state.next_number()
    memory = device.memory
    size = Bytes(size_on(device, service, memory.room))
    granted = Bytes(size - memory.excess.get(digest, 0))
    loading = Loading(device, digest, granted, size, tier, state.now)
    assert memory.loading is None, "a device loads one fragment at a time"
    assert size <= memory.room, f"no room for {size} bytes"
    memory.loading, memory.granted[digest] = loading, granted
    state.pending[number] = loading
    users = state.by_digest.get(digest, ())
    for user in users:
        user.loading[device] = None
    state.out.append(
        Load(
            instruction=number,
            device=device.name,
            digest=digest,
            granted=granted,
            tier=tier,
            peers=_peers(state, device, digest),
            priority=max((user.priority for user in users), default=0),
        )
    )


def end_load(state: State, device: Device) -> None:
    loading, device.memory.loading = device.memory.loading, None
    assert loading is not None
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
    if device.memory.drop(digest):
        device.tally.evictions += 1
    for service in state.by_digest.get(digest, ()):
        if service.held:
            request_provisioning(state, service)  # it comes back when there is room again
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
    device.disk.cached[digest] = None
    state.holders.setdefault(digest, {})[device] = None


def note_dropped(state: State, device: Device, digest: Digest) -> None:
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


def _note_disk(state: State, device: Device, came: Digest, dropped: frozenset[Digest]) -> None:
    """A fragment came to a device's disk; others, or even this one, have left it."""
    note_cached(state, device, came)
    for digest in sorted(dropped):
        note_dropped(state, device, digest)
        for service in state.by_digest.get(digest, ()):
            service.dropped_by.add(device)


# ---- answers -------------------------------------------------------------------------------------


def resident(state: State, loading: Loading, event: FragmentResident) -> None:
    device, digest = loading.device, loading.digest
    size = Bytes(max(loading.size, event.resident))
    end_load(state, device)
    device.memory.learn(digest, event.resident)
    device.memory.add(loading, size, state.now)
    device.work.used_at[digest] = state.now  # so that it does not go at once
    device.tally.loads += 1
    device.health.backoffs.pop(digest, None)
    _note_disk(state, device, digest, event.dropped)
    for service in state.by_digest.get(digest, ()):
        service.starving_since = None
        if device.preempted_by is service:
            end_preemption(state, service)
    evict_excess(state, device)
    review(state, device)


def unloaded(state: State, unloading: Unloading) -> None:
    """A fragment's memory is back; the load that waited for it follows."""
    device = unloading.device
    device.memory.unloading.pop(unloading.digest, None)
    drop_fragment(state, device, unloading.digest)
    if device.memory.unloading:
        return
    service, room = take_plan(device), device.memory.room
    if service is not None and service.queues and size_on(device, service, room) <= room:
        start_load(state, service, device, Tier.EVICT)


def cached(state: State, prefetching: Prefetching, event: FragmentCached) -> None:
    """A fragment is on disk; others may have had to go for it."""
    prefetching.device.disk.prefetching = None
    _note_disk(state, prefetching.device, prefetching.digest, event.dropped)


def prefetch_failed(state: State, prefetching: Prefetching) -> None:
    """It was only a favour: leave the device alone for a while, unless it was cancelled."""
    disk = prefetching.device.disk
    disk.prefetching = None
    if prefetching.void:
        return
    disk.prefetch_after = Nanoseconds(state.now + state.limits.retry_delay_most)


def unload_failed(state: State, unloading: Unloading, failure: Failure) -> None:
    """The fragment is still there, unless the device says that it never was."""
    device = unloading.device
    if failure.kind is FailureKind.NOT_RESIDENT:
        unloaded(state, unloading)
        return
    device.memory.unloading.pop(unloading.digest, None)
    service = take_plan(device)
    if service is not None:
        record_failure(state, device, service.digest, failure)
    review(state, device)


def load_cancelled(state: State, loading: Loading) -> None:
    """No job had a use for it, and that is no failure; one that came meanwhile has it loaded."""
    end_load(state, loading.device)
    for service in state.by_digest.get(loading.digest, ()):
        request_provisioning(state, service)


def load_failed(state: State, loading: Loading, failure: Failure) -> None:
    device, digest = loading.device, loading.digest
    end_load(state, device)
    services = list(state.by_digest.get(digest, ()))
    retries = 0
    if failure.kind is FailureKind.BUDGET and services:
        learned = _learn_need(device, loading, services[0].least, failure)
        retries = int(learned and can_host(state, services[0], device))
    if failure.kind is FailureKind.DISK_FULL:
        note_dropped(state, device, digest)
        if _clear_disk(state, device, digest):
            return
        device.disk.full_until = Nanoseconds(state.now + 4 * state.limits.retry_delay)
    if failure.kind in {FailureKind.CORRUPT, FailureKind.UNAVAILABLE}:
        note_dropped(state, device, digest)
    if failure.kind is FailureKind.UNAVAILABLE and device.health.fetched_at > loading.since:
        device.health.backoffs.pop(digest, None)  # bytes came, and stay: the next try goes further
    record_failure(state, device, digest, failure, free=retries)
    for service in services:
        request_provisioning(state, service)
        for queue in list(service.queues):
            final = impossible(state, queue.job) or _out_of_tries(state, service)
            if final is not None and queue.job.ended_at is None:
                end_job(state, queue.job, final if final.outgrown else of_fragment(queue, final))


def _clear_disk(state: State, device: Device, digest: Digest) -> bool:
    """Unload what no job uses any more, then load again: a resident fragment's file cannot go. Else
    activations of one of several items make way, if they can: they may be what is on the disk."""
    unused = [each for each in device.memory.resident if each not in state.by_digest]
    service = next(iter(state.by_digest.get(digest, ())), None)
    if service is None or device.draining:
        return False
    if unused:
        plan_load(state, service, device, unused)
    elif make_way(state, device):
        request_provisioning(state, service)
    else:
        return False
    return True


def _learn_need(device: Device, loading: Loading, least: Bytes, failure: Failure) -> bool:
    """What a refusal says about what the fragment exceeds its grant by, so that it is granted less:
    nothing where there was room by the refusal's own numbers. Whether anything was learned.
    """
    memory, need, have = device.memory, failure.need, failure.have
    if loading.size < loading.granted:
        return True  # the budget has become smaller since it was given
    if need is not None and need > loading.size:
        return (have is None or need > have) and memory.learn(loading.digest, need)
    if need is not None and have is not None:
        # Others take more than is reckoned for them: it is granted what they leave.
        taken = loading.size + need - have
        if need <= have or taken - loading.granted <= memory.budget - least:
            return need > have and memory.learn(loading.digest, taken)
    if memory.resident or not device.work.idle:
        return False  # tasks may have been in its way
    # Alone, and still too large, whatever the numbers say: next the least, then never again.
    excess = memory.budget - least + (loading.granted <= least)
    return memory.learn(loading.digest, loading.granted + excess)


def _out_of_tries(state: State, service: Service) -> Failure | None:
    """The last failure, when every device that could load it has tried often enough, and none that
    cannot just now may do so soon."""
    if service.servers or service.loading or awaits_homes(state, service):
        return None
    last: Failure | None = None
    for device in state.devices.values():
        if device.draining:
            continue
        if size_on(device, service) > device.memory.budget:
            if has_shrunk_just_now(state, device):
                return None
            continue
        avoided = device.health.backoffs.get(service.digest)
        if avoided is None or avoided.failures_in_a_row < state.limits.load_tries:
            return None
        last = avoided.failure
    return last


# ---- prefetch ------------------------------------------------------------------------------------


def prefetch_idle(state: State) -> None:
    """Bring to disk what an idle device may have to load: its own stages, and second copies."""
    if not state.services:
        return
    coming = Counter(device.disk.prefetching for device in state.devices.values())
    wishes = _wishes(state, coming)
    for device in state.devices.values():
        if device not in wishes.full and _may_prefetch(state, device):
            digest = _to_prefetch(state, device, wishes)
            if digest is not None:
                device.disk.prefetching = digest
                number, peers = state.next_number(), _peers(state, device, digest)
                state.pending[number] = Prefetching(device, digest, state.now)
                state.out.append(
                    Prefetch(instruction=number, device=device.name, digest=digest, peers=peers)
                )


def _may_prefetch(state: State, device: Device) -> bool:
    disk = device.disk
    if device.draining or not device.work.idle or device.memory.moving:
        return False
    return disk.prefetching is None and max(disk.prefetch_after, disk.full_until) <= state.now


class _Wishes(NamedTuple):
    """What is to come to disks: the services of each home, by name, and those with one copy, by
    fragment. `full` are the devices whose disks have no room for all: each would go for the next,
    for ever. Made once for all devices, of which there may be a thousand."""

    at_home: Mapping[str, Sequence[Service]]
    single: dict[Digest, list[Service]]
    full: Set[Device]


def _wishes(state: State, coming: Counter[Digest | None]) -> _Wishes:
    at_home: dict[str, list[Service]] = {}
    single: dict[Digest, list[Service]] = {}
    full: set[Device] = set()
    for service in state.services.values():
        for name in service.homes:
            at_home.setdefault(name, []).append(service)
        copies, digest = len(state.holders.get(service.digest, ())), service.digest
        if copies and copies + len(service.loading) + coming[digest] < _COPIES:
            single.setdefault(digest, []).append(service)
        full |= service.dropped_by
    return _Wishes(at_home, single, full)


def _to_prefetch(state: State, device: Device, wishes: _Wishes) -> Digest | None:
    """What the device will have to load itself; else what only one other device has."""
    cached = device.disk.cached
    for service in wishes.at_home.get(device.name, ()):
        if service.digest not in cached and can_host(state, service, device):
            wishes.single.pop(service.digest, None)
            return service.digest
    for digest, services in wishes.single.items():
        if digest not in cached and any(can_host(state, each, device) for each in services):
            del wishes.single[digest]
            return digest
    return None
