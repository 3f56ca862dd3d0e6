"""Itineraries: an item of a light job is decided once, and passes all its stages without asking.

Where each stage of a job has one device, has run there, and takes next to no time, nothing is left
to decide while an item is under way. The job gets a *route*: each device learns its legs of it,
once (`Plan`). From then on an item is one instruction (`Travel`): it enters at the first device,
every device runs what arrives and sends it on, and the last one answers.

    no route --light, one device a stage--> planned --all legs answered--> open
       ^                                      |                            |
       +-- a leg failed, a device left, an item failed or took too long --+  (backoff)

- While a route is planned no item is admitted: the answers take less time than a window of items
  that run task by task. A device that does not answer holds up nothing for longer than
  `Limits.planning`.
- Nothing is kept of an item on its way: what is lost begins anew, and costs what light stages
  cost. It then runs task by task (`assignment`), and so does an item that has failed: that way
  tells what is to blame, and knows of relays, disks and deadlines. So each item travels once.
- An item takes no slot, since it is mostly elsewhere: the window of its job bounds how many there
  are. Where one of the devices has tasks of other jobs, items run task by task, so that priorities
  decide.
- Nobody says that an item is lost between two devices: one that is not answered within
  `Limits.travel` is given up. Whatever still comes of it is ignored, because its number is void.
"""

from collections.abc import Iterator, Sequence

from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.instructions import Cancel, PeerLost, Plan, Travel
from shoal_coordinator.dispatch.servers import alight, board
from shoal_coordinator.dispatch.state import (
    RUNNING,
    WAITING,
    Item,
    Job,
    Planning,
    Route,
    State,
    Travelling,
)
from shoal_protocol.units import Nanoseconds


def plan(state: State, job: Job) -> None:
    """Plan a route for a light job that has none, if it may have one."""
    if not job.spec.light or job.route is not None or state.now < job.route_after:
        return
    if not job.spec.open_ended and job.open <= len(job.active):
        return
    devices: list[Device] = []
    for queue in job.queues:
        service = queue.service
        if len(service.servers) != 1 or service.loading:
            return
        (device,) = service.servers
        if device.memory.single or service.digest not in device.work.times:
            return
        if device.work.times[service.digest] > state.limits.ahead:
            return
        devices.append(device)
    route = job.route = Route(state.next_number(), job, tuple(devices), state.now)
    names = tuple([device.name for device in devices])
    for first, last in _legs(route):
        number = state.next_number()
        device = devices[first]
        route.unanswered.add(number)
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


def awaits_route(state: State, job: Job) -> bool:
    """Whether all legs of a route should answer soon."""
    route = job.route
    if route is None or not route.unanswered:
        return False
    return state.now - route.since < state.limits.planning


def close(state: State, route: Route) -> None:
    """Items do not travel on this route any more; there may be another after a while."""
    job, limits = route.job, state.limits
    state.worklist.stored.append(job)
    if job.route is route:
        job.route = None
        delay = min(limits.retry_delay << min(job.route_failures, 16), limits.retry_delay_most)
        job.route_after = Nanoseconds(state.now + delay)
        job.route_failures += 1


# ---- items ---------------------------------------------------------------------------------------


def open_route(state: State, job: Job) -> Route | None:
    """The route that items of a job may travel on now."""
    route = job.route
    if route is None or route.unanswered:
        return None
    for queue, device in zip(job.queues, route.devices, strict=True):
        if queue.service not in device.listed:
            close(state, route)
            return None
        for service in device.listed:
            for other in service.queues:
                if (other.waiting or other.running) and other.job is not job:
                    return None
    return route


def travel(state: State, items: Sequence[Item], route: Route) -> None:
    """Have items that were just admitted travel."""
    job, now, count = route.job, state.now, len(items)
    if job.started_at is None:
        job.started_at = now
    for queue, device in zip(job.queues, route.devices, strict=True):
        digest = queue.service.digest
        board(device, digest, count)
        device.work.used_at[digest] = now
        device.tally.tiers[0] += count
        queue.running += count
    job.tiers[0] += count * len(job.queues)
    job.served += count * len(job.queues)
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
    for travelling in together:
        for task in travelling.tasks:
            task.device = None
    for queue, device in zip(route.job.queues, route.devices, strict=True):
        alight(device, queue.service.digest, len(together))
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
        route = job.route
        if route is None or lost not in route.stages_on:
            continue
        close(state, route)
        hops = zip(route.devices, route.devices[1:], strict=False)
        senders = {one: None for one, other in hops if other is lost and one is not lost}
        state.out += [PeerLost(device=sender.name, peer=lost.name) for sender in senders]
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
