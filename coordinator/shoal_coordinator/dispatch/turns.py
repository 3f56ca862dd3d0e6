"""How devices that load the fragments of a job in turn share its items.

A fragment that is loaded serves all items that are on the device before the next one takes its
place. Such a turn is short where the device has the next fragment's items as well: so an item stays
on the home where it entered, as long as that is a home of its next stage. What another device has
loaded just now is not worth the way there and back, and both would have fewer items for each load.

A device begins no more items than its *share*. So those that are admitted are enough for all,
however unequal; a fast device takes its next share when it has ended one. One that has no item
left, and will get none, helps the others at the end: what waits for them does so no longer. Nor
does what waits for a device that cannot run it any more, or that other jobs have taken.
"""

from collections.abc import Iterable, Sequence

from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.larger_items import avoids
from shoal_coordinator.dispatch.servers import reserve, unreserve
from shoal_coordinator.dispatch.services import can_host, request_provisioning
from shoal_coordinator.dispatch.state import READY, Item, Job, Service, StageQueue, State, Task
from shoal_protocol.turns import items_in_turn

_TURNS_OF_OTHERS = 10
"""For so many turns a device may serve other jobs of the same priority, which it does in turn, and
what waits for it goes nowhere else."""


def entries(devices: Iterable[Device], services: Sequence[Service]) -> dict[str, int]:
    """The homes that load their fragments in turn, and the stages where items enter them."""
    return {
        device.name: next(n for n, each in enumerate(services) if device.name in each.homes)
        for device in devices
        if _loads_in_turn(device, services)
    }


def _loads_in_turn(device: Device, services: Sequence[Service]) -> bool:
    """Whether a home cannot have all of its fragments at once."""
    its = {each.digest: each for each in services if device.name in each.homes}
    if device.memory.single:
        return len(its) > 1
    return sum(each.least for each in its.values()) > device.memory.budget


def items_of_a_turn(job: Job) -> int:
    """How many items share a load."""
    return items_in_turn(stage.output_bytes for stage in job.spec.stages)


# ---- the items on a device -----------------------------------------------------------------------


def enter(task: Task, device: Device) -> None:
    """A task of an item is given to a device; the item stays there if its fragments take turns."""
    item = task.item
    keeper = device if device.name in item.job.in_turn else None
    if item.stays_on is not keeper:
        leave(item)
        item.stays_on = keeper
        if keeper is not None:
            on = item.job.staying
            on[keeper] = on.get(keeper, 0) + 1


def leave(item: Item) -> None:
    """The item has nothing to do on a device any more."""
    if (device := item.stays_on) is not None:
        on = item.job.staying
        item.stays_on = None
        on[device] -= 1
        if not on[device]:
            del on[device]


def keeper(state: State, task: Task) -> Device | None:
    """The device on which the item of a task that is about to wait stays."""
    device = task.item.stays_on
    if device is None or not _keeps(state, task.queue, device):
        return None
    return None if task.excluded is not None and avoids(task, device) else device


def move_on(task: Task) -> None:
    """A ready task does not wait for the device where its item was: it stays there for others of
    its tasks at most."""
    device = task.item.stays_on
    if device is not None and not any(_is_for(each, device) for each in task.item.tasks):
        leave(task.item)


def _is_for(task: Task, device: Device) -> bool:
    """Whether a task waits for the device where its item stays, or runs on a device."""
    return task.kept or task.device is device


def _keeps(state: State, queue: StageQueue, device: Device) -> bool:
    """Whether items that are on a device wait there for a stage: one of its own, while all of its
    homes have something to do, and the device does something for the job."""
    job, service = queue.job, queue.service
    if device.name not in job.in_turn or device.name not in service.homes:
        return False
    if not can_host(state, service, device):
        return False
    homes = (state.devices.get(name) for name in service.homes if name != device.name)
    others = [each for each in homes if each is not None]
    if others and _is_taken(state, queue, device):
        return False
    done = [each for each in others if _is_done(job, each)]
    entry = job.queues[job.in_turn[device.name]]
    if entry.coming > 0:  # items have yet to enter, and keep those busy that they may enter
        done = [each for each in done if each.name not in entry.service.homes]
        return all(service not in each.listed for each in done)
    return not done


def _is_taken(state: State, queue: StageQueue, device: Device) -> bool:
    """Whether a device has nothing of a job any more, since it works for others: for so long that
    what waits for it need not wait for their end."""
    job, turn = queue.job, state.limits.turn
    if any(device in each.service.servers or device in each.service.loading for each in job.queues):
        return False
    kept = (task for task in queue.reserved.get(device, ()) if task.kept)
    since = next((task.ready_at for task in kept), state.now)
    yields = any(each.priority > job.spec.priority for each in device.listed)
    return state.now - since >= (turn if yields else _TURNS_OF_OTHERS * turn)


def _is_done(job: Job, device: Device) -> bool:
    """Whether a device has nothing to do, and no item of a job."""
    return not job.staying.get(device) and device.work.idle and not device.memory.moving


def share_the_rest(state: State, device: Device) -> None:
    """A device that has nothing to do, and will have nothing, helps those that have."""
    for job in state.jobs.values():
        if job.staying and _is_done(job, device):
            _review(state, job)


def has_share(job: Job, device: Device) -> bool:
    """Whether a device has as many items of the job as it may have in one turn, and something to
    do for them."""
    if device.name not in job.in_turn or job.staying.get(device, 0) < _share(job):
        return False
    return not device.work.idle or any(device in queue.kept for queue in job.queues)


def may_enter(task: Task, device: Device) -> bool:
    """Whether a device may have a task: its item is there, or it has not got its share yet."""
    item = task.item
    return item.stays_on is device or not has_share(item.job, device)


def _share(job: Job) -> int:
    return min(items_of_a_turn(job), -(-job.window // len(job.in_turn)))


# ---- the tasks that wait for a device ------------------------------------------------------------


def wait_for(task: Task, device: Device) -> None:
    """A ready task waits for the device where its item stays, and for no other."""
    if task.reserved_on is not device:
        unreserve(task)
        reserve(task, device)
    task.kept = True
    kept = task.queue.kept
    kept[device] = kept.get(device, 0) + 1


def end_wait(task: Task) -> None:
    """A ready task waits no longer: it is given, or given up."""
    task.queue.waiting -= 1
    _uncount(task)


def _uncount(task: Task) -> None:
    if task.kept:
        task.kept = False
        device, kept = task.reserved_on, task.queue.kept
        assert device is not None
        kept[device] -= 1
        if not kept[device]:
            del kept[device]


def _let_go(state: State, queue: StageQueue, device: Device) -> None:
    """Others may take what waits for a device."""
    for task in queue.reserved.pop(device, ()):
        if task.status is READY and task.reserved_on is device:
            _uncount(task)
            leave(task.item)
            unreserve(task)
            queue.ready.append(task)
    request_provisioning(state, queue.service)


def review_turns(state: State) -> None:
    """Let go what waits for devices that cannot have it any more."""
    for job in state.jobs.values():
        if job.staying:
            _review(state, job)


def _review(state: State, job: Job) -> None:
    for queue in job.queues:
        for device in list(queue.kept):
            if not _keeps(state, queue, device):
                _let_go(state, queue, device)


def lose(state: State, device: Device) -> None:
    """A device is lost: nothing waits for it."""
    for job in state.jobs.values():
        for queue in job.queues:
            if device in queue.kept:
                _let_go(state, queue, device)


# ---- whose turn it is ----------------------------------------------------------------------------


def waiting_for(service: Service, device: Device) -> int:
    """Ready tasks of a service that a device may take."""
    return sum(_waiting_for(queue, device) for queue in service.queues)


def _waiting_for(queue: StageQueue, device: Device) -> int:
    if not queue.kept:
        return 0 if has_share(queue.job, device) else queue.waiting
    kept = queue.kept.get(device, 0)
    return kept if has_share(queue.job, device) else kept + _entering(queue)


def _entering(queue: StageQueue) -> int:
    """Ready tasks of items that stay nowhere yet."""
    return queue.waiting - sum(queue.kept.values())


def batch_waits(service: Service, device: Device) -> bool:
    """Whether enough of its tasks wait for a load on a device to pay."""
    return any(_batch_waits(queue, device) for queue in service.queues)


def _batch_waits(queue: StageQueue, device: Device) -> bool:
    """Whether at least half of what a device serves in a turn waits at a stage: of the items that
    stay there, or of those that may enter; or all that is left."""
    job, kept = queue.job, queue.kept.get(device, 0)
    if device.name not in job.in_turn:
        return queue.waiting >= max(1, min(job.window, job.open - job.storing) // 2)
    here = job.staying.get(device, 0)
    if kept and (device.work.idle or kept >= here // 2):
        return True
    if has_share(job, device):
        return False
    left = job.open - job.storing - sum(job.staying.values())
    return _entering(queue) >= max(1, min(_share(job), left) // 2)
