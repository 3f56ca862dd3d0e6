"""What holds after every step, whatever happened.

`violations` recounts from scratch what the state counts by increments, and says what differs.
"""

from collections import Counter
from collections.abc import Iterator

from shoal_coordinator.dispatch.device import Device
from shoal_coordinator.dispatch.servers import eligible, rank
from shoal_coordinator.dispatch.state import (
    READY,
    Forwarding,
    Item,
    Job,
    Running,
    Service,
    State,
    Status,
    Travelling,
    Worklist,
)


def violations(state: State) -> list[str]:
    """Everything that does not hold; nothing, if all is well."""
    found: list[str] = []
    if state.worklist != Worklist():
        found.append(f"the worklist is not empty: {state.worklist}")
    for device in state.devices.values():
        found += _of_device(state, device)
    for job in state.jobs.values():
        found += _of_job(state, job)
    for service in state.services.values():
        found += _of_service(state, service)
    found += _of_pending(state)
    return found


def _of_device(state: State, device: Device) -> Iterator[str]:
    name, memory, work = device.name, device.memory, device.work
    reserved = 0 if memory.loading is None else memory.loading.size
    if memory.resident_bytes != sum(memory.resident.values()):
        yield f"{name}: {memory.resident_bytes} bytes are not the sum of what is resident"
    if memory.resident_bytes + reserved > memory.budget:
        yield f"{name}: {memory.resident_bytes} + {reserved} bytes exceed {memory.budget}"
    if memory.single and len(memory.resident) + (memory.loading is not None) > 1:
        yield f"{name}: more than one fragment"
    if not 0 <= work.queued <= state.limits.queue_depth + state.limits.queue_extra:
        yield f"{name}: {work.queued} tasks given"
    if work.queued + work.travelling != sum(work.in_use.values()):
        given = work.queued + work.travelling
        yield f"{name}: {given} tasks given, but {work.in_use} in use"
    for made in device.work.outputs:
        if made.holder is not device or made.item.ended:
            yield f"{name}: holds an output that is not its own"
    if not work.served.keys() <= set(state.jobs.values()):
        yield f"{name}: remembers jobs that have ended"
    if device.lost:
        yield f"{name}: lost and listed"


def _of_job(state: State, job: Job) -> Iterator[str]:
    name = job.spec.name
    ended = job.spec.first + len(job.completed) + job.succeeded + job.failed
    if job.open != job.items - ended:
        yield f"{name}: {job.open} items open"
    if len(job.active) > job.open:
        yield f"{name}: {len(job.active)} active of {job.open}"
    counts = {queue.stage: [0, 0, 0, 0] for queue in job.queues}
    for item in job.active.values():
        for problem in _of_item(item):
            yield f"{name}/{item.index}{problem}"
        for task in item.tasks:
            counts[task.queue.stage][task.status] += 1
    # Most keep none, and to make and to compare a Counter takes longer than to look for them.
    staying = [item.stays_on for item in job.active.values() if item.stays_on is not None]
    if (staying or job.staying) and job.staying != Counter(staying):
        yield f"{name}: other items stay than {job.staying}"
    for queue in job.queues:
        tasks = [item.tasks[queue.stage] for item in job.active.values() if item.tasks]
        kept = [task for task in tasks if task.kept]
        if (kept or queue.kept) and (
            queue.kept != Counter(task.reserved_on for task in kept)
            or any(task.status is not READY for task in kept)
        ):
            yield f"{name}: stage {queue.stage} keeps other tasks than {queue.kept}"
        counted = [queue.waiting, queue.running, queue.passed]
        if counted != counts[queue.stage][1:]:
            yield f"{name}: stage {queue.stage} counts {counted}, has {counts[queue.stage][1:]}"


def _of_item(item: Item) -> Iterator[str]:
    """What does not hold of an item, behind its name."""
    if item.ended:
        yield ": ended and active"
    results, left = item.job.results, 0
    for task in item.tasks:
        device, holder, status = task.device, task.holder, task.status
        left += not task.reported and task.queue.stage in results
        if (status is Status.RUNNING) != (device is not None):
            yield f"/{task.queue.stage}: {status.name} on {device and device.name}"
        if device is not None and device.lost:
            yield f"/{task.queue.stage}: runs on a device that is lost"
        if holder is not None:
            if task not in holder.work.outputs:
                yield f"/{task.queue.stage}: {holder.name} does not know that it holds it"
            if status is not Status.FINISHED:
                yield f"/{task.queue.stage}: held, but {status.name}"
    if item.results_left != left and not item.storing:
        yield f": {item.results_left} results to come, in truth {left}"


def _of_service(state: State, service: Service) -> Iterator[str]:
    name = service.digest[:16]
    for device in state.devices.values():
        able = eligible(state, service, device)
        listed = service in device.listed
        if listed != (device in service.servers):
            yield f"{name}: {device.name} is listed on one side only"
        if listed and not able:
            yield f"{name}: {device.name} is listed, and cannot serve"
        if able and not listed and not device.health.backoffs:
            yield f"{name}: {device.name} could serve, and is not listed"
        if listed:
            known = device.listed[service]
            if known > rank(service, device):
                yield f"{name}: {device.name} ranks worse than it should"
            if all(other is not known for other in service.ranks):
                yield f"{name}: {device.name} is not in the queue"
    for device in service.loading:
        loads = device.memory.loading is not None and device.memory.loading.digest == service.digest
        if device.lost or not (loads or device.memory.next_load is service):
            yield f"{name}: {device.name} does not load it"


def _of_pending(state: State) -> Iterator[str]:
    given: Counter[Device] = Counter()
    travelling: Counter[Device] = Counter()
    items: Counter[Job] = Counter()
    for number, pending in state.pending.items():
        if pending.device.lost:
            yield f"instruction {number}: waits for {pending.device.name}, which is lost"
        if isinstance(pending, Running):
            given[pending.device] += 1
            if pending.task.instruction != number and not pending.task.item.ended:
                yield f"instruction {number}: its task is given again"
        if isinstance(pending, Travelling):
            travelling.update(pending.route.devices)
            items[pending.route.job] += 1
            yield from _of_travelling(number, pending)
        if isinstance(pending, Forwarding) and pending.target is pending.device:
            yield f"instruction {number}: forwards to itself"
    for job in state.jobs.values():
        if job.travelling != items[job]:
            yield f"{job.spec.name}: {items[job]} items travel, not {job.travelling}"
    yield from _of_work(state, given, travelling)


def _of_work(state: State, given: Counter[Device], travelling: Counter[Device]) -> Iterator[str]:
    items = [item for job in state.jobs.values() for item in job.active.values()]
    tasks = [task for item in items for task in item.tasks if task.reserved_on is not None]
    reserved = Counter(task.reserved_on for task in tasks)
    for device in state.devices.values():
        name, queued = device.name, device.work.queued
        if queued != given[device]:
            yield f"{name}: {queued} tasks given, {given[device]} unanswered"
        if device.work.travelling != travelling[device]:
            yield f"{name}: not {travelling[device]} tasks of items that travel"
        if device.work.load != queued + reserved[device]:
            yield f"{name}: load {device.work.load} is not {queued} + {reserved[device]}"


def _of_travelling(number: int, travelling: Travelling) -> Iterator[str]:
    if any(device.lost for device in travelling.route.devices):
        yield f"instruction {number}: travels over a device that is lost"
    if travelling.item.travels_as != number or travelling.item.ended:
        yield f"instruction {number}: its item does not travel as that"
    if any(task.status is not Status.RUNNING for task in travelling.item.tasks):
        yield f"instruction {number}: a task of its item does not run"
