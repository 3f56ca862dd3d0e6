"""The tables of residency, row by row: each with a situation that it alone decides."""

from dataclasses import dataclass, field, replace

import pytest

from coordinator.dispatch.driving import MIB, chain, digest, job
from shoal_coordinator.dispatch.decisions import (
    EVICTION,
    LOADING,
    PREEMPTION,
    SPARING,
    EvictionCase,
    LoadCase,
    PreemptionCase,
    SparingCase,
    brings_work,
    decide,
)
from shoal_coordinator.dispatch.device import Backoff, Crashes, Device, Loss, Tally, new_device
from shoal_coordinator.dispatch.events import DeviceJoined, Failure, FailureKind, JobSpec, Policy
from shoal_coordinator.dispatch.instructions import Tier
from shoal_coordinator.dispatch.item_sets import ItemSet
from shoal_coordinator.dispatch.servers import add_server
from shoal_coordinator.dispatch.state import (
    Job,
    Loading,
    Service,
    StageQueue,
    State,
    new_state,
)
from shoal_protocol.units import Bytes, Nanoseconds, nanoseconds

NOW = nanoseconds(100)
LATELY = nanoseconds(99.9)
LONG_AGO = nanoseconds(10)


def job_of(spec: JobSpec, waiting: int = 0) -> Job:
    """A job with items that wait for each stage but the first."""
    owner = Job(
        spec=spec,
        submitted_at=NOW,
        items=spec.items,
        open_ended=False,
        completed=ItemSet(),
        open=100,
        window=8,
    )
    for index, stage in enumerate(spec.stages):
        service = Service(
            digest=stage.digest,
            resident=stage.resident_bytes,
            least=stage.least_bytes,
            homes=(),
            granted={},
            policy=Policy.FIFO,
        )
        queue = StageQueue(
            job=owner,
            stage=index,
            spec=stage,
            service=service,
            predecessors=stage.predecessors,
            consumers=(),
            waiting=waiting if index else 0,
        )
        service.queues.append(queue)
        owner.queues.append(queue)
    return owner


@dataclass(kw_only=True)
class Facts:
    """A device with `a` resident, which `user` serves, and `claimant`, whose fragment is `c`.

    The claimant comes second in a chain, after a stage that no device serves. `one_job`: both are
    of its job, and the device is its home.
    """

    user_waiting: int = 0
    user_priority: int = 0
    user_elsewhere: bool = False
    work_comes: bool = False
    used_at: Nanoseconds = LATELY
    tasks_given: bool = False
    no_user: bool = False
    claimant_waiting: int = 1
    claimant_priority: int = 0
    claimant_served: bool = False
    starving_since: Nanoseconds = LATELY
    preempted_by: str = ""
    loaded_at: Nanoseconds = LATELY
    budget_mib: int = 12
    least_mib: int = 10
    cached: bool = False
    disk_full: bool = False
    failed: bool = False
    moving: bool = False
    resident: bool = False
    suspect: bool = False
    one_job: bool = False
    state: State = field(default_factory=new_state)

    def __post_init__(self) -> None:
        state = self.state
        state.now = NOW
        self.user = self._service("ba", self.user_priority, self.user_waiting)
        self.claimant = self._service("dc", self.claimant_priority, self.claimant_waiting)
        self.claimant.starving_since = self.starving_since
        self.device = self._device("here", resident="c" if self.resident else "a")
        other = self._device("other", resident="a")
        if self.one_job:
            self.user.queues[0].job = self.claimant.queues[0].job
            self.claimant.homes = ("here",)
        add_server(self.user, self.device)
        if not self.no_user:
            state.by_digest[digest("a")] = [self.user]
        if self.user_elsewhere:
            add_server(self.user, other)
        if self.claimant_served:
            add_server(self.claimant, other)
        if self.work_comes:
            self.user.queues[0].job.queues[0].running = 1
        self._set_device()

    def _set_device(self) -> None:
        device = self.device
        device.work.used_at[digest("a")] = self.used_at
        device.memory.loaded_at = self.loaded_at
        if self.tasks_given:
            device.work.in_use[digest("a")] = 1
        if self.preempted_by:
            device.preempted_by = getattr(self, self.preempted_by)
        if self.cached:
            device.disk.cached[digest("c")] = None
        if self.disk_full:
            device.disk.full_until = Nanoseconds(NOW + 1)
        if self.failed:
            failure = Failure(kind=FailureKind.CORRUPT, message="it went wrong")
            device.health.backoffs[digest("c")] = Backoff(Nanoseconds(NOW + 1), 1, failure)
        if self.suspect:
            losses = [Loss("other", incarnation, loading=True) for incarnation in (1, 2)]
            self.state.crashes[digest("a")] = Crashes(losses=losses)
        if self.moving:
            device.memory.loading = Loading(device, digest("z"), Bytes(1), Bytes(1), Tier.IDLE, NOW)

    def _device(self, name: str, resident: str) -> Device:
        joined = DeviceJoined(
            at=NOW,
            device=name,
            session=1,
            budget=Bytes(self.budget_mib * MIB),
            resident={digest(resident): Bytes(10 * MIB)},
        )
        tally = Tally(joined.budget)
        return new_device(joined, order=len(name), tally=tally, slots=2)

    def _service(self, names: str, priority: int, waiting: int) -> Service:
        """The service of the second of two stages, with a window of eight items."""
        stages = chain(*names, least_mib=self.least_mib)
        spec = job(stages, 100, name=names, priority=priority)
        return job_of(spec, waiting).queues[1].service

    def sparing(self) -> SparingCase:
        """Can the user spare the device?"""
        return SparingCase(self.state, self.claimant, self.device, self.user)

    def eviction(self) -> EvictionCase:
        """May `a` go for `c`?"""
        return EvictionCase(self.state, self.claimant, self.device, digest("a"))

    def loading(self) -> LoadCase:
        """How can `c` be loaded?"""
        return LoadCase(self.state, self.claimant, self.device)

    def preemption(self) -> PreemptionCase:
        """May the device be emptied for the claimant?"""
        return PreemptionCase(self.state, self.claimant, self.device)


ELSEWHERE = Facts(user_elsewhere=True, claimant_served=True)
SERVED = Facts(claimant_served=True)
SPARING_ROWS = [
    (Facts(user_waiting=1), False),
    (Facts(one_job=True, claimant_waiting=4, claimant_served=True, user_elsewhere=True), True),
    (Facts(user_elsewhere=True), True),
    (replace(ELSEWHERE, used_at=LONG_AGO, state=new_state()), True),
    (ELSEWHERE, False),
    (SERVED, False),
    (Facts(user_waiting=1, claimant_priority=1), True),
    (Facts(work_comes=True, claimant_waiting=4), True),
    (Facts(work_comes=True, claimant_waiting=3, starving_since=LONG_AGO), True),
    (Facts(work_comes=True, claimant_waiting=3), False),
    (Facts(claimant_waiting=3), True),
]
EVICTION_ROWS = [
    (Facts(tasks_given=True, no_user=True), False),
    (Facts(no_user=True, claimant_waiting=0), True),
    (Facts(user_waiting=1, claimant_waiting=0, preempted_by="claimant"), True),
    (Facts(claimant_waiting=0), False),
    (Facts(user_waiting=1), False),
    (Facts(), True),
]
LOADING_ROWS = [
    (Facts(resident=True, moving=True), None),
    (Facts(moving=True, budget_mib=24), None),
    (Facts(preempted_by="user", budget_mib=24), None),
    (Facts(failed=True, budget_mib=24), None),
    (Facts(suspect=True, tasks_given=True, disk_full=True, budget_mib=24), None),
    (Facts(disk_full=True, budget_mib=24), None),
    (Facts(cached=True, disk_full=True, budget_mib=24), Tier.CACHED),
    (Facts(budget_mib=24, no_user=True), Tier.IDLE),
    (Facts(no_user=True, budget_mib=14, least_mib=4, cached=True), Tier.EVICT),
    (Facts(budget_mib=14, least_mib=4, cached=True), Tier.CACHED),
    (Facts(budget_mib=14, least_mib=4), Tier.IDLE),
    (Facts(cached=True), Tier.EVICT),
    (Facts(user_waiting=1), None),
]
PREEMPTION_ROWS = [
    (Facts(claimant_priority=1), True),
    (Facts(user_priority=1, starving_since=LONG_AGO, loaded_at=LONG_AGO), False),
    (Facts(one_job=True, starving_since=LONG_AGO, loaded_at=LONG_AGO), False),
    (Facts(loaded_at=LONG_AGO), False),
    (Facts(starving_since=LONG_AGO, loaded_at=LONG_AGO), True),
    (Facts(starving_since=LONG_AGO), False),
]


@pytest.mark.parametrize("row", range(len(SPARING)), ids=lambda row: SPARING[row].reason)
def test_a_service_can_spare_a_device_or_not(row: int) -> None:
    facts, verdict = SPARING_ROWS[row]
    rule = decide(SPARING, facts.sparing())
    assert (rule.reason, rule.verdict) == (SPARING[row].reason, verdict)


@pytest.mark.parametrize(("task_seconds", "is_next"), [(0.4, False), (0.6, True)])
def test_a_home_takes_its_turn_where_its_batch_waits_longer_than_a_load_takes(
    task_seconds: float, is_next: bool
) -> None:
    facts = Facts(one_job=True, claimant_waiting=4, claimant_served=True)
    (other,) = facts.claimant.servers
    other.work.times[digest("c")] = nanoseconds(task_seconds)
    facts.claimant.fastest = other
    facts.device.memory.load_took = nanoseconds(2)
    assert facts.sparing().is_next == is_next


@pytest.mark.parametrize("row", range(len(EVICTION)), ids=lambda row: EVICTION[row].reason)
def test_a_fragment_may_go_or_not(row: int) -> None:
    facts, verdict = EVICTION_ROWS[row]
    rule = decide(EVICTION, facts.eviction())
    assert (rule.reason, rule.verdict) == (EVICTION[row].reason, verdict)


@pytest.mark.parametrize("row", range(len(LOADING)), ids=lambda row: LOADING[row].reason)
def test_a_fragment_can_be_loaded_in_one_way_or_not_at_all(row: int) -> None:
    facts, verdict = LOADING_ROWS[row]
    rule = decide(LOADING, facts.loading())
    assert (rule.reason, rule.verdict) == (LOADING[row].reason, verdict)


@pytest.mark.parametrize("row", range(len(PREEMPTION)), ids=lambda row: PREEMPTION[row].reason)
def test_a_device_may_be_preempted_or_not(row: int) -> None:
    facts, verdict = PREEMPTION_ROWS[row]
    rule = decide(PREEMPTION, facts.preemption())
    assert (rule.reason, rule.verdict) == (PREEMPTION[row].reason, verdict)


def test_work_is_looked_for_once_in_each_stage_however_many_ways_there_are() -> None:
    stages = tuple(
        replace(stage, predecessors=tuple(range(index)))
        for index, stage in enumerate(chain(*(f"{number:02}" for number in range(64))))
    )
    queues = job_of(job(stages, 100)).queues
    assert not brings_work(queues[-1]), "two to the power of 62 ways lead here"
    queues[0].running = 1
    assert brings_work(queues[-1])
    assert not brings_work(queues[0])
