"""What reconcilers see: our objects parsed, foreign ones reduced to what a decision needs.

None for a foreign object means that it is not there; a coordinator that cannot be reached is
`Unreachable`, which is never the same as empty.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from shoal_operator.api.kinds import (
    Device,
    DevicePool,
    InferenceJob,
    Model,
    Partition,
    Placement,
)
from shoal_operator.api.partition import PartitionDocument
from shoal_operator.reconcile.settings import OperatorSettings
from shoal_protocol.units import Bytes


class WorkerPhase(StrEnum):
    """How far a worker's pod is."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A `batch/v1` Job of ours.

    `output` is the JSON that a succeeded worker printed on its last line (None where the worker has
    nothing to say). `message` says why it failed or waits: the pod's own last words, or the
    scheduler's. `refused`: it failed for good, because of what it was given.
    """

    name: str
    phase: WorkerPhase
    output: bytes | None = None
    message: str = ""
    refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A Deployment or DaemonSet of ours: how many pods there should be and are ready, and what the
    trouble is where one is known (image cannot be pulled, OOMKilled, no node fits).
    """

    name: str
    wanted: int
    ready: int
    current: bool
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node: its labels, what pods may allocate, whether it is Ready, whether its taints (key,
    value, effect) keep pods away.
    """

    name: str
    labels: Mapping[str, str]
    allocatable_memory: Bytes
    ready: bool
    taints: tuple[tuple[str, str, str], ...] = ()
    architecture: str = ""


class DeviceState(StrEnum):
    """How a coordinator sees a device."""

    READY = "Ready"
    SILENT = "Silent"
    DRAINING = "Draining"
    LOST = "Lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectedDevice:
    """A device as its pool's coordinator reports it."""

    name: str
    state: DeviceState
    architecture: str
    budget_bytes: Bytes
    floor_bytes: Bytes
    cached_fragments: int
    cached_bytes: Bytes
    silent_seconds: float


class RunState(StrEnum):
    """A job in the coordinator."""

    PENDING = "Pending"
    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"
    CANCELLED = "Cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A job as its coordinator reports it. `failures`: item, input, reason; the first eight."""

    job: str
    state: RunState
    message: str
    epoch: int
    items: int
    active: int
    succeeded: int
    failed: int
    seconds: float
    items_per_second: float
    latency_p50_seconds: float
    tier_hits: tuple[int, int, int, int]
    failures: tuple[tuple[int, str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """A coordinator that does not answer, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorView:
    """What a pool's coordinator says at one moment: its devices, jobs, and fragments in store."""

    devices: tuple[ConnectedDevice, ...]
    runs: Mapping[str, Run]
    fragments: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshot:
    """A Model, and the worker that fetches, verifies and profiles it (`model.worker_name`)."""

    now: str
    settings: OperatorSettings
    model: Model
    worker: Worker | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSnapshot:
    """A Partition with its Model and the worker that cuts it; `document` is kept in a ConfigMap of
    the Partition (`partition.document_name`) once it was cut. `pools` are those of the namespace.
    """

    now: str
    settings: OperatorSettings
    partition: Partition
    model: Model | None
    worker: Worker | None
    document: PartitionDocument | None
    pools: tuple[DevicePool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePoolSnapshot:
    """A DevicePool and everything that it consists of. `secrets`: those of `certificates` that are
    there. `jobs` are the coordinator's names of the namespace's InferenceJobs that still exist.
    """

    now: str
    settings: OperatorSettings
    pool: DevicePool
    nodes: tuple[Node, ...]
    secrets: frozenset[str]
    coordinator: Workload | None
    agents: tuple[Workload, ...]
    view: CoordinatorView | Unreachable
    devices: tuple[Device, ...]
    jobs: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSnapshot:
    """A Placement with what is to be placed and where; `measured` is the last job's Run on it."""

    now: str
    settings: OperatorSettings
    placement: Placement
    partition: Partition | None
    document: PartitionDocument | None
    pool: DevicePool | None
    view: CoordinatorView | Unreachable
    measured: Run | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceJobSnapshot:
    """An InferenceJob, what it refers to (through its Placement), its workers, and how its
    coordinator says it goes. `deliver` puts the fragments into the pool's store, `stage_in` the
    inputs, `stage_out` takes the results to where the user wants them.
    """

    now: str
    settings: OperatorSettings
    job: InferenceJob
    model: Model | None
    partition: Partition | None
    document: PartitionDocument | None
    placement: Placement | None
    pool: DevicePool | None
    deliver: Worker | None
    stage_in: Worker | None
    stage_out: Worker | None
    view: CoordinatorView | Unreachable


Snapshot = (
    ModelSnapshot
    | PartitionSnapshot
    | DevicePoolSnapshot
    | PlacementSnapshot
    | InferenceJobSnapshot
)
