"""A little cluster: the real reconcilers, and a seeded model of what they decide about.

Workers start, succeed, fail and are evicted; nodes go and return with their agents; the coordinator
goes away, comes back with its volume, and runs jobs item by item; statuses are written first, and
the operator may die after any part of carrying a decision out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from reconcile.rules import decide, name_of
from reconcile.simulated_work import (
    ITEMS,
    SimulatedJob,
    SimulatedWorker,
    edited,
    printed,
    rolled_out,
)
from reconcile.values import NAMESPACE, SETTINGS, K, document, make, model, pool
from shoal_api.kinds import Device, DevicePool, InferenceJob, Model, Partition, Placement
from shoal_api.schema import parse
from shoal_operator.reconcile.decision import (
    CancelJob,
    CoordinatorCall,
    Decision,
    Manifest,
    RemoveJob,
    SubmitJob,
)
from shoal_operator.reconcile.job_status import has_ended, is_running
from shoal_operator.reconcile.names import (
    OWNER_UID,
    document_name,
    job_id,
    model_of,
    partition_of,
    placement_of,
    pool_of,
    table_name,
)
from shoal_operator.reconcile.partition import read_document
from shoal_operator.reconcile.planned_cuts import read_table
from shoal_operator.reconcile.snapshot import (
    ConnectedDevice,
    CoordinatorView,
    DevicePoolSnapshot,
    DeviceState,
    InferenceJobSnapshot,
    ModelSnapshot,
    Node,
    PartitionSnapshot,
    PlacementSnapshot,
    Refusal,
    RunState,
    Snapshot,
    StoredDocument,
    StoredTable,
    Unreachable,
    Worker,
    WorkerPhase,
    Workload,
)
from shoal_operator.reconcile.times import as_time, instant
from shoal_operator.reconcile.volumes import Claim
from shoal_protocol.cut_table import CutTable
from shoal_protocol.partition import Outgrown, PartitionDocument, document_from_json
from shoal_protocol.units import Bytes

MIB = 1 << 20
START = instant("2026-03-01T12:00:00Z")


@dataclass(slots=True)
class Cluster:
    """Everything there is. `cut`: what a worker's command cuts; `refusal`: why it cannot; `table`:
    what its model can be cut into; `too_large`: the fragments that, as measured, fit on no device,
    for `large_items`, or, where these are none, for any; `budgets` are those of devices that have
    another one; `finished`: how often each item was finished anew.
    """

    chance: Random
    failures: float = 0.1
    bad_items: frozenset[int] = frozenset()
    cut: Callable[[tuple[str, ...]], PartitionDocument] = lambda _: document()
    refusal: Callable[[tuple[str, ...]], str] = lambda _: ""
    table: CutTable | None = None
    large_items: frozenset[int] = frozenset()
    too_large: Callable[[PartitionDocument], tuple[Outgrown, ...]] = lambda _: ()
    budgets: dict[str, int] = field(default_factory=dict)
    now: float = START
    models: dict[str, Model] = field(default_factory=dict)
    partitions: dict[str, Partition] = field(default_factory=dict)
    pools: dict[str, DevicePool] = field(default_factory=dict)
    placements: dict[str, Placement] = field(default_factory=dict)
    jobs: dict[str, InferenceJob] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)
    objects: dict[tuple[str, str], Manifest] = field(default_factory=dict)
    workers: dict[str, SimulatedWorker] = field(default_factory=dict)
    connected: dict[str, DeviceState] = field(default_factory=dict)
    reachable: bool = True
    runs: dict[str, SimulatedJob] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    inputs: set[str] = field(default_factory=set)
    fragments: set[str] = field(default_factory=set)
    transferred: dict[str, set[int]] = field(default_factory=dict)
    finished: dict[tuple[str, int], int] = field(default_factory=dict)
    notes: list[tuple[str, str, str]] = field(default_factory=list)
    _uids: int = 0
    _read: dict[int, tuple[Manifest, StoredDocument | None]] = field(default_factory=dict)

    # ---- what is seen ----------------------------------------------------------------------------

    @property
    def time(self) -> str:
        return as_time(self.now)

    def view(self) -> CoordinatorView | Unreachable:
        if not self.reachable:
            return Unreachable(reason="connection refused")
        return CoordinatorView(
            begun=self.now,
            devices=tuple(
                ConnectedDevice(
                    name=name,
                    state=state,
                    architecture="amd64",
                    budget_bytes=Bytes(self.budget_of(name)),
                    floor_bytes=Bytes(60 * MIB),
                    cached_fragments=0,
                    cached_bytes=Bytes(0),
                    silent_seconds=0.0,
                )
                for name, state in sorted(self.connected.items())
            ),
            runs={name: job.seen(name) for name, job in self.runs.items()},
            fragments=frozenset(self.fragments),
        )

    def budget_of(self, device: str) -> int:
        return self.budgets.get(device, 64 * MIB)

    def workers_of(self, *owners: str | None) -> tuple[Worker, ...]:
        return tuple(
            Worker(
                name=name,
                phase=worker.phase,
                output=self._output(worker) if worker.phase is WorkerPhase.SUCCEEDED else None,
                message=worker.message,
                refused=worker.refused,
                ended_at=worker.ended_at,
                end_seen=None if worker.ended_at is None else instant(worker.ended_at),
            )
            for name, worker in sorted(self.workers.items())
            if worker.owner in owners
        )

    def _output(self, worker: SimulatedWorker) -> bytes | None:
        return printed(worker.command, self.cut, self.table)

    def snapshots(self) -> list[Snapshot]:
        """Everything that is to be reconciled."""
        kinds: list[Snapshot] = [self.see_model(each) for each in self.models.values()]
        kinds += [self.see_partition(each) for each in self.partitions.values()]
        kinds += [self.see_pool(each) for each in self.pools.values()]
        kinds += [self.see_placement(each) for each in self.placements.values()]
        kinds += [self.see_job(each) for each in self.jobs.values()]
        return kinds

    def see_model(self, of: Model) -> ModelSnapshot:
        return ModelSnapshot(
            now=self.time,
            settings=SETTINGS,
            model=of,
            workers=self.workers_of(of.metadata.uid),
            partitions=tuple(self.partitions.values()),
        )

    def see_partition(self, of: Partition) -> PartitionSnapshot:
        return PartitionSnapshot(
            now=self.time,
            settings=SETTINGS,
            partition=of,
            model=self.models.get(of.spec.model_ref.name),
            workers=self.workers_of(of.metadata.uid),
            document=self._kept(of),
            pools=tuple(self.pools.values()),
            table=self._table(of),
            placements=self._placements_of(of),
            runs=any(map(is_running, self.jobs.values())),
        )

    def _table(self, of: Partition) -> StoredTable | None:
        return read_table(self.objects.get(("ConfigMap", table_name(of.metadata.name)), {}))

    def _placements_of(self, of: Partition) -> tuple[Placement, ...]:
        found, name = self.placements.values(), of.metadata.name
        return tuple(each for each in found if each.spec.partition_ref.name == name)

    def _kept(self, of: Partition) -> StoredDocument | None:
        made = self.objects.get(("ConfigMap", document_name(of.metadata.name)))
        if made is None:
            return None
        if id(made) not in self._read:
            self._read[id(made)] = (made, read_document(made))
        return self._read[id(made)][1]

    def see_pool(self, of: DevicePool) -> DevicePoolSnapshot:
        made = ("Deployment", "shelf-coordinator") in self.objects
        coordinator = Workload(
            name="shelf-coordinator", wanted=1, ready=int(self.reachable), current=True
        )
        return DevicePoolSnapshot(
            now=self.time,
            settings=SETTINGS,
            pool=of,
            nodes=tuple(
                Node(
                    name=name,
                    labels={"shoal.dev/pool": "shelf"},
                    allocatable_memory=Bytes(512 * MIB),
                    ready=name in self.connected,
                )
                for name in ("n1", "n2", "n3")
            ),
            secrets=frozenset({"shelf-ca", "shelf-coordinator-tls", "shelf-worker-tls"}),
            coordinator=coordinator if made else None,
            claim=Claim(name="shelf-coordinator", bound=True, size=Bytes(5 << 30)),
            agents=rolled_out(self.objects, len(self.connected)),
            view=self.view(),
            devices=tuple(self.devices.values()),
            jobs=frozenset(job_id(job) for job in self.jobs.values()),
            own_jobs=tuple(self.jobs.values()),
            enrolment_authority="-----BEGIN CERTIFICATE-----",
        )

    def see_placement(self, of: Placement) -> PlacementSnapshot:
        partition = self.partitions.get(of.spec.partition_ref.name)
        there = self.pools.get(of.spec.pool_ref.name)
        return PlacementSnapshot(
            now=self.time,
            settings=SETTINGS,
            placement=of,
            partition=partition,
            document=None if partition is None else self._kept(partition),
            pool=there,
            view=self.view() if there is not None else Unreachable(reason="there is no pool"),
            table=None if partition is None else self._table(partition),
            placements=() if partition is None else self._placements_of(partition),
        )

    def see_job(self, of: InferenceJob) -> InferenceJobSnapshot:
        placement = self.placements.get(placement_of(of))
        partition = self.partitions.get(partition_of(of, placement) or "")
        there = self.pools.get(pool_of(of, placement) or "")
        owners = [of.metadata.uid, None if partition is None else partition.metadata.uid]
        return InferenceJobSnapshot(
            now=self.time,
            settings=SETTINGS,
            job=of,
            model=self.models.get(model_of(of, partition) or ""),
            partition=partition,
            document=None if partition is None else self._kept(partition),
            placement=placement,
            pool=there,
            view=self.view() if there is not None else Unreachable(reason="there is no pool"),
            workers=self.workers_of(*owners),
            refusal=self.refusals.get(job_id(of)),
            rivals=tuple(
                each for each in self.jobs.values() if each.spec.priority > of.spec.priority
            ),
        )

    # ---- what is done ----------------------------------------------------------------------------

    def reconcile(self, snapshot: Snapshot, *, dies: bool = False) -> Decision:
        """Decide and carry out; an operator that dies does the first part of it only."""
        decision = decide(snapshot)
        steps: list[Callable[[], None]] = [partial(self._write_status, snapshot, decision)]
        steps += [partial(self._apply, snapshot, child) for child in decision.children]
        steps += [partial(self._remove, key.kind, key.name) for key in decision.removals]
        steps += [partial(self._call, call) for call in decision.calls]
        for step in steps[: self.chance.randrange(len(steps) + 1) if dies else None]:
            step()
        if not dies:
            for child in decision.devices:
                parsed = parse(Device, dict(child.device))
                assert isinstance(parsed, Device)
                self.devices[parsed.metadata.name] = replace(
                    parsed,
                    metadata=replace(parsed.metadata, generation=1),
                    status=child.status,
                )
            if decision.delete_self:
                assert isinstance(snapshot, InferenceJobSnapshot)
                self.jobs.pop(snapshot.job.metadata.name, None)
        self.notes += [(type(snapshot).__name__, n.reason, n.message) for n in decision.notes]
        return decision

    def _write_status(self, snapshot: Snapshot, decision: Decision) -> None:
        status: Any = decision.status
        match snapshot:
            case ModelSnapshot(model=of):
                self.models[of.metadata.name] = replace(of, status=status)
            case PartitionSnapshot(partition=of):
                self.partitions[of.metadata.name] = replace(of, status=status)
            case DevicePoolSnapshot(pool=of):
                self.pools[of.metadata.name] = replace(of, status=status)
            case PlacementSnapshot(placement=of):
                self.placements[of.metadata.name] = replace(of, status=status)
            case InferenceJobSnapshot(job=of):
                self.jobs[of.metadata.name] = replace(of, status=status)

    def _apply(self, snapshot: Snapshot, child: Manifest) -> None:
        metadata, spec, name = child["metadata"], child.get("spec"), name_of(child)
        assert isinstance(metadata, Mapping)
        match child["kind"]:
            case "Job":
                assert isinstance(spec, Mapping)
                command = spec["template"]["spec"]["containers"][0]["command"]
                owner = metadata["labels"][OWNER_UID]
                self.workers.setdefault(name, SimulatedWorker(owner, tuple(command)))
            case "Partition":
                assert isinstance(spec, Mapping)
                wanted = self.new(Partition, name, spec, metadata["labels"])
                self.partitions[name] = edited(self.partitions.get(name), wanted)
            case "Placement":
                assert isinstance(spec, Mapping)
                if name not in self.placements:
                    self.placements[name] = self.new(Placement, name, spec, metadata["labels"])
            case kind:
                self.objects[str(kind), name] = child

    def new(
        self, kind: type[K], name: str, spec: Mapping[str, object], labels: Mapping[str, str]
    ) -> K:
        self._uids += 1
        uid = f"{self._uids:08}-0000-4000-8000-000000000000"
        return make(kind, name, spec, uid=uid, labels=labels)

    def _remove(self, kind: str, name: str) -> None:
        if kind == "Job":
            self.workers.pop(name, None)
        if kind == "Device":
            self.devices.pop(name, None)

    def _call(self, call: CoordinatorCall) -> None:
        if not self.reachable:
            return
        match call:
            case SubmitJob(job=name, partition=partition, plan=plan, terms=terms):
                known = self.runs.get(name)
                if known is not None and known.is_active:
                    if known.has(document_from_json(partition)):
                        known.plan, known.terms = max(known.plan, plan), terms
                    else:
                        self.refusals[name] = Refusal(
                            plan=plan, terms=terms, message="runs with others", other_way=True
                        )
                elif name not in self.inputs:
                    self.runs[name] = again = SimulatedJob.submitted(call, known)
                    again.state, again.reason = RunState.FAILED, "FolderRefused"
                else:
                    self.runs[name] = again = SimulatedJob.submitted(call, known)
                    again.too_large = self.too_large(document_from_json(partition))
                    again.large_items = self.large_items if again.too_large else frozenset()
            case CancelJob(job=name):
                known = self.runs.get(name)
                if known is not None and known.is_active:
                    known.state, known.reason = RunState.CANCELLED, "Cancelled"
            case RemoveJob(job=name):
                known = self.runs.get(name)
                if known is not None and not known.is_active:
                    del self.runs[name]
                    self.inputs.discard(name)

    # ---- what happens by itself ------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        for worker in self.workers.values():
            self._work(worker)
        if self.reachable and any(s is DeviceState.READY for s in self.connected.values()):
            for name, job in self.runs.items():
                for item in self._advance(job, seconds):
                    self.finished[name, item] = self.finished.get((name, item), 0) + 1

    def _advance(self, job: SimulatedJob, seconds: float) -> list[int]:
        ready = [name for name, each in self.connected.items() if each is DeviceState.READY]
        if job.waits_for_room(map(self.budget_of, ready), map(self.budget_of, self.connected)):
            return []
        return job.advance(seconds, self.now, self.bad_items)

    def _work(self, worker: SimulatedWorker) -> None:
        talks = "--tls-ca" in worker.command
        match worker.phase:
            case WorkerPhase.PENDING:
                worker.phase = WorkerPhase.RUNNING
            case WorkerPhase.RUNNING if self.chance.random() < self.failures:
                worker.phase = WorkerPhase.FAILED
                worker.message = "the store does not answer"
                worker.ended_at = self.time
            case WorkerPhase.RUNNING if refusal := self.refusal(worker.command):
                worker.phase, worker.refused = WorkerPhase.FAILED, True
                worker.message, worker.ended_at = refusal, self.time
            case WorkerPhase.RUNNING if not talks or self.reachable:
                worker.phase = WorkerPhase.SUCCEEDED
                worker.ended_at = self.time
                self._effect(worker.command)

    def _effect(self, command: tuple[str, ...]) -> None:
        match command:
            case ("shoal", "copy", _, target, *_) if target.startswith("coordinator://"):
                self.inputs.add(target.split("/")[-2])
            case ("shoal", "copy", source, *_):
                name = source.split("/")[-2]
                self.transferred[name] = set(self.runs[name].finished)
            case ("shoal", "partition", *_) if "--to" in command:
                self.fragments |= {fragment.digest for fragment in self.cut(command).fragments}


def started(chance: Random, jobs: int, **more: object) -> Cluster:
    """A cluster with a model, a pool of three nodes, and jobs that name the model."""
    cluster = Cluster(chance=chance, **more)  # type: ignore[arg-type]
    cluster.models["rec"] = model()
    cluster.pools["shelf"] = pool()
    cluster.connected = dict.fromkeys(("n1", "n2", "n3"), DeviceState.READY)
    for number in range(jobs):
        name = f"job-{number}"
        spec = {
            "modelRef": {"name": "rec"},
            "poolRef": {"name": "shelf"},
            "inputs": {"uri": "pvc://lines/in"},
            "outputs": {"uri": f"pvc://lines/out-{number}"},
        }
        cluster.jobs[name] = cluster.new(InferenceJob, name, spec, {})
    return cluster


def all_over(cluster: Cluster) -> bool:
    """Whether every job has ended."""
    return all(job.status is not None and has_ended(job.status) for job in cluster.jobs.values())


__all__ = ["ITEMS", "NAMESPACE", "Cluster", "all_over", "started"]
