"""What the dispatcher receives. Each event carries when it happened; an answer carries which
instruction it answers. An answer to an instruction that is void is ignored."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from shoal_protocol.choices import Mode as Mode  # noqa: PLC0414 (offered from here as well)
from shoal_protocol.choices import Policy as Policy  # noqa: PLC0414 (offered from here as well)
from shoal_protocol.digests import Digest
from shoal_protocol.partition import Outgrown
from shoal_protocol.seen_sizes import Sizes
from shoal_protocol.units import Bytes, Nanoseconds


class FailureKind(StrEnum):
    """Why an instruction failed; what the dispatcher does about it depends on this alone."""

    BUDGET = "Budget"
    UNAVAILABLE = "Unavailable"
    CORRUPT = "Corrupt"
    DISK_FULL = "DiskFull"
    INVALID_INPUT = "InvalidInput"
    RUNTIME = "Runtime"
    MISSING_ACTIVATION = "MissingActivation"
    CANCELLED = "Cancelled"
    DEADLINE = "Deadline"
    UNREACHABLE = "Unreachable"
    NOT_RESIDENT = "NotResident"
    OUTPUT = "Output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure as a value; `need` and `have` are set for BUDGET, `device` if one reported it.
    `outgrown` are the job's fragments that fit on no device; `seen` the sizes that the task's item
    had on its way, where no plan knows them."""

    kind: FailureKind
    message: str
    need: Bytes | None = None
    have: Bytes | None = None
    device: str = ""
    outgrown: tuple[Outgrown, ...] = ()
    seen: Sizes = field(default_factory=dict)


Failures = Mapping[int, Failure]
"""By item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A fragment's place in a job.

    `predecessors` are the stages whose outputs it needs; `takes_model_inputs` says that it needs
    some of the model's inputs, `gives_results` that some of its outputs are the model's. `homes`
    are the devices that the plan gives it, best first; none: any device. `granted` is what the plan
    grants it on devices that give it less than `resident_bytes`: there it runs in blocks, for which
    it needs `least_bytes`. `output_bytes` is per item. `predicted` is how long the plan says that a
    task takes on a device. `batch` items that wait on a device may run there at once, and each of
    them but one takes `batch_item_bytes` more.
    """

    digest: Digest
    resident_bytes: Bytes
    least_bytes: Bytes
    predecessors: tuple[int, ...] = ()
    takes_model_inputs: bool = False
    gives_results: bool = False
    homes: tuple[str, ...] = ()
    granted: tuple[tuple[str, Bytes], ...] = ()
    output_bytes: Bytes | None = None
    predicted: tuple[tuple[str, Nanoseconds], ...] = ()
    batch: int = 1
    batch_item_bytes: Bytes = Bytes(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A bounded piece of work: `items` inputs through `stages`, which are in topological order.

    An `open_ended` job gets more of them by `ItemsArrived`, and runs until the last have arrived
    and ended, or it is cancelled. Items before `first` have ended in earlier runs. One that `holds`
    has none: its fragments are fetched, and loaded where there is room that no other job needs, on
    their homes.
    """

    name: str
    stages: tuple[Stage, ...]
    items: int
    epoch: int
    mode: Mode = Mode.STREAMING
    policy: Policy = Policy.FIFO
    priority: int = 0
    backoff_limit: int = 3
    deadline: Nanoseconds | None = None
    """A point in time, not a duration."""
    parallelism: int = 0
    """Items on their way at once, at most; 0: as many as keep the devices busy."""
    open_ended: bool = False
    first: int = 0
    holds: bool = False
    light: bool = False
    """What an item takes from stage to stage is so little that it may travel (`itineraries`)."""
    final_cut: bool = False
    """No finer cut is possible: an item that takes more than every device has fails by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Readings of one device; None is unknown, never zero."""

    cpu_fraction: float | None = None
    memory_available: Bytes | None = None
    temperature_celsius: float | None = None
    battery_fraction: float | None = None
    round_trip: Nanoseconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    at: Nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport(_Event):
    """What a session's device says unasked; void once the session is over."""

    device: str
    session: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(_Event):
    """What became of an instruction; void once its device is lost."""

    instruction: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted(_Event):
    """`completed` are the items whose results exist already, `failed` those that failed in an
    earlier run and are not tried again."""

    job: JobSpec
    completed: Set[int] = frozenset()
    failed: Failures = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCancelled(_Event):
    job: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsArrived(_Event):
    """An open-ended job has so many items now, those that have ended among them. `last`: no more
    arrive."""

    job: str
    items: int
    last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceJoined(_Event):
    """A new session of a device. One with a known name replaces the session before, which is lost.

    `incarnation` grows with each start of the device's process: an equal one is a reconnection.
    `resident` maps digests to measured bytes. `single` is residency Single: one fragment at a time.
    """

    device: str
    session: int
    incarnation: int = 0
    budget: Bytes
    single: bool = False
    resident: dict[Digest, Bytes] = field(default_factory=dict)
    cached: frozenset[Digest] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLost(DeviceReport):
    """The session's stream broke. (Silence is for the dispatcher itself to notice.)"""

    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDraining(DeviceReport):
    """The device leaves in order: it takes nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTelemetry(DeviceReport):
    """Also a sign of life. `fetched` counts the bytes of fragments that ever came to the agent: by
    its growth a device that fetches a large one shows progress.
    """

    telemetry: Telemetry
    fetched: Bytes = Bytes(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChanged(DeviceReport):
    """The device has more or less memory from now on; `resident` is what is resident in it, with
    what that counts: what is not among it was given up."""

    budget: Bytes
    resident: Mapping[Digest, Bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswered(DeviceReport):
    """Answers Probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentResident(Answer):
    """Answers Load. `resident` is what was measured, or the estimate where nothing was yet;
    `dropped` have left the disk cache."""

    resident: Bytes
    dropped: frozenset[Digest] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentCached(Answer):
    """Answers Prefetch. `dropped` have left the disk cache."""

    dropped: frozenset[Digest] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentUnloaded(Answer):
    """Answers Unload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentEvicted(DeviceReport):
    """Unasked: the device has evicted a fragment by itself."""

    digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFinished(Answer):
    """Answers Execute. For a stage that gives results they have arrived, and wait for FinishItem.

    `delivered` are the consumers that the activation reached on the routes of Execute. `resident`
    is what the fragment counts on the device from now on; 0: it says nothing.
    """

    compute: Nanoseconds
    delivered: tuple[int, ...] = ()
    resident: Bytes = Bytes(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LegPlanned(Answer):
    """Answers Plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsTravelled(_Event):
    """Answers each Travel of these numbers: all results of these items have arrived, and wait for
    FinishItem. `compute` is what each stage took for one of them, on average."""

    instructions: tuple[int, ...]
    compute: tuple[Nanoseconds, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationForwarded(Answer):
    """Answers Forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionFailed(Answer):
    """Answers Load, Unload, Prefetch, Execute, Forward, Plan or Travel."""

    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsStored(_Event):
    """Answers the FinishItem of each of these items: the results are safe, or `failure` says why
    they could not be written."""

    job: str
    items: tuple[int, ...]
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputUnreadable(_Event):
    """The item's input cannot be read or does not suit the model: the item fails, without retry."""

    job: str
    item: int
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(_Event):
    """Time has passed. Comes at least every `TICK_INTERVAL`."""


TICK_INTERVAL: Final = Nanoseconds(250_000_000)

Event = (
    JobSubmitted
    | JobCancelled
    | ItemsArrived
    | DeviceJoined
    | DeviceLost
    | DeviceDraining
    | BudgetChanged
    | DeviceTelemetry
    | ProbeAnswered
    | FragmentResident
    | FragmentCached
    | FragmentUnloaded
    | FragmentEvicted
    | TaskFinished
    | LegPlanned
    | ItemsTravelled
    | ActivationForwarded
    | InstructionFailed
    | ItemsStored
    | InputUnreadable
    | Tick
)
