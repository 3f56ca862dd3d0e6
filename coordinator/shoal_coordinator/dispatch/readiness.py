"""The job's graph: which stages end an item, when a task is ready, when an output may go.

A task is ready when all its predecessors of the same item have finished (streaming), and, in
Barrier mode, when every item has passed every stage before. An output is held until all its
consumers have finished. If it is lost before, or was released and is needed again, its task
becomes undone, and its inputs are asked for in turn, back to the model's input: the graph itself
is the log to replay.
"""

from collections.abc import Sequence

from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.events import Stage
from shoal_coordinator.dispatch.instructions import Release
from shoal_coordinator.dispatch.state import (
    FINISHED,
    Item,
    Job,
    State,
    Task,
)


def ends(stages: Sequence[Stage]) -> frozenset[int]:
    """The stages that an item waits for: those that give results, and those without consumers."""
    followed = {before for stage in stages for before in stage.predecessors}
    return frozenset(
        index for index, stage in enumerate(stages) if stage.gives_results or index not in followed
    )


def is_ready(task: Task) -> bool:
    """Whether nothing but a device is missing."""
    queue = task.queue
    if queue.stage > queue.job.open_stages:
        return False
    tasks = task.item.tasks
    for producer in queue.predecessors:  # noqa: SIM110 (all() costs a generator, twice a task)
        if tasks[producer].status is not FINISHED:
            return False
    return True


def has_copy(task: Task, producer: int, device: Device) -> bool:
    """Whether the device has, or will have, what the producer made for this task."""
    inputs = task.inputs
    return inputs is not None and inputs.get(producer) is device


def out_of_reach(task: Task, producer: int) -> bool:
    """Whether a finished producer's output is nowhere where this task could get it."""
    if task.item.tasks[producer].holder is not None:
        return False
    reserved_on = task.reserved_on
    return reserved_on is None or reserved_on.lost or not has_copy(task, producer, reserved_on)


def open_barrier(job: Job) -> bool:
    """Barrier mode: move on past every stage that all items have passed; whether it moved."""
    before = job.open_stages
    for queue in job.queues[before:-1]:
        if queue.passed < job.open:
            break
        job.open_stages += 1
    return job.open_stages > before


def release_inputs(state: State, task: Task) -> None:
    """A task has finished: release its inputs that no other consumer needs."""
    tasks = task.item.tasks
    for producer in task.queue.predecessors:
        made = tasks[producer]
        if made.holder is not None:
            for consumer in made.queue.consumers:
                if tasks[consumer].status is not FINISHED:
                    break
            else:
                release(state, made)


def release(state: State, made: Task) -> None:
    holder, item = made.holder, made.item
    if holder is not None:
        del holder.work.outputs[made]
        made.holder = None
        release_at(state, holder, item, made.queue.stage)
    if item.orphan_copies:
        stage = made.queue.stage
        for device, producer in item.orphan_copies:
            if producer == stage and not device.lost:
                release_at(state, device, item, stage)
        item.orphan_copies = [copy for copy in item.orphan_copies if copy[1] != stage]


def release_at(state: State, device: Device, item: Item, stage: int) -> None:
    state.out.append(
        Release(
            device=device.name,
            job=item.job.spec.name,
            epoch=item.epoch,
            item=item.index,
            stage=stage,
        )
    )


def note_missing(state: State, task: Task) -> None:
    """A device did not have an input that it should have: the second time, all are made again."""
    task.missing += 1
    if task.missing > 1:
        for producer in task.queue.predecessors:
            release(state, task.item.tasks[producer])


def note_orphan(state: State, made: Task, device: Device) -> None:
    """A copy of an output may lie on a device that will not use it: it goes with the original."""
    if device.lost:
        return
    if made.item.ended:
        release_at(state, device, made.item, made.queue.stage)
    else:
        made.item.orphan_copies.append((device, made.queue.stage))


def drop_copies(task: Task, used_at: Device | None) -> None:
    """Copies sent for a task that ran elsewhere are orphans; they go when their original does."""
    if task.inputs is None:
        return
    for producer, device in task.inputs.items():
        if device is not used_at and not device.lost:
            task.item.orphan_copies.append((device, producer))
    task.inputs = None
