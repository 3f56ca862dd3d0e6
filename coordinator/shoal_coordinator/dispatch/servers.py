"""Which of the devices that serve a fragment comes first, without looking at all of them.

A service keeps its servers in a heap of entries (load, rank, order, device). Fewer tasks come
first; among equals the policy ranks:

- Fifo: the device that was given its last task longest ago;
- LeastLoaded: by the time until it is free, load times its measured time for this fragment;
- Edas, Aras, Mabac: the best score (see `ranking`).

Load stands before the policy because scores are refreshed at most once a second: without it, the
best device would take a second task while the next one idles.

An entry may be *better* than what its device deserves now: that is found out, and put right, when
it comes to the top. It is never worse: when a device's load falls, it is listed anew, and the old
entry is dropped when met. So a task costs a constant number of heap operations, each logarithmic
in the number of servers, and nothing when nobody asks.
"""

from heapq import heapify, heappop, heappush, heapreplace

from shoal_coordinator.dispatch.events import Policy
from shoal_coordinator.dispatch.state import Device, Entry, Service, State

_SLACK = 64


def entry(service: Service, device: Device) -> Entry:
    """Where a device stands in a service's order, as of now."""
    policy = service.policy
    if policy is Policy.FIFO:
        return device.load, device.given, device.order, device
    if policy is Policy.LEAST_LOADED:
        time = device.compute.get(service.digest, 0)
        return (device.load + 1.0) * time, device.load, device.order, device
    return device.load, -device.scores.get(policy, 0.0), device.order, device


def enlist(service: Service, device: Device) -> None:
    """The device can take tasks of this service from now on."""
    if service in device.listed:
        return
    service.servers[device] = None
    _push(service, device, entry(service, device))
    learn(service, device)


def delist(service: Service, device: Device) -> None:
    """It cannot any more. Its entries in the heap are dropped when met."""
    if device.listed.pop(service, None) is None:
        return
    del service.servers[device]
    if service.fastest is device:
        digest = service.digest
        timed = [other for other in service.servers if digest in other.compute]
        service.fastest = min(timed, key=lambda other: other.compute[digest], default=None)


def relist(device: Device) -> None:
    """Its load has fallen: it may stand further to the front now."""
    for service, known in device.listed.items():
        now = entry(service, device)
        if now < known:
            _push(service, device, now)


def best(service: Service) -> Device | None:
    """The first of the servers, busy or not; None when there is none."""
    queue = service.queue
    while queue:
        top = queue[0]
        device = top[3]
        if device.listed.get(service) is not top:
            heappop(queue)
            continue
        now = entry(service, device)
        if now > top:
            device.listed[service] = now
            heapreplace(queue, now)
            continue
        return device
    return None


def best_but(service: Service, shunned: Device) -> Device | None:
    """The first of the servers other than one; for the rare task that failed there."""
    others = (device for device in service.servers if device is not shunned)
    return min(others, key=lambda device: entry(service, device), default=None)


def reorder(service: Service) -> None:
    """The scores are new: order everybody again."""
    service.queue = [entry(service, device) for device in service.servers]
    for item in service.queue:
        item[3].listed[service] = item
    heapify(service.queue)


def learn(service: Service, device: Device) -> None:
    """A task's time is known on a device: it may be the fastest."""
    digest, fastest = service.digest, service.fastest
    time = device.compute.get(digest)
    if time is None or fastest is device or service not in device.listed:
        return
    if fastest is None or time < fastest.compute[digest]:
        service.fastest = device


def _push(service: Service, device: Device, item: Entry) -> None:
    queue = service.queue
    if len(queue) > 4 * len(service.servers) + _SLACK:
        device.listed[service] = item
        queue[:] = [other for other in queue if other[3].listed.get(service) is other]
        heapify(queue)
    device.listed[service] = item
    heappush(queue, item)


def eligible(state: State, service: Service, device: Device) -> bool:
    """The model gate, and whether the device may be given work of this service at all."""
    digest = service.digest
    if digest not in device.resident or digest in device.unloading:
        return False
    if device.lost or device.draining or device.preempted_by is not None:
        return False
    avoided = device.avoid.get(digest)
    if avoided is not None and avoided.until > state.now:
        return False
    return not service.homes_up or device.name in service.homes


def review(state: State, device: Device) -> None:
    """Something about the device has changed: list it where it may serve, and nowhere else."""
    for service in list(device.listed):
        if not eligible(state, service, device):
            delist(service, device)
    for digest in device.resident:
        for service in state.by_digest.get(digest, ()):
            if eligible(state, service, device):
                enlist(service, device)
