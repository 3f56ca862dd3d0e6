"""Itineraries: an item of a light job is decided once, and passes all its stages without asking.

Where each stage of a job has run, and takes next to no time, nothing is left to decide while an
item is under way. The job gets *routes*, which name a device for each stage: each device learns its
legs of them, once (`Plan`). From then on an item is one instruction (`Travel`): it enters at the
first device of a route, every device runs what arrives and sends it on, and the last one answers.

    no routes --every stage is light--> planned --all legs answered--> open
       ^                                  |                             |
       +-- a leg failed, a device left, an item failed or took too long-+  (backoff)
       +-- other devices serve a stage than before ---------------------+  (at once)

- There are as many routes as the stage with the most replicas has devices, so that every device is
  on one; an item stays on a device as long as it can. An item takes the route on which least waits,
  and of those where nothing does the fastest: so one at a time is through soonest, and a device
  that has not run for long shows what it takes now when others have work.
- While routes are planned no item is admitted: the answers take less time than a window of items
  that run task by task. A device that does not answer holds up nothing for longer than
  `Limits.planning`.
- Nothing is kept of an item on its way: what is lost begins anew, and costs what light stages
  cost. It then runs task by task (`assignment`), and so does an item that has failed: that way
  tells what is to blame, and knows of relays, disks and deadlines. So each item travels once.
- An item takes no slot, since it is mostly elsewhere: the window of its job bounds how many there
  are. Where one of the devices has work of other jobs, items run task by task, so that priorities
  decide. Jobs of one priority that all have routes travel side by side: each waits until the tasks
  of the others have ended, and none begins further ones.
- Nobody says that an item is lost between two devices: one that is not answered within
  `Limits.travel` is given up. Whatever still comes of it is ignored, because its number is void.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Final

from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.instructions import Cancel, PeerLost, Plan, Travel
from shoal_coordinator.dispatch.servers import begin_travel, end_travel
from shoal_coordinator.dispatch.services import want
from shoal_coordinator.dispatch.state import (
    RUNNING,
    WAITING,
    Item,
    Job,
    Planning,
    Route,
    Service,
    StageQueue,
    State,
    Travelling,
)
from shoal_protocol.units import Nanoseconds

_MOST_ROUTES: Final = 16
"""Where a stage has more devices, its items run task by task."""
_HOP: Final = 500_000
"""Nanoseconds from one device to the next; an item avoids it where that costs less."""


def plan(state: State, job: Job) -> None:
    """Plan routes for a light job that has none, or whose devices have changed, if it may have
    some."""
    if job.routes and not _changed(job):
        return
    job.routes = ()
    if not job.spec.light or state.now < job.route_after:
        return
    if not job.open_ended and job.open <= len(job.active):
        return
    if all(_is_light(state, queue.service) for queue in job.queues):
        services = [queue.service for queue in job.queues]
        for queue in job.queues:
            want(state, queue)  # no task is given that says so: a home may lack it
        job.routes = tuple(_plan(state, job, devices) for devices in _lanes(services))
        stages = zip(*[route.devices for route in job.routes], strict=True)
        job.routed = [frozenset(devices) for devices in stages]


def _changed(job: Job) -> bool:
    """Whether other devices serve a stage than those that the routes name."""
    return [queue.service.servers.keys() for queue in job.queues] != job.routed


def _is_light(state: State, service: Service) -> bool:
    """Whether a fragment has the devices that it will have, and is known to take next to no time.
    The fastest stands for all: what was measured elsewhere may be long ago."""
    if service.fastest is None or service.loading or len(service.servers) > _MOST_ROUTES:
        return False
    if any(device.memory.single for device in service.servers):
        return False
    return service.fastest.work.times[service.digest] <= state.limits.ahead


def _lanes(services: Sequence[Service]) -> Iterator[tuple[Device, ...]]:
    """The devices of each route: for each stage one on which it has the fewest routes, if possible
    where the item is, else where it can stay longest."""
    used: Counter[tuple[int, Device]] = Counter()
    for _ in range(max(len(service.servers) for service in services)):
        lane: list[Device] = []
        for stage, service in enumerate(services):
            here = lane[-1:]
            orders = {
                device: (used[stage, device], device not in here, -_stay(device, services[stage:]))
                for device in service.servers
            }
            lane.append(min(orders, key=orders.__getitem__))
        used.update(enumerate(lane))
        yield tuple(lane)


def _stay(device: Device, services: Sequence[Service]) -> int:
    """How many stages in a row a device serves."""
    return len(list(takewhile(lambda service: device in service.servers, services)))


def _plan(state: State, job: Job, devices: tuple[Device, ...]) -> Route:
    """Have the devices of a route learn their legs."""
    route = Route(state.next_number(), job, devices, state.now)
    names = tuple([device.name for device in devices])
    for first, last in _legs(route):
        number = state.next_number()
        device = devices[first]
        route.unanswered.add(number)
        job.devices[device.name] = None
        state.pending[number] = Planning(device, route, state.now)
        state.out.append(
            Plan(
                instruction=number,
                device=device.name,
                job=job.spec.name,
                epoch=job.spec.epoch,
                route=route.number,
                stages=(first, last),
                devices=names,
            )
        )
    return route


def _legs(route: Route) -> Iterator[tuple[int, int]]:
    """Stages that follow one another on one device: the first, and the one after the last."""
    first = 0
    for stage, device in enumerate(route.devices):
        if device is not route.devices[first]:
            yield first, stage
            first = stage
    yield first, len(route.devices)


def planned(state: State, planning: Planning, number: int) -> None:
    """A device has its leg; with the last one, items begin to travel."""
    planning.route.unanswered.discard(number)
    state.worklist.stored.append(planning.route.job)


def close(state: State, route: Route) -> None:
    """Items do not travel on the routes of a job any more, because of one of them; there may be
    others after a while."""
    job, limits = route.job, state.limits
    state.worklist.stored.append(job)
    if route in job.routes:
        job.routes = ()
        state.obstructed.pop(job, None)
        job.route_after = Nanoseconds(state.now + limits.delay(job.route_failures))
        job.route_failures += 1


# ---- items ---------------------------------------------------------------------------------------


def open_routes(state: State, job: Job) -> tuple[Route, ...] | None:
    """The routes that items of a job may travel on now: all of them, or none. None: items wait, for
    they may travel soon. Routes that nothing can travel on for long are closed."""
    unanswered = [route for route in job.routes if route.unanswered]
    if unanswered:
        soon = any(state.now - route.since < state.limits.planning for route in unanswered)
        return None if soon else ()
    others = list(_others(job))
    beside = all(_travels_beside(job, each) for each in others)
    if not beside or not any(map(_has_tasks, others)):
        state.obstructed.pop(job, None)
        return job.routes if beside else ()
    if state.now - state.obstructed.setdefault(job, state.now) < state.limits.planning:
        return None
    close(state, job.routes[0])
    return ()


def _others(job: Job) -> Iterator[StageQueue]:
    """Stages of other jobs with work for a device of these routes."""
    for device in {device: None for route in job.routes for device in route.devices}:
        for service in device.listed:
            for queue in service.queues:
                if (queue.waiting or queue.running) and queue.job is not job:
                    yield queue


def _has_tasks(queue: StageQueue) -> bool:
    """Whether there is work beside items that travel."""
    return bool(queue.waiting) or queue.running > queue.job.travelling


def _travels_beside(job: Job, queue: StageQueue) -> bool:
    return bool(queue.job.routes) and queue.job.spec.priority == job.spec.priority


def travel(state: State, items: Sequence[Item], routes: Sequence[Route]) -> None:
    """Have items that were just admitted travel."""
    for route, together in _shared(items, routes):
        _travel(state, together, route)


def _shared(
    items: Sequence[Item], routes: Sequence[Route]
) -> Iterable[tuple[Route, Sequence[Item]]]:
    """Which items travel on which route."""
    if len(routes) == 1:
        return [(routes[0], items)]
    shares: dict[Route, list[Item]] = {}
    times = {route: _times(route) for route in routes}
    waiting = {device: device.work.travelling for route in routes for device in route.devices}

    def order(route: Route) -> tuple[int, int]:
        taken = times[route]
        stages = zip(route.devices, taken, strict=True)
        queue = max([waiting[device] * time for device, time in stages])
        return queue, sum(taken) + _HOP * (len(route.stages_on) - 1)

    for item in items:
        route = min(routes, key=order)
        shares.setdefault(route, []).append(item)
        for device in route.devices:
            waiting[device] += 1
    return shares.items()


def _times(route: Route) -> list[int]:
    """What each stage takes; where a device has not run it, what it takes on the fastest."""
    times: list[int] = []
    for queue, device in zip(route.job.queues, route.devices, strict=True):
        digest, fastest = queue.service.digest, queue.service.fastest or device
        times.append(device.work.times.get(digest, fastest.work.times.get(digest, _HOP)))
    return times


def _travel(state: State, items: Sequence[Item], route: Route) -> None:
    job, now, count = route.job, state.now, len(items)
    if job.started_at is None:
        job.started_at = now
    for queue, device in zip(job.queues, route.devices, strict=True):
        digest = queue.service.digest
        begin_travel(device, digest, count)
        device.work.used_at[digest] = now
        device.work.serve(job, count)
        device.tally.tiers[0] += count
        queue.running += count
    job.travelling += count
    job.tiers[0] += count * len(job.queues)
    first, names = route.devices[0], tuple([device.name for device in route.devices])
    for item in items:
        number = item.travels_as = state.next_number()
        item.started_at = now
        for task, device in zip(item.tasks, route.devices, strict=True):
            task.status = RUNNING
            task.device = device
            task.instruction = number
            task.attempts = 1
        state.pending[number] = Travelling(first, route, item.tasks, item, now)
        state.out.append(
            Travel(
                instruction=number,
                device=first.name,
                job=job.spec.name,
                epoch=item.epoch,
                item=item.index,
                route=route.number,
                devices=names,
            )
        )


def leave(state: State, route: Route, together: Sequence[Travelling]) -> None:
    """Items have ended their travel on a route, somehow."""
    route.job.travelling -= len(together)
    for travelling in together:
        for task in travelling.tasks:
            task.device = None
    for queue, device in zip(route.job.queues, route.devices, strict=True):
        end_travel(device, queue.service.digest, len(together))
        if device.work.idle and not device.lost:
            state.worklist.freed.append(device)


def run_again(state: State, travelling: Travelling) -> None:
    """An item that has not come through runs task by task."""
    item = travelling.item
    item.travels_as = 0
    if item.ended:
        return
    for task in item.tasks:
        task.status = WAITING
        task.attempts = 0
        task.queue.running -= 1
    state.worklist.ready += [task for task in item.tasks if not task.queue.predecessors]


def give_up(state: State, number: int) -> None:
    """Void an item's travel; what still comes of it is ignored."""
    travelling = state.pending.pop(number)
    assert isinstance(travelling, Travelling)
    leave(state, travelling.route, (travelling,))
    state.out.append(Cancel(device=travelling.device.name, cancelled=number))


# ---- losses --------------------------------------------------------------------------------------


def lose(state: State, lost: Device) -> None:
    """A device is lost: routes over it are closed, and its neighbours stop sending to it."""
    for job in state.jobs.values():
        over = [route for route in job.routes if lost in route.stages_on]
        hops = [hop for route in over for hop in pairwise(route.devices)]
        senders = {one: None for one, other in hops if other is lost and one is not lost}
        state.out += [PeerLost(device=sender.name, peer=lost.name) for sender in senders]
        for route in over:
            close(state, route)
    for number, pending in list(state.pending.items()):
        if isinstance(pending, Travelling) and lost in pending.route.stages_on:
            pending.item.retries += 1
            pending.item.job.retries += 1
            give_up(state, number)
            run_again(state, pending)


def expire(state: State) -> None:
    """Give up items that are under way for too long."""
    overdue = []
    for number, pending in state.pending.items():
        if state.now - pending.since < state.limits.travel:
            break  # the numbers grow, and with them the times
        if isinstance(pending, Travelling):
            overdue.append((number, pending))
    for number, pending in overdue:
        close(state, pending.route)
        give_up(state, number)
        run_again(state, pending)
