"""Fragments that take devices down: counted by digest, and failed after a bound.

A model that ends the runtime's process while it is loaded, or at its first task, would otherwise
take down one device after another, for ever, and every other job with them. Counted are the losses
in a row: a task of the fragment that finishes anywhere ends the row. Losses of several devices
under one event outside (a switch, a power cut) count once: a trial that began before the last
counted loss is not counted again. A device that drains, leaves in order. One that returns in the
same incarnation has lost its connection, not its process: its loss is not counted any more.

One bad item may kill the devices that run it: it is given up first (`tasks`), so losses at first
tasks are allowed that many times more. From the second loss on, a suspect is loaded, or first run,
alone on its device (`decisions.LOADING`), so that no other fragment is blamed for it.
"""

from collections.abc import Collection
from typing import NamedTuple

from shoal_coordinator.dispatch.device import Crashes, Device, Loss
from shoal_coordinator.dispatch.events import DeviceJoined, Failure, FailureKind
from shoal_coordinator.dispatch.jobs import end_job
from shoal_coordinator.dispatch.state import Running, StageQueue, State
from shoal_protocol.digests import Digest
from shoal_protocol.units import Nanoseconds, counted


class Trial(NamedTuple):
    """A fragment that a device loads, or runs for the first time in this session."""

    digest: Digest
    since: Nanoseconds
    loading: bool


def discount_reconnected(state: State, event: DeviceJoined) -> None:
    """A device joins: if its process is one that was lost, it did not crash."""
    for crashes in state.crashes.values():
        crashes.losses = [
            loss
            for loss in crashes.losses
            if (loss.device, loss.incarnation) != (event.device, event.incarnation)
        ]


def trials(state: State, device: Device) -> list[Trial]:
    """What the loss of the device may be blamed on; a load rather than a first task."""
    loading, work = device.memory.loading, device.work
    if device.draining:
        return []
    if loading is not None:
        return [Trial(loading.digest, loading.since, loading=True)]
    first: dict[Digest, Trial] = {}
    for pending in state.pending.values():
        if isinstance(pending, Running) and pending.device is device:
            digest = pending.task.queue.service.digest
            if digest not in work.times:
                first.setdefault(digest, Trial(digest, pending.since, loading=False))
    return list(first.values())


def note_loss(state: State, device: Device, tried: list[Trial]) -> None:
    """The device was lost during these trials; a fragment with too many losses fails its jobs."""
    for digest, since, loading in tried:
        if digest not in state.by_digest:
            continue  # no job uses it any more
        crashes = state.crashes.setdefault(digest, Crashes())
        if since < crashes.counted_at:
            continue
        crashes.counted_at = state.now
        crashes.losses.append(Loss(device.name, device.incarnation, loading))
        while_loading = sum(loss.loading for loss in crashes.losses)
        at_first_task = len(crashes.losses) - while_loading
        users = [queue for service in state.by_digest[digest] for queue in service.queues]
        bound = state.limits.load_losses
        if while_loading >= bound or at_first_task > bound + _by_one_item(state, users):
            _fail_jobs(state, users, device, crashes.losses)


def _by_one_item(state: State, users: list[StageQueue]) -> int:
    """How many losses at first tasks one bad item may cause before it fails."""
    return state.limits.kills + max((user.job.spec.backoff_limit for user in users), default=0)


def _fail_jobs(
    state: State, users: list[StageQueue], device: Device, losses: Collection[Loss]
) -> None:
    times = counted(len(losses), "time")
    devices = counted(len({loss.device for loss in losses}), "device")
    for queue in users:
        if queue.job.ended_at is None:
            message = (
                f"fragment {queue.stage} of {queue.job.spec.name} ended agents {times} in a row, "
                f"on {devices}, while they loaded it or ran it for the first time, at last on "
                f"{device.name}: give it more memory, which they may have lacked; if that is no "
                "help, see the log of its agent, and load the model with ONNX Runtime there"
            )
            end_job(state, queue.job, Failure(kind=FailureKind.RUNTIME, message=message))
