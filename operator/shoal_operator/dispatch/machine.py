"""The dispatcher: one event in, the instructions that follow out.

    state = new_state()
    instructions = step(state, event)

A step has three phases: what the event says is noted, and what follows at once is done; services that
turned out to have work and nobody to do it are considered; the instructions are handed over. Time is the
event's. Whatever an event does not set off is found by the next Tick, which looks at everything that
waits: so nothing waits for ever.

The parts, each a module: `readiness` (the graph), `assignment` (task to device), `servers` (their
order), `ranking` (their scores), `residency` (what is loaded where) with `services` and `loading`,
`answers` and `recovery` (what goes wrong), `jobs` (from submission to end).
"""

from typing import assert_never

from shoal_operator.dispatch import answers, jobs, recovery
from shoal_operator.dispatch.assignment import take_work
from shoal_operator.dispatch.events import (
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
from shoal_operator.dispatch.instructions import Instruction
from shoal_operator.dispatch.loading import gone, prefetch_idle
from shoal_operator.dispatch.ranking import refresh
from shoal_operator.dispatch.residency import consider_device, consider_service
from shoal_operator.dispatch.servers import review
from shoal_operator.dispatch.services import call_for, count_all_homes
from shoal_operator.dispatch.state import (
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

__all__ = ["Limits", "State", "new_state", "step"]


def step(state: State, event: Event) -> tuple[Instruction, ...]:
    """Take one event; the state is changed in place (see `state`)."""
    if event.at > state.now:
        state.now = event.at
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
        case TaskFinished():
            running = _answered(state, event.instruction)
            if isinstance(running, Running):
                answers.task_finished(state, running, event)
        case ItemStored():
            jobs.stored(state, event)
        case ActivationForwarded():
            forwarding = _answered(state, event.instruction)
            if isinstance(forwarding, Forwarding):
                answers.forwarded(state, forwarding)
        case DeviceTelemetry() | ProbeAnswered() | DeviceDraining() | DeviceLost():
            _note_device(state, event)
        case FragmentEvicted():
            device = _current(state, event.device, event.session)
            if device is not None:
                gone(state, device, event.digest)
                _wake_users(state, device, event)
        case FragmentResident() | FragmentCached() | FragmentUnloaded():
            _note_fragment(state, event)
        case InstructionFailed():
            _note_failure(state, event)
        case DeviceJoined():
            _note_joined(state, event)
        case JobSubmitted():
            jobs.submit(state, event)
        case JobCancelled():
            jobs.cancel_job(state, event)
            _sweep(state)
        case InputUnreadable():
            jobs.unreadable(state, event)
        case Tick():
            _tick(state)
        case _:
            assert_never(event)


def _answered(state: State, instruction: int) -> Pending | None:
    """What an answer answers; None if that was given up. Any answer is a sign of life."""
    pending = state.pending.pop(instruction, None)
    if pending is not None:
        pending.device.seen_at = state.now
    return pending


def _current(state: State, name: str, session: int) -> Device | None:
    """The device, if the event is of its present session."""
    device = state.devices.get(name)
    if device is None or device.session != session:
        return None
    device.seen_at = state.now
    return device


# ---- devices -------------------------------------------------------------------------------------


def _note_device(
    state: State, event: DeviceTelemetry | ProbeAnswered | DeviceDraining | DeviceLost
) -> None:
    device = _current(state, event.device, event.session)
    if device is None:
        return
    match event:
        case DeviceTelemetry():
            recovery.note_telemetry(state, device, event)
        case ProbeAnswered():
            device.probed_at = None
        case DeviceDraining():
            device.draining = True
            review(state, device)
            count_all_homes(state, device)
            for digest in device.resident:
                for service in state.by_digest.get(digest, ()):
                    call_for(state, service)
        case DeviceLost():
            _lose(state, device, event.reason)


def _note_joined(state: State, event: DeviceJoined) -> None:
    before = state.devices.get(event.device)
    if before is not None:
        if before.session >= event.session:
            return
        _lose(state, before, "a new session took its place")
    device = recovery.join(state, event)
    answers.put_to_work(state, device)


def _lose(state: State, device: Device, reason: str) -> None:
    failure = Failure(
        kind=FailureKind.UNREACHABLE, message=f"device {device.name} was lost {reason}".rstrip()
    )
    for task in recovery.lose(state, device):
        if not task.item.ended:
            task.lane.running -= 1
            task.device = None
            answers.drop_lost(task, device)
            answers.undo(state, task, failure)
    _sweep(state)


# ---- fragments -----------------------------------------------------------------------------------


def _note_fragment(
    state: State, event: FragmentResident | FragmentCached | FragmentUnloaded
) -> None:
    pending = _answered(state, event.instruction)
    match event, pending:
        case FragmentResident(), Loading():
            recovery.resident(state, pending, event)
        case FragmentUnloaded(), Unloading():
            recovery.unloaded(state, pending)
        case FragmentCached(), Prefetching():
            recovery.cached(state, pending, event)
        case _:
            return
    answers.put_to_work(state, pending.device)


def _note_failure(state: State, event: InstructionFailed) -> None:
    pending = _answered(state, event.instruction)
    match pending:
        case None:
            return
        case Running():
            answers.task_failed(state, pending, event.failure)
        case Forwarding():
            answers.forward_failed(state, pending, event)
        case Loading():
            recovery.load_failed(state, pending, event.failure)
        case Unloading():
            recovery.unload_failed(state, pending, event.failure)
        case Prefetching():
            recovery.prefetch_failed(state, pending, event.failure)
        case _:
            assert_never(pending)
    answers.put_to_work(state, pending.device)


def _wake_users(state: State, device: Device, event: FragmentEvicted) -> None:
    for service in state.by_digest.get(event.digest, ()):
        call_for(state, service)
    answers.put_to_work(state, device)


# ---- what waits ----------------------------------------------------------------------------------


def _serve(state: State, service: Service) -> None:
    """A service may have work and nobody for it: load the fragment, and use who is free."""
    consider_service(state, service)
    depth = state.limits.queue_depth
    if any(lane.waiting for lane in service.lanes):
        for device in list(service.servers):
            if device.queued < depth:
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
    for device, reason in recovery.silent(state):
        if not device.lost:
            recovery.disconnect(state, device, reason)
            _lose(state, device, reason)
    recovery.forgive(state)
    answers.retry_delayed(state)
    _sweep(state)
    recovery.give_up_impossible(state)
    prefetch_idle(state)
    refresh(state)
