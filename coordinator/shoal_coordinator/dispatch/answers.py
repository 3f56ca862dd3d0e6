"""What follows from the answers to Execute and Forward: results, deliveries, tries.

A try of an item is a task that failed for a reason of its own. The loss of a device is none, but
an item that was on too many devices when they died is taken for their killer and fails.
"""

from heapq import heappop, heappush

from shoal_coordinator.dispatch.assignment import demand, place, take_work, vacate
from shoal_coordinator.dispatch.events import Failure, FailureKind, TaskFinished
from shoal_coordinator.dispatch.jobs import admit, cancel, end_job, fail_item, pass_barrier, store
from shoal_coordinator.dispatch.loading import gone
from shoal_coordinator.dispatch.readiness import (
    drop_copies,
    is_ready,
    note_stray,
    release,
    release_at,
    release_inputs,
)
from shoal_coordinator.dispatch.recovery import record_failure
from shoal_coordinator.dispatch.residency import consider_device
from shoal_coordinator.dispatch.servers import learn, review
from shoal_coordinator.dispatch.services import count_all_homes
from shoal_coordinator.dispatch.state import (
    Device,
    Forwarding,
    Running,
    StageQueue,
    State,
    Status,
    Task,
)
from shoal_protocol.units import Nanoseconds

_WAITING_SHARE = 16
"""What waits for the tasks of a deep queue takes at most this part of a device's budget."""
_OVERTIME_TRIES = 3
"""So many tasks of a stage may run out of time while none has finished."""
_FREE_STRIKES = 2
"""Tasks may fail twice in a row on a device before its fragment there is suspected."""


def schedule_device(state: State, device: Device) -> None:
    """A device may have a free slot: fill it, or see whether it had better load something."""
    take_work(state, device)
    if not device.queued and (state.unmet or device.preempted_by is not None):
        consider_device(state, device)


def task_finished(state: State, running: Running, event: TaskFinished) -> None:
    """A task has run; what it made is kept, and delivered where a route said so."""
    device, task = running.device, running.task
    item, queue = task.item, task.queue
    if not item.ended:
        _learn(state, task, device, event.compute)
    vacate(task, device)
    device.tally.tasks += 1
    if device.avoid and device.avoid.pop(queue.service.digest, None) is not None:
        review(state, device)
        count_all_homes(state, device, queue.service.digest)
    if item.ended:
        _too_late(state, running)
    else:
        _finish(state, running, event.delivered)
    schedule_device(state, device)
    if item.storing:
        admit(state, queue.job)


def _finish(state: State, running: Running, delivered: tuple[int, ...]) -> None:
    task, device = running.task, running.device
    item, queue = task.item, task.queue
    task.status = Status.FINISHED
    task.device = None
    queue.running -= 1
    queue.finished += 1
    queue.passed += 1
    if task.inputs is not None:
        drop_copies(task, device)
    release_inputs(state, task)
    if queue.consumers:
        task.holder = device
        device.keeps[task] = None
        if running.routes:
            _note_delivered(state, running, delivered)
        for consumer in queue.consumers:
            following = item.tasks[consumer]
            if following.status is Status.WAITING and is_ready(following):
                place(state, following)
    if not task.reported and queue.stage in queue.job.results:
        task.reported = True
        item.results_left -= 1
        if not item.results_left:
            store(state, item)
    if not queue.job.streaming:
        pass_barrier(state, queue.job)


def _learn(state: State, task: Task, device: Device, compute: Nanoseconds) -> None:
    digest = task.queue.service.digest
    task.queue.times.add(compute)
    known = device.compute.get(digest)
    time = compute if known is None else known + (compute - known) // 4
    device.compute[digest] = time
    learn(task.queue.service, device)
    limits = state.limits
    slots = limits.queue_depth + _extra_slots(state, task.queue, device, time)
    if slots != device.slots:
        device.slots = slots
        state.slots_changed = True


def _extra_slots(state: State, queue: StageQueue, device: Device, time: int) -> int:
    """How many short tasks more fill the time until the next instructions come.

    In powers of two: every change has the windows of all jobs reckoned anew. Growing step by step:
    meanwhile it is learned of the devices behind how much they take.
    """
    limits = state.limits
    extra = min(limits.turnaround // max(time, 1), limits.queue_extra)
    if extra and queue.moved_bytes:
        extra = min(extra, device.budget // _WAITING_SHARE // queue.moved_bytes)
    return min(1 << extra.bit_length() >> 1, device.slots)


def _note_delivered(state: State, running: Running, delivered: tuple[int, ...]) -> None:
    task = running.task
    for consumer, target in running.routes:
        following = task.item.tasks[consumer]
        if consumer not in delivered or following.status >= Status.RUNNING:
            note_stray(state, task, target)
        elif not target.lost:
            if following.inputs is None:
                following.inputs = {}
            following.inputs[task.queue.stage] = target


def _too_late(state: State, running: Running) -> None:
    """Nobody waits for this task any more: have everything dropped that it made."""
    task, device = running.task, running.device
    if not task.queue.consumers:
        return
    release_at(state, device, task.item, task.queue.stage)
    for _, target in running.routes:
        note_stray(state, task, target)


def task_failed(state: State, running: Running, failure: Failure) -> None:
    """A task did not run to its end."""
    device, task = running.device, running.task
    vacate(task, device)
    item = task.item
    if not item.ended:
        _unrun(task)
        _again(state, running, failure)
    schedule_device(state, device)


def task_lost(state: State, task: Task, failure: Failure) -> None:
    """The device that a task was given to is gone."""
    _unrun(task)
    undo(state, task, failure)


def _unrun(task: Task) -> None:
    task.queue.running -= 1
    task.status = Status.WAITING
    task.device = None
    drop_copies(task, None)  # a copy may have come after the task was given up: let all go


def _again(state: State, running: Running, failure: Failure) -> None:
    device, task = running.device, running.task
    match failure.kind:
        case FailureKind.INVALID_INPUT:
            fail_item(state, task.item, failure)
        case FailureKind.CANCELLED if running.void:
            if running.blame is None:
                demand(state, task)
            else:
                _retry(state, task, device, running.blame)
        case FailureKind.NOT_RESIDENT:
            gone(state, device, task.queue.service.digest)
            undo(state, task, failure)
        case FailureKind.CANCELLED:
            undo(state, task, failure)
        case FailureKind.MISSING_ACTIVATION:
            task.missing += 1
            if task.missing > 1:
                _distrust_holders(state, task)
            _retry(state, task, device, failure)
        case _:
            record_failure(state, device, task.queue.service.digest, failure, free=_FREE_STRIKES)
            _retry(state, task, device, failure)


def undo(state: State, task: Task, failure: Failure) -> None:
    """A task was lost through no fault of its own; only too often is too often."""
    item, limits = task.item, state.limits
    item.kills += 1
    most = limits.kills + item.job.spec.backoff_limit
    if item.kills > most:
        message = f"killed {item.kills} devices, at last by: {failure.message}"
        fail_item(state, item, Failure(kind=failure.kind, message=message))
        return
    item.retries += 1
    item.job.retries += 1
    demand(state, task)


def _retry(state: State, task: Task, device: Device, failure: Failure) -> None:
    """Try again, elsewhere if there is an elsewhere: once at once, then later and later."""
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
    task.shunned = device
    if item.failures == 1:
        demand(state, task)
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


def _distrust_holders(state: State, task: Task) -> None:
    """What should be kept was missed twice: make it again."""
    for producer in task.queue.predecessors:
        release(state, task.item.tasks[producer])


def forwarded(state: State, forwarding: Forwarding) -> None:
    """A copy has reached the device that needs it; unless it came too late."""
    consumer, producer, target = forwarding.consumer, forwarding.producer, forwarding.target
    if target.lost or _still_waits(state, forwarding):
        return
    if producer.holder is None:
        release_at(state, target, consumer.item, producer.queue.stage)
    else:
        note_stray(state, producer, target)


def forward_failed(state: State, forwarding: Forwarding, failure: Failure) -> None:
    """An input will not come: the task that waits for it is given up, and tried again."""
    if failure.kind is FailureKind.MISSING_ACTIVATION:
        release(state, forwarding.producer)
    note_stray(state, forwarding.producer, forwarding.target)
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
        and consumer.status is Status.RUNNING
        and consumer.instruction == forwarding.waiter
        and forwarding.waiter in state.pending
    )


def retry_delayed(state: State) -> None:
    """The time has come for tasks that were to be tried again later."""
    while state.delayed and state.delayed[0][0] <= state.now:
        task = heappop(state.delayed)[2]
        if not task.item.ended and task.status is Status.WAITING:
            demand(state, task)
