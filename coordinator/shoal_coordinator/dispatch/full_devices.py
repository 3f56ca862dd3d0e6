"""Devices that have no room for more activations: their items slow down instead of failing.

A device keeps activations within its budget and a share of its disk. Where it takes no inputs, or
cannot keep what a task made, while other items have something there, nobody is to blame, and it is
no try of the item. Fewer items of its job are under way from then on (`crowding`), and there is one
order of all items: priority, age of the job, number.

- An item that stands before all others that have something on the device keeps what it has, and
  asks again after a moment, on another device if there is one.
- Any other one is *set back*: it gives up what it has, on all devices, and goes on after a growing
  delay, when its job's window has room for it, before others of its job begin. Lost inputs are
  made again (`assignment.demand`).

So who waits with something in hands waits for items that stand behind it, and no two wait for one
another; and what is set back frees devices for the stages that others need next. An item that is
refused where nothing is beside it asks once more: something may have left meanwhile. The second
time in a row is a try.

A fragment that finds no room beside the activations of several items has the last of them set back.

Barrier mode holds what all items made; there, every refusal is a try.
"""

from collections.abc import Iterator
from heapq import heappush

from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.events import Failure, FailureKind, Mode
from shoal_coordinator.dispatch.readiness import drop_copies, release
from shoal_coordinator.dispatch.servers import unreserve
from shoal_coordinator.dispatch.state import READY, RUNNING, WAITING, Item, Job, State, Task
from shoal_coordinator.dispatch.turns import end_wait, leave
from shoal_protocol.units import Nanoseconds


def wait_for_room(state: State, task: Task, device: Device, failure: Failure) -> bool:
    """Have a task that was refused wait, if room is what it lacked and others may leave some."""
    item = task.item
    if failure.kind is not FailureKind.DISK_FULL or item.job.spec.mode is Mode.BARRIER:
        return False
    beside = [each for each in _on(state, device) if each is not item]
    if not beside and item.refused_alone:
        return False
    item.refused_alone = not beside
    task.excluded = device
    item.retries += 1
    item.job.retries += 1
    if beside:
        _narrow(state, item.job)
    if all(_place(item) < _place(other) for other in beside):
        again_at = Nanoseconds(state.now + state.limits.retry_delay)
        heappush(state.delayed, (again_at, state.next_number(), task))
    else:
        _set_back(state, task)
    return True


def never_fits(task: Task, failure: Failure) -> bool:
    """Whether there is nowhere else to try a task that takes more than the share of a disk, with
    nothing beside it; a disk that others have filled may have room again."""
    refused = failure.kind is FailureKind.DISK_FULL and failure.need is not None
    return refused and task.item.refused_alone and len(task.queue.service.servers) < 2


def make_way(state: State, device: Device) -> bool:
    """A fragment has found no room beside what items have on a device: the last of several that
    runs nowhere is set back. Whether there was one."""
    streaming = (each for each in _on(state, device) if each.job.spec.mode is not Mode.BARRIER)
    items = sorted(streaming, key=_place)
    for item in reversed(items[1:]):
        waiting = [task for task in item.tasks if task.status is READY]
        holds = any(task.holder is device for task in item.tasks)
        if not holds or not waiting or any(task.status is RUNNING for task in item.tasks):
            continue
        _narrow(state, item.job)
        for task in waiting:
            _withdraw(task)
            _set_back(state, task)
        return True
    return False


def resume(state: State) -> None:
    """Have items that were set back go on, of each job in their order."""
    waiting, later = state.set_back, set[Job]()
    for task in sorted(waiting, key=lambda task: _place(task.item)):
        item, job = task.item, task.item.job
        due = state.now >= waiting[task] and job not in later
        if item.ended or task.status is not WAITING:
            del waiting[task]
            state.worklist.admitting.append(job)
        elif any(each.status in (READY, RUNNING) for each in item.tasks):
            continue
        elif due and _under_way(state, job) < max(1, job.window):
            del waiting[task]
            state.worklist.rerun.append(task)
            state.worklist.admitting.append(job)
        else:
            _give_up_outputs(state, item)  # also what has been made since
            later.add(job)


def is_crowded(state: State, job: Job) -> bool:
    """Whether items of a job were set back, and go on before others begin."""
    return any(task.item.job is job for task in state.set_back)


def _set_back(state: State, task: Task) -> None:
    item = task.item
    leave(item)
    _give_up_outputs(state, item)
    state.set_back[task] = Nanoseconds(state.now + state.limits.delay(item.set_backs))
    item.set_backs += 1


def _narrow(state: State, job: Job) -> None:
    """A device had no room for all items of a job that are under way."""
    job.crowding.narrow(_under_way(state, job))
    job.window = min(job.window, job.crowding.most)


def _under_way(state: State, job: Job) -> int:
    """How many items of a job may have something on a device."""
    waiting = {task.item for task in state.set_back if task.item.job is job}
    return len(job.active) - job.storing - sum(not item.ended for item in waiting)


def _withdraw(task: Task) -> None:
    """A ready task waits for a device no longer."""
    task.status = WAITING
    end_wait(task)
    if task.reserved_on is not None:
        unreserve(task)
    drop_copies(task, None)


def _on(state: State, device: Device) -> Iterator[Item]:
    """The items that have something on a device, or run there."""
    for job in state.jobs.values():
        for item in job.active.values():
            if not item.storing and _is_on(item, device):
                yield item


def _is_on(item: Item, device: Device) -> bool:
    if any(holder is device for holder, _ in item.orphan_copies):
        return True
    for task in item.tasks:
        copies = () if task.inputs is None else task.inputs.values()
        if task.holder is device or task.device is device or device in copies:
            return True
    return False


def _place(item: Item) -> tuple[int, int, str, int]:
    spec = item.job.spec
    return -spec.priority, item.job.submitted_at, spec.name, item.index


def _give_up_outputs(state: State, item: Item) -> None:
    """Release what was made of an item, but for what a task takes that runs now."""
    copied = {stage for _, stage in item.orphan_copies}
    for made in item.tasks:
        if made.holder is not None or made.queue.stage in copied:
            consumers = (item.tasks[consumer] for consumer in made.queue.consumers)
            if all(each.status is not RUNNING for each in consumers):
                release(state, made)
