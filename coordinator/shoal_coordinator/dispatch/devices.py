"""Devices that join, go silent, are lost and return.

Telemetry is the heartbeat. Silence is followed by a probe, the probe's silence by the loss
(Asteroid, section 3.4). A loss voids the session's instructions. Its tasks run again; outputs that
it held are lost, which is noticed when a consumer needs them (`readiness`). A device that returns
is a new session: what it has resident and cached counts, what it was doing does not.
"""

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import instructions as ins
from shoal_coordinator.dispatch import itineraries, turns
from shoal_coordinator.dispatch.crashes import discount_reconnected, note_loss, trials
from shoal_coordinator.dispatch.device import Device, Tally, new_device
from shoal_coordinator.dispatch.fragments import (
    drop_fragment,
    end_load,
    evict_excess,
    note_cached,
    note_dropped,
    take_plan,
)
from shoal_coordinator.dispatch.jobs import cancel, resize_windows
from shoal_coordinator.dispatch.readiness import note_orphan
from shoal_coordinator.dispatch.servers import review
from shoal_coordinator.dispatch.services import count_all_homes, request_provisioning
from shoal_coordinator.dispatch.state import (
    Forwarding,
    Loading,
    Planning,
    Prefetching,
    Running,
    Service,
    State,
    Travelling,
    Unloading,
)
from shoal_protocol.digests import Digest

_KNOWN_DEVICES = 4096
_KNOWN_FRAGMENTS = 1024


def note_report(state: State, event: ev.DeviceReport) -> None:  # noqa: C901 - one for each kind
    """A device says something unasked, or its session's stream broke."""
    device = state.devices.get(event.device)
    if device is None or device.session != event.session:
        return  # of a session that is over
    device.health.seen_at = state.now
    match event:
        case ev.DeviceTelemetry():
            health = device.health
            if event.fetched != health.fetched:
                health.fetched, health.fetched_at = event.fetched, state.now
            if event.telemetry != device.telemetry:  # the ranking follows at its own pace
                device.telemetry = event.telemetry
                state.telemetry_changed = True
        case ev.ProbeAnswered():
            device.health.probed_at = None
        case ev.FragmentEvicted():
            drop_fragment(state, device, event.digest)
            _request_replacement(state, event.digest)
            state.worklist.freed.append(device)
        case ev.BudgetChanged():
            _change_budget(state, device, event)
        case ev.DeviceDraining():
            device.draining = True
            review(state, device)
            count_all_homes(state, device)
            for digest in device.memory.resident:
                _request_replacement(state, digest)
        case ev.DeviceLost():
            lose(state, device, event.reason)


def _request_replacement(state: State, digest: Digest) -> None:
    for service in state.by_digest.get(digest, ()):
        request_provisioning(state, service)


def replaced(state: State, event: ev.DeviceJoined) -> Device | None:
    """The session before of a device that joins, if it is still there."""
    before = state.devices.get(event.device)
    return before if before is not None and before.session < event.session else None


def join(state: State, event: ev.DeviceJoined) -> None:
    if event.device in state.devices:
        return  # a newer session is there
    tally = state.tallies.pop(event.device, None) or Tally(event.budget)
    tally.budget, tally.has_left = event.budget, False
    _recall(tally)
    state.tallies[event.device] = tally
    while len(state.tallies) > _KNOWN_DEVICES:
        del state.tallies[next(iter(state.tallies))]
    order, slots = state.next_number(), state.limits.queue_depth
    device = new_device(event, order=order, tally=tally, slots=slots)
    state.devices[event.device] = device
    discount_reconnected(state, event)
    for digest in [*sorted(event.cached), *event.resident]:
        note_cached(state, device, digest)
    state.telemetry_changed = True
    _take_up(state, device)


def _take_up(state: State, device: Device) -> None:
    """A device is there, with a budget that is new: what may be served is looked at again."""
    evict_excess(state, device)
    review(state, device)
    count_all_homes(state, device)
    for service in state.services.values():
        if service.wanted:
            state.unmet[service] = None
    resize_windows(state)
    state.worklist.freed.append(device)


def _change_budget(state: State, device: Device, event: ev.BudgetChanged) -> None:
    """What was found too large for a smaller budget says nothing of a larger one."""
    tally = device.tally
    if event.budget > tally.budget:
        tally.forget_too_large(tally.excess)
        device.health.forget(ev.FailureKind.BUDGET)
    elif event.budget < tally.budget:
        device.health.shrunk_at = state.now
    tally.budget, device.health.unchanged_since = event.budget, state.now
    for digest in device.memory.change_budget(event.budget, event.resident):
        drop_fragment(state, device, digest)
        _request_replacement(state, digest)
    _take_up(state, device)


def _recall(tally: Tally) -> None:
    """What was measured holds in the next session; only where nothing would fit any more, the
    device may try again."""
    tally.forget_too_large(tally.excess)
    while len(tally.excess) > _KNOWN_FRAGMENTS:
        del tally.excess[next(iter(tally.excess))]
    for digest in [each for each in tally.granted if each not in tally.excess]:
        del tally.granted[digest]


def lose(state: State, device: Device, reason: str, *, crashed: bool = True) -> None:
    """A session has ended: void its instructions; its tasks run again, the last given first.
    `crashed`: as far as anybody knows, its process has ended with it.
    """
    message = f"device {device.name} was lost: {reason}" if reason else f"{device.name} was lost"
    failure = ev.Failure(kind=ev.FailureKind.UNREACHABLE, message=message)
    device.lost, device.tally.has_left = True, device.draining
    del state.devices[device.name]
    tried = trials(state, device) if crashed else []
    partners = _partners(state, device)
    served = _withdraw_device(state, device)
    itineraries.lose(state, device)
    _void_instructions(state, device, failure)
    state.out += [ins.PeerLost(device=each, peer=device.name) for each in partners]
    count_all_homes(state, device)
    turns.lose(state, device)
    for service in served:
        for queue in service.queues:
            queue.reserved.pop(device, None)
        request_provisioning(state, service)
    note_loss(state, device, tried)
    resize_windows(state)
    state.worklist.everything = True


def _withdraw_device(state: State, device: Device) -> list[Service]:
    """Nobody counts on the device any more; returned are the services that did."""
    served: list[Service] = list(device.listed)
    review(state, device)
    if device.memory.loading is not None:
        served += state.by_digest.get(device.memory.loading.digest, ())
        end_load(state, device)
    if (planned := take_plan(device)) is not None:
        served.append(planned)
    if device.preempted_by is not None:
        device.preempted_by.preempting = None
    for digest in list(device.disk.cached):
        note_dropped(state, device, digest)
    for made in device.work.outputs:
        made.holder = None
    device.work.outputs.clear()
    return list(dict.fromkeys(served))


def _void_instructions(state: State, device: Device, failure: ev.Failure) -> None:
    void = [number for number, pending in state.pending.items() if pending.device is device]
    for number in void:
        match state.pending.pop(number):
            case Running(task=task, routes=routes):
                for _, target in routes:
                    note_orphan(state, task, target)
                state.worklist.lost.appendleft((task, failure))
            case Forwarding(waiter=waiter, producer=producer, target=target):
                note_orphan(state, producer, target)
                waiting = state.pending.get(waiter)
                if isinstance(waiting, Running) and not (waiting.void or waiting.device.lost):
                    waiting.void = True
                    cancel(state, waiting.task)
            case Loading() | Unloading() | Prefetching() | Planning():
                pass
            case Travelling():
                raise AssertionError("the routes over a lost device are closed before")


def _partners(state: State, lost: Device) -> list[str]:
    """The devices that send to a lost one, or may fetch from it, to be told: to them it may only
    seem slow, what they wait to hand over blocks all else that they send, and what they fetch is to
    be had elsewhere.
    """
    partners: dict[str, None] = {}
    for pending in state.pending.values():
        match pending:
            case Running(routes=routes) if any(target is lost for _, target in routes):
                partners[pending.device.name] = None
            case Forwarding(target=target) if target is lost:
                partners[pending.device.name] = None
            case Loading(digest=digest) | Prefetching(digest=digest):
                if digest in lost.disk.cached and digest not in pending.device.disk.cached:
                    partners[pending.device.name] = None
            case _:
                pass
    partners.pop(lost.name, None)
    return list(partners)


def give_up(state: State, device: Device, reason: str) -> None:
    state.out.append(ins.Disconnect(device=device.name, session=device.session, reason=reason))
    lose(state, device, reason)


def silent(state: State) -> list[tuple[Device, str]]:
    """Probe the devices that have been silent; returned are those to give up, and why."""
    limits, now = state.limits, state.now
    given_up: list[tuple[Device, str]] = []
    for device in state.devices.values():
        health = device.health
        if now - health.seen_at < limits.silence:
            health.probed_at = None
        elif health.probed_at is None:
            health.probed_at = now
            state.out.append(ins.Probe(device=device.name, session=device.session))
        elif now - health.probed_at >= limits.probe_patience:
            given_up.append((device, "silent: no answer to a probe"))
    for number, pending in state.pending.items():
        if now - pending.since < limits.overdue:
            break  # the numbers grow, and with them the times
        fetches = isinstance(pending, Loading | Prefetching)
        if fetches and now - pending.device.health.fetched_at < limits.overdue:
            continue
        if all(device is not pending.device for device, _ in given_up):
            given_up.append((pending.device, f"instruction {number} was not answered"))
    return given_up
