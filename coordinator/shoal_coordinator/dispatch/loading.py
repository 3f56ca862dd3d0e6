"""The instructions that move fragments: load, unload, prefetch; and the ledger's side of them.

The ledger counts a fragment from the moment when Load is given until Unload is answered.
"""

from itertools import islice

from shoal_coordinator.dispatch.instructions import Load, Prefetch, Tier, Unload
from shoal_coordinator.dispatch.servers import review
from shoal_coordinator.dispatch.services import can_host, size_on
from shoal_coordinator.dispatch.state import Device, Loading, Prefetching, Service, State, Unloading
from shoal_protocol.digests import Digest
from shoal_protocol.units import Bytes

_PEERS = 4
_COPIES = 2
"""Disk copies of a fragment that prefetching aims at, so that a loss costs no download."""


def has_room(device: Device, size: int) -> bool:
    """Whether a fragment fits beside what is resident."""
    if device.single and device.resident:
        return False
    return size <= device.budget - device.resident_bytes


def start_load(state: State, service: Service, device: Device, tier: Tier) -> None:
    """Give Load; the ledger counts the fragment from now on."""
    digest = service.digest
    number = state.next_number()
    size = Bytes(size_on(device, service))
    assert device.loading is None, f"{device.name} loads already"
    assert has_room(device, size), f"{device.name} has no room for {size} bytes"
    device.loading = Loading(device, digest, size, tier, state.now)
    state.pending[number] = device.loading
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
    """A device's load has ended, somehow."""
    assert device.loading is not None
    for user in state.by_digest.get(device.loading.digest, ()):
        user.loading.pop(device, None)
    device.loading = None


def plan_load(state: State, service: Service, device: Device, victims: list[Digest]) -> None:
    """Make room first; the load follows when that is answered."""
    device.next_load = service
    service.loading[device] = None
    for digest in victims:
        unload(state, device, digest)


def forget_plan(device: Device) -> Service | None:
    """The load that was to follow: it is begun now, or not at all."""
    service = device.next_load
    if service is not None:
        device.next_load = None
        service.loading.pop(device, None)
    return service


def unload(state: State, device: Device, digest: Digest) -> None:
    """Give Unload; the ledger counts the fragment until that is answered."""
    number = state.next_number()
    device.unloading[digest] = None
    device.fresh.pop(digest, None)
    state.pending[number] = Unloading(device, digest, state.now)
    review(state, device)
    state.out.append(Unload(instruction=number, device=device.name, digest=digest))


def gone(state: State, device: Device, digest: Digest) -> None:
    """A fragment is not resident any more."""
    size = device.resident.pop(digest, None)
    if size is not None:
        device.resident_bytes -= size
        device.tally.evictions += 1
    device.fresh.pop(digest, None)
    review(state, device)


def note_cached(state: State, device: Device, digest: Digest) -> None:
    """The device has the fragment on disk."""
    device.cached[digest] = None
    state.holders.setdefault(digest, {})[device] = None


def note_dropped(state: State, device: Device, digest: Digest) -> None:
    """The device has it on disk no more."""
    device.cached.pop(digest, None)
    holders = state.holders.get(digest)
    if holders is not None:
        holders.pop(device, None)
        if not holders:
            del state.holders[digest]


def _peers(state: State, device: Device, digest: Digest) -> tuple[str, ...]:
    """Who has the fragment on disk, those with little to do first, then those that are near; a
    distance that is unknown counts as the mean of the others'.
    """
    if digest in device.cached:
        return ()
    others = (holder for holder in state.holders.get(digest, ()) if holder is not device)
    holders = list(islice(others, 4 * _PEERS))
    trips = [holder.telemetry.round_trip for holder in holders]
    known = [trip for trip in trips if trip is not None]
    mean = sum(known) / max(len(known), 1)
    near = sorted(
        (holder.load, mean if trip is None else trip, holder.name)
        for holder, trip in zip(holders, trips, strict=True)
    )
    return tuple(name for _, _, name in near[:_PEERS])


def prefetch_idle(state: State) -> None:
    """Bring to disk what an idle device may have to load: its own stages, and second copies."""
    if not state.services:
        return
    coming: dict[Digest, int] = {}
    for device in state.devices.values():
        if device.prefetching is not None:
            coming[device.prefetching] = coming.get(device.prefetching, 0) + 1
    for device in state.devices.values():
        busy = device.queued or device.loading is not None or device.unloading
        fetching = device.prefetching is not None or device.prefetch_after > state.now
        if busy or fetching or device.draining or device.disk_full_until > state.now:
            continue
        digest = _to_prefetch(state, device, coming)
        if digest is not None:
            coming[digest] = coming.get(digest, 0) + 1
            _prefetch(state, digest, device)


def _to_prefetch(state: State, device: Device, coming: dict[Digest, int]) -> Digest | None:
    """What the device will have to load itself; else what only one other has."""
    spare: Digest | None = None
    for service in state.services.values():
        digest = service.digest
        if digest in device.cached or not can_host(state, service, device):
            continue
        if device.name in service.homes:
            return digest
        copies = len(state.holders.get(digest, ()))
        if copies and copies + len(service.loading) + coming.get(digest, 0) < _COPIES:
            spare = spare or digest
    return spare


def _prefetch(state: State, digest: Digest, device: Device) -> None:
    number = state.next_number()
    device.prefetching = digest
    state.pending[number] = Prefetching(device, digest, state.now)
    state.out.append(
        Prefetch(
            instruction=number,
            device=device.name,
            digest=digest,
            peers=_peers(state, device, digest),
        )
    )
