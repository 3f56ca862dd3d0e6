"""What the answers to Execute and Forward change: results, deliveries, tries, losses.

A try of an item is a task that failed for a reason of its own. The loss of a device is none, but
an item that was on too many devices when they were lost counts as their killer and fails.
"""

from dataclasses import replace
from heapq import heappop, heappush

from shoal_coordinator.dispatch import itineraries
from shoal_coordinator.dispatch.assignment import forward
from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.events import Failure, FailureKind, ItemsTravelled, TaskFinished
from shoal_coordinator.dispatch.fragments import drop_fragment
from shoal_coordinator.dispatch.full_devices import never_fits, wait_for_room
from shoal_coordinator.dispatch.jobs import cancel, fail_item, give_up_endless, store
from shoal_coordinator.dispatch.larger_items import (
    can_differ,
    is_of_the_item,
    may_change,
    note_refusal,
    outgrows_again,
)
from shoal_coordinator.dispatch.readiness import (
    drop_copies,
    note_missing,
    note_orphan,
    release,
    release_at,
    release_inputs,
)
from shoal_coordinator.dispatch.servers import end_task, note_time, review
from shoal_coordinator.dispatch.services import count_all_homes, of_fragment, record_failure
from shoal_coordinator.dispatch.state import (
    FINISHED,
    RUNNING,
    WAITING,
    Forwarding,
    Route,
    Running,
    StageQueue,
    State,
    Task,
    Travelling,
)
from shoal_coordinator.dispatch.timings import TaskTiming
from shoal_protocol.partition import items_within
from shoal_protocol.seen_sizes import larger
from shoal_protocol.units import Nanoseconds

_WAITING_SHARE = 16
"""What waits for the tasks of a deep queue takes at most this part of a device's budget."""
_NOT_BEGUN = (FailureKind.CANCELLED, FailureKind.DEADLINE, FailureKind.MISSING_ACTIVATION)
"""How a task fails whose inputs do not come: no try of the item, while their task has not ended."""
_FREE_FAILURES = 2
"""Tasks may fail twice in a row on a device before its fragment there is suspected."""


def finished(state: State, running: Running, event: TaskFinished) -> None:
    """A task has run; its output is held, and delivered where a route named a device."""
    device, task = running.device, running.task
    if not task.item.ended:
        _note_time(state, task.queue, device, event.compute)
    end_task(task, device)
    _note_success(state, task.queue, device)
    device.memory.grow(task.queue.service.digest, event.resident)
    if task.item.ended:
        _discard_output(state, running)
    else:
        _finish(state, running, event)


def travelled(state: State, event: ItemsTravelled) -> None:
    """Items have come through all their stages. A number that does not travel is void."""
    arrived: dict[Route, list[Travelling]] = {}
    for number in event.instructions:
        travelling = state.pending.get(number)
        if isinstance(travelling, Travelling):
            del state.pending[number]
            arrived.setdefault(travelling.route, []).append(travelling)
    for route, together in arrived.items():
        _arrive(state, route, together, event.compute)


def _arrive(
    state: State, route: Route, together: list[Travelling], compute: tuple[Nanoseconds, ...]
) -> None:
    """Items of one route have come through it: as a task that finishes, for all stages at once."""
    job, now, count = route.job, state.now, len(together)
    for queue, device, took in zip(job.queues, route.devices, compute, strict=True):
        device.health.seen_at = now
        _note_time(state, queue, device, took, count)
        _note_success(state, queue, device, count)
        queue.running -= count
        queue.finished += count
        queue.passed += count
    names = [device.name for device in route.devices]
    for travelling in together:
        item, since = travelling.item, travelling.since
        for task, name, took in zip(item.tasks, names, compute, strict=True):
            task.status = FINISHED
            task.reported = True
            task.ran = TaskTiming(task.queue.stage, name, since, now, took)
        item.travels_as = item.results_left = 0
        store(state, item)
    itineraries.leave(state, route, together)
    job.route_failures = 0
    state.worklist.stored.append(job)


def travel_failed(state: State, travelling: Travelling, failure: Failure) -> None:
    """An item has not come through: it runs task by task, unless that would be of no use."""
    itineraries.leave(state, travelling.route, (travelling,))
    itineraries.run_again(state, travelling)
    if failure.kind is not FailureKind.INVALID_INPUT:
        itineraries.close(state, travelling.route)
    elif not travelling.item.ended:
        fail_item(state, travelling.item, failure)


def _note_success(state: State, queue: StageQueue, device: Device, tasks: int = 1) -> None:
    digest = queue.service.digest
    queue.overtime = 0
    device.tally.tasks += tasks
    if state.crashes:
        state.crashes.pop(digest, None)
    if digest in device.health.backoffs:
        del device.health.backoffs[digest]
        review(state, device)
        count_all_homes(state, device, digest)


def _finish(state: State, running: Running, event: TaskFinished) -> None:
    task, device = running.task, running.device
    queue = task.queue
    _pass(state, task)
    task.item.refused_alone = False
    task.ran = TaskTiming(queue.stage, device.name, running.since, state.now, event.compute)
    if task.inputs is not None:
        drop_copies(task, device)
    release_inputs(state, task)
    if queue.consumers:
        task.holder = device
        device.work.outputs[task] = None
        if running.routes:
            _note_delivered(state, running, event.delivered)
        state.worklist.ready += _end_lead(state, task)


def _pass(state: State, task: Task) -> None:
    task.status = FINISHED
    task.device = None
    task.queue.running -= 1
    task.queue.finished += 1
    task.queue.passed += 1
    state.worklist.passed.append(task)


def _end_lead(state: State, task: Task) -> list[Task]:
    """Its consumers are not ahead of it any more; those that have not finished before it."""
    tasks = task.item.tasks
    unfinished: list[Task] = []
    for consumer in task.queue.consumers:
        following = tasks[consumer]
        following.ahead = False
        if following.status is not FINISHED:
            unfinished.append(following)
    if not unfinished:
        release(state, task)
    return unfinished


def _note_time(
    state: State, queue: StageQueue, device: Device, compute: Nanoseconds, tasks: int = 1
) -> None:
    """So many tasks took so long each."""
    queue.times.add(compute, tasks)
    times, digest = device.work.times, queue.service.digest
    known = times.get(digest)
    time = times[digest] = compute if known is None else known + (compute - known) // 4
    queue.time_on[device.name] = time
    note_time(queue.service, device)
    slots = state.limits.queue_depth + _extra_slots(state, queue, device, time)
    if device.work.slots != slots:
        device.work.slots = slots
        state.slots_changed = True


def _extra_slots(state: State, queue: StageQueue, device: Device, time: int) -> int:
    """How many short tasks more fill the time until the next instructions come, or the batch after
    the one that runs.

    In powers of two: every change recomputes the windows of all jobs. Growing step by step, so
    that the devices behind have time to show how much they take.
    """
    limits = state.limits
    batch = _batch(queue, device) if queue.spec.batch > 1 else 1
    extra = 2 * batch if batch > 1 else 0
    if time <= limits.turnaround:
        extra = max(extra, min(limits.turnaround // max(time, 1), limits.queue_extra))
    if not extra:
        return 0
    if queue.moved_bytes:
        extra = min(extra, device.memory.budget // _WAITING_SHARE // queue.moved_bytes)
    return min(1 << extra.bit_length() >> 1, device.work.slots)


def _batch(queue: StageQueue, device: Device) -> int:
    """How many items a device may run at once, by what its fragments leave."""
    return items_within(device.memory.room, queue.spec.batch_item_bytes, queue.spec.batch)


def _note_delivered(state: State, running: Running, delivered: tuple[int, ...]) -> None:
    task = running.task
    for consumer, target in running.routes:
        following = task.item.tasks[consumer]
        came = consumer in delivered and consumer not in running.spent
        if following.ahead and following.status is FINISHED:
            continue
        if not came or (following.status >= RUNNING and not following.ahead):
            note_orphan(state, task, target)
            if following.ahead:
                forward(state, task, running.device, following, target)
        elif not target.lost:
            if following.inputs is None:
                following.inputs = {}
            following.inputs[task.queue.stage] = target


def _discard_output(state: State, running: Running) -> None:
    """The item has ended meanwhile: have everything dropped that the task made."""
    task, device = running.task, running.device
    if not task.queue.consumers:
        return
    release_at(state, device, task.item, task.queue.stage)
    for _, target in running.routes:
        note_orphan(state, task, target)


# ---- failures and losses -------------------------------------------------------------------------


def failed(state: State, running: Running, failure: Failure) -> None:
    device, task = running.device, running.task
    end_task(task, device)
    task.item.job.seen = larger(task.item.job.seen, failure.seen)
    if task.item.ended or _is_needless(state, task):
        return
    was_ahead = task.ahead
    _stop(state, task)
    if was_ahead and failure.kind in _NOT_BEGUN:
        state.worklist.rerun.append(task)
        return
    if failure.kind is FailureKind.DEADLINE:
        taken = _tasks_in(device, Nanoseconds(state.now - running.since))
        device.work.overrun(task.item.job, taken)
    _handle_failure(state, running, failure)


def lost(state: State, task: Task, failure: Failure) -> None:
    if task.item.ended or _is_needless(state, task):
        return
    was_ahead = task.ahead
    _stop(state, task)
    if was_ahead:  # it waited for its input: the item has nothing to do with the loss
        state.worklist.rerun.append(task)
    else:
        _rerun_lost(state, task, failure)


def _is_needless(state: State, task: Task) -> bool:
    """Whether all that a task was for is there already: consumers that were given ahead of its
    answer have finished. Then it has passed, whatever became of it."""
    item, queue = task.item, task.queue
    consumed = bool(queue.consumers) and all(
        item.tasks[consumer].status is FINISHED for consumer in queue.consumers
    )
    if not item.storing and (not consumed or queue.stage in queue.job.results):
        return False
    drop_copies(task, None)
    _pass(state, task)
    release_inputs(state, task)
    _end_lead(state, task)
    return True


def _stop(state: State, task: Task) -> None:
    task.queue.running -= 1
    task.status = WAITING
    task.device = None
    _forget_lead(state, task)
    drop_copies(task, None)  # a copy may have come after the task was given up: release all
    for consumer in task.queue.consumers:
        following = task.item.tasks[consumer]
        waiter = state.pending.get(following.instruction)
        if following.ahead and following.status is RUNNING and isinstance(waiter, Running):
            following.ahead = False
            if not waiter.void:
                waiter.void = True
                cancel(state, following)


def _forget_lead(state: State, task: Task) -> None:
    if task.ahead:
        task.ahead = False
        (producer,) = task.queue.predecessors
        running = state.pending.get(task.item.tasks[producer].instruction)
        if isinstance(running, Running):
            running.spent += (task.queue.stage,)


def _handle_failure(state: State, running: Running, failure: Failure) -> None:
    device, task = running.device, running.task
    match failure.kind:
        case FailureKind.INVALID_INPUT:
            fail_item(state, task.item, failure)
        case FailureKind.CANCELLED if running.void:
            if running.blame is None:
                state.worklist.rerun.append(task)
            else:
                _retry(state, task, device, running.blame)
        case FailureKind.NOT_RESIDENT:
            drop_fragment(state, device, task.queue.service.digest)
            _rerun_lost(state, task, failure)
        case FailureKind.CANCELLED:
            _rerun_lost(state, task, failure)
        case FailureKind.MISSING_ACTIVATION:
            note_missing(state, task)
            _retry(state, task, device, failure)
        case FailureKind.BUDGET:
            _handle_excess(state, device, task, failure)
        case FailureKind.DISK_FULL:
            _retry(state, task, device, failure)
        case _:
            record_failure(state, device, task.queue.service.digest, failure, free=_FREE_FAILURES)
            _retry(state, task, device, failure)


def _tasks_in(device: Device, time: Nanoseconds) -> int:
    """How many tasks, as they are measured on a device, it could have run in a time."""
    times = device.work.times.values()
    return len(times) * time // max(1, sum(times))


def _handle_excess(state: State, device: Device, task: Task, failure: Failure) -> None:
    """It took more than its grant: it is loaded with less, or more of the budget, if that says
    something new of what the fragment takes."""
    digest = task.queue.service.digest
    if failure.need is None:
        note_refusal(task, device, failure)
    if is_of_the_item(state, device, task, failure):
        _retry(state, task, device, failure)  # the others need not wait
    elif device.memory.learn(digest, failure.need or 0):
        count_all_homes(state, device, digest)
        _rerun(state, task)
    else:
        record_failure(state, device, digest, failure, free=_FREE_FAILURES)
        _retry(state, task, device, failure)


def _rerun_lost(state: State, task: Task, failure: Failure) -> None:
    """The loss is no try of the item; but an item that was lost too often fails."""
    item, limits = task.item, state.limits
    item.kills += 1
    most = limits.kills + item.job.spec.backoff_limit
    if item.kills > most:
        message = f"its device was lost {item.kills} times while it ran, at last: {failure.message}"
        fail_item(state, item, replace(failure, message=message))
        return
    _rerun(state, task)


def _rerun(state: State, task: Task) -> None:
    task.item.retries += 1
    task.item.job.retries += 1
    state.worklist.rerun.append(task)


def _retry(state: State, task: Task, device: Device, failure: Failure) -> None:
    """Try again, on another device if there is one: once at once, then with a growing backoff."""
    if wait_for_room(state, task, device, failure):
        return
    item = task.item
    item.failures += 1
    waits = not can_differ(state, task)
    in_vain = outgrows_again(state, task, failure) or never_fits(task, failure)
    in_vain |= waits and not may_change(state, task)
    if in_vain or item.failures > item.job.spec.backoff_limit:
        fail_item(state, item, of_fragment(task.queue, failure))
    if failure.kind is FailureKind.DEADLINE:
        give_up_endless(state, task, failure)
    if item.ended:
        return
    item.retries += 1
    item.job.retries += 1
    task.excluded = device
    if item.failures == 1 and not waits:
        state.worklist.rerun.append(task)
        return
    again_at = Nanoseconds(state.now + state.limits.delay(max(0, item.failures - 2)))
    heappush(state.delayed, (again_at, state.next_number(), task))


def forwarded(state: State, forwarding: Forwarding) -> None:
    """A copy has reached the device that needs it, or it came too late and is dropped."""
    consumer, producer, target = forwarding.consumer, forwarding.producer, forwarding.target
    if target.lost or _still_waits(state, forwarding):
        return
    if producer.holder is None:
        release_at(state, target, consumer.item, producer.queue.stage)
    else:
        note_orphan(state, producer, target)


def forward_failed(state: State, forwarding: Forwarding, failure: Failure) -> None:
    """An input will not come: the task that waits for it is cancelled, and tried again."""
    if failure.kind is FailureKind.MISSING_ACTIVATION:
        release(state, forwarding.producer)
    note_orphan(state, forwarding.producer, forwarding.target)
    if not _still_waits(state, forwarding):
        return
    waiter = state.pending[forwarding.waiter]
    assert isinstance(waiter, Running)
    if not waiter.void:
        waiter.void = True
        waiter.blame = failure
        cancel(state, waiter.task)


def _still_waits(state: State, forwarding: Forwarding) -> bool:
    consumer = forwarding.consumer
    return (
        not consumer.item.ended
        and consumer.status is RUNNING
        and consumer.instruction == forwarding.waiter
        and forwarding.waiter in state.pending
    )


def retry_delayed(state: State) -> None:
    while state.delayed and state.delayed[0][0] <= state.now:
        task = heappop(state.delayed)[2]
        refusals = task.refusals
        if refusals is None or task.item.ended or can_differ(state, task):
            state.worklist.rerun.append(task)
        else:
            fail_item(state, task.item, of_fragment(task.queue, refusals.failure))
