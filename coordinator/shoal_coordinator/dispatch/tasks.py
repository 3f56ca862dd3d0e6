"""What the answers to Execute and Forward change: results, deliveries, tries, losses.

A try of an item is a task that failed for a reason of its own. The loss of a device is none, but
an item that was on too many devices when they were lost counts as their killer and fails.
"""

from dataclasses import replace
from heapq import heappop, heappush

from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.events import Failure, FailureKind, TaskFinished
from shoal_coordinator.dispatch.fragments import drop_fragment
from shoal_coordinator.dispatch.jobs import cancel, end_job, fail_item
from shoal_coordinator.dispatch.readiness import (
    drop_copies,
    note_orphan,
    release,
    release_at,
    release_inputs,
)
from shoal_coordinator.dispatch.servers import note_time, review, vacate
from shoal_coordinator.dispatch.services import count_all_homes, record_failure
from shoal_coordinator.dispatch.state import (
    FINISHED,
    RUNNING,
    WAITING,
    Forwarding,
    Running,
    StageQueue,
    State,
    Task,
)
from shoal_protocol.units import Nanoseconds

_WAITING_SHARE = 16
"""What waits for the tasks of a deep queue takes at most this part of a device's budget."""
_OVERTIME_TRIES = 3
"""So many tasks of a stage may run out of time while none has finished."""
_FREE_FAILURES = 2
"""Tasks may fail twice in a row on a device before its fragment there is suspected."""


def finished(state: State, running: Running, event: TaskFinished) -> None:
    """A task has run; its output is held, and delivered where a route named a device."""
    device, task = running.device, running.task
    digest = task.queue.service.digest
    if not task.item.ended:
        _note_time(state, task, device, event.compute)
    vacate(task, device)
    device.tally.tasks += 1
    if state.crashes:
        state.crashes.pop(digest, None)
    if digest in device.health.backoffs:
        del device.health.backoffs[digest]
        review(state, device)
        count_all_homes(state, device, digest)
    if task.item.ended:
        _discard_output(state, running)
    else:
        _finish(state, running, event.delivered)


def _finish(state: State, running: Running, delivered: tuple[int, ...]) -> None:
    task, device = running.task, running.device
    item, queue = task.item, task.queue
    task.status = FINISHED
    task.device = None
    queue.running -= 1
    queue.finished += 1
    queue.passed += 1
    if task.inputs is not None:
        drop_copies(task, device)
    release_inputs(state, task)
    if queue.consumers:
        task.holder = device
        device.work.outputs[task] = None
        if running.routes:
            _note_delivered(state, running, delivered)
        for consumer in queue.consumers:
            state.worklist.ready.append(item.tasks[consumer])
    state.worklist.passed.append(task)


def _note_time(state: State, task: Task, device: Device, compute: Nanoseconds) -> None:
    task.queue.times.add(compute)
    times, digest = device.work.times, task.queue.service.digest
    known = times.get(digest)
    time = times[digest] = compute if known is None else known + (compute - known) // 4
    task.queue.time_on[device.name] = time
    note_time(task.queue.service, device)
    slots = state.limits.queue_depth + _extra_slots(state, task.queue, device, time)
    if device.work.slots != slots:
        device.work.slots = slots
        state.slots_changed = True


def _extra_slots(state: State, queue: StageQueue, device: Device, time: int) -> int:
    """How many short tasks more fill the time until the next instructions come.

    In powers of two: every change recomputes the windows of all jobs. Growing step by step, so
    that the devices behind have time to show how much they take.
    """
    limits = state.limits
    if time > limits.turnaround:
        return 0
    extra = min(limits.turnaround // max(time, 1), limits.queue_extra)
    if queue.moved_bytes:
        extra = min(extra, device.memory.budget // _WAITING_SHARE // queue.moved_bytes)
    return min(1 << extra.bit_length() >> 1, device.work.slots)


def _note_delivered(state: State, running: Running, delivered: tuple[int, ...]) -> None:
    task = running.task
    for consumer, target in running.routes:
        following = task.item.tasks[consumer]
        if consumer not in delivered or following.status >= RUNNING:
            note_orphan(state, task, target)
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
    vacate(task, device)
    if not task.item.ended:
        _stop(task)
        _handle_failure(state, running, failure)


def lost(state: State, task: Task, failure: Failure) -> None:
    if not task.item.ended:
        _stop(task)
        _rerun_lost(state, task, failure)


def _stop(task: Task) -> None:
    task.queue.running -= 1
    task.status = WAITING
    task.device = None
    drop_copies(task, None)  # a copy may have come after the task was given up: release all


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
            task.missing += 1
            if task.missing > 1:  # where it should be held: make all inputs again
                for producer in task.queue.predecessors:
                    release(state, task.item.tasks[producer])
            _retry(state, task, device, failure)
        case FailureKind.BUDGET if failure.need is not None and device.memory.learn(
            task.queue.service.digest, failure.need
        ):
            # Measured for the first time, it took more than its grant: it is loaded with less.
            count_all_homes(state, device, task.queue.service.digest)
            _rerun_lost(state, task, failure)
        case _:
            record_failure(state, device, task.queue.service.digest, failure, free=_FREE_FAILURES)
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
    item.retries += 1
    item.job.retries += 1
    state.worklist.rerun.append(task)


def _retry(state: State, task: Task, device: Device, failure: Failure) -> None:
    """Try again, on another device if there is one: once at once, then with a growing backoff."""
    item = task.item
    item.failures += 1
    if item.failures > item.job.spec.backoff_limit:
        fail_item(state, item, failure)
    if failure.kind is FailureKind.DEADLINE:
        _give_up_endless(state, task.queue, failure)
    if item.ended:
        return
    item.retries += 1
    item.job.retries += 1
    task.excluded = device
    if item.failures == 1:
        state.worklist.rerun.append(task)
        return
    limits = state.limits
    delay = min(limits.retry_delay << (item.failures - 2), limits.retry_delay_most)
    heappush(state.delayed, (Nanoseconds(state.now + delay), state.next_number(), task))


def _give_up_endless(state: State, queue: StageQueue, failure: Failure) -> None:
    """End a job of which a stage has run out of time again and again and finished no task: each
    more would take a device from other jobs for as long as a task may take."""
    job = queue.job
    queue.overtime += 1
    if job.ended_at is None and not queue.finished and queue.overtime >= _OVERTIME_TRIES:
        message = f"{queue.overtime} tasks ran out of time, and none finished: {failure.message}"
        end_job(state, job, Failure(kind=FailureKind.RUNTIME, message=message))


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
        state.worklist.rerun.append(heappop(state.delayed)[2])
