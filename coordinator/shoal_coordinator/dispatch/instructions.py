"""What the dispatcher asks for. Those with an `instruction` number are answered by exactly one
event with that number, unless the device is lost first: then they are void.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar, dataclass_transform

from shoal_coordinator.dispatch.events import Failure
from shoal_protocol.digests import Digest
from shoal_protocol.units import Bytes, Nanoseconds

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _instruction(cls: type[_T]) -> type[_T]:
    """A frozen value for the type checker. At run time nothing checks it: `frozen=True` sets each
    field through a call, which is a tenth of what a step costs.
    """
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)


class Tier(IntEnum):
    """How well a device suits a task (CROWDio, "4-Tier Affinity Scheduler")."""

    RESIDENT = 1
    CACHED = 2
    IDLE = 3
    EVICT = 4


@_instruction
class Load:
    """`granted` is what the fragment may take: with less than its `resident_bytes` it runs in
    blocks. `peers` are devices that have it on disk, nearest first. `priority` is the highest of
    the jobs that it serves.
    """

    instruction: int
    device: str
    digest: Digest
    granted: Bytes
    tier: Tier
    peers: tuple[str, ...] = ()
    priority: int = 0


@_instruction
class Unload:
    instruction: int
    device: str
    digest: Digest


@_instruction
class Prefetch:
    instruction: int
    device: str
    digest: Digest
    peers: tuple[str, ...] = ()


@_instruction
class Execute:
    """Run (job, item, stage) on a device where the fragment is resident (the model gate).

    The server sends the model's inputs to the device if the stage takes them. `routes` are pairs
    (consumer stage, device) known already: the activation leaves at once. `waited` lasts from when
    the task was ready. `why` is the choice as one loggable tuple: the rank of the device
    (`device.Rank`), with its name. `ahead`: what makes its input has not ended; the device waits
    for that, and the task has not waited.
    """

    instruction: int
    device: str
    job: str
    epoch: int
    item: int
    stage: int
    digest: Digest
    tier: Tier
    attempt: int
    ahead: bool = False
    waited: Nanoseconds = Nanoseconds(0)
    routes: tuple[tuple[int, str], ...] = ()
    why: tuple[int, float, int, float, int, str] = (0, 0.0, 0, 0.0, 0, "")


@_instruction
class Plan:
    """Let a device take items that run there through the stages from the first up to the last, this
    one not included. `devices` are those of all stages of the route.
    """

    instruction: int
    device: str
    job: str
    epoch: int
    route: int
    stages: tuple[int, int]
    devices: tuple[str, ...]


@_instruction
class Travel:
    """Send an item on a route that was planned; it enters at `device`. Answered by ItemsTravelled;
    any of the devices may answer that it has failed. A Cancel makes its number void, and it is not
    answered then.
    """

    instruction: int
    device: str
    job: str
    epoch: int
    item: int
    route: int
    devices: tuple[str, ...]


@_instruction
class Forward:
    """Send the held activation of (job, item, producer) from `device` to `target` for
    `consumer`.
    """

    instruction: int
    device: str
    target: str
    job: str
    epoch: int
    item: int
    producer: int
    consumer: int


@_instruction
class Cancel:
    """Cancel an earlier instruction; that one is then answered. No answer of its own."""

    device: str
    cancelled: int


@_instruction
class Release:
    """Activations of (job, item, stage) that a device holds are not needed any more. No answer."""

    device: str
    job: str
    epoch: int
    item: int
    stage: int


@_instruction
class ForgetJob:
    """A job has ended, in this epoch: nothing of it is needed any more, its legs and what is still
    on its way to the device included. No answer."""

    device: str
    job: str
    epoch: int


@_instruction
class PeerLost:
    """Abort transfers from a device to `peer`, which is lost. No answer: the instructions that
    requested the transfers are answered.
    """

    device: str
    peer: str


@_instruction
class Probe:
    """Are you there? Answered by ProbeAnswered, or by silence."""

    device: str
    session: int


@_instruction
class Disconnect:
    """The device is lost: close its session. If it is alive, it will join again."""

    device: str
    session: int
    reason: str


@_instruction
class FinishItem:
    """All results of the item have arrived: write them. Answered by ItemsStored."""

    job: str
    epoch: int
    item: int
    attempts: int


@_instruction
class FailItem:
    """The item has failed for good: note it, drop what arrived of it. No answer."""

    job: str
    item: int
    failure: Failure
    attempts: int


@_instruction
class FinishJob:
    """Every item has ended (or the job as a whole cannot go on: then `failure` says why)."""

    job: str
    failure: Failure | None = None


Instruction = (
    Load
    | Unload
    | Prefetch
    | Execute
    | Plan
    | Travel
    | Forward
    | Cancel
    | Release
    | ForgetJob
    | PeerLost
    | Probe
    | Disconnect
    | FinishItem
    | FailItem
    | FinishJob
)
