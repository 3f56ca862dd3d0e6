"""What is loaded where, and what makes room for it.

Loading is just in time: a job's first stages at its start (on the homes that a plan gives them; or,
without a plan, as CROWDio does, on every device that has room), any other when a task of a stage
before it was given. One load at a time per device; what must go first is unloaded, and answered,
before.

The tier of a load: 2 the fragment is on the device's disk and there is room, 3 there is room, 4
another fragment must go. (Tier 1 needs no load.) Within a tier, fewer tasks come first, then the
policy.

When may a fragment go? Never with tasks given to the device. Freely, when no job uses it. Otherwise
the rules keep devices from changing fragments back and forth, each keeping the system alive:

- it has tasks waiting: it stays, unless the device yields (below);
- others serve it as well: it goes for a stage that nobody serves, or, after lying idle for
  `settle`, for one that has more tasks than its servers have slots;
- it is the last: it goes for a stage that nobody serves, if a batch waits there, or nothing is
  under way that would bring this one work, or that stage has starved for `patience`.

A device *yields* to a starving stage of higher priority, or, after a `turn`, of the same: it is
given nothing new until it is empty. The turn is at least four times what the last load took, so
that loading costs a fifth of the time at most.
"""

from shoal_coordinator.dispatch.instructions import Tier
from shoal_coordinator.dispatch.loading import has_room, plan_load, start_load
from shoal_coordinator.dispatch.servers import entry, review
from shoal_coordinator.dispatch.services import (
    awaits_homes,
    can_host,
    may_serve,
    size_on,
    stop_yielding,
)
from shoal_coordinator.dispatch.state import Device, Service, StageQueue, State
from shoal_protocol.digests import Digest


def consider_service(state: State, service: Service) -> None:
    """Does this fragment need to be loaded somewhere, and where?"""
    if not service.queues:
        return
    waiting = service.waiting
    _note_starving(state, service, waiting)
    if not waiting and not service.wanted:
        state.unmet.pop(service, None)
        return
    if awaits_homes(state, service):
        return
    if service.homes_up:
        for name in service.homes:
            device = state.devices.get(name)
            if device is not None:
                load_if_possible(state, service, device)
    else:
        _spread(state, service, waiting)
    if waiting and not service.servers and not service.loading:
        _ask_to_yield(state, service)
    if not waiting and service.servers and not _home_missing(state, service):
        state.unmet.pop(service, None)


def consider_device(state: State, device: Device) -> None:
    """The device has nothing to do: is there a stage that needs it?"""
    if device.loading is not None or device.unloading or device.draining or device.lost:
        return
    claimant = device.preempted_by
    if claimant is not None:
        if not device.queued:
            load_if_possible(state, claimant, device)
        return
    best: tuple[tuple[int, int, int], Service] | None = None
    for service in state.unmet:
        if not service.queues or not _wants(state, service, device):
            continue
        tier = tier_for(state, service, device)
        if tier is not None:
            key = (-service.priority, int(tier), -service.queues[0].stage)
            if best is None or key < best[0]:
                best = key, service
    if best is not None:
        load_if_possible(state, best[1], device)


def load_if_possible(state: State, service: Service, device: Device) -> None:
    """Load the fragment there, making room if need be; do nothing if it cannot be done now."""
    tier = tier_for(state, service, device)
    if tier is None:
        return
    size = size_on(device, service)
    if tier is Tier.EVICT:
        plan_load(state, service, device, _victims(state, service, device, size) or [])
    else:
        start_load(state, service, device, tier)


def tier_for(state: State, service: Service, device: Device) -> Tier | None:
    """How the fragment could be loaded there now; None if it cannot, or is there."""
    digest = service.digest
    if digest in device.resident or device.loading is not None or device.unloading:
        return None
    if device.preempted_by is not None and device.preempted_by is not service:
        return None
    if not can_host(state, service, device):
        return None
    if digest not in device.cached and device.disk_full_until > state.now:
        return None
    size = size_on(device, service)
    if has_room(device, size):
        return Tier.CACHED if digest in device.cached else Tier.IDLE
    return Tier.EVICT if _victims(state, service, device, size) is not None else None


# ---- how many devices ----------------------------------------------------------------------------


def _home_missing(state: State, service: Service) -> bool:
    homes = (state.devices.get(name) for name in service.homes)
    return any(device is not None and service.digest not in device.resident for device in homes)


def _spread(state: State, service: Service, waiting: int) -> None:
    """Without a home: once; a first stage wherever there is room; more as work piles up."""
    first = any(not queue.predecessors for queue in service.queues)
    depth = state.limits.queue_depth
    enough = not waiting or any(device.queued < device.slots for device in service.servers)
    if service.servers and not first and enough:
        return
    choices = [
        (tier, device.load, *entry(service, device)[1:3], device)
        for device in state.devices.values()
        if (tier := tier_for(state, service, device)) is not None
    ]
    choices.sort(key=lambda choice: choice[:4])
    for tier, load, _, _, device in choices:
        piled_up = waiting > depth * len(service.loading)
        if not service.servers and not service.loading:
            wanted = True
        elif tier is Tier.EVICT:
            wanted = piled_up and not load
        else:
            wanted = piled_up or first
        if wanted:
            load_if_possible(state, service, device)


def _wants(state: State, service: Service, device: Device) -> bool:
    """Whether a device that has nothing to do would help."""
    if service.homes_up:
        return device.name in service.homes
    if awaits_homes(state, service):
        return False
    if not service.servers and not service.loading:
        return True
    if not device.resident and any(not queue.predecessors for queue in service.queues):
        return True
    return service.waiting > state.limits.queue_depth * len(service.loading)


# ---- what may go ---------------------------------------------------------------------------------


def _victims(state: State, service: Service, device: Device, size: int) -> list[Digest] | None:
    """Fragments to give up for another, those that are least missed first; None: not enough."""
    candidates = [digest for digest in device.resident if _may_go(state, digest, service, device)]
    if device.single:
        return candidates if len(candidates) == len(device.resident) else None
    candidates.sort(key=lambda digest: (digest in state.by_digest, device.used_at.get(digest, 0)))
    room = device.budget - device.resident_bytes
    chosen: list[Digest] = []
    for digest in candidates:
        if room >= size:
            break
        room += device.resident[digest]
        chosen.append(digest)
    return chosen if room >= size else None


def _may_go(state: State, digest: Digest, claimant: Service, device: Device) -> bool:
    if device.in_use.get(digest):
        return False
    users = state.by_digest.get(digest)
    if not users or device.preempted_by is claimant:
        return True
    if not claimant.waiting:
        return False  # wanted soon only: it takes what is free, and pushes nothing out
    starving = not claimant.servers and not claimant.loading
    return all(
        _can_spare(state, user, claimant, device, starving=starving)
        for user in users
        if may_serve(user, device)
    )


def _can_spare(
    state: State, user: Service, claimant: Service, device: Device, *, starving: bool
) -> bool:
    """Whether one stage can do without a device that another one claims."""
    if user.waiting and user.priority >= claimant.priority:
        return False
    others = len(user.servers) + len(user.loading) - (user in device.listed)
    if not others:
        return starving and _worth_it(state, user, claimant)
    idle = state.now - device.used_at.get(user.digest, device.loaded_at)
    return starving or idle >= state.limits.settle


def _worth_it(state: State, user: Service, claimant: Service) -> bool:
    """Whether the last server of one stage may turn to another that has none."""
    if claimant.priority > user.priority:
        return True
    if claimant.waiting >= min(max(queue.job.window // 2, 1) for queue in claimant.queues):
        return True
    since = claimant.starving_since
    if since is not None and state.now - since >= state.limits.patience:
        return True
    return not any(_brings_work(queue) for queue in user.queues)


def _brings_work(queue: StageQueue) -> bool:
    """Whether something is under way before this stage that will make it work soon."""
    for producer in queue.predecessors:
        before = queue.job.queues[producer]
        if before.running or (before.waiting and before.service.servers):
            return True
        if _brings_work(before):
            return True
    return False


# ---- yielding ------------------------------------------------------------------------------------


def _note_starving(state: State, service: Service, waiting: int) -> None:
    if not waiting or service.servers or service.loading:
        service.starving_since = None
        if not waiting or service.servers:
            stop_yielding(state, service)
    elif service.starving_since is None:
        service.starving_since = state.now


def _ask_to_yield(state: State, service: Service) -> None:
    """Nobody serves it, no device can be freed at once: one of the busy ones empties itself."""
    if service.yielder is not None:
        return
    candidates = [
        (device.load, device.order, device)
        for device in state.devices.values()
        if device.preempted_by is None
        and device.loading is None
        and not device.unloading
        and may_serve(service, device)
        and can_host(state, service, device)
        and (service.digest in device.cached or device.disk_full_until <= state.now)
        and _turn_is_over(state, service, device)
    ]
    if not candidates:
        return
    device = min(candidates, key=lambda candidate: candidate[:2])[2]
    device.preempted_by = service
    service.yielder = device
    review(state, device)
    if not device.queued:
        load_if_possible(state, service, device)


def _turn_is_over(state: State, service: Service, device: Device) -> bool:
    users = [user for digest in device.resident for user in state.by_digest.get(digest, ())]
    highest = max((user.priority for user in users), default=service.priority)
    if service.priority != highest:
        return service.priority > highest
    turn = max(state.limits.turn, 4 * device.load_took)
    since = service.starving_since
    patient = since is not None and state.now - since >= state.limits.patience
    return patient and state.now - device.loaded_at >= turn
