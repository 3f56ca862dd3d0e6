"""The dispatcher: one event in, the instructions that follow out.

    state = new_state()
    instructions = step(state, event)

A step has three phases: what the event says is noted, and what follows at once is done; services
that turned out to have work and nobody to do it are considered; the instructions are handed over.
Time is the event's. Whatever an event does not set off is found by the next Tick, which looks at
everything that waits: so nothing waits for ever.

The parts, each a module: `readiness` (the graph), `assignment` (task to device), `servers` (their
order), `ranking` (their scores), `residency` (what is loaded where) with `services` and `loading`,
`answers` and `recovery` (what goes wrong), `jobs` (from submission to end).
"""

from typing import assert_never

from shoal_coordinator.dispatch import answers, jobs, recovery
from shoal_coordinator.dispatch.assignment import take_work
from shoal_coordinator.dispatch.events import (
    ActivationForwarded,
    DeviceDraining,
    DeviceJoined,
    DeviceLost,
    DeviceTelemetry,
    Event,
    Failure,
    FailureKind,
    FragmentCached,
    FragmentEvicted,
    FragmentResident,
    FragmentUnloaded,
    InputUnreadable,
    InstructionFailed,
    ItemStored,
    JobCancelled,
    JobSubmitted,
    ProbeAnswered,
    TaskFinished,
    Tick,
)
from shoal_coordinator.dispatch.instructions import Instruction
from shoal_coordinator.dispatch.loading import gone, prefetch_idle
from shoal_coordinator.dispatch.ranking import refresh
from shoal_coordinator.dispatch.residency import consider_device, consider_service
from shoal_coordinator.dispatch.servers import review
from shoal_coordinator.dispatch.services import call_for, count_all_homes
from shoal_coordinator.dispatch.state import (
    Device,
    Forwarding,
    Limits,
    Loading,
    Pending,
    Prefetching,
    Running,
    Service,
    State,
    Unloading,
    new_state,
)
from shoal_protocol.digests import Digest

__all__ = ["Limits", "State", "new_state", "step"]

Answer = (
    TaskFinished
    | ActivationForwarded
    | InstructionFailed
    | FragmentResident
    | FragmentCached
    | FragmentUnloaded
)


def step(state: State, event: Event) -> tuple[Instruction, ...]:
    """Take one event; the state is changed in place (see `state`)."""
    state.now = max(state.now, event.at)
    _note(state, event)
    while state.starving:
        services = dict.fromkeys(state.starving)
        state.starving.clear()
        for service in services:
            _serve(state, service)
    out = tuple(state.out)
    state.out.clear()
    state.log.append((event, out))
    return out


def _note(state: State, event: Event) -> None:
    match event:
        case (
            TaskFinished()
            | ActivationForwarded()
            | InstructionFailed()
            | FragmentResident()
            | FragmentCached()
            | FragmentUnloaded()
        ):
            _note_answer(state, event)
        case ItemStored():
            jobs.stored(state, event)
        case InputUnreadable():
            jobs.unreadable(state, event)
        case JobSubmitted():
            jobs.submit(state, event)
        case JobCancelled():
            jobs.cancel_job(state, event)
            _sweep(state)
        case DeviceJoined():
            _note_joined(state, event)
        case (
            DeviceTelemetry()
            | ProbeAnswered()
            | FragmentEvicted()
            | DeviceDraining()
            | DeviceLost()
        ):
            _note_device(state, event)
        case Tick():
            _tick(state)
        case _:
            assert_never(event)


# ---- answers -------------------------------------------------------------------------------------


def _note_answer(state: State, event: Answer) -> None:
    pending = state.pending.pop(event.instruction, None)
    if pending is None:
        return  # it was given up
    device = pending.device
    device.seen_at = state.now
    match event, pending:
        case TaskFinished(), Running():
            answers.task_finished(state, pending, event)
            return
        case ActivationForwarded(), Forwarding():
            answers.forwarded(state, pending)
            return
        case FragmentResident(), Loading():
            recovery.resident(state, pending, event)
        case FragmentUnloaded(), Unloading():
            recovery.unloaded(state, pending)
        case FragmentCached(), Prefetching():
            recovery.cached(state, pending, event)
        case InstructionFailed(), _:
            _note_failure(state, pending, event.failure)
        case _:
            raise AssertionError(f"{event} does not answer {pending}")
    if not device.lost:
        answers.schedule_device(state, device)


def _note_failure(state: State, pending: Pending, failure: Failure) -> None:
    match pending:
        case Running():
            answers.task_failed(state, pending, failure)
        case Forwarding():
            answers.forward_failed(state, pending, failure)
        case Loading():
            recovery.load_failed(state, pending, failure)
        case Unloading():
            recovery.unload_failed(state, pending, failure)
        case Prefetching():
            recovery.prefetch_failed(state, pending)
        case _:
            assert_never(pending)


# ---- devices -------------------------------------------------------------------------------------


def _note_device(
    state: State,
    event: DeviceTelemetry | ProbeAnswered | FragmentEvicted | DeviceDraining | DeviceLost,
) -> None:
    device = state.devices.get(event.device)
    if device is None or device.session != event.session:
        return  # of a session that is over
    device.seen_at = state.now
    match event:
        case DeviceTelemetry():
            recovery.note_telemetry(state, device, event)
        case ProbeAnswered():
            device.probed_at = None
        case FragmentEvicted():
            gone(state, device, event.digest)
            _call_users(state, event.digest)
            answers.schedule_device(state, device)
        case DeviceDraining():
            device.draining = True
            review(state, device)
            count_all_homes(state, device)
            for digest in device.resident:
                _call_users(state, digest)
        case DeviceLost():
            _lose(state, device, event.reason)


def _note_joined(state: State, event: DeviceJoined) -> None:
    before = state.devices.get(event.device)
    if before is not None:
        if before.session >= event.session:
            return
        _lose(state, before, "a new session took its place")
    device = recovery.join(state, event)
    answers.schedule_device(state, device)


def _lose(state: State, device: Device, reason: str) -> None:
    message = f"device {device.name} was lost: {reason}" if reason else f"{device.name} was lost"
    failure = Failure(kind=FailureKind.UNREACHABLE, message=message)
    for task in recovery.lose(state, device):
        if not task.item.ended:
            answers.task_lost(state, task, failure)
    _sweep(state)


def _call_users(state: State, digest: Digest) -> None:
    for service in state.by_digest.get(digest, ()):
        call_for(state, service)


# ---- what waits ----------------------------------------------------------------------------------


def _serve(state: State, service: Service) -> None:
    """A service may have work and nobody for it: load the fragment, and use who is free."""
    consider_service(state, service)
    if any(queue.waiting for queue in service.queues):
        for device in list(service.servers):
            if device.queued < device.slots:
                take_work(state, device)


def _sweep(state: State) -> None:
    """Look at everything that waits."""
    for service in list(state.unmet):
        _serve(state, service)
    for device in list(state.devices.values()):
        if not device.queued:
            consider_device(state, device)


def _tick(state: State) -> None:
    jobs.expire(state, state.jobs.values())
    if state.slots_changed:
        state.slots_changed = False
        jobs.resize_windows(state)
    for device, reason in recovery.silent(state):
        recovery.disconnect(state, device, reason)
        _lose(state, device, reason)
    recovery.expire_backoff(state)
    answers.retry_delayed(state)
    _sweep(state)
    recovery.give_up_impossible(state)
    prefetch_idle(state)
    refresh(state)
