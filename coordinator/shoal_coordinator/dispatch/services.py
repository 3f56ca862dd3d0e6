"""A service's life: who uses it, which of its homes are up, and whether any device can have it at
all.

The homes that a plan names are soft: while one of them is up, only homes serve; when all are gone,
any device that fits does, until one comes back. Homes that have not joined yet are awaited for a
while.
"""

from shoal_coordinator.dispatch.events import Failure, FailureKind
from shoal_coordinator.dispatch.servers import review
from shoal_coordinator.dispatch.state import Device, Job, Service, StageQueue, State
from shoal_protocol.digests import Digest
from shoal_protocol.units import Bytes, Nanoseconds, format_bytes


def begin_service(state: State, queue: StageQueue) -> None:
    """A stage has begun to use its service."""
    service = queue.service
    service.queues.append(queue)
    if len(service.queues) == 1:
        state.by_digest.setdefault(service.digest, []).append(service)
        service.homes_awaited_until = Nanoseconds(state.now + state.limits.homes_grace)
        for device in state.devices.values():
            if device.loading is not None and device.loading.digest == service.digest:
                service.loading[device] = None
        count_homes(state, service)
    if queue.wanted:
        call_for(state, service)


def retire_service(state: State, queue: StageQueue) -> None:
    """A stage uses it no more; with the last one it goes. Its fragments stay where they are."""
    service = queue.service
    if queue not in service.queues:
        return
    queue.served_by = tuple(device.name for device in service.servers)
    service.queues.remove(queue)
    if service.queues:
        return
    for device in list(service.servers):
        del device.listed[service]
    service.servers.clear()
    service.queue.clear()
    stop_yielding(state, service)
    for device in service.loading:
        if device.next_load is service:
            device.next_load = None
    state.unmet.pop(service, None)
    del state.services[service.digest, service.homes, service.policy]
    users = state.by_digest[service.digest]
    users.remove(service)
    if not users:
        del state.by_digest[service.digest]


def call_for(state: State, service: Service) -> None:
    """Have somebody look, before this step ends, whether the fragment is to be loaded somewhere."""
    state.unmet[service] = None
    state.starving.append(service)


def stop_yielding(state: State, service: Service) -> None:
    """The stage has been helped, or needs no help any more."""
    device = service.yielder
    service.yielder = None
    if device is not None and device.preempted_by is service:
        device.preempted_by = None
        review(state, device)


# ---- homes, and what fits ------------------------------------------------------------------------


def can_host(state: State, service: Service, device: Device) -> bool:
    """Whether a device could have the fragment at all, as things stand."""
    if device.draining or device.lost:
        return False
    avoided = device.avoid.get(service.digest)
    if avoided is not None and avoided.until > state.now:
        return False
    return size_on(device, service) <= device.budget


def may_serve(service: Service, device: Device) -> bool:
    """Whether the plan lets a device serve: a home, or anyone when all homes are gone."""
    return not service.homes_up or device.name in service.homes


def awaits_homes(state: State, service: Service) -> bool:
    """Whether the plan's devices are still on their way."""
    if service.homes_up or state.now >= service.homes_awaited_until:
        return False
    return any(name not in state.tallies for name in service.homes)


def size_on(device: Device, service: Service) -> int:
    """What the fragment takes there: as measured there, else as estimated."""
    return device.needs.get(service.digest, service.resident)


def count_homes(state: State, service: Service) -> None:
    """Count the homes that can serve, and list the servers anew if that changes who may."""
    before = service.homes_up
    homes = (state.devices.get(name) for name in service.homes)
    service.homes_up = sum(
        device is not None and can_host(state, service, device) for device in homes
    )
    if bool(before) != bool(service.homes_up) or not service.servers:
        for device in state.devices.values():
            if service.digest in device.resident:
                review(state, device)


def count_all_homes(state: State, device: Device, digest: Digest | None = None) -> None:
    """A device has changed what it can do: every service that it is a home of counts again."""
    for service in list(state.services.values()):
        if device.name in service.homes and (digest is None or service.digest == digest):
            count_homes(state, service)
            if service.wanted:
                call_for(state, service)


def impossible(state: State, job: Job) -> Failure | None:
    """A fragment larger than every budget known: say what it would need, and what each has."""
    if not state.devices:
        return None
    for queue in job.queues:
        service = queue.service
        if awaits_homes(state, service):
            continue
        budgets = {name: tally.budget for name, tally in state.tallies.items()}
        needs = [
            size_on(state.devices[name], service) if name in state.devices else service.resident
            for name in budgets
        ]
        if all(need > budget for need, budget in zip(needs, budgets.values(), strict=True)):
            return _too_large(queue, max(needs), budgets)
    return None


def _too_large(queue: StageQueue, need: int, budgets: dict[str, Bytes]) -> Failure:
    (first, budget), *others = budgets.items()
    have = ", ".join(
        [
            f"{first} has {format_bytes(budget)}",
            *(f"{name} {format_bytes(budget)}" for name, budget in others),
        ]
    )
    message = (
        f"fragment {queue.stage} of {queue.job.spec.name} needs {format_bytes(need)} resident; "
        f"{have}; cut finer or raise the budget"
    )
    most = Bytes(max(budgets.values()))
    return Failure(kind=FailureKind.BUDGET, message=message, need=Bytes(need), have=most)
