"""Which task goes to which device: the choice, the reservation ahead, and the Execute.

Two questions, each answered without visiting all devices or all tasks:

- `place`: a task is ready; which device takes it? The one reserved for it, else the first by rank
  (`servers`), if that has a free slot; else the task waits in its queue.
- `fill`: a device has a free slot; which task does it take? Of the queues that it serves, the one
  of the highest priority, then of the job that it has served least (in tasks; one that ran out of
  time counts as all that would have fitted; see `DeviceWork.serve`), then the latest stage (items
  are finished before others are begun); in the queue, what is reserved for it first, then the
  oldest.

*Route ahead*: when a task is given, devices are reserved for its consumers, so that the activation
leaves as soon as it is made. The device that makes it is preferred, since nothing travels then. A
reservation is soft: an idle device takes what is reserved for one that is full.

*Given ahead*: where one device alone can serve a consumer, nothing is left to decide when its input
will have been made. It is given together with the task that makes the input, and waits on its
device; so a chain of stages is decided once for each item, and no stage waits for the answer of the
one before it. Only behind short tasks: what waits for long ones would come near its deadline. It
takes a slot, but never the last one, so that nothing that is ready waits for what is not. When its
producer fails or is lost, it is cancelled, and given again when it is ready.

*Items stay*: where devices load the fragments of a job in turn, an item stays on the one where it
entered (`turns`); its tasks wait for no other.

*The slow device at the end*: a device does not get a task that the fastest server would have
finished sooner, after all that is left before it. The task then waits for that server; but no
longer than the device takes for it, since the fastest may have other work to do first.
"""

import math
from collections.abc import Mapping
from functools import partial
from itertools import islice

from shoal_coordinator.dispatch import turns
from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.instructions import Execute, Forward, Tier
from shoal_coordinator.dispatch.larger_items import avoids
from shoal_coordinator.dispatch.readiness import drop_copies, has_copy, is_ready, out_of_reach
from shoal_coordinator.dispatch.servers import begin_task, best, best_but, rank, reserve, unreserve
from shoal_coordinator.dispatch.services import want
from shoal_coordinator.dispatch.state import (
    FINISHED,
    READY,
    RUNNING,
    WAITING,
    Forwarding,
    Job,
    Running,
    Service,
    StageQueue,
    State,
    Task,
)
from shoal_protocol.units import Nanoseconds

_LOOK_AHEAD = 8
"""How many waiting tasks an idle device examines for one reserved for another."""
_LOOK_AHEAD_BUSY = 2
"""The same of a device that has tasks. In a wide pool all that waits is mostly reserved for others,
and each one examined is memory that no cache has."""


def place_ready(state: State) -> None:
    """Give every task that has become ready to a device, and every one that must run again."""
    work = state.worklist
    for task in work.ready:
        if task.status is WAITING and not task.item.ended and is_ready(task):
            place(state, task)
    work.ready.clear()
    for task in work.rerun:
        if task.status is WAITING and not task.item.ended:
            demand(state, task)
    work.rerun.clear()


def demand(state: State, task: Task) -> None:
    """A task is to run, now or when its inputs are there; lost inputs are made again."""
    if task.status is FINISHED:
        task.queue.passed -= 1
    task.status = WAITING
    tasks = task.item.tasks
    for producer in task.queue.predecessors:
        made = tasks[producer]
        if made.status is FINISHED and out_of_reach(task, producer):
            demand(state, made)
    if is_ready(task):
        place(state, task)


def place(state: State, task: Task) -> None:
    """Give a ready task to a device, or let it wait in its queue."""
    queue = task.queue
    service = queue.service
    task.status = READY
    task.ready_at = state.now
    queue.waiting += 1
    device = _choose(task, service) if task.item.stays_on is None else _choose_again(state, task)
    if device is not None:
        _give_or_demand(state, task, device)
        return
    if task.attempts and not task.kept:
        queue.ready.appendleft(task)
    elif not task.kept:
        queue.ready.append(task)
    if task.reserved_on is not None:
        queue.reserved.setdefault(task.reserved_on, []).append(task)
    if service not in state.unmet:
        state.unmet[service] = None
    if service.unserved:
        state.worklist.services.append(service)


def _choose_again(state: State, task: Task) -> Device | None:
    """The device where the item stays, if that has a slot; else as for any other task."""
    service = task.queue.service
    keeper = turns.keeper(state, task)
    if keeper is None:
        turns.move_on(task)
        return _choose(task, service)
    turns.wait_for(task, keeper)
    return keeper if service in keeper.listed and keeper.work.has_slot else None


def _choose(task: Task, service: Service) -> Device | None:
    """A device with a free slot for a task that has just become ready."""
    if task.reserved_on is not None:
        if service in task.reserved_on.listed:
            return _keep_or_break_reservation(task, task.reserved_on)
        if task.reserved_on not in service.loading:
            unreserve(task)
    first = None if task.excluded is None else best_but(service, partial(avoids, task))
    first = first or best(service)
    if first is not None and not turns.may_enter(task, first):
        first = best_but(service, lambda device: not turns.may_enter(task, device))
    if first is None or not first.work.has_slot:
        return None
    faster = _sooner_elsewhere(task, first)
    if faster is None:
        return first
    return faster if faster.work.has_slot else None


def _keep_or_break_reservation(task: Task, reserved: Device) -> Device | None:
    """The reserved device, if it has a slot; a faster one; or one that is idle."""
    faster = _sooner_elsewhere(task, reserved)
    if faster is None and reserved.work.has_slot:
        return reserved
    if faster is not None and faster.work.has_slot:
        return faster
    first = best(task.queue.service)
    return first if first is not None and first.work.queued == 0 else None


def _sooner_elsewhere(task: Task, device: Device) -> Device | None:
    """The fastest server, if it would end all that is left before this device ends the task."""
    queue = task.queue
    service = queue.service
    fastest = service.fastest
    if fastest is None or fastest is device:
        return None
    if task.excluded is not None and avoids(task, fastest):
        return None
    mine = device.work.times.get(service.digest)
    its = fastest.work.times.get(service.digest)
    if mine is None or its is None or its >= mine or service not in fastest.listed:
        return None
    until_fastest_is_done = (queue.coming + fastest.work.load) * its
    return fastest if until_fastest_is_done < mine * (device.work.queued + 1) else None


def _held_back(task: Task, device: Device, now: Nanoseconds) -> bool:
    """Whether a waiting task is left to the fastest server, in place of this device."""
    if _sooner_elsewhere(task, device) is None:
        return False
    its = device.work.times[task.queue.service.digest]
    return now - task.ready_at <= its * (device.work.queued + 1)


def fill(state: State, device: Device) -> None:
    work = device.work
    while work.queued < work.slots:
        chosen: Task | None = None
        for service in device.listed:
            for queue in service.queues:
                if not queue.waiting:
                    continue
                if chosen is None or _before(queue, chosen.queue, work.served):
                    task = _offer(queue, device, state.now)
                    if task is not None:
                        chosen = task
        if chosen is None:
            return
        work.reach(chosen.queue.job)
        _give_or_demand(state, chosen, device)


def _before(queue: StageQueue, other: StageQueue, served: Mapping[Job, int]) -> bool:
    """Whether a device serves one queue before another; of equal ones the first listed stays."""
    job, rival = queue.job, other.job
    if job is rival:
        return queue.stage > other.stage
    if job.spec.priority != rival.spec.priority:
        return job.spec.priority > rival.spec.priority
    return served.get(job, 0) < served.get(rival, 0)


def _offer(queue: StageQueue, device: Device, now: Nanoseconds) -> Task | None:
    """The task that a queue has for a device with a free slot, left in its place."""
    ready = queue.ready
    while ready and ready[0].status is not READY:
        ready.popleft()
    task = _reserved_for(queue, device)
    if task is not None and (task.kept or not _held_back(task, device, now)):
        return task
    service = queue.service
    takes_over = not device.work.queued or service.fastest is device
    for task in islice(ready, _LOOK_AHEAD if takes_over else _LOOK_AHEAD_BUSY):
        other = task.reserved_on
        elsewhere = other is not None and other is not device and service in other.listed
        if elsewhere and not takes_over:
            continue
        if task.status is READY and turns.may_enter(task, device) and _may_take(task, device, now):
            return task
    return None


def _reserved_for(queue: StageQueue, device: Device) -> Task | None:
    """The first task that waits for this device and no other."""
    waiting = queue.reserved.get(device)
    if waiting is None:
        return None
    for stale, task in enumerate(waiting):
        if task.status is READY and task.reserved_on is device:
            del waiting[:stale]
            return task
    del queue.reserved[device]
    return None


def _may_take(task: Task, device: Device, now: Nanoseconds) -> bool:
    """Whether a waiting task may go to this device, given its reservation and who is faster."""
    other, service = task.reserved_on, task.queue.service
    is_avoided = task.excluded is not None and avoids(task, device)
    if is_avoided and not all(avoids(task, each) for each in service.servers):
        return False
    if other is not None and other is not device and service in other.listed:
        other_is_full = device.work.queued == 0 and not other.work.has_slot
        if not other_is_full and (
            service.fastest is not device or _sooner_elsewhere(task, other) is None
        ):
            return False
    return service.fastest is device or not _held_back(task, device, now)


def _give_or_demand(state: State, task: Task, device: Device) -> None:
    """Give the task, unless an input of it was lost: then see to that first."""
    queue = task.queue
    tasks = task.item.tasks
    turns.end_wait(task)
    senders: list[tuple[Task, Device]] = []
    for producer in queue.predecessors:
        made = tasks[producer]
        holder = made.holder
        if holder is device or has_copy(task, producer, device):
            continue
        if holder is None:
            unreserve(task)
            drop_copies(task, None)
            demand(state, task)
            return
        senders.append((made, holder))
    _give(state, task, device, senders)


def _give(state: State, task: Task, device: Device, senders: list[tuple[Task, Device]]) -> None:
    queue, item = task.queue, task.item
    job, digest = queue.job, queue.service.digest
    _, backlog, load, score, order, _ = rank(queue.service, device)
    begin_task(task, device)
    if job.in_turn:
        turns.enter(task, device)
    work = device.work
    state.counter = number = state.counter + 1
    work.last_given = number
    work.used_at[digest] = state.now
    loaded_as = device.memory.loaded_as
    tier = loaded_as.pop(digest, Tier.RESIDENT) if loaded_as else Tier.RESIDENT
    device.tally.tiers[tier - 1] += 1
    job.tiers[tier - 1] += 1
    work.serve(job)
    queue.running += 1
    task.status = RUNNING
    task.instruction = number
    task.device = device
    task.attempts += 1
    if item.started_at is None:
        item.started_at = state.now
        if job.started_at is None:
            job.started_at = state.now
    running = state.pending[number] = Running(device, task, state.now)
    job.devices[device.name] = None
    if queue.consumers:
        running.routes = _reserve_for_consumers(state, task, device)
        for _, other in running.routes:
            job.devices[other.name] = None
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
            ahead=task.ahead,
            waited=Nanoseconds(0 if task.ahead else state.now - task.ready_at),
            routes=tuple([(stage, other.name) for stage, other in running.routes]),
            why=(int(tier), backlog, load, score, order, device.name),
        )
    )
    for made, holder in senders:
        forward(state, made, holder, task, device)
    if queue.consumers:
        _give_ahead(state, task, device)


def _give_ahead(state: State, task: Task, device: Device) -> None:
    """Give the consumers of a task that was given just now, where they may go ahead of it."""
    tasks = task.item.tasks
    for consumer in task.queue.consumers:
        following = tasks[consumer]
        if len(following.queue.service.servers) != 1:  # mostly, in a pool with replicas
            continue
        target = following.reserved_on
        if target is not None and _may_go_ahead(state, task, device, following, target):
            following.ahead = True
            _give(state, following, target, [])


def _may_go_ahead(
    state: State, task: Task, device: Device, following: Task, target: Device
) -> bool:
    """Whether nothing is left to decide when the task will have ended, where one device alone can
    serve the consumer: see above."""
    queue, work = following.queue, target.work
    service = queue.service
    if following.status is not WAITING or following.attempts or len(queue.predecessors) != 1:
        return False
    if service.loading or service not in target.listed:
        return False
    if work.queued + 2 > work.slots or target.memory.single:
        return False
    if queue.stage > queue.job.open_stages or service.digest not in work.times:
        return False
    return device.work.times.get(task.queue.service.digest, math.inf) <= state.limits.ahead


def forward(state: State, made: Task, holder: Device, task: Task, device: Device) -> None:
    number = state.next_number()
    state.pending[number] = Forwarding(holder, device, made, task, task.instruction, state.now)
    if task.inputs is None:
        task.inputs = {}
    elif (orphan := task.inputs.get(made.queue.stage)) is not None and not orphan.lost:
        task.item.orphan_copies.append((orphan, made.queue.stage))
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


def _reserve_for_consumers(
    state: State, task: Task, device: Device
) -> tuple[tuple[int, Device], ...]:
    """Name a device for each consumer; the routes are those to other devices."""
    queue = task.queue
    tasks, queues = task.item.tasks, queue.job.queues
    named: list[tuple[int, Device]] = []
    for consumer in queue.consumers:
        service = queues[consumer].service
        want(state, queues[consumer])
        following = tasks[consumer]
        if following.status is not WAITING:
            continue
        target = following.reserved_on
        if target is None or target.lost or service not in target.listed:
            unreserve(following)
            target = turns.keeper(state, following)
            if target is None:
                target = _foresee(service, device, state.limits.queue_depth)
            if target is not None:
                reserve(following, target)
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
    if service in producer.listed and producer.work.load <= first.work.load + producer.work.slots:
        return producer
    # Where short tasks fill deep queues and one device has the fragment, the activation goes there
    # in any case: a Forward later would only be one more instruction.
    slack = 2 * (first.work.slots - depth) if len(service.servers) == 1 else 0
    return first if first.work.load <= first.work.slots + slack else None


def _next_to_come(service: Service) -> Device | None:
    """Of the devices where the fragment is on its way, the one with the least load, among a few in
    rotation: there may be hundreds.
    """
    few = list(islice(service.loading, _LOOK_AHEAD))
    for device in few:  # to the end, so that the next call sees others
        del service.loading[device]
        service.loading[device] = None
    able = [device for device in few if device.preempted_by is None]
    return min(able, key=_load_and_order, default=None)


def _load_and_order(device: Device) -> tuple[int, int]:
    return device.work.load, device.order
