"""Items that take more memory than the plan covers: where another try can end otherwise.

An agent that refuses such an item has let go of all that it may let go of, and nobody knows what
the item needs. On the same device, with the same budget and beside the same fragments, it would be
refused again after as much work, and so it would with a smaller budget. So a task is given to each
device once, until that changes, and its item fails when there is no other.
"""

from collections.abc import Iterator

from shoal_coordinator.dispatch.device import Device, Refusals
from shoal_coordinator.dispatch.events import Failure
from shoal_coordinator.dispatch.services import can_host
from shoal_coordinator.dispatch.state import State, Task


def is_of_the_item(state: State, device: Device, task: Task, failure: Failure) -> bool:
    """Whether a failure says nothing of fragment and device: an item that is larger than the plan
    covers, for which nobody knows a need; one for which the whole budget is too little, where
    others have run; or for which every budget is, where no finer cut is possible."""
    need, queue = failure.need, task.queue
    if need is None or (queue.finished and need > device.memory.budget):
        return True
    return queue.job.spec.final_cut and need > _largest_budget(state)


def outgrows_again(state: State, task: Task, failure: Failure) -> bool:
    """Whether no budget is enough for the item, and was not at its last try either: something else
    may have taken memory in one of them, but further tries are in vain."""
    most = _largest_budget(state)
    before, task.outgrown = task.outgrown, failure.need is not None and failure.need >= most
    return before and task.outgrown


def _largest_budget(state: State) -> int:
    return max((tally.budget for tally in state.tallies.values()), default=0)


def note_refusal(task: Task, device: Device, failure: Failure) -> None:
    """A device has refused the task's item, and nobody knows its need."""
    refusals = task.refusals
    if refusals is None:
        refusals = task.refusals = Refusals(failure)
    refusals.failure = failure
    refusals.standings[device.name] = device.memory.standing(task.queue.service.digest)


def is_in_vain(task: Task, device: Device) -> bool:
    """Whether a device would refuse the item, by what it and others have refused."""
    refusals = task.refusals
    if refusals is None:
        return False
    standing = device.memory.standing(task.queue.service.digest)
    return refusals.standings.get(device.name) == standing or standing[0] < refusals.most_bytes


def avoids(task: Task, device: Device) -> bool:
    """Whether a task that has failed is rather given to another device."""
    return task.excluded is device or is_in_vain(task, device)


def can_differ(state: State, task: Task) -> bool:
    """Whether there is a device on which another try can end otherwise; also where there is none
    at all, which is waited for."""
    if task.refusals is None:
        return True
    devices = list(_devices_for(state, task))
    return not devices or not all(is_in_vain(task, device) for device in devices)


def may_change(state: State, task: Task) -> bool:
    """Whether a device that has refused the item had other fragments, which may go."""
    known = {} if task.refusals is None else task.refusals.standings
    return any(known.get(each.name, (0, ()))[1] for each in _devices_for(state, task))


def _devices_for(state: State, task: Task) -> Iterator[Device]:
    """The homes; without one, those that serve or are about to, and those with larger budgets."""
    service, refusals = task.queue.service, task.refusals
    for device in state.devices.values():
        if not can_host(state, service, device):
            continue
        if service.homes_up:
            if device.name in service.homes:
                yield device
            continue
        larger = refusals is not None and device.memory.budget > refusals.most_bytes
        if larger or device in service.servers or device in service.loading:
            yield device
