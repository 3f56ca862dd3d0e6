"""Which of the devices that serve a fragment comes first, without visiting all of them.

A service keeps its servers in a heap of ranks (`device.Rank`). The device with the least load comes
first; among equals the policy decides:

- Fifo: the device that was given its last task longest ago;
- LeastLoaded: the time until it is free, load times its measured time for this fragment;
- Edas, Aras, Mabac: the best score (see `ranking`).

A rank in the heap may be *better* than what its device deserves now: that is detected, and
corrected, when it reaches the top. It is never worse: when a device's load falls, it is pushed
anew, and the old entry is dropped when it reaches the top. So a task costs a constant number of
heap operations, each logarithmic in the number of servers.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from shoal_coordinator.dispatch.device import Device, DeviceWork, Rank
from shoal_coordinator.dispatch.events import Policy
from shoal_coordinator.dispatch.instructions import Tier
from shoal_coordinator.dispatch.state import Service, State, Task
from shoal_protocol.digests import Digest

_SLACK = 64
_FIFO, _LEAST_LOADED, _RESIDENT = Policy.FIFO, Policy.LEAST_LOADED, Tier.RESIDENT


def rank(service: Service, device: Device, tier: int = _RESIDENT) -> Rank:
    """A device's rank for a service now: the one place that builds it."""
    work, policy, backlog = device.work, service.policy, 0.0
    score: float
    if policy is _FIFO:
        score = work.last_given
    elif policy is _LEAST_LOADED:
        score = work.load
        if tier == _RESIDENT:
            backlog = (work.load + 1.0) * work.times.get(service.digest, 0)
    else:
        score = -device.scores.get(policy, 0.0)
    return tier, backlog, work.load, score, device.order, device


# ---- the heap of a service -----------------------------------------------------------------------


def best(service: Service) -> Device | None:
    """The first of the servers, busy or not; None when there is none."""
    heap = service.ranks
    while heap:
        top = heap[0]
        device = top[5]
        if device.listed.get(service) is not top:
            heappop(heap)
            continue
        now = rank(service, device)
        if now > top:
            device.listed[service] = now
            heapreplace(heap, now)
            continue
        return device
    return None


def best_but(service: Service, avoids: Callable[[Device], bool]) -> Device | None:
    """The first of the servers other than some; for the rare task that failed there."""
    others = (device for device in service.servers if not avoids(device))
    return min(others, key=lambda device: rank(service, device), default=None)


def add_server(service: Service, device: Device) -> None:
    if service in device.listed:
        return
    service.servers[device] = None
    _push(service, device, rank(service, device))
    note_time(service, device)


def remove_server(service: Service, device: Device) -> None:
    """It cannot any more. Its entries in the heap are dropped when they reach the top."""
    if device.listed.pop(service, None) is None:
        return
    del service.servers[device]
    if service.fastest is device:
        digest = service.digest
        timed = [other for other in service.servers if digest in other.work.times]
        service.fastest = min(timed, key=lambda other: other.work.times[digest], default=None)


def relist(device: Device) -> None:
    """The device's load has fallen: it may stand further to the front now."""
    for service, known in device.listed.items():
        now = rank(service, device)
        if now < known:
            _push(service, device, now)


def reorder(service: Service) -> None:
    """The scores are new: order all servers again."""
    service.ranks = [rank(service, device) for device in service.servers]
    for entry in service.ranks:
        entry[5].listed[service] = entry
    heapify(service.ranks)


def note_time(service: Service, device: Device) -> None:
    """A task's time is known on a device: it may be the fastest."""
    digest, fastest = service.digest, service.fastest
    time = device.work.times.get(digest)
    if time is None or fastest is device or service not in device.listed:
        return
    if fastest is None or time < fastest.work.times[digest]:
        service.fastest = device


def _push(service: Service, device: Device, entry: Rank) -> None:
    heap = service.ranks
    if len(heap) > 4 * len(service.servers) + _SLACK:
        device.listed[service] = entry
        heap[:] = [other for other in heap if other[5].listed.get(service) is other]
        heapify(heap)
    device.listed[service] = entry
    heappush(heap, entry)


# ---- who may serve -------------------------------------------------------------------------------


def eligible(state: State, service: Service, device: Device) -> bool:
    """The model gate, and whether the device may be given work of this service at all."""
    digest = service.digest
    if digest not in device.memory.resident or digest in device.memory.unloading:
        return False
    if device.lost or device.draining or device.preempted_by is not None:
        return False
    if device.health.backs_off(digest, state.now):
        return False
    return may_serve(service, device)


def may_serve(service: Service, device: Device) -> bool:
    """Whether the plan lets a device serve: a home, or any device when all homes are gone."""
    return not service.homes_up or device.name in service.homes


def review(state: State, device: Device) -> None:
    """Something about the device has changed: list it where it may serve, and nowhere else."""
    for service in list(device.listed):
        if not eligible(state, service, device):
            remove_server(service, device)
    for digest in device.memory.resident:
        for service in state.by_digest.get(digest, ()):
            if eligible(state, service, device):
                add_server(service, device)


# ---- slots and reservations: they change a device's rank -----------------------------------------


def reserve(task: Task, device: Device) -> None:
    task.reserved_on = device
    device.work.load += 1


def unreserve(task: Task) -> None:
    device = task.reserved_on
    if device is not None:
        task.reserved_on = None
        device.work.load -= 1
        relist(device)


def begin_task(task: Task, device: Device) -> None:
    """The task is given to a device, which may differ from the one where it had a reservation."""
    work, digest = device.work, task.queue.service.digest
    if task.reserved_on is device:
        task.reserved_on = None
    else:
        unreserve(task)
        work.load += 1
    work.queued += 1
    work.in_use[digest] = work.in_use.get(digest, 0) + 1


def begin_travel(device: Device, digest: Digest, items: int) -> None:
    """Items travel, and will be on the device. They take no slot: they are mostly elsewhere."""
    work = device.work
    work.travelling += items
    work.in_use[digest] = work.in_use.get(digest, 0) + items


def end_travel(device: Device, digest: Digest, items: int) -> None:
    work = device.work
    work.travelling -= items
    _end_use(work, digest, items)
    relist(device)  # the time of its tasks may have fallen


def end_task(task: Task, device: Device) -> None:
    work, digest = device.work, task.queue.service.digest
    work.queued -= 1
    work.load -= 1
    _end_use(work, digest)
    relist(device)


def _end_use(work: DeviceWork, digest: Digest, tasks: int = 1) -> None:
    work.in_use[digest] -= tasks
    if not work.in_use[digest]:
        del work.in_use[digest]
