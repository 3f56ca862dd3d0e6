"""What reconcilers see: our objects parsed, foreign ones reduced to what a decision needs.

None for a foreign object means that it does not exist; a coordinator that cannot be reached is
`Unreachable`, which is never the same as empty.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from shoal_api.kinds import Device, DevicePool, InferenceJob, Model, Partition, Placement
from shoal_api.kinds.inference_job import InferenceJobStatus
from shoal_api.kinds.placement import NearState
from shoal_operator.reconcile.agent_pods import AgentPod
from shoal_operator.reconcile.decision import Terms
from shoal_operator.reconcile.names import job_id, pool_of
from shoal_operator.reconcile.settings import OperatorSettings
from shoal_operator.reconcile.volumes import Claim, StoreRoom
from shoal_planner.outcome import Infeasible, Plan
from shoal_planner.planned_cuts import PlannedCut
from shoal_protocol.cut_table import CutTable
from shoal_protocol.partition import Outgrown, PartitionDocument
from shoal_protocol.seen_sizes import Sizes
from shoal_protocol.speeds import UNKNOWN_LINK, UNKNOWN_SPEED, FragmentTimes, Link, Speed
from shoal_protocol.units import Bytes

RECOVERY_SECONDS: Final = 600.0
"""For how long a device counts as over its budget after the last measurement above it."""
_UNSCHEDULABLE: Final = "node.kubernetes.io/unschedulable"


class WorkerPhase(StrEnum):
    """The state of a worker's pod."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A `batch/v1` Job of ours.

    `output` is the JSON that a succeeded worker printed on its last line (None where the worker has
    nothing to say, or its log is gone). `message` says why it failed or waits: the pod's own last
    words, or the scheduler's. `refused`: it failed for good, because of what it was given (exit
    status 2). `no_room`: it found none on the coordinator's volume (exit status 4). `ended_at`:
    when it succeeded or failed; `end_seen`: when this operator has seen that, in seconds of its own
    clock.
    """

    name: str
    phase: WorkerPhase
    output: bytes | None = None
    message: str = ""
    refused: bool = False
    no_room: bool = False
    ended_at: str | None = None
    end_seen: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDocument:
    """What a Partition's ConfigMap holds (`partition.read_document` reads it from the object).

    `recipe` says what was cut and how, without the budget that the planner chose (`recipe_of`);
    `arguments` are those of `shoal partition` that made it, so that it can be made again.
    """

    recipe: str
    arguments: tuple[str, ...]
    document: PartitionDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTable:
    """The table of cuts of a Partition whose cuts are planned, with the recipe that it is of."""

    recipe: str
    table: CutTable


@dataclass(frozen=True, slots=True)
class CutAnswer:
    """Where a Placement has its Partition cut; None: no cut fits its devices."""

    cut: PlannedCut | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A Deployment or DaemonSet of ours: how many pods there should be, are ready, and are of the
    newest template, and what is wrong where that is known (image cannot be pulled, OOMKilled,
    no node fits). `current`: its controller has seen the newest template, and all pods are of it.
    `template` is the mark of the pods' template that was applied (`names.TEMPLATE`), and
    `budget_bytes` its budget. `in_place`: pods stay when the template changes; `current` and
    `updated` say nothing then. `behind_at`: when a Deployment was last seen to be behind, in
    seconds of the operator's own clock.
    """

    name: str
    wanted: int
    ready: int
    current: bool
    updated: int = 0
    template: str = ""
    message: str = ""
    budget_bytes: Bytes = Bytes(0)
    in_place: bool = False
    behind_at: float | None = None

    @property
    def is_behind(self) -> bool:
        """Whether pods are not ready yet, or not of the newest template."""
        return self.ready < self.wanted or not self.current


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

    @property
    def is_cordoned(self) -> bool:
        """Whether it is to get no new work (`kubectl cordon`)."""
        return any(key == _UNSCHEDULABLE for key, _, _ in self.taints)


class DeviceState(StrEnum):
    """How a coordinator sees a device."""

    READY = "Ready"
    SILENT = "Silent"
    DRAINING = "Draining"
    LOST = "Lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """A device was measured above its budget: the highest such measurement since its agent started,
    and how many seconds ago the last one was.
    """

    peak_bytes: Bytes
    budget_bytes: Bytes
    seconds: float

    @property
    def is_recent(self) -> bool:
        """Whether the device still counts as over its budget."""
        return self.seconds < RECOVERY_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectedDevice:
    """A device as its pool's coordinator reports it. `cache_bytes`: what its disk may hold of
    fragments; 0: not known. `has_left`: it is Lost, and its last session ended in order."""

    name: str
    state: DeviceState
    architecture: str
    budget_bytes: Bytes
    floor_bytes: Bytes
    cached_fragments: int
    cached_bytes: Bytes
    silent_seconds: float
    has_left: bool = False
    cache_bytes: Bytes = Bytes(0)
    excess: Excess | None = None
    speed: Speed = UNKNOWN_SPEED
    link: Link = UNKNOWN_LINK
    times: FragmentTimes = ()


class RunState(StrEnum):
    """A job in the coordinator."""

    PENDING = "Pending"
    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"
    CANCELLED = "Cancelled"

    @property
    def is_over(self) -> bool:
        """Whether it has ended, one way or another."""
        return self not in (RunState.PENDING, RunState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A job as its coordinator reports it. `failures`: item, input, reason; the first eight.

    `reason` is the coordinator's one word for why it failed or was cancelled. `plan` and `terms`
    are what it was submitted with last. `completing`: every item has ended, and the results are
    being completed. `following`: more items may come. `started_seconds`: when its first task
    started, by the coordinator's clock, since 1970; 0: none has. `fragment_seconds`: of those that
    ran, their index and the median time of a task in ONNX Runtime. `devices`: those that have run
    tasks of it, whatever the plan. `retry`: which retry of the job
    it is. `outgrown`: fragments for which it failed that fit on no device; `seen`: the largest
    sizes that items had there, where no plan knows them. `final_cut`: it was submitted so.
    """

    job: str
    state: RunState
    message: str
    plan: int
    terms: Terms
    items: int
    active: int
    succeeded: int
    failed: int
    seconds: float
    items_per_second: float
    latency_p50_seconds: float
    tier_hits: tuple[int, int, int, int]
    failures: tuple[tuple[int, str, str], ...] = ()
    devices: tuple[str, ...] = ()
    reason: str = ""
    completing: bool = False
    following: bool = False
    started_seconds: float = 0.0
    fragment_seconds: tuple[tuple[int, float], ...] = ()
    retry: int = 0
    outgrown: tuple[Outgrown, ...] = ()
    seen: Sizes = field(default_factory=dict)
    final_cut: bool = False

    @property
    def known_items(self) -> int | None:
        """How many items it has; None: they are not counted yet, or more come."""
        return None if self.following else self.items or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The coordinator's last answer to `SubmitJob` of this plan on these terms, where asking again
    would bring the same; never that it is busy or away. `other_way`: it runs, with
    other fragments, and may go on with these when it was stopped.
    """

    plan: int
    terms: Terms
    message: str
    retry: int = 0
    other_way: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The coordinator's last answer to `PlaceFragments`: fragment, device and state of each, and
    why nothing more is fetched or loaded, where that is so.
    """

    fragments: tuple[tuple[int, str, NearState], ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """A coordinator that does not answer, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorView:
    """What a pool's coordinator said at one moment: its devices, jobs, and fragments in store.
    `begun`: when it was asked, in seconds of the operator's own clock. `store`: what that has room
    for; None where a coordinator of another version does not say it. `unsubmitted`: jobs that have
    files there, and no run.
    """

    begun: float
    devices: tuple[ConnectedDevice, ...]
    runs: Mapping[str, Run]
    fragments: frozenset[str]
    store: StoreRoom | None = None
    unsubmitted: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    """What every reconciler sees: the time, and how the operator was installed."""

    now: str
    settings: OperatorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshot(_Snapshot):
    """A Model, the workers that carry its uid as the label `shoal.dev/owner-uid`, and the
    Partitions of it.
    """

    model: Model
    workers: tuple[Worker, ...] = ()
    partitions: tuple[Partition, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSnapshot(_Snapshot):
    """A Partition with its Model and the workers that carry its uid as the label
    `shoal.dev/owner-uid`; `document` is what its ConfigMap (`names.document_name`) holds. `pools`
    are those of the namespace, and `placements` those of the Partition, where that says no size;
    `runs`: a job runs by one of these. Where cuts are planned, `table` is what may be chosen from.
    """

    partition: Partition
    model: Model | None
    workers: tuple[Worker, ...] = ()
    document: StoredDocument | None = None
    pools: tuple[DevicePool, ...] = ()
    table: StoredTable | None = None
    placements: tuple[Placement, ...] = ()
    runs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePoolSnapshot(_Snapshot):
    """A DevicePool and everything that it consists of.

    `nodes` are the cluster's. `pods` are those of agents, where one may have another memory limit
    than it should; they are not read each time. `secrets`: those of `certificates` that exist.
    `agents`: every DaemonSet that carries the pool's uid as the label `shoal.dev/owner-uid`. `jobs`
    are the coordinator's names (`names.job_id`) of all InferenceJobs of the namespace that exist
    and are not being deleted, readable or not: what is not among them is cancelled and removed.
    `own_jobs` and `placements` are those on this pool.
    `enrolment_authority`: the certificates (PEM) that agents trust when they enrol, if there are.
    `not_resized`: why the cluster last refused to resize a pod. `taken_names`: the names of
    the Devices of other pools, and `taken_sets` those of their DaemonSets.
    """

    pool: DevicePool
    nodes: tuple[Node, ...]
    secrets: frozenset[str]
    coordinator: Workload | None
    claim: Claim | None
    agents: tuple[Workload, ...]
    view: CoordinatorView | Unreachable
    devices: tuple[Device, ...]
    jobs: frozenset[str]
    own_jobs: tuple[InferenceJob, ...] = ()
    placements: tuple[Placement, ...] = ()
    enrolment_authority: str = ""
    pods: tuple[AgentPod, ...] = ()
    not_resized: str = ""
    taken_names: frozenset[str] = frozenset()
    taken_sets: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSnapshot(_Snapshot):
    """A Placement with what is to be placed and where.

    `measured` is the newest Run on it that its coordinator knows; the controller reconciles again
    when such a Run ends. `cordoned` are the nodes where nothing new is to be placed. Where cuts are
    planned, `table` is what may be chosen from, and `placements` are those of the Partition.
    `beside` are older Placements on the same pool that jobs run by. `cut_answer` and `answer` are
    those to its questions, as far as it has some (`placement.question_of`). `model`,
    `workers` (the Partition's) and `placed` are for a Placement that prefetches. `job_ended`: a job
    made it for itself, and has ended, as have all others that run by it.
    """

    placement: Placement
    partition: Partition | None
    document: StoredDocument | None
    pool: DevicePool | None
    view: CoordinatorView | Unreachable
    measured: Run | None = None
    cordoned: frozenset[str] = frozenset()
    table: StoredTable | None = None
    placements: tuple[Placement, ...] = ()
    beside: tuple[Placement, ...] = ()
    cut_answer: CutAnswer | None = None
    answer: Plan | Infeasible | None = None
    model: Model | None = None
    workers: tuple[Worker, ...] = ()
    placed: Placed | None = None
    job_ended: bool = False

    @property
    def pool_name(self) -> str:
        """The name of the DevicePool."""
        return self.placement.spec.pool_ref.name


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceJobSnapshot(_Snapshot):
    """An InferenceJob, the objects it refers to, its workers, and what its coordinator says of it.

    The objects have the names of `names`: `placement_of`, `partition_of`, `model_of`,
    `pool_of`. `workers` carry the job's uid or its Partition's as the label `shoal.dev/owner-uid`.
    `rivals` are the jobs on the same pool with a higher priority, as long as this one has no run.
    """

    job: InferenceJob
    model: Model | None
    partition: Partition | None
    document: StoredDocument | None
    placement: Placement | None
    pool: DevicePool | None
    view: CoordinatorView | Unreachable
    workers: tuple[Worker, ...] = ()
    refusal: Refusal | None = None
    rivals: tuple[InferenceJob, ...] = ()

    @property
    def before(self) -> InferenceJobStatus:
        """The status that was written last."""
        return self.job.status or InferenceJobStatus()

    @property
    def run(self) -> Run | None:
        """The run as the coordinator knows it; None where it does not, or does not answer."""
        view = self.view
        return None if isinstance(view, Unreachable) else view.runs.get(job_id(self.job))

    @property
    def active_run(self) -> Run | None:
        """The run, if it has not ended."""
        return None if self.run is None or self.run.state.is_over else self.run

    @property
    def pool_name(self) -> str:
        """The name of the job's DevicePool; empty while that is not known."""
        return pool_of(self.job, self.placement) or ""


Snapshot = (
    ModelSnapshot
    | PartitionSnapshot
    | DevicePoolSnapshot
    | PlacementSnapshot
    | InferenceJobSnapshot
)
