"""The dispatcher: one event in, the instructions that follow out.

    state = new_state()
    instructions = step(state, event)

A step has numbered phases. The first applies the event: it changes ledgers, counts and the graph,
and gives no work. What it makes necessary is added to `state.worklist` (`state.Worklist`), and each
later phase drains one part of that. So a loss that fails a job that frees devices is no chain of
calls: each link is an entry, and `_settle` alone decides the order.

Time is the event's. Whatever an event does not set off is found by the next Tick, which considers
all that waits: so nothing waits for ever.
"""

from collections.abc import Iterable
from typing import assert_never

from shoal_coordinator.dispatch import (
    devices,
    fragments,
    full_devices,
    itineraries,
    jobs,
    tasks,
    turns,
)
from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch.assignment import fill, place_ready
from shoal_coordinator.dispatch.fragments import evict_excess, prefetch_idle
from shoal_coordinator.dispatch.instructions import Instruction
from shoal_coordinator.dispatch.ranking import refresh
from shoal_coordinator.dispatch.residency import consider_device, consider_service
from shoal_coordinator.dispatch.services import expire_backoffs
from shoal_coordinator.dispatch.state import (
    Forwarding,
    Limits,
    Loading,
    Pending,
    Planning,
    Prefetching,
    Running,
    Service,
    State,
    Travelling,
    Unloading,
    new_state,
)
from shoal_coordinator.dispatch.surveys import Demand, Survey

__all__ = ["Limits", "State", "new_state", "step"]


def step(state: State, event: ev.Event) -> tuple[Instruction, ...]:
    """Take one event; the state is changed in place (see `state`)."""
    state.now = max(state.now, event.at)
    # 1. Apply what the event says.
    _apply(state, event)
    # 2. to 6. Admit items, assign tasks, recover what was lost, fill free devices.
    _settle(state)
    # 7. Residency: load fragments for services that have work and too few devices.
    while state.worklist.services:
        services = dict.fromkeys(state.worklist.services)
        state.worklist.services.clear()
        _provision(state, services)
    # 8. Emit.
    out = tuple(state.out)
    state.out.clear()
    return out


def _settle(state: State) -> None:
    """Drain the worklist, except for services; a later phase may send it back to an earlier one."""
    work = state.worklist
    while True:
        # 2. Admit: jobs in whose window there is room.
        if work.admitting:
            jobs.admit(state)
        # 3. Assign: tasks that are ready, or must run again.
        if work.ready or work.rerun:
            place_ready(state)
        # 4. Complete: items and barriers that the finished tasks complete.
        if work.passed:
            jobs.complete(state)
            if work.ready:
                continue
        # 5. Recover: tasks of a lost device, one at a time; each may fail its item or its job.
        if work.lost:
            tasks.lost(state, *work.lost.popleft())
            continue
        # 6. Fill: free devices take what waits, before further items are admitted.
        if work.freed or work.everything:
            _fill_freed(state)
        if not work.stored:
            return
        work.admitting += work.stored
        work.stored.clear()


def _fill_freed(state: State) -> None:
    """Fill free slots; a device that finds nothing to do may load something else."""
    work = state.worklist
    for device in work.freed:
        fill(state, device)
        if device.work.idle:
            turns.share_the_rest(state, device)
        if device.work.idle and (state.unmet or device.preempted_by is not None):
            consider_device(state, device, state.unmet)
    work.freed.clear()
    if work.everything:
        work.everything = False
        _provision(state, list(state.unmet))
        demand = Demand(state)
        for device in list(state.devices.values()):
            if device.work.idle:
                consider_device(state, device, demand.for_device(device))


def _provision(state: State, services: Iterable[Service]) -> None:
    """Services may have work and no device for it: load their fragments, and use free devices."""
    survey = Survey(state)
    for service in services:
        consider_service(state, service, survey)
        if any(queue.waiting for queue in service.queues):
            for device in list(service.servers):
                if device.work.has_slot:
                    fill(state, device)


# ---- 1. apply ------------------------------------------------------------------------------------


def _apply(state: State, event: ev.Event) -> None:  # noqa: C901 - one for each kind
    match event:
        case ev.Answer():
            _apply_answer(state, event)
        case ev.ItemsTravelled():
            tasks.travelled(state, event)
        case ev.ItemsStored():
            jobs.stored(state, event)
        case ev.InputUnreadable():
            jobs.unreadable(state, event)
        case ev.JobSubmitted():
            jobs.submit(state, event)
        case ev.JobCancelled():
            jobs.cancel_job(state, event)
            state.worklist.everything = True
        case ev.ItemsArrived():
            jobs.extend(state, event)
        case ev.DeviceJoined():
            _apply_joined(state, event)
        case ev.DeviceReport():
            devices.note_report(state, event)
        case ev.Tick():
            _tick(state)
        case _:
            assert_never(event)


def _apply_joined(state: State, event: ev.DeviceJoined) -> None:
    if (before := devices.replaced(state, event)) is not None:
        crashed = before.incarnation != event.incarnation
        devices.lose(state, before, "a new session took its place", crashed=crashed)
        _settle(state)
    devices.join(state, event)


def _apply_answer(state: State, event: ev.Answer) -> None:
    pending = state.pending.pop(event.instruction, None)
    if pending is None:
        return  # the instruction is void
    device = pending.device
    device.health.seen_at = state.now
    match event, pending:
        case ev.TaskFinished(), Running():
            tasks.finished(state, pending, event)
        case ev.ActivationForwarded(), Forwarding():
            tasks.forwarded(state, pending)
            return
        case ev.FragmentResident(), Loading():
            fragments.resident(state, pending, event)
        case ev.FragmentUnloaded(), Unloading():
            fragments.unloaded(state, pending)
        case ev.FragmentCached(), Prefetching():
            fragments.cached(state, pending, event)
        case ev.InstructionFailed(), _:
            _apply_failure(state, pending, event.failure)
        case ev.LegPlanned(), Planning():
            itineraries.planned(state, pending, event.instruction)
        case _:
            raise AssertionError(f"{event} does not answer {pending}")
    state.worklist.freed.append(device)


def _apply_failure(state: State, pending: Pending, failure: ev.Failure) -> None:
    match pending:
        case Running():
            tasks.failed(state, pending, failure)
        case Forwarding():
            tasks.forward_failed(state, pending, failure)
        case Loading(void=True) if failure.kind is ev.FailureKind.CANCELLED:
            fragments.load_cancelled(state, pending)
        case Loading():
            fragments.load_failed(state, pending, failure)
        case Unloading():
            fragments.unload_failed(state, pending, failure)
        case Prefetching():
            fragments.prefetch_failed(state, pending)
        case Planning():
            itineraries.close(state, pending.route)
        case Travelling():
            tasks.travel_failed(state, pending, failure)
        case _:
            assert_never(pending)


def _tick(state: State) -> None:
    """Deadlines, silence, backoffs; then everything that waits is considered."""
    jobs.expire(state)
    if state.slots_changed:
        state.slots_changed = False
        jobs.resize_windows(state)
    _settle(state)
    for device, reason in devices.silent(state):
        devices.give_up(state, device, reason)
        _settle(state)
    expire_backoffs(state)
    for device in state.devices.values():
        if device.memory.resident_bytes > device.memory.budget:
            evict_excess(state, device)
    tasks.retry_delayed(state)
    full_devices.resume(state)
    turns.review_turns(state)
    itineraries.expire(state)
    state.worklist.admitting += [job for job in state.jobs.values() if job.spec.light]
    state.worklist.everything = True
    _settle(state)
    jobs.give_up_impossible(state)
    prefetch_idle(state)
    refresh(state)
