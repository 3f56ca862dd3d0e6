"""A service from its first stage to its last: its homes, and whether any device can load it.

The homes that a plan names are preferences: while one of them is up, only homes serve; when all are
lost, any device that fits serves, until a home joins again. Homes that have not joined yet are
awaited for `Limits.homes_grace`, and where no other device has room, for `Limits.joining`.
"""

from collections.abc import Iterator
from dataclasses import replace

from shoal_coordinator.dispatch.device import Backoff, Device
from shoal_coordinator.dispatch.events import Failure, FailureKind
from shoal_coordinator.dispatch.instructions import Cancel
from shoal_coordinator.dispatch.servers import review
from shoal_coordinator.dispatch.state import (
    Job,
    Loading,
    Prefetching,
    Service,
    StageQueue,
    State,
)
from shoal_protocol.digests import Digest
from shoal_protocol.partition import Outgrown
from shoal_protocol.units import Bytes, Nanoseconds, format_downwards, format_need


def begin_service(state: State, queue: StageQueue) -> None:
    service = queue.service
    service.queues.append(queue)
    if len(service.queues) == 1:
        state.by_digest.setdefault(service.digest, []).append(service)
        service.homes_awaited_until = Nanoseconds(state.now + state.limits.homes_grace)
        for device in state.devices.values():
            if device.memory.loading is not None and device.memory.loading.digest == service.digest:
                service.loading[device] = None
        count_homes(state, service)
    if queue.wanted:
        request_provisioning(state, service)


def retire_service(state: State, queue: StageQueue) -> None:
    """A stage uses it no more; with the last one it goes. Its fragments stay where they are."""
    service = queue.service
    if queue not in service.queues:
        return
    queue.served_by = queue.devices
    service.queues.remove(queue)
    if service.queues:
        if service.held:
            request_provisioning(state, service)
        return
    for device in list(service.servers):
        del device.listed[service]
    service.servers.clear()
    service.ranks.clear()
    end_preemption(state, service)
    for device in service.loading:
        if device.memory.next_load is service:
            device.memory.next_load = None
    state.unmet.pop(service, None)
    del state.services[service.key]
    users = state.by_digest[service.digest]
    users.remove(service)
    if not users:
        del state.by_digest[service.digest]
        state.crashes.pop(service.digest, None)


def cancel_unused(state: State) -> None:
    """Nobody waits any more for what is being brought to devices: others have a use for these."""
    for number, pending in state.pending.items():
        if not isinstance(pending, Loading | Prefetching) or pending.void:
            continue
        if pending.digest not in state.by_digest:
            pending.void = True
            state.out.append(Cancel(device=pending.device.name, cancelled=number))


def want(state: State, queue: StageQueue) -> None:
    """Items are on their way to a stage: its fragment is loaded from now on, where it is not."""
    if not queue.wanted:
        queue.wanted = True
        request_provisioning(state, queue.service)


def request_provisioning(state: State, service: Service) -> None:
    state.unmet[service] = None
    state.worklist.services.append(service)


def end_preemption(state: State, service: Service) -> None:
    """The service has a device, or needs none any more."""
    device = service.preempting
    service.preempting = None
    if device is not None and device.preempted_by is service:
        device.preempted_by = None
        review(state, device)


# ---- backoff: a device that fails with a fragment is left alone with it, longer each time --------


def record_failure(
    state: State, device: Device, digest: Digest, failure: Failure, free: int = 0
) -> None:
    """Start the next backoff; the first `free` failures in a row have none."""
    known = device.health.backoffs.get(digest)
    failures_in_a_row = 1 if known is None else known.failures_in_a_row + 1
    backoff = device.health.backoffs[digest] = Backoff(state.now, failures_in_a_row, failure)
    again = failures_in_a_row - free - 1
    if again < 0:
        return
    backoff.until = Nanoseconds(state.now + state.limits.delay(again))
    review(state, device)
    count_all_homes(state, device, digest)
    for service in state.by_digest.get(digest, ()):
        request_provisioning(state, service)


def expire_backoffs(state: State) -> None:
    oldest = state.now - 2 * state.limits.retry_delay_most
    for device in state.devices.values():
        for digest, backoff in device.health.backoffs.items():
            if oldest < backoff.until <= state.now:
                if digest in device.memory.resident:
                    review(state, device)
                count_all_homes(state, device, digest)


# ---- homes, and what fits ------------------------------------------------------------------------


def can_host(state: State, service: Service, device: Device) -> bool:
    """Whether a device could have the fragment at all, as things stand."""
    if device.draining or device.lost:
        return False
    if device.health.backs_off(service.digest, state.now):
        return False
    return size_on(device, service) <= device.memory.budget


def awaits_homes(state: State, service: Service) -> bool:
    """Whether the plan's devices are still on their way."""
    if service.homes_up or state.now >= service.homes_awaited_until:
        return False
    return any(name not in state.tallies for name in service.homes)


def size_on(device: Device, service: Service, room: int | None = None) -> int:
    """What is to be reckoned for the fragment there, in the whole budget or in `room`: what the
    plan grants it; in less room all of that, in blocks; but not less than it needs, which is then
    more than the room. What it was measured to take beyond its grant comes on top.
    """
    memory = device.memory
    excess = memory.excess.get(service.digest, 0)
    planned = service.granted.get(device.name, service.resident)
    most = (memory.budget if room is None else room) - excess
    return excess + max(service.least, min(planned, most))


def fits_in(device: Device, service: Service, room: int) -> bool:
    """Whether the device can run the fragment in that room, at least in blocks."""
    return size_on(device, service, room) <= room


def count_homes(state: State, service: Service) -> None:
    """Count the homes that can serve, and list the servers again if that changes who may."""
    before = service.homes_up
    homes = (state.devices.get(name) for name in service.homes)
    service.homes_up = sum(
        device is not None and can_host(state, service, device) for device in homes
    )
    if bool(before) != bool(service.homes_up) or not service.servers:
        for device in state.devices.values():
            if service.digest in device.memory.resident:
                review(state, device)


def count_all_homes(state: State, device: Device, digest: Digest | None = None) -> None:
    """A device has changed what it can do: every service that it is a home of counts again."""
    for service in list(state.services.values()):
        if device.name in service.homes and (digest is None or service.digest == digest):
            count_homes(state, service)
            if service.wanted:
                request_provisioning(state, service)


def _may_come(state: State, job: Job, service: Service) -> bool:
    """Whether a home has not joined yet, and may: the coordinator may have begun again just now."""
    young = state.now - job.submitted_at < state.limits.joining
    return young and any(name not in state.tallies for name in service.homes)


def has_shrunk_just_now(state: State, device: Device) -> bool:
    """Whether a device has a smaller budget, and has not had it for long: it may be back soon."""
    at = device.health.shrunk_at
    return at is not None and at > state.now - state.limits.homes_grace


def _needs(state: State, service: Service) -> Iterator[tuple[int, Bytes]]:
    """What a fragment needs on each device known, and the device's budget."""
    for name, tally in state.tallies.items():
        device = state.devices.get(name)
        yield service.least if device is None else size_on(device, service), tally.budget


def impossible(state: State, job: Job) -> Failure | None:
    """Fragments larger than every budget known: what the first would need, and what each has."""
    devices = state.devices.values()
    if not devices or any(has_shrunk_just_now(state, device) for device in devices):
        return None
    failures: list[Failure] = []
    for queue in job.queues:
        service = queue.service
        if awaits_homes(state, service) or _may_come(state, job, service):
            continue
        needs = _needs(state, service)
        if all(need > budget for need, budget in needs):  # mostly the first device will do
            budgets = {name: tally.budget for name, tally in state.tallies.items()}
            most = max(need for need, _ in _needs(state, service))
            failures.append(_too_large(queue, most, budgets))
    if not failures:
        return None
    return replace(failures[0], outgrown=tuple(each.outgrown[0] for each in failures))


def of_fragment(queue: StageQueue, failure: Failure) -> Failure:
    """The failure, with the fragment that took too much, where one did."""
    if failure.kind is not FailureKind.BUDGET or failure.need is None:
        return failure
    return replace(failure, outgrown=(Outgrown(fragment=queue.stage, need_bytes=failure.need),))


def _too_large(queue: StageQueue, need: int, budgets: dict[str, Bytes]) -> Failure:
    first, *others = [(name, format_downwards(budget)) for name, budget in budgets.items()]
    have = ", ".join([" has ".join(first), *map(" ".join, others)])
    excess = need - queue.service.least
    needs = format_need(need, queue.service.resident + excess)
    message = (
        f"fragment {queue.stage} of {queue.job.spec.name} needs {needs}; "
        f"{have}; cut finer or raise the budget"
    )
    most = Bytes(max(budgets.values()))
    failure = Failure(kind=FailureKind.BUDGET, message=message, need=Bytes(need), have=most)
    return of_fragment(queue, failure)
