"""Which task goes to which device: the choice, the promise made ahead, and the giving.

Two questions, each answered without looking at all devices or all tasks:

- `place`: a task is ready; who takes it? The device promised to it, else the first of the
  service's order (`servers`), if it has a free slot; else the task waits in its queue.
- `take_work`: a device has a free slot; what does it take? Of the queues that it serves, the one of
  the highest priority, then of the job served least, then the latest stage (items are finished
  before new ones are begun); in the queue, what was promised to it first, then the oldest.

*Route ahead*: when a task is given, its consumers are promised to devices, so that the activation
leaves as soon as it is made. The device that makes it is preferred, since nothing need travel
then. A promise is soft: an idle device takes what is promised to one that is full.

*The slow device at the end*: a device does not get a task that the fastest server would have
finished sooner, after all that is left before it. The task then waits for that server.
"""

from itertools import islice

from shoal_coordinator.dispatch.instructions import Execute, Forward, Tier
from shoal_coordinator.dispatch.readiness import drop_copies, has_copy, is_ready, out_of_reach
from shoal_coordinator.dispatch.servers import best, best_but, entry, relist
from shoal_coordinator.dispatch.state import (
    Device,
    Forwarding,
    Running,
    Service,
    StageQueue,
    State,
    Status,
    Task,
)

_LOOK_AHEAD = 8
"""How many waiting tasks an idle device looks at for one that it may take from another."""


def demand(state: State, task: Task) -> None:
    """A task is to run, now or when its inputs are there; lost inputs are made again."""
    if task.status is Status.FINISHED:
        task.queue.passed -= 1
    task.status = Status.WAITING
    tasks = task.item.tasks
    for producer in task.queue.predecessors:
        made = tasks[producer]
        if made.status is Status.FINISHED and out_of_reach(task, producer):
            demand(state, made)
    if is_ready(task):
        place(state, task)


def place(state: State, task: Task) -> None:
    """Give a ready task to a device, or let it wait in its queue."""
    queue = task.queue
    service = queue.service
    task.status = Status.READY
    queue.waiting += 1
    device = _choose(task, service)
    if device is not None:
        _give_or_demand(state, task, device)
        return
    if task.attempts:
        queue.ready.appendleft(task)
    else:
        queue.ready.append(task)
    if task.promised is not None:
        held = queue.held.get(task.promised)
        if held is None:
            queue.held[task.promised] = [task]
        else:
            held.append(task)
    if service not in state.unmet:
        state.unmet[service] = None
    if not service.servers and not service.loading:
        state.starving.append(service)


def _choose(task: Task, service: Service) -> Device | None:
    """A device with a free slot for a task that has just become ready."""
    promised = task.promised
    if promised is not None:
        if service in promised.listed:
            rival = _sooner_elsewhere(task, promised)
            if promised.queued < promised.slots and rival is None:
                return promised
            if rival is not None and rival.queued < rival.slots:
                return rival
            rival = best(service)
            return rival if rival is not None and rival.queued == 0 else None
        if promised not in service.loading:
            unpromise(task)
    if task.shunned is None:
        first = best(service)
    else:
        first = best_but(service, task.shunned) or best(service)
    if first is None or first.queued >= first.slots:
        return None
    faster = _sooner_elsewhere(task, first)
    if faster is None:
        return first
    return faster if faster.queued < faster.slots else None


def _sooner_elsewhere(task: Task, device: Device) -> Device | None:
    """The fastest server, if it would end all that is left before this device ends the task."""
    queue = task.queue
    service = queue.service
    fastest = service.fastest
    if fastest is None or fastest is device or fastest is task.shunned:
        return None
    mine, its = device.compute.get(service.digest), fastest.compute.get(service.digest)
    if mine is None or its is None or its >= mine or service not in fastest.listed:
        return None
    return fastest if (queue.coming + fastest.load) * its < mine * (device.queued + 1) else None


def take_work(state: State, device: Device) -> None:
    """Fill a device's free slots."""
    while device.queued < device.slots:
        chosen: Task | None = None
        for service in device.listed:
            for queue in service.queues:
                if queue.waiting and (chosen is None or _before(queue, chosen.queue)):
                    task = _offer(queue, device)
                    if task is not None:
                        chosen = task
        if chosen is None:
            return
        _give_or_demand(state, chosen, device)


def _before(queue: StageQueue, other: StageQueue) -> bool:
    job, rival = queue.job, other.job
    if job is rival:
        return queue.stage > other.stage
    if job.spec.priority != rival.spec.priority:
        return job.spec.priority > rival.spec.priority
    return job.served < rival.served


def _offer(queue: StageQueue, device: Device) -> Task | None:
    """The task that a queue has for a device with a free slot, left in its place."""
    ready = queue.ready
    while ready and ready[0].status is not Status.READY:
        ready.popleft()
    task = _held_for(queue, device)
    if task is not None and _sooner_elsewhere(task, device) is None:
        return task
    service = queue.service
    rival = not device.queued or service.fastest is device
    for task in islice(ready, _LOOK_AHEAD):
        promised = task.promised
        others = promised is not None and promised is not device and service in promised.listed
        if (rival or not others) and task.status is Status.READY and _may_take(task, device):
            return task
    return None


def _held_for(queue: StageQueue, device: Device) -> Task | None:
    """The first task that waits for this device and no other."""
    held = queue.held.get(device)
    if held is None:
        return None
    for stale, task in enumerate(held):
        if task.status is Status.READY and task.promised is device:
            del held[:stale]
            return task
    del queue.held[device]
    return None


def _may_take(task: Task, device: Device) -> bool:
    """Whether a waiting task may go to this device, seen what was promised and who is faster."""
    promised, service = task.promised, task.queue.service
    if task.shunned is device and len(service.servers) > 1:
        return False
    if promised is not None and promised is not device and service in promised.listed:
        full = device.queued == 0 and promised.queued >= promised.slots
        if not full and (
            service.fastest is not device or _sooner_elsewhere(task, promised) is None
        ):
            return False
    return service.fastest is device or _sooner_elsewhere(task, device) is None


def _give_or_demand(state: State, task: Task, device: Device) -> None:
    """Give the task, unless an input of it was lost: then see to that first."""
    queue = task.queue
    tasks = task.item.tasks
    queue.waiting -= 1
    senders: list[tuple[Task, Device]] = []
    for producer in queue.predecessors:
        made = tasks[producer]
        holder = made.holder
        if holder is device or has_copy(task, producer, device):
            continue
        if holder is None:
            unpromise(task)
            drop_copies(task, None)
            demand(state, task)
            return
        senders.append((made, holder))
    _give(state, task, device, senders)


def _give(state: State, task: Task, device: Device, senders: list[tuple[Task, Device]]) -> None:
    queue, item = task.queue, task.item
    job, digest = queue.job, queue.service.digest
    rank = entry(queue.service, device)[1]
    occupy(task, device)
    state.counter = number = state.counter + 1
    device.given = number
    device.used_at[digest] = state.now
    tier = device.fresh.pop(digest, Tier.RESIDENT) if device.fresh else Tier.RESIDENT
    device.tally.tiers[tier - 1] += 1
    job.tiers[tier - 1] += 1
    job.served += 1
    queue.running += 1
    task.status = Status.RUNNING
    task.instruction = number
    task.device = device
    task.attempts += 1
    if item.started_at is None:
        item.started_at = state.now
        if job.started_at is None:
            job.started_at = state.now
    running = Running(device, task, state.now)
    state.pending[number] = running
    if queue.consumers:
        running.routes = _promise_consumers(state, task, device)
    state.out.append(
        Execute(
            instruction=number,
            device=device.name,
            job=job.spec.name,
            epoch=item.epoch,
            item=item.index,
            stage=queue.stage,
            digest=digest,
            tier=tier,
            attempt=task.attempts,
            routes=tuple([(stage, other.name) for stage, other in running.routes]),
            why=(int(tier), rank, device.name),
        )
    )
    for made, holder in senders:
        _forward(state, made, holder, task, device)


def _forward(state: State, made: Task, holder: Device, task: Task, device: Device) -> None:
    number = state.next_number()
    state.pending[number] = Forwarding(holder, device, made, task, task.instruction, state.now)
    if task.inputs is None:
        task.inputs = {}
    elif (stray := task.inputs.get(made.queue.stage)) is not None and not stray.lost:
        task.item.orphan_copies.append((stray, made.queue.stage))
    task.inputs[made.queue.stage] = device
    state.out.append(
        Forward(
            instruction=number,
            device=holder.name,
            target=device.name,
            job=task.queue.job.spec.name,
            epoch=task.item.epoch,
            item=task.item.index,
            producer=made.queue.stage,
            consumer=task.queue.stage,
        )
    )


def _promise_consumers(state: State, task: Task, device: Device) -> tuple[tuple[int, Device], ...]:
    """Name a device for each consumer; the routes are those to other devices."""
    queue = task.queue
    tasks, queues = task.item.tasks, queue.job.queues
    named: list[tuple[int, Device]] = []
    for consumer in queue.consumers:
        service = queues[consumer].service
        if not queues[consumer].wanted:
            queues[consumer].wanted = True
            state.unmet[service] = None
            state.starving.append(service)
        following = tasks[consumer]
        if following.status is not Status.WAITING:
            continue
        target = following.promised
        if target is None or target.lost or service not in target.listed:
            unpromise(following)
            target = _foresee(service, device, state.limits.queue_depth)
            if target is not None:
                promise(following, target)
        if target is not None and target is not device:
            named.append((consumer, target))
    return tuple(named)


def _foresee(service: Service, producer: Device, depth: int) -> Device | None:
    """Where a consumer will probably run: here if that is no worse, else the first server."""
    first = best(service)
    if first is None:
        first = _next_to_come(service)
    if first is None:
        return None
    if service in producer.listed and producer.load <= first.load + producer.slots:
        return producer
    # Where short tasks fill deep queues and one device has the fragment, the activation goes there
    # in any case: a Forward later would only be one more instruction.
    slack = 2 * (first.slots - depth) if len(service.servers) == 1 else 0
    return first if first.load <= first.slots + slack else None


def _next_to_come(service: Service) -> Device | None:
    """Of the devices where the fragment is on its way, one with little to do. A few are looked at,
    in turns: there may be hundreds.
    """
    few = list(islice(service.loading, _LOOK_AHEAD))
    for device in few:  # to the end, so that all have their turn
        del service.loading[device]
        service.loading[device] = None
    able = [device for device in few if device.preempted_by is None]
    return min(able, key=_load_and_order, default=None)


def _load_and_order(device: Device) -> tuple[int, int]:
    return device.load, device.order


# ---- promises and claims -------------------------------------------------------------------------


def promise(task: Task, device: Device) -> None:
    """Reserve a place on a device for a task to come."""
    task.promised = device
    device.load += 1


def unpromise(task: Task) -> None:
    """Take the reservation back."""
    device = task.promised
    if device is not None:
        task.promised = None
        device.load -= 1
        relist(device)


def occupy(task: Task, device: Device) -> None:
    """The task is given to a device: its promise, if any, is kept or broken."""
    if task.promised is device:
        task.promised = None
    else:
        unpromise(task)
        device.load += 1
    device.queued += 1
    digest = task.queue.service.digest
    device.in_use[digest] = device.in_use.get(digest, 0) + 1


def vacate(task: Task, device: Device) -> None:
    """The task has ended on a device, somehow: its slot is free."""
    device.queued -= 1
    device.load -= 1
    digest = task.queue.service.digest
    left = device.in_use[digest] - 1
    if left:
        device.in_use[digest] = left
    else:
        del device.in_use[digest]
    relist(device)
