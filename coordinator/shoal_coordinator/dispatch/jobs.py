"""A job from its submission to its end, and an item from its admission to its result.

Items are admitted up to a window, so that what the dispatcher holds depends on the devices, not on
the length of the job: enough to fill every device's queue and one more. Those that are only being
stored have left the devices and take no place, up to a bound, unless the user set the number. Of a
device that loads its fragments in turn, each serves a batch before the next one takes its place, so
the window has a batch for each such device. Barrier mode admits everything; that is what it is for.

Each item ends once: `FinishItem`, answered, or `FailItem`. Each job ends once: `FinishJob`. An
open-ended job gets more items until its last have arrived; then it is as any other.

A newer epoch of a job voids everything of the older one on every device that hears of it (the
protocol's rule), so a new plan starts the items over that are under way; finished ones stay. In the
same epoch only priority, deadline and parallelism are taken over, and nothing starts over.
"""

from dataclasses import replace

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import instructions as ins
from shoal_coordinator.dispatch import itineraries
from shoal_coordinator.dispatch.full_devices import is_crowded
from shoal_coordinator.dispatch.item_sets import ItemSet
from shoal_coordinator.dispatch.ranking import refresh
from shoal_coordinator.dispatch.readiness import drop_copies, ends, open_barrier, release
from shoal_coordinator.dispatch.servers import unreserve
from shoal_coordinator.dispatch.services import (
    begin_service,
    cancel_unused,
    impossible,
    retire_service,
)
from shoal_coordinator.dispatch.state import (
    FINISHED,
    READY,
    RUNNING,
    WAITING,
    Item,
    Job,
    Service,
    StageQueue,
    State,
    Task,
)
from shoal_coordinator.dispatch.turns import end_wait, entries, items_of_a_turn, leave
from shoal_protocol.turns import LEAST_ITEMS
from shoal_protocol.units import Nanoseconds

SHOWN_FAILURES = 64
_STORING = 64
_TRAVELLING = 200
"""So many items of a job may be under way where they travel: all may wait on one device."""
_OVERTIME_TRIES = 3
"""So many tasks of a stage may run out of time in a row for each that has finished, and one."""


def submit(state: State, event: ev.JobSubmitted) -> None:
    """Take a job, or a newer plan or other terms of one that runs."""
    spec = event.job
    known = state.jobs.get(spec.name)
    if known is not None:
        if spec.epoch > known.spec.epoch:
            _replan(state, known, spec)
        elif spec.epoch == known.spec.epoch:
            _amend(state, known, spec)
        return
    first, items = spec.first, range(spec.first, spec.items)
    completed = ItemSet.of(event.completed).within(items)
    failed = {item: why for item, why in event.failed.items() if item in items}
    skipped = completed.plus(failed)
    job = Job(
        spec=spec,
        submitted_at=event.at,
        items=spec.items,
        open_ended=spec.open_ended,
        completed=completed,
        skipped=skipped,
        next_item=first,
    )
    job.failed = len(skipped) - len(completed)
    job.failures.extend(list(failed.items())[:SHOWN_FAILURES])
    job.open = len(items) - len(skipped)
    state.ended.pop(spec.name, None)
    state.jobs[spec.name] = job
    if not job.open and not spec.open_ended:
        end_job(state, job, None)
        return
    _make_queues(state, job)
    _begin_services(state, job)


def extend(state: State, event: ev.ItemsArrived) -> None:
    """An open-ended job has more items, or has all of them."""
    job = state.jobs.get(event.job)
    if job is None or not job.open_ended:
        return
    job.open += max(0, event.items - job.items)
    job.items, job.open_ended = max(job.items, event.items), not event.last
    if not job.open and event.last:
        end_job(state, job, None)
        return
    state.worklist.admitting.append(job)


def _begin_services(state: State, job: Job) -> None:
    if job.spec.final_cut:  # for other items than those of the run that failed
        for tally in state.tallies.values():
            tally.forget_too_large(stage.digest for stage in job.spec.stages)
    for queue in job.queues:
        begin_service(state, queue)
    if (failure := impossible(state, job)) is not None:
        end_job(state, job, failure)
        return
    refresh(state)
    open_barrier(job)
    _open_window(state, job)


def _make_queues(state: State, job: Job) -> None:
    stages = job.spec.stages
    job.results = ends(stages)
    job.open_stages = 0 if job.spec.mode is ev.Mode.BARRIER else len(stages)
    for index, stage in enumerate(stages):
        key = (stage.digest, stage.homes, stage.granted, job.spec.policy)
        service = state.services.get(key)
        if service is None:
            service = state.services[key] = Service(
                digest=stage.digest,
                resident=stage.resident_bytes,
                least=stage.least_bytes,
                homes=stage.homes,
                granted=dict(stage.granted),
                policy=job.spec.policy,
            )
        consumers = [
            other for other, following in enumerate(stages) if index in following.predecessors
        ]
        before = [stages[number] for number in stage.predecessors]
        queue = StageQueue(
            job=job,
            stage=index,
            spec=stage,
            service=service,
            predecessors=stage.predecessors,
            consumers=tuple(consumers),
            wanted=not stage.predecessors or job.spec.holds,
            moved_bytes=max(other.output_bytes or 0 for other in (stage, *before)),
        )
        job.queues.append(queue)


def _replan(state: State, job: Job, spec: ev.JobSpec) -> None:
    items = [item for item in job.active.values() if not item.storing]
    for item in items:
        abandon(state, item)
        del job.active[item.index]
    queues = job.queues
    job.spec = spec
    job.again.extend(sorted(item.index for item in items))
    job.queues = []
    _make_queues(state, job)
    for queue, before in zip(job.queues, queues, strict=False):
        queue.finished, queue.times = before.finished, before.times
    for item in job.active.values():  # those that are being stored have passed every stage
        item.tasks = [Task(item, queue, FINISHED) for queue in job.queues]
    for queue in job.queues:
        queue.passed = len(job.active)
    _begin_services(state, job)
    for queue in queues:
        retire_service(state, queue)
    cancel_unused(state)
    job.routes = ()


def _amend(state: State, job: Job, spec: ev.JobSpec) -> None:
    job.spec = replace(
        job.spec,
        priority=spec.priority,
        deadline=spec.deadline,
        parallelism=spec.parallelism,
    )
    _open_window(state, job)


# ---- items ---------------------------------------------------------------------------------------


def resize_windows(state: State) -> None:
    for job in list(state.jobs.values()):
        _open_window(state, job)


def _open_window(state: State, job: Job) -> None:
    job.window = _window(state, job)
    state.worklist.admitting.append(job)


def _window(state: State, job: Job) -> int:
    if job.spec.mode is ev.Mode.BARRIER:
        job.in_turn = {}
        return job.items
    services = [queue.service for queue in job.queues]
    if all(service.homes_up for service in services):
        names = {name for service in services for name in service.homes}
        devices = [state.devices[name] for name in names if name in state.devices]
        job.in_turn = entries(devices, services)
        turns = len(job.in_turn)
    else:
        devices = list(state.devices.values())
        crowded = len(devices) < len(services) and any(device.memory.single for device in devices)
        turns, job.in_turn = int(crowded), {}
    slots = sum(device.work.slots for device in devices)
    window = max(slots + 2, turns * items_of_a_turn(job), LEAST_ITEMS)
    return min(window, job.spec.parallelism or window, job.crowding.most or window)


def admit(state: State) -> None:
    """Open the barriers that may open, and admit items while the windows have room."""
    for job in dict.fromkeys((*state.worklist.admitting, *state.obstructed)):
        if job.ended_at is None:
            _pass_barrier(state, job)
            _fill_window(state, job)
    state.worklist.admitting.clear()


def _fill_window(state: State, job: Job) -> None:
    storing = 0 if job.spec.parallelism else min(job.storing, _STORING)
    itineraries.plan(state, job)
    routes = itineraries.open_routes(state, job)
    if routes is None or is_crowded(state, job):
        return
    window = min(job.window, _TRAVELLING) if routes else job.window
    entering: list[Item] = []
    while len(job.active) - storing < window:
        if job.again:
            index = job.again.popleft()
        else:
            job.next_item = job.skipped.next_absent(job.next_item)
            if job.next_item >= job.items:
                break
            index = job.next_item
            job.next_item += 1
        item = Item(job, index, job.spec.epoch, len(job.results))
        item.tasks = [Task(item, queue) for queue in job.queues]
        job.active[index] = item
        if routes:
            entering.append(item)
            continue
        for task in item.tasks:
            if not task.queue.predecessors:
                state.worklist.ready.append(task)
    if entering:
        itineraries.travel(state, entering, routes)


def complete(state: State) -> None:
    """Tasks have finished: perhaps their items, or in Barrier mode the whole stage."""
    for task in state.worklist.passed:
        item, job = task.item, task.queue.job
        if not task.reported and task.queue.stage in job.results:
            task.reported = True
            item.results_left -= 1
            if not item.results_left:
                store(state, item)
        _pass_barrier(state, job)
        if item.storing:
            state.worklist.stored.append(job)
    state.worklist.passed.clear()


def store(state: State, item: Item) -> None:
    """All results of an item have come: have them written."""
    item.storing = True
    leave(item)
    item.job.storing += 1
    attempts = 1 + item.retries
    state.out.append(
        ins.FinishItem(job=item.job.spec.name, epoch=item.epoch, item=item.index, attempts=attempts)
    )


def stored(state: State, event: ev.ItemsStored) -> None:
    """The results of items are written, or cannot be."""
    if (job := state.jobs.get(event.job)) is None:
        return
    for index in event.items:
        item = job.active.get(index)
        if item is None or not item.storing:
            continue
        if event.failure is not None:
            fail_item(state, item, event.failure)
            continue
        job.succeeded += 1
        if item.started_at is not None:
            took = Nanoseconds(event.at - item.started_at)
            job.latency.add(took)
            if job.slowest.belongs(took):
                job.slowest.add(item.timing(item.started_at, event.at))
        _end_item(state, item)


def unreadable(state: State, event: ev.InputUnreadable) -> None:
    job = state.jobs.get(event.job)
    item = None if job is None else job.active.get(event.item)
    if item is not None and not item.storing:
        fail_item(state, item, event.failure)


def fail_item(state: State, item: Item, failure: ev.Failure) -> None:
    job = item.job
    job.failed += 1
    for each in failure.outgrown:
        known = job.outgrown.get(each.fragment, 0)
        job.outgrown[each.fragment] = max(known, each.need_bytes)
    if len(job.failures) < SHOWN_FAILURES:
        job.failures.append((item.index, failure))
    attempts = item.retries + (item.started_at is not None)
    state.out.append(
        ins.FailItem(job=job.spec.name, item=item.index, failure=failure, attempts=attempts)
    )
    _end_item(state, item)


def _end_item(state: State, item: Item) -> None:
    job = item.job
    abandon(state, item)
    del job.active[item.index]
    job.storing -= item.storing
    job.open -= 1
    if job.crowding.note_end():
        job.window = _window(state, job)
    if not job.open and not job.open_ended:
        end_job(state, job, None)
        return
    state.worklist.admitting.append(job)


def abandon(state: State, item: Item) -> None:
    """Undo an item: cancel what runs, release the outputs that devices hold."""
    item.ended = True
    if item.travels_as:
        itineraries.give_up(state, item.travels_as)
        item.travels_as = 0
    for task in item.tasks:
        if task.status is FINISHED:
            task.queue.passed -= 1
        elif task.status is RUNNING:
            task.queue.running -= 1
            cancel(state, task)
        elif task.status is READY:
            end_wait(task)
        task.status = WAITING
        if task.reserved_on is not None:
            unreserve(task)
        if task.inputs is not None:
            drop_copies(task, None)
    leave(item)
    for task in item.tasks:
        if task.holder is not None or item.orphan_copies:
            release(state, task)
    item.tasks = []  # no cycle is left: reference counting frees the item without the collector


def cancel(state: State, task: Task) -> None:
    """Ask the device to give an instruction up; it answers all the same."""
    device = task.device
    if device is not None and not device.lost:
        state.out.append(ins.Cancel(device=device.name, cancelled=task.instruction))


def _pass_barrier(state: State, job: Job) -> None:
    """Barrier mode: begin the stages whose turn has come."""
    first = job.open_stages + 1
    if first < len(job.queues) and open_barrier(job):
        for item in job.active.values():
            state.worklist.ready += item.tasks[first : job.open_stages + 1]


# ---- the end -------------------------------------------------------------------------------------


def cancel_job(state: State, event: ev.JobCancelled) -> None:
    if (job := state.jobs.get(event.job)) is not None:
        failure = ev.Failure(kind=ev.FailureKind.CANCELLED, message=event.reason or "cancelled")
        end_job(state, job, failure)


def expire(state: State) -> None:
    for job in list(state.jobs.values()):
        deadline = job.spec.deadline
        if deadline is not None and state.now >= deadline:
            ended = job.succeeded + job.failed
            message = f"the deadline passed with {job.open} of {job.open + ended} items not ended"
            end_job(state, job, ev.Failure(kind=ev.FailureKind.DEADLINE, message=message))


def end_job(state: State, job: Job, failure: ev.Failure | None) -> None:
    """Emit FinishJob, undo what is under way, and store the counts for a while."""
    job.ended_at = state.now
    job.failure = failure
    for item in list(job.active.values()):
        abandon(state, item)
    job.active.clear()
    job.routes = ()
    state.obstructed.pop(job, None)
    name, epoch = job.spec.name, job.spec.epoch
    state.out += [ins.ForgetJob(device=device, job=name, epoch=epoch) for device in job.devices]
    for device in filter(None, map(state.devices.get, job.devices)):
        device.work.served.pop(job, None)
    for queue in job.queues:
        retire_service(state, queue)
    cancel_unused(state)
    del state.jobs[job.spec.name]
    state.ended[job.spec.name] = job
    while len(state.ended) > state.limits.ended_jobs:
        del state.ended[next(iter(state.ended))]
    state.out.append(ins.FinishJob(job=job.spec.name, failure=failure))


def give_up_endless(state: State, task: Task, failure: ev.Failure) -> None:
    """End a job of which a stage runs out of time again and again and finishes no task: each more
    would take a device from other jobs for as long as a task may take. Where some have finished,
    an item counts once: its further tries say nothing of the others."""
    job, queue, done = task.item.job, task.queue, task.queue.finished
    queue.overtime += not done or task.item.failures == 1
    if job.ended_at is None and queue.overtime >= _OVERTIME_TRIES * (1 + done):
        none = f"none but {done}" if done else "none"
        message = f"{queue.overtime} tasks ran out of time, and {none} finished: {failure.message}"
        end_job(state, job, ev.Failure(kind=ev.FailureKind.RUNTIME, message=message))


def give_up_impossible(state: State) -> None:
    """End the jobs that waited for their homes, and fit on no device: once the devices have had
    time to join, and to have their budgets back."""
    settled_since = state.now - state.limits.homes_grace
    changed = (device.health.unchanged_since for device in state.devices.values())
    if max(changed, default=state.now) > settled_since:
        return
    for job in list(state.jobs.values()):
        if job.submitted_at > settled_since:
            continue
        if any(queue.service.unserved for queue in job.queues):
            failure = impossible(state, job)
            if failure is not None:
                end_job(state, job, failure)
