"""What the dispatcher asks for. Those with an `instruction` number are answered by exactly one
event with that number, unless the device is lost first: then they are void.
"""

from dataclasses import dataclass
from enum import IntEnum

from shoal_coordinator.dispatch.events import Failure
from shoal_protocol.digests import Digest
from shoal_protocol.units import Bytes


class Tier(IntEnum):
    """How well a device suits a task (CROWDio, "4-Tier Affinity Scheduler")."""

    RESIDENT = 1
    CACHED = 2
    IDLE = 3
    EVICT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`peers` are devices that have the fragment on disk, nearest first."""

    instruction: int
    device: str
    digest: Digest
    resident: Bytes
    tier: Tier
    peers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unload:
    instruction: int
    device: str
    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    instruction: int
    device: str
    digest: Digest
    peers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Execute:
    """Run (job, item, stage) on a device where the fragment is resident (the model gate).

    The shell sends the model's inputs to the device if the stage takes them. `routes` are pairs
    (consumer stage, device) known already: the activation leaves at once. `why` is the choice as
    one loggable tuple: (tier, rank, device).
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
    routes: tuple[tuple[int, str], ...] = ()
    why: tuple[int, float, str] = (0, 0.0, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Send the kept activation of (job, item, producer) from `device` to `target` for
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Give up an earlier instruction; that one is then answered. No answer of its own."""

    device: str
    cancelled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Kept activations of (job, item, stage) on a device are not needed any more. No answer."""

    device: str
    job: str
    epoch: int
    item: int
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost:
    """Give up what is on its way from a device to `peer`, which is lost. No answer: what was to
    carry it is answered.
    """

    device: str
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Are you there? Answered by ProbeAnswered, or by silence."""

    device: str
    session: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnect:
    """The device is lost: close its session. If it lives, it will join anew."""

    device: str
    session: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishItem:
    """All results of the item have arrived: write them. Answered by ItemStored."""

    job: str
    epoch: int
    item: int
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailItem:
    """The item has failed for good: note it, drop what arrived of it. No answer."""

    job: str
    item: int
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishJob:
    """Every item has ended (or the job as a whole cannot go on: then `failure` says why)."""

    job: str
    failure: Failure | None = None


Instruction = (
    Load
    | Unload
    | Prefetch
    | Execute
    | Forward
    | Cancel
    | Release
    | PeerLost
    | Probe
    | Disconnect
    | FinishItem
    | FailItem
    | FinishJob
)
