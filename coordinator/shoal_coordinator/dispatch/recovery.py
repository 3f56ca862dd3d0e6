"""Devices that come, go silent, are lost and return; fragments that cannot be had.

Silence is followed by a probe, the probe's silence by the loss (Asteroid, section 3.4). A loss
voids the session's instructions. Its tasks are wanted again; outputs that it kept are gone, which
is noticed when somebody needs them (`readiness`). A device that returns is a new session: what it
has resident and cached counts, what it was doing does not.

Failures of loading: BUDGET teaches what the fragment takes there; a full disk keeps the device
from fetching for a while; everything else is tried again later, on each device at most
`load_tries` times in a row. When no device is left to try, the job fails with the last reason.
"""

from shoal_coordinator.dispatch.events import (
    DeviceJoined,
    DeviceTelemetry,
    Failure,
    FailureKind,
    FragmentCached,
    FragmentResident,
)
from shoal_coordinator.dispatch.instructions import Disconnect, PeerLost, Probe, Tier
from shoal_coordinator.dispatch.jobs import cancel, end_job, resize_windows
from shoal_coordinator.dispatch.loading import (
    end_load,
    forget_plan,
    gone,
    has_room,
    note_cached,
    note_dropped,
    plan_load,
    start_load,
    unload,
)
from shoal_coordinator.dispatch.readiness import note_stray
from shoal_coordinator.dispatch.servers import review
from shoal_coordinator.dispatch.services import (
    awaits_homes,
    call_for,
    count_all_homes,
    impossible,
    size_on,
    stop_yielding,
)
from shoal_coordinator.dispatch.state import (
    Avoid,
    Device,
    Forwarding,
    Job,
    Loading,
    Pending,
    Prefetching,
    Running,
    Service,
    State,
    Tally,
    Task,
    Unloading,
)
from shoal_protocol.digests import Digest
from shoal_protocol.units import Bytes, Nanoseconds

_KNOWN_DEVICES = 4096


def join(state: State, event: DeviceJoined) -> Device:
    """A new session begins."""
    tally = state.tallies.pop(event.device, None) or Tally(event.device, event.budget)
    tally.budget = event.budget
    state.tallies[event.device] = tally
    while len(state.tallies) > _KNOWN_DEVICES:
        del state.tallies[next(iter(state.tallies))]
    device = Device(
        name=event.device,
        session=event.session,
        order=state.next_number(),
        budget=event.budget,
        single=event.single,
        tally=tally,
        slots=state.limits.queue_depth,
        seen_at=event.at,
        joined_at=event.at,
        loaded_at=event.at,
        resident=dict(event.resident),
        resident_bytes=sum(event.resident.values()),
    )
    device.needs.update(event.resident)
    state.devices[event.device] = device
    for digest in [*sorted(event.cached), *event.resident]:
        note_cached(state, device, digest)
    state.telemetry_changed = True
    relieve(state, device)
    review(state, device)
    count_all_homes(state, device)
    for service in state.services.values():
        if service.wanted:
            state.unmet[service] = None
    resize_windows(state)
    return device


def relieve(state: State, device: Device) -> None:
    """The device has more than it may: what is used least goes."""
    excess = device.resident_bytes - device.budget
    if device.single and len(device.resident) - len(device.unloading) > 1:
        excess = max(excess, 1)
    for digest in sorted(device.resident, key=lambda digest: device.used_at.get(digest, 0)):
        if digest in device.unloading:
            excess -= device.resident[digest]
        elif excess > 0 and not device.in_use.get(digest):
            excess -= device.resident[digest]
            unload(state, device, digest)


def lose(state: State, device: Device) -> list[Task]:
    """A session has ended. Returned are its tasks, nobody's now, the last given first."""
    device.lost = True
    del state.devices[device.name]
    serving: list[Service] = list(device.listed)
    review(state, device)
    if device.loading is not None:
        serving += state.by_digest.get(device.loading.digest, ())
        end_load(state, device)
    if (planned := forget_plan(device)) is not None:
        serving.append(planned)
    if device.preempted_by is not None:
        device.preempted_by.yielder = None
    for digest in list(device.cached):
        note_dropped(state, device, digest)
    for task in device.keeps:
        task.holder = None
    device.keeps.clear()
    tasks = _void_instructions(state, device)
    _warn_senders(state, device)
    count_all_homes(state, device)
    for service in dict.fromkeys(serving):
        for queue in service.queues:
            queue.held.pop(device, None)
        call_for(state, service)
    resize_windows(state)
    return tasks


def _void_instructions(state: State, device: Device) -> list[Task]:
    void = [number for number, pending in state.pending.items() if pending.device is device]
    tasks: list[Task] = []
    for number in void:
        match state.pending.pop(number):
            case Running(task=task, routes=routes):
                for _, target in routes:
                    note_stray(state, task, target)
                if not task.item.ended:
                    tasks.append(task)
            case Forwarding(waiter=waiter, producer=producer, target=target):
                note_stray(state, producer, target)
                waiting = state.pending.get(waiter)
                if isinstance(waiting, Running) and not (waiting.void or waiting.device.lost):
                    waiting.void = True
                    cancel(state, waiting.task)
            case Loading() | Unloading() | Prefetching():
                pass
    return tasks[::-1]


def _warn_senders(state: State, lost: Device) -> None:
    """Those who send to a lost device learn of it: from where they are it may only seem slow, and
    what they wait to hand over stands in the way of all else that they do.
    """
    senders: dict[str, None] = {}
    for pending in state.pending.values():
        match pending:
            case Running(routes=routes) if any(target is lost for _, target in routes):
                senders[pending.device.name] = None
            case Forwarding(target=target) if target is lost:
                senders[pending.device.name] = None
            case _:
                pass
    state.out += [PeerLost(device=sender, peer=lost.name) for sender in senders]


def disconnect(state: State, device: Device, reason: str) -> None:
    """Give a device up."""
    state.out.append(Disconnect(device=device.name, session=device.session, reason=reason))


def silent(state: State) -> list[tuple[Device, str]]:
    """Probe who has been silent; return whom to give up, and why."""
    limits, now = state.limits, state.now
    given_up: list[tuple[Device, str]] = []
    for device in state.devices.values():
        if now - device.seen_at < limits.silence:
            device.probed_at = None
        elif device.probed_at is None:
            device.probed_at = now
            state.out.append(Probe(device=device.name, session=device.session))
        elif now - device.probed_at >= limits.probe_patience:
            given_up.append((device, "silent: no answer to a probe"))
    for number, pending in state.pending.items():
        if now - pending.since < limits.overdue:
            break  # the numbers grow, and with them the times
        if _fetches(pending) and now - pending.device.fetched_at < limits.overdue:
            continue
        if all(device is not pending.device for device, _ in given_up):
            given_up.append((pending.device, f"instruction {number} was not answered"))
    return given_up


def _fetches(pending: Pending) -> bool:
    return isinstance(pending, Loading | Prefetching)


def note_telemetry(state: State, device: Device, event: DeviceTelemetry) -> None:
    """Readings have come; the ranking follows at its own pace."""
    if event.fetched != device.fetched:
        device.fetched, device.fetched_at = event.fetched, state.now
    if device.telemetry != event.telemetry:
        device.telemetry = event.telemetry
        state.telemetry_changed = True


# ---- fragments -----------------------------------------------------------------------------------


def resident(state: State, loading: Loading, event: FragmentResident) -> None:
    """A fragment can run now."""
    device, digest = loading.device, loading.digest
    size = Bytes(max(loading.size, event.resident))
    end_load(state, device)
    device.resident[digest] = size
    device.resident_bytes += size
    device.needs[digest] = size
    device.fresh[digest] = loading.tier
    device.loaded_at = state.now
    device.used_at[digest] = state.now
    device.load_took = Nanoseconds(state.now - loading.since)
    device.tally.loads += 1
    device.avoid.pop(digest, None)
    note_cached(state, device, digest)
    for service in state.by_digest.get(digest, ()):
        service.starving_since = None
        if device.preempted_by is service:
            stop_yielding(state, service)
    relieve(state, device)
    review(state, device)


def unloaded(state: State, unloading: Unloading) -> None:
    """A fragment's memory is back; the load that waited for it follows."""
    device = unloading.device
    device.unloading.pop(unloading.digest, None)
    gone(state, device, unloading.digest)
    if device.unloading:
        return
    service = forget_plan(device)
    if service is not None and service.queues and has_room(device, size_on(device, service)):
        start_load(state, service, device, Tier.EVICT)


def cached(state: State, prefetching: Prefetching, event: FragmentCached) -> None:
    """A fragment is on disk; others may have had to go for it."""
    device = prefetching.device
    device.prefetching = None
    for digest in sorted(event.dropped):
        note_dropped(state, device, digest)
    note_cached(state, device, prefetching.digest)


def prefetch_failed(state: State, prefetching: Prefetching) -> None:
    """It was only a favour: leave the device alone for a while."""
    device = prefetching.device
    device.prefetching = None
    device.prefetch_after = Nanoseconds(state.now + state.limits.retry_delay_most)


def unload_failed(state: State, unloading: Unloading, failure: Failure) -> None:
    """The fragment is still there, unless the device says that it never was."""
    device = unloading.device
    if failure.kind is FailureKind.NOT_RESIDENT:
        unloaded(state, unloading)
        return
    device.unloading.pop(unloading.digest, None)
    service = forget_plan(device)
    if service is not None:
        record_failure(state, device, service.digest, failure)
    review(state, device)


def load_failed(state: State, loading: Loading, failure: Failure) -> None:
    """The fragment could not be had, or does not fit."""
    device, digest = loading.device, loading.digest
    end_load(state, device)
    if failure.kind is FailureKind.BUDGET:
        _learn_need(device, loading, failure)
    if failure.kind is FailureKind.DISK_FULL:
        note_dropped(state, device, digest)
        if _clear_disk(state, device, digest):
            return
        device.disk_full_until = Nanoseconds(state.now + 4 * state.limits.retry_delay)
    if failure.kind in {FailureKind.CORRUPT, FailureKind.UNAVAILABLE}:
        note_dropped(state, device, digest)
    if failure.kind is FailureKind.UNAVAILABLE and device.fetched_at > loading.since:
        device.avoid.pop(digest, None)  # it got on: what came stays, so this is no try in a row
    record_failure(state, device, digest, failure)
    for service in list(state.by_digest.get(digest, ())):
        call_for(state, service)
        for job in list(dict.fromkeys(queue.job for queue in service.queues)):
            hopeless = impossible(state, job) or _out_of_tries(state, service)
            if hopeless is not None and job.ended_at is None:
                end_job(state, job, hopeless)


def _clear_disk(state: State, device: Device, digest: Digest) -> bool:
    """Unload what no job uses any more, then load again: a resident fragment's file cannot go."""
    unused = [each for each in device.resident if each not in state.by_digest]
    service = next(iter(state.by_digest.get(digest, ())), None)
    if service is None or not unused or device.draining:
        return False
    plan_load(state, service, device, unused)
    return True


def _learn_need(device: Device, loading: Loading, failure: Failure) -> None:
    """What a refusal says about the fragment's size: nothing, where there was room for it by the
    refusal's own numbers, or where tasks may have been in its way.
    """
    need, have = failure.need, failure.have
    if need is not None and have is not None and need <= have:
        return
    if need is not None and need > loading.size:
        device.needs[loading.digest] = need
    elif not device.resident and not device.queued:
        # Alone, and still too large, whatever the numbers say.
        device.needs[loading.digest] = Bytes(device.budget + 1)


def _out_of_tries(state: State, service: Service) -> Failure | None:
    """The last failure, when every device that could load it has tried often enough."""
    if service.servers or service.loading or awaits_homes(state, service):
        return None
    last: Failure | None = None
    for device in state.devices.values():
        if device.draining or size_on(device, service) > device.budget:
            continue
        avoided = device.avoid.get(service.digest)
        if avoided is None or avoided.failures_in_a_row < state.limits.load_tries:
            return None
        last = avoided.failure
    return last


def record_failure(
    state: State, device: Device, digest: Digest, failure: Failure, free: int = 0
) -> None:
    """A device has failed with a fragment: leave it alone, longer each time in a row."""
    known = device.avoid.get(digest)
    failures_in_a_row = 1 if known is None else known.failures_in_a_row + 1
    limits = state.limits
    delay = 0
    if failures_in_a_row > free:
        delay = min(
            limits.retry_delay << min(failures_in_a_row - free - 1, 16), limits.retry_delay_most
        )
    device.avoid[digest] = Avoid(Nanoseconds(state.now + delay), failures_in_a_row, failure)
    if delay:
        review(state, device)
        count_all_homes(state, device, digest)
        for service in state.by_digest.get(digest, ()):
            call_for(state, service)


def expire_backoff(state: State) -> None:
    """Devices whose time of being avoided is over may serve again."""
    for device in state.devices.values():
        for digest, avoided in device.avoid.items():
            if state.now - state.limits.retry_delay_most * 2 < avoided.until <= state.now:
                if digest in device.resident:
                    review(state, device)
                count_all_homes(state, device, digest)
        if device.resident_bytes > device.budget:
            relieve(state, device)


def give_up_impossible(state: State) -> None:
    """Jobs that waited for their homes, and turn out to fit nowhere."""
    for job in list(state.jobs.values()):
        if any(_unserved(queue.service) for queue in job.queues):
            hopeless = impossible(state, job) if _settled(state, job) else None
            if hopeless is not None:
                end_job(state, job, hopeless)


def _unserved(service: Service) -> bool:
    return not service.servers and not service.loading


def _settled(state: State, job: Job) -> bool:
    """Whether the devices have had time to join."""
    grace = state.limits.homes_grace
    newest = max((device.joined_at for device in state.devices.values()), default=state.now)
    return state.now - job.submitted_at >= grace and state.now - newest >= grace
