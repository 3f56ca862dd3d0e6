"""Snapshots: what a decision sees, from the cache and from what is read for it.

Everything is read through a `Reader`, so that an object is reconciled again when a part
of its snapshot changes. What is not watched (pods, claims, Secrets, documents) is read on demand;
where it may still change, the object is requeued.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter
from typing import Final, assert_never

from shoal_api.kinds import AnyKind, Device, DevicePool, InferenceJob, Model, Partition, Placement
from shoal_operator.controller import views
from shoal_operator.controller.agent_pods import AgentPods
from shoal_operator.controller.api import Api
from shoal_operator.controller.cache import (
    ANY,
    WHICH,
    Cache,
    Reader,
    State,
    made_for,
    referring,
)
from shoal_operator.controller.certificates import Certificates
from shoal_operator.controller.clock import now_text
from shoal_operator.controller.coordinators import Coordinators
from shoal_operator.controller.documents import Documents
from shoal_operator.controller.foreign import JobState, NodeState, WorkloadState
from shoal_operator.controller.pods import REQUEUE_SECONDS, Claims, Pods
from shoal_operator.reconcile.certificates import secrets_needed
from shoal_operator.reconcile.job_status import has_ended, is_running
from shoal_operator.reconcile.names import (
    OWNER_UID,
    coordinator_name,
    document_name,
    job_id,
    model_of,
    namespace_of,
    partition_of,
    placement_of,
    pool_of,
    run_id,
    table_name,
    uid_of,
)
from shoal_operator.reconcile.planned_cuts import age, is_planned
from shoal_operator.reconcile.pool_budgets import is_cut_for_pools
from shoal_operator.reconcile.resources import CONFIG_MAP, DAEMON_SET, DEPLOYMENT, JOB, NODE
from shoal_operator.reconcile.settings import OperatorSettings
from shoal_operator.reconcile.snapshot import (
    CoordinatorView,
    DevicePoolSnapshot,
    InferenceJobSnapshot,
    ModelSnapshot,
    Node,
    PartitionSnapshot,
    PlacementSnapshot,
    Run,
    Snapshot,
    StoredDocument,
    StoredTable,
    Unreachable,
    Worker,
    WorkerPhase,
    Workload,
)
from shoal_protocol.choices import Objective

CORDONED_SECONDS: Final = 30.0


@dataclass(slots=True)
class Snapshots:
    """Builds snapshots. `enrolment_authority` gives what agents are to trust when they enrol."""

    api: Api
    cache: Cache
    certificates: Certificates
    coordinators: Coordinators
    settings: OperatorSettings
    enrolment_authority: Callable[[], str] = field(kw_only=True)
    _pods: Pods = field(init=False)
    _agent_pods: AgentPods = field(init=False)
    _claims: Claims = field(init=False)
    _documents: Documents = field(init=False)

    def __post_init__(self) -> None:
        self._pods = Pods(self.api)
        self._agent_pods = AgentPods(self.api)
        self._claims = Claims(self.api)
        self._documents = Documents(self.api)

    async def build(self, value: AnyKind, reader: Reader) -> Snapshot:
        """What is to be decided with about an object. Raises `ApiError`."""
        match value:
            case Model():
                return await self._model(reader, value)
            case Partition():
                return await self._partition(reader, value)
            case DevicePool():
                return await self._pool(reader, value)
            case Placement():
                return await self._placement(reader, value)
            case InferenceJob():
                return await self._job(reader, value)
            case Device():
                raise AssertionError("nothing is ever decided about a Device by itself")
            case _:
                assert_never(value)

    async def _model(self, reader: Reader, model: Model) -> ModelSnapshot:
        return ModelSnapshot(
            now=now_text(),
            settings=self.settings,
            model=model,
            workers=await self._workers(reader, model),
            partitions=reader.all_own(
                Partition, namespace_of(model), referring(model.metadata.name)
            ),
        )

    async def _partition(self, reader: Reader, partition: Partition) -> PartitionSnapshot:
        namespace, for_pools = namespace_of(partition), is_cut_for_pools(partition)
        placements = self._placements(reader, partition)
        return PartitionSnapshot(
            now=now_text(),
            settings=self.settings,
            partition=partition,
            model=reader.own(Model, namespace, partition.spec.model_ref.name),
            workers=await self._workers(reader, partition),
            document=await self._document(reader, partition, fresh=True),
            pools=reader.all_own(DevicePool, namespace) if for_pools else (),
            table=await self._table(reader, partition),
            placements=placements,
            runs=for_pools and self._are_run(namespace, placements),
        )

    async def _pool(self, reader: Reader, pool: DevicePool) -> DevicePoolSnapshot:
        namespace, name = namespace_of(pool), pool.metadata.name
        size = pool.spec.coordinator.storage.size
        claim = await self._claims.claim(namespace, coordinator_name(name), uid_of(pool), size)
        if claim is None or not claim.bound or claim.leaving:
            reader.requeue(REQUEUE_SECONDS)
        coordinator, agents = await self._workloads(
            reader,
            reader.state(DEPLOYMENT.kind, namespace, coordinator_name(name)),
            reader.members((DAEMON_SET.kind, namespace, made_for(uid_of(pool)))),
        )
        snapshot = DevicePoolSnapshot(
            now=now_text(),
            settings=self.settings,
            pool=pool,
            nodes=self._nodes(reader),
            secrets=await self._secrets(reader, pool),
            coordinator=coordinator,
            claim=claim,
            agents=agents,
            view=self._view(reader, namespace, name, views.DEVICES, views.EXCESSES, views.RUNS),
            devices=reader.all_own(Device, namespace, referring(name)),
            jobs=job_ids(reader, self.cache, namespace),
            own_jobs=tuple(self._jobs_on(namespace, name)),
            placements=tuple(
                # Nobody subscribes to them: a thousand jobs have as many.
                each
                for each in self.cache.all_own(Placement, namespace)
                if each.spec.pool_ref.name == name
            ),
            enrolment_authority=self.enrolment_authority(),
            taken_names=frozenset(
                # Nobody subscribes to them: a name that is taken meanwhile is refused.
                each.metadata.name
                for each in self.cache.all_own(Device, namespace)
                if each.spec.pool_ref.name != name
            ),
            taken_sets=sets_of_others(self.cache, pool),
        )
        snapshot = replace(snapshot, pods=await self._agent_pods.read(snapshot))
        if self._agent_pods.are_adopting(snapshot):
            reader.requeue(REQUEUE_SECONDS)
        return snapshot

    async def _placement(self, reader: Reader, placement: Placement) -> PlacementSnapshot:
        namespace, pool = namespace_of(placement), placement.spec.pool_ref.name
        partition = reader.own(Partition, namespace, placement.spec.partition_ref.name)
        view = self._view(reader, namespace, pool, views.FLEET, views.EXCESSES)
        snapshot = PlacementSnapshot(
            now=now_text(),
            settings=self.settings,
            placement=placement,
            partition=partition,
            document=await self._document(reader, partition),
            pool=reader.own(DevicePool, namespace, pool),
            view=view,
            measured=self._measured(reader, placement, view),
            cordoned=self._cordoned(reader, view),
            table=await self._table(reader, partition),
            placements=self._placements(reader, partition),
            beside=tuple(self._beside(placement)),
            job_ended=_job_ended(reader, placement),
        )
        name = placement.metadata.name
        placed = self.coordinators.placed(namespace, pool, name)
        if not placement.spec.prefetch or partition is None:
            return replace(snapshot, placed=placed)
        reader.subscribe(views.topic(namespace, pool, views.FRAGMENTS))
        reader.subscribe(views.topic(namespace, pool, views.placed_part(name)))
        return replace(
            snapshot,
            placed=placed,
            model=reader.own(Model, namespace, partition.spec.model_ref.name),
            workers=await self._workers(reader, partition, answers=False),
        )

    async def _job(self, reader: Reader, job: InferenceJob) -> InferenceJobSnapshot:
        namespace = namespace_of(job)
        placement = reader.own(Placement, namespace, placement_of(job))
        partition = reader.own(Partition, namespace, partition_of(job, placement))
        pool = reader.own(DevicePool, namespace, pool_of(job, placement))
        over = job.status is not None and has_ended(job.status)
        run = views.run_part(job_id(job))
        name = pool_of(job, placement)
        workers = await self._workers(reader, job, answers=False)
        if partition is not None and not over:
            workers += await self._workers(reader, partition, answers=False)
        view: views.View = Unreachable(reason="the job's pool is not known yet")
        if name is not None:
            # Of a job that has ended only its run is left to be removed.
            parts = () if over else (views.LOST, views.EXCESSES, views.FRAGMENTS)
            view = self._view(reader, namespace, name, run, *parts)
        return InferenceJobSnapshot(
            now=now_text(),
            settings=self.settings,
            job=job,
            model=reader.own(Model, namespace, model_of(job, partition)),
            partition=partition,
            document=None if over else await self._document(reader, partition),
            placement=placement,
            pool=pool,
            view=view,
            workers=workers,
            refusal=self.coordinators.refusal(namespace, name or "", job_id(job)),
            rivals=() if over or name is None else self._rivals(job, name, view),
        )

    def _placements(self, reader: Reader, partition: Partition | None) -> tuple[Placement, ...]:
        """Those that a Partition is cut for, or that choose its cuts."""
        if partition is None or not (is_planned(partition) or is_cut_for_pools(partition)):
            return ()
        name = partition.metadata.name
        return reader.all_own(Placement, namespace_of(partition), referring(name))

    def _are_run(self, namespace: str, placements: Sequence[Placement]) -> bool:
        """Whether a job runs by one of them. Nobody subscribes to it, as to jobs on a pool."""
        names = {each.metadata.name for each in placements}
        jobs = self.cache.all_own(InferenceJob, namespace)
        return any(placement_of(job) in names and is_running(job) for job in jobs)

    async def _table(self, reader: Reader, partition: Partition | None) -> StoredTable | None:
        if partition is None or not is_planned(partition):
            return None
        namespace, name = namespace_of(partition), table_name(partition.metadata.name)
        reader.subscribe((CONFIG_MAP.kind, namespace, name))
        return await self._documents.read_table(partition)

    def _view(self, reader: Reader, namespace: str, pool: str, *parts: str) -> views.View:
        """What a pool's coordinator says; reconciled again when one of these parts changes."""
        for part in (views.REACH, *parts):
            reader.subscribe(views.topic(namespace, pool, part))
        return self.coordinators.view(namespace, pool)

    def _cordoned(self, reader: Reader, view: views.View) -> frozenset[str]:
        """The devices of a pool whose nodes are cordoned. Nobody subscribes to nodes here: a
        thousand Placements would reconcile for each of them. While there is one, this is asked
        again.
        """
        devices = view.devices if isinstance(view, CoordinatorView) else ()
        states = (self.cache.state(NODE.kind, "", device.name) for device in devices)
        nodes = (state.node for state in states if isinstance(state, NodeState))
        found = frozenset(node.name for node in nodes if node.is_cordoned)
        if found:
            reader.requeue(CORDONED_SECONDS)
        return found

    def _measured(self, reader: Reader, placement: Placement, view: views.View) -> Run | None:
        """The run of the newest job on a Placement; reconciled again when one of them ends, and for
        a makespan when its items are counted."""
        namespace, pool = namespace_of(placement), placement.spec.pool_ref.name
        jobs = reader.all_own(InferenceJob, namespace, referring(placement.metadata.name))
        runs: list[tuple[str, Run]] = []
        for job in jobs:
            reader.subscribe(views.topic(namespace, pool, views.end_part(job_id(job))))
            if placement.spec.objective is Objective.MAKESPAN:
                reader.subscribe(views.topic(namespace, pool, views.count_part(job_id(job))))
            if isinstance(view, CoordinatorView) and job_id(job) in view.runs:
                runs.append((job.metadata.creation_timestamp or "", view.runs[job_id(job)]))
        return max(reversed(runs), key=itemgetter(0), default=("", None))[1]

    def _rivals(self, job: InferenceJob, pool: str, view: views.View) -> tuple[InferenceJob, ...]:
        """The jobs with a higher priority on a job's pool, as long as the job has no run."""
        if isinstance(view, CoordinatorView) and job_id(job) in view.runs:
            return ()
        own, namespace = job.spec.priority, namespace_of(job)
        return tuple(self._jobs_on(namespace, pool, above=own))

    def _jobs_on(
        self, namespace: str, pool: str, above: int | None = None
    ) -> Iterator[InferenceJob]:
        """The jobs on a pool, all or those with a higher priority than `above`. Nobody subscribes
        to them: a pool reconciles when their runs come and end, and a job that waits for another
        asks again.
        """
        for job in self.cache.all_own(InferenceJob, namespace):
            if above is None or job.spec.priority > above:
                placement = self.cache.own(Placement, namespace, placement_of(job))
                if pool_of(job, placement) == pool:
                    yield job

    def _beside(self, placement: Placement) -> Iterator[Placement]:
        """Older Placements on a pool that jobs run by. Where there is one Model, all have the same
        fragments. Nobody subscribes to them, as to jobs on a pool.
        """
        namespace, pool = namespace_of(placement), placement.spec.pool_ref.name
        models = islice(self.cache.all_own(Model, namespace), 2)
        if len(list(models)) < 2:
            return
        own = age(placement)
        names = {
            placement_of(job)
            for job in self._jobs_on(namespace, pool)
            if not job.spec.suspend and not (job.status is not None and has_ended(job.status))
        }
        for name in sorted(names):
            other = self.cache.own(Placement, namespace, name)
            if other is not None and age(other) < own:
                yield other

    def _nodes(self, reader: Reader) -> tuple[Node, ...]:
        states = reader.members((NODE.kind, "", ANY))
        return tuple(state.node for state in states if isinstance(state, NodeState))

    async def _secrets(self, reader: Reader, pool: DevicePool) -> frozenset[str]:
        wanted, pair = secrets_needed(pool), self.certificates.pair
        found = {each for each in wanted if await pair(namespace_of(pool), each) is not None}
        if len(found) < len(wanted):
            reader.requeue(REQUEUE_SECONDS)
        return frozenset(found)

    async def _workers(
        self, reader: Reader, owner: AnyKind, *, answers: bool = True
    ) -> tuple[Worker, ...]:
        states = reader.members((JOB.kind, namespace_of(owner), made_for(uid_of(owner))))
        jobs = [each for each in states if isinstance(each, JobState)]
        workers = [await self._pods.worker(each, answers=answers) for each in jobs]
        if any(worker.phase is WorkerPhase.PENDING for worker in workers):
            reader.requeue(REQUEUE_SECONDS)
        return tuple(workers)

    async def _workloads(
        self, reader: Reader, coordinator: State | None, agents: Sequence[State]
    ) -> tuple[Workload | None, tuple[Workload, ...]]:
        deployed = None
        if isinstance(coordinator, WorkloadState):
            deployed = await self._pods.workload(coordinator)
        sets = [state for state in agents if isinstance(state, WorkloadState)]
        found = await self._pods.agents(sets)
        if any(each is not None and each.is_behind for each in (deployed, *found)):
            reader.requeue(REQUEUE_SECONDS)
        return deployed, found

    async def _document(
        self, reader: Reader, partition: Partition | None, *, fresh: bool = False
    ) -> StoredDocument | None:
        if partition is None:
            return None
        namespace, name = namespace_of(partition), document_name(partition.metadata.name)
        reader.subscribe((CONFIG_MAP.kind, namespace, name))
        return await self._documents.read(partition, fresh=fresh)


def job_ids(reader: Reader, cache: Cache, namespace: str) -> frozenset[str]:
    """What coordinators call the namespace's jobs. One that cannot be read counts as any other: the
    kinds of the cluster may be of a newer version than the operator.
    """
    reader.subscribe((InferenceJob.__name__, namespace, WHICH))
    jobs = (each.identity for each in cache.states(InferenceJob.__name__, namespace))
    return frozenset(run_id(each.name, each.uid) for each in jobs if not each.leaving)


def sets_of_others(cache: Cache, pool: DevicePool) -> frozenset[str]:
    """The names of the DaemonSets of other pools that exist; what one that was deleted has left is
    taken over, or goes. Nobody subscribes to them, as to other pools' Devices.
    """
    namespace = namespace_of(pool)
    pools = {each.identity.uid for each in cache.states(DevicePool.__name__, namespace)}
    others = pools - {uid_of(pool)}
    sets = (each.identity for each in cache.states(DAEMON_SET.kind, namespace))
    return frozenset(each.name for each in sets if each.owner_uid in others)


def _job_ended(reader: Reader, placement: Placement) -> bool:
    """Whether a job made a Placement for itself, and no job runs by it any more."""
    group, owner = referring(placement.metadata.name), placement.metadata.labels.get(OWNER_UID)
    jobs = reader.all_own(InferenceJob, namespace_of(placement), group)
    over = all(job.status is not None and has_ended(job.status) for job in jobs)
    return over and owner in [uid_of(job) for job in jobs]
