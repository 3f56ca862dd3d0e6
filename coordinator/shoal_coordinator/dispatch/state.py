"""What the dispatcher knows, as one value that its caller owns.

    State --- jobs ---> Job --- queues ---> StageQueue (one stage of the job) --- service ---+
      |                  '---- active ---> Item ---- tasks ---> Task (item x stage)   |
      |                                                                               v
      +----- devices --> Device --- listed ---------------------------------------> Service

A *service* is a fragment under a plan: its digest, the devices that the plan gives it, what these
grant it, and the policy that ranks them. Stages of several jobs that agree in these share one, and
so share residency.

The state is changed in place: a functional update would copy thousands of entries for each of
20,000 tasks a second. The price is a rule: only `machine.step` changes a state, and no caller holds
parts of it across a step.

Everything that is iterated is a list or a dict (insertion order), never a set of objects: the same
events give the same instructions in every run.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TypeAlias

from shoal_coordinator.dispatch.crowding import Crowding
from shoal_coordinator.dispatch.device import Crashes, Device, Rank, Refusals, Tally
from shoal_coordinator.dispatch.events import Failure, JobSpec, Policy, Stage
from shoal_coordinator.dispatch.histogram import Histogram
from shoal_coordinator.dispatch.instructions import Instruction, Tier
from shoal_coordinator.dispatch.item_sets import ItemSet
from shoal_coordinator.dispatch.limits import Limits as Limits  # noqa: PLC0414 (offered from here)
from shoal_coordinator.dispatch.timings import ItemTiming, Slowest, TaskTiming
from shoal_protocol.digests import Digest
from shoal_protocol.seen_sizes import Sizes
from shoal_protocol.units import Bytes, Nanoseconds


class JobPhase(StrEnum):
    """Where a job is: no task given yet, under way, or ended in one of two ways."""

    PENDING = "Pending"
    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"


class Status(IntEnum):
    """Of a task. READY means: counted in its queue's `waiting`."""

    WAITING = 0
    READY = 1
    RUNNING = 2
    FINISHED = 3


WAITING, READY, RUNNING, FINISHED = Status  # a task reads them twenty times: without a look-up


@dataclass(slots=True, eq=False, kw_only=True)
class Service:
    """A fragment under a plan.

    `servers` can take a task now or when a slot is free; `ranks` is the heap that orders them. The
    fragment is on its way to `loading`; the disks of `dropped_by` gave it up for others. `homes_up`
    counts homes that have joined and can load it; without one, any device may serve. `preempting`
    is the device that empties itself for this service.
    """

    digest: Digest
    resident: Bytes
    least: Bytes
    homes: tuple[str, ...]
    granted: dict[str, Bytes]
    policy: Policy
    queues: list["StageQueue"] = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)
    servers: dict[Device, None] = field(default_factory=dict)
    loading: dict[Device, None] = field(default_factory=dict)
    dropped_by: set[Device] = field(default_factory=set)
    homes_up: int = 0
    homes_awaited_until: Nanoseconds = Nanoseconds(0)
    fastest: Device | None = None
    preempting: Device | None = None
    starving_since: Nanoseconds | None = None

    @property
    def key(self) -> "ServiceKey":
        return self.digest, self.homes, tuple(self.granted.items()), self.policy

    @property
    def unserved(self) -> bool:
        """Whether no device serves it, and none loads its fragment."""
        return not self.servers and not self.loading

    @property
    def waiting(self) -> int:
        """Ready tasks that no device has been given."""
        return sum(queue.waiting for queue in self.queues)

    @property
    def wanted(self) -> bool:
        """Whether there is, or soon will be, something for it to do."""
        return any(
            queue.wanted and (queue.coming > 0 or queue.job.spec.holds) for queue in self.queues
        )

    @property
    def held(self) -> bool:
        """Whether no job has items for it: then it is loaded on its homes, and nowhere else."""
        return all(queue.job.spec.holds for queue in self.queues)

    @property
    def priority(self) -> int:
        return max(queue.job.spec.priority for queue in self.queues)


@dataclass(slots=True, eq=False, kw_only=True)
class StageQueue:
    """One stage of one job: who waits, who has passed.

    `ready` contains every ready task, `reserved` those reserved for a device that is full; a task
    may be in both, and one that is not READY any more is skipped. Those that wait for the device
    where their item stays, `kept` of each, are in `reserved` alone (`turns`). `passed` counts items
    that have finished here and not ended. `wanted` is set when a task before it was given: its
    fragment is needed soon. `moved_bytes` is what one task takes or makes at most, where that is
    known. `overtime` counts tasks that were stopped at their deadline since one finished.
    `served_by` are the devices that served it at the end.
    """

    job: "Job"
    stage: int
    spec: Stage
    service: Service
    predecessors: tuple[int, ...]
    consumers: tuple[int, ...]
    wanted: bool = False
    moved_bytes: int = 0
    ready: deque["Task"] = field(default_factory=deque)
    reserved: dict[Device, list["Task"]] = field(default_factory=dict)
    kept: dict[Device, int] = field(default_factory=dict)
    waiting: int = 0
    running: int = 0
    finished: int = 0
    passed: int = 0
    overtime: int = 0
    times: Histogram = field(default_factory=Histogram)
    time_on: dict[str, int] = field(default_factory=dict)
    """Measured nanoseconds of a task, by device, smoothed."""
    served_by: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """Who serves it, or served it at its end."""
        return self.served_by or tuple(device.name for device in self.service.servers)

    @property
    def coming(self) -> int:
        """Items that have yet to be given here, as far as anybody knows."""
        return self.job.open - self.passed - self.running


@dataclass(slots=True, eq=False)
class Task:
    """One item at one stage.

    `ready_at` is when it became READY last. `device` runs it; `holder` has its output, until it is
    released or lost. `reserved_on` is the device named for it on a route, `excluded` the one where
    it failed last; `kept`: it waits for `reserved_on` alone. `inputs` says, by producer, on which
    device a copy for this task is (or will be) beside the holder's own. `ran` is how its last try
    went. `ahead`: it was given before its producer has answered (see `assignment`). `outgrown`: no
    budget was enough for its last try; `refusals` of its item (see `larger_items`).
    """

    item: "Item"
    queue: StageQueue
    status: Status = WAITING
    instruction: int = 0
    ready_at: Nanoseconds = Nanoseconds(0)
    device: Device | None = None
    holder: Device | None = None
    reserved_on: Device | None = None
    kept: bool = False
    excluded: Device | None = None
    inputs: dict[int, Device] | None = None
    attempts: int = 0
    missing: int = 0
    reported: bool = False
    ahead: bool = False
    outgrown: bool = False
    refusals: Refusals | None = None
    ran: TaskTiming | None = None


@dataclass(slots=True, eq=False)
class Item:
    """One input on its way. `failures` are its tries, `kills` the devices that died with it;
    `travels_as` is the instruction while it travels, else 0. `stays_on`: the device whose loads in
    turn it shares (`turns`). `refused_alone`: the last device that
    had no room for it had nothing else; `set_backs` of it so far (`full_devices`)."""

    job: "Job"
    index: int
    epoch: int
    results_left: int
    tasks: list[Task] = field(default_factory=list)
    started_at: Nanoseconds | None = None
    failures: int = 0
    kills: int = 0
    retries: int = 0
    storing: bool = False
    ended: bool = False
    travels_as: int = 0
    stays_on: Device | None = None
    refused_alone: bool = False
    set_backs: int = 0
    orphan_copies: list[tuple[Device, int]] = field(default_factory=list)

    def timing(self, started_at: Nanoseconds, until: Nanoseconds) -> ItemTiming:
        """How its tasks went that have ended."""
        ran = tuple(task.ran for task in self.tasks if task.ran is not None)
        return ItemTiming(self.index, started_at, until, self.retries, ran)


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """A job in progress. It has `items` so far, and may get more if it is `open_ended`: its spec
    says what it began with. `open` are those that have not ended, admitted or not. `completed`
    are those whose results existed before, `skipped` these and those that are not tried again,
    `succeeded` those of this run; `latency` of an item lasts from its first task's start to its
    result. `routed` are the devices of each stage on the `routes`; there are new ones not before
    `route_after`, which is later with each of `route_failures`; `travelling` items are on routes;
    `devices` have been given, or are to be sent, something of it.
    The devices of `in_turn` load its fragments in turn, from that stage on; so many items are
    `staying` on each of them.
    Stages up to `open_stages` may begin: all of them, unless the mode is Barrier. `outgrown`:
    fragments that an item needed more for than any device has, with the most that was measured;
    `seen`: the largest sizes that items had there, where no plan knows them.
    """

    spec: JobSpec
    submitted_at: Nanoseconds
    items: int
    open_ended: bool
    completed: ItemSet
    skipped: ItemSet = field(default_factory=ItemSet)
    queues: list[StageQueue] = field(default_factory=list)
    results: frozenset[int] = frozenset()
    active: dict[int, Item] = field(default_factory=dict)
    again: deque[int] = field(default_factory=deque)
    next_item: int = 0
    open: int = 0
    window: int = 0
    in_turn: dict[str, int] = field(default_factory=dict)
    staying: dict[Device, int] = field(default_factory=dict)
    crowding: Crowding = field(default_factory=Crowding)
    storing: int = 0
    open_stages: int = 0
    succeeded: int = 0
    failed: int = 0
    outgrown: dict[int, int] = field(default_factory=dict)
    seen: Sizes = field(default_factory=dict)
    retries: int = 0
    tiers: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    started_at: Nanoseconds | None = None
    ended_at: Nanoseconds | None = None
    failures: list[tuple[int, Failure]] = field(default_factory=list)
    failure: Failure | None = None
    routes: "tuple[Route, ...]" = ()
    routed: list[frozenset[Device]] = field(default_factory=list)
    route_after: Nanoseconds = Nanoseconds(0)
    route_failures: int = 0
    travelling: int = 0
    devices: dict[str, None] = field(default_factory=dict)
    latency: Histogram = field(default_factory=Histogram)
    slowest: Slowest = field(default_factory=Slowest)

    @property
    def phase(self) -> JobPhase:
        if self.ended_at is not None:
            return JobPhase.COMPLETE if self.failure is None else JobPhase.FAILED
        return JobPhase.PENDING if self.started_at is None else JobPhase.RUNNING


# ---- instructions that wait for their answer -----------------------------------------------------


@dataclass(slots=True, eq=False)
class Running:
    """Execute. `routes` are the consumers named in it; those of `spent` were given ahead and have
    failed, perhaps after they had used up what was sent to them. `void`: it was cancelled, because
    of `blame` if that is set (what failed was a Forward to it)."""

    device: Device
    task: Task
    since: Nanoseconds
    routes: tuple[tuple[int, Device], ...] = ()
    spent: tuple[int, ...] = ()
    void: bool = False
    blame: Failure | None = None


@dataclass(slots=True, eq=False)
class Loading:
    """Load. `granted` is what the fragment gets, `size` what is reckoned for it. `void`: it was
    cancelled, as no job had a use for it."""

    device: Device
    digest: Digest
    granted: Bytes
    size: Bytes
    tier: Tier
    since: Nanoseconds
    void: bool = False


@dataclass(slots=True, eq=False)
class Unloading:
    device: Device
    digest: Digest
    since: Nanoseconds


@dataclass(slots=True, eq=False)
class Prefetching:
    """Prefetch; `void` as with `Loading`."""

    device: Device
    digest: Digest
    since: Nanoseconds
    void: bool = False


@dataclass(slots=True, eq=False)
class Forwarding:
    """Forward, for the Execute numbered `waiter`."""

    device: Device
    target: Device
    producer: Task
    consumer: Task
    waiter: int
    since: Nanoseconds


@dataclass(slots=True, eq=False)
class Route:
    """A device for each stage of a job, for items that travel. `unanswered` are the Plans that its
    devices have not answered `since` then, `stages_on` counts stages by device."""

    number: int
    job: Job
    devices: tuple[Device, ...]
    since: Nanoseconds
    unanswered: set[int] = field(default_factory=set)
    stages_on: Counter[Device] = field(init=False)

    def __post_init__(self) -> None:
        self.stages_on = Counter(self.devices)


@dataclass(slots=True, eq=False)
class Planning:
    """Plan."""

    device: Device
    route: Route
    since: Nanoseconds


@dataclass(slots=True, eq=False)
class Travelling:
    """Travel. `tasks` are those of the item, and all of them run; `device` is the first."""

    device: Device
    route: Route
    tasks: list[Task]
    item: Item
    since: Nanoseconds


Pending = Running | Loading | Unloading | Prefetching | Forwarding | Planning | Travelling


@dataclass(slots=True)
class Worklist:
    """What the event of this step has made necessary and is not done yet: one list for each
    phase of `machine.step`. Every module adds to it; `machine` alone has it drained, and it is
    empty between steps.

    `admitting`: jobs that may have room for further items. `ready`: tasks whose last input may have
    come; `rerun`: tasks that must run again. `passed`: tasks that have just finished. `lost`: tasks
    whose device was lost, and why. `freed`: devices with a free slot; `everything` adds all devices
    and all unmet services. `stored`: jobs of which an item has left the devices. `services`: those
    that may need another device.
    """

    admitting: list[Job] = field(default_factory=list)
    ready: list[Task] = field(default_factory=list)
    rerun: list[Task] = field(default_factory=list)
    passed: list[Task] = field(default_factory=list)
    lost: deque[tuple[Task, Failure]] = field(default_factory=deque)
    freed: list[Device] = field(default_factory=list)
    everything: bool = False
    stored: list[Job] = field(default_factory=list)
    services: list[Service] = field(default_factory=list)


ServiceKey: TypeAlias = tuple[Digest, tuple[str, ...], tuple[tuple[str, Bytes], ...], Policy]


@dataclass(slots=True, eq=False, kw_only=True)
class State:
    """Everything. `unmet` are services with more work than devices: each Tick considers them.
    `obstructed` are jobs that could travel but for tasks of others, and since when; `set_back` are
    tasks that give others their room (`full_devices`), and until when at least."""

    limits: Limits
    now: Nanoseconds = Nanoseconds(0)
    jobs: dict[str, Job] = field(default_factory=dict)
    ended: dict[str, Job] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)
    tallies: dict[str, Tally] = field(default_factory=dict)
    services: dict[ServiceKey, Service] = field(default_factory=dict)
    by_digest: dict[Digest, list[Service]] = field(default_factory=dict)
    holders: dict[Digest, dict[Device, None]] = field(default_factory=dict)
    crashes: dict[Digest, Crashes] = field(default_factory=dict)
    pending: dict[int, Pending] = field(default_factory=dict)
    unmet: dict[Service, None] = field(default_factory=dict)
    obstructed: dict[Job, Nanoseconds] = field(default_factory=dict)
    worklist: Worklist = field(default_factory=Worklist)
    delayed: list[tuple[Nanoseconds, int, Task]] = field(default_factory=list)
    set_back: dict[Task, Nanoseconds] = field(default_factory=dict)
    refreshed_at: Nanoseconds = Nanoseconds(0)
    telemetry_changed: bool = False
    slots_changed: bool = False
    counter: int = 0
    out: list[Instruction] = field(default_factory=list)

    def next_number(self) -> int:
        """A number that was not given before; of instructions, and of orders in general."""
        self.counter += 1
        return self.counter


def new_state(limits: Limits | None = None) -> State:
    return State(limits=limits or Limits())
