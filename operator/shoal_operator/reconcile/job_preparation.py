"""What an InferenceJob needs before it can run: the objects it refers to, its turn, fragments in
the pool's store, and its inputs on the coordinator's volume. Pure.

The coordinator's dispatcher orders tasks by priority, but only of the jobs that it has. So a job is
prepared and submitted after those of its pool with a higher priority that are about to start. It
waits for none that waits itself for something that may never come, and for none longer than
`PATIENCE_SECONDS`: a job that cannot start delays no other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from shoal_api.kinds import InferenceJob, Partition, Placement
from shoal_api.kinds.placement import StageStatus
from shoal_api.writing import write
from shoal_operator.reconcile.addresses import offline, unsuitable
from shoal_operator.reconcile.conditions import (
    FALSE,
    TRUE,
    Cause,
    ConditionUpdate,
    not_ready,
)
from shoal_operator.reconcile.decision import Manifest, ObjectKey
from shoal_operator.reconcile.job_batches import one_by_one
from shoal_operator.reconcile.job_cuts import (
    cut_for,
    is_asked,
    is_cut_as_wanted,
    is_ours,
    is_outdated,
    may_have_more,
    refusal_of,
)
from shoal_operator.reconcile.job_status import (
    PARTITION_REFUSED,
    POOL_NOT_FOUND,
    WAITING,
    Verdict,
    has_ended,
    missing_pool,
)
from shoal_operator.reconcile.manifests import labels_of, manifest, owner_reference
from shoal_operator.reconcile.names import (
    OWNER_UID,
    model_of,
    partition_of,
    placement_of,
    pool_of,
)
from shoal_operator.reconcile.partition import current_document
from shoal_operator.reconcile.plans import in_force, served_by
from shoal_operator.reconcile.snapshot import (
    CoordinatorView,
    InferenceJobSnapshot,
    PlacementSnapshot,
    Unreachable,
    Worker,
    WorkerPhase,
)
from shoal_operator.reconcile.store_room import WAITING_FOR_ROOM, waits_for_room
from shoal_operator.reconcile.times import seconds_since
from shoal_operator.reconcile.workers import (
    NO_ROOM_SECONDS,
    WorkerSpec,
    deliver_worker,
    input_transfer_worker,
    worker_job,
    worker_key,
    worker_named,
    worker_text,
)
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import counted

PATIENCE_SECONDS: Final = 300.0
DELIVERIES: Final = 3
"""So many follow one another to a store that does not keep what it is given."""
_PASSING: Final = frozenset(
    {"Waiting", "Planning", "ModelNotReady", "PartitionNotReady", "PlacementNotPlanned"}
)
"""Reasons of Planned for a job that gets its plan by itself soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A plan to run by: per fragment its devices, what each grants it (0: all that it needs), and
    how long a task of it takes there.
    `plan` is its epoch, `planned` the job's condition of it.
    """

    document: PartitionDocument
    stages: tuple[tuple[str, ...], ...]
    granted_bytes: tuple[tuple[int, ...], ...]
    predicted_seconds: tuple[tuple[float, ...], ...]
    plan: int
    planned: ConditionUpdate


@dataclass(frozen=True, slots=True)
class Step:
    """A worker that is not done; `child` is to be created, `removal` one that made way for it."""

    cause: Cause
    child: Manifest | None = None
    removal: ObjectKey | None = None

    @property
    def children(self) -> tuple[Manifest, ...]:
        """What is to be created."""
        return () if self.child is None else (self.child,)

    @property
    def removals(self) -> tuple[ObjectKey, ...]:
        """What is to be deleted."""
        return () if self.removal is None else (self.removal,)


# ---- what the job refers to ----------------------------------------------------------------------


def own_children(snapshot: InferenceJobSnapshot) -> tuple[Manifest, ...]:
    """The Partition and the Placement that the job has made for itself."""
    job = snapshot.job
    children: list[Manifest] = []
    if job.spec.model_ref is not None and is_ours(job, snapshot.partition):
        size = cut_for(snapshot)
        if size is None:
            return ()
        model_ref = {"name": job.spec.model_ref.name}
        how: dict[str, object] = {"modelRef": model_ref, "maxFragmentSize": size}
        if (finer := snapshot.before.finer_cut) is not None:
            parts = {"seen": finer.seen, "outgrown": finer.outgrown}
            how |= {name: [write(each) for each in part] for name, part in parts.items() if part}
        children.append(_child(job, "Partition", **how))
    if job.spec.placement_ref is None and is_ours(job, snapshot.placement):
        if snapshot.pool is None:
            return ()
        partition_ref = {"name": partition_of(job, None)}
        pool_ref, objective = {"name": pool_of(job, None)}, job.spec.objective.value
        children.append(
            _child(
                job, "Placement", partitionRef=partition_ref, poolRef=pool_ref, objective=objective
            )
        )
    return tuple(children)


def _child(job: InferenceJob, kind: str, **spec: object) -> Manifest:
    return manifest(job, kind, job.metadata.name, labels_of(job, kind.lower()), spec=spec)


def unusable(snapshot: InferenceJobSnapshot) -> Verdict | None:
    """Why a job can never run: its addresses mean nothing in a cluster."""
    spec = snapshot.job.spec
    problems = [unsuitable(spec.inputs.uri), unsuitable(spec.outputs.uri)]
    if spec.inputs.follow and spec.inputs.uri.startswith("https://"):
        problems.append(f"{spec.inputs.uri} is one file; what is followed is a folder or a bucket")
    if spec.inputs.uri.rstrip("/") == spec.outputs.uri.rstrip("/"):
        problems.append(f"results would be written over the inputs in {spec.inputs.uri}")
    problem = next((each for each in problems if each is not None), None)
    if problem is None:
        return None
    return Verdict("UnsuitableAddress", problem)


def refused_cut(snapshot: InferenceJobSnapshot) -> Verdict | None:
    """The job's own Partition cannot be cut, for no device of the pool: nobody will change it.
    Which devices there are, the coordinator says.
    """
    job, partition = snapshot.job, snapshot.partition
    if job.spec.model_ref is None or partition is None or not is_ours(job, partition):
        return None
    finer = snapshot.before.finer_cut
    if finer is not None and not is_asked(partition, finer):
        return None
    refused = refusal_of(partition)
    if refused is None or isinstance(snapshot.view, Unreachable):
        return None
    if may_have_more(snapshot, partition):
        return None
    return Verdict(PARTITION_REFUSED, refused)


def plan_for(snapshot: InferenceJobSnapshot) -> Ready | Cause:
    """The plan to run by, or what it waits for."""
    spec, settings = snapshot.job.spec, snapshot.settings
    waits = offline(spec.inputs.uri, settings) or offline(spec.outputs.uri, settings)
    waits = waits or _references(snapshot) or _unready(snapshot)
    if waits is not None:
        return waits
    placement = snapshot.placement
    assert placement is not None, "`_references` has checked"
    status, name = placement.status, placement.metadata.name
    if status is None or not placement.holds("Planned"):
        known = placement.condition("Planned")
        if known is None or known.status is not FALSE:
            return Cause("PlacementNotPlanned", f"Placement {name} is not planned yet")
        return Cause(known.reason, known.message)
    document = current_document(snapshot.partition, snapshot.document)
    if document is None:
        partition = partition_of(snapshot.job, placement)
        return Cause("PartitionNotReady", f"Partition {partition} is not cut yet")
    in_place = in_force(placement, document)
    if not in_place or is_outdated(snapshot):
        still = "with larger budgets" if in_place else "other fragments"
        return Cause("PlacementNotPlanned", f"Placement {name} still plans {still}")
    stages, granted = served_by(in_place)
    text = placement.message("Planned") + one_by_one(snapshot, document, in_place)
    planned = ConditionUpdate("Planned", TRUE, "Planned", text)
    return Ready(
        document=document,
        stages=stages,
        granted_bytes=granted,
        predicted_seconds=_predicted(in_place, document),
        plan=status.epoch or 1,
        planned=planned,
    )


def _predicted(
    stages: Sequence[StageStatus], document: PartitionDocument
) -> tuple[tuple[float, ...], ...]:
    """Per fragment: its part, by its operations, of what its stage takes on each device."""
    flops = [fragment.flops or 0 for fragment in document.fragments]
    return tuple(
        tuple(
            taken * flops[index] / max(1, sum(flops[each] for each in stage.fragments))
            for taken in stage.device_seconds
        )
        for stage in stages
        for index in stage.fragments
    )


def _references(snapshot: InferenceJobSnapshot) -> Cause | None:
    """What the job refers to and does not exist."""
    job, placement, partition = snapshot.job, snapshot.placement, snapshot.partition
    made = {
        "Partition": job.spec.model_ref is not None,
        "Placement": job.spec.placement_ref is None,
    }
    for kind, there in (("Partition", partition), ("Placement", placement)):
        if there is not None and made[kind] and not is_ours(job, there):
            return _taken(job, kind, there)
    wanted = (
        ("Placement", placement_of(job), placement),
        ("DevicePool", pool_of(job, placement), snapshot.pool),
        ("Partition", partition_of(job, placement), partition),
        ("Model", model_of(job, partition), snapshot.model),
    )
    missing = [(kind, name) for kind, name, there in wanted if there is None and not made.get(kind)]
    if missing:
        reason = f"{missing[0][0].removeprefix('Device')}NotFound"
        names = ", and ".join(f"no {kind} {name}" for kind, name in missing)
        return Cause(reason, f"there is {names}")
    leaving = missing_pool(snapshot)
    return None if leaving is None else Cause(POOL_NOT_FOUND, leaving)


def _unready(snapshot: InferenceJobSnapshot) -> Cause | None:
    """What exists and is not ready."""
    partition = snapshot.partition
    if partition is None and cut_for(snapshot) is None:
        text = f"the budget of DevicePool {snapshot.pool_name} is not known yet"
        return Cause("PoolNotReady", text)
    for there in (snapshot.model, partition):
        if there is not None and (cause := not_ready(there)) is not None:
            return cause
    if snapshot.placement is None or partition is None or not is_cut_as_wanted(snapshot):
        return Cause("Planning", "the plan is being made")
    return None


# ---- its turn ------------------------------------------------------------------------------------


def preceded_by(snapshot: InferenceJobSnapshot) -> Cause | None:
    """The job that starts before this one; None: it is this one's turn."""
    own = snapshot.job.spec.priority
    ahead = [
        job for job in snapshot.rivals if job.spec.priority > own and _starts(job, snapshot.now)
    ]
    if not ahead:
        return None
    first = min(ahead, key=lambda job: (-job.spec.priority, job.metadata.name))
    which = f"InferenceJob {first.metadata.name} on DevicePool {snapshot.pool_name}"
    return Cause("Queued", f"{which} has priority {first.spec.priority} and starts first")


def _starts(job: InferenceJob, now: str) -> bool:
    """Whether a job is about to start: nothing but its own preparation is missing."""
    if job.spec.suspend or job.metadata.deletion_timestamp is not None:
        return False
    if job.status is not None and (job.status.items is not None or has_ended(job.status)):
        return False
    planned, resumed = (job.condition(type_) for type_ in ("Planned", "Suspended"))
    complete = job.condition("Complete")
    if complete is not None and complete.reason == WAITING_FOR_ROOM:
        return False
    if planned is not None and planned.status is FALSE and planned.reason not in _PASSING:
        return False
    since = job.metadata.creation_timestamp
    if resumed is not None and resumed.status is FALSE:
        since = resumed.last_transition_time
    return since is not None and seconds_since(since, now) < PATIENCE_SECONDS


# ---- what is transferred to the coordinator ------------------------------------------------------


def deliver(
    snapshot: InferenceJobSnapshot | PlacementSnapshot, document: PartitionDocument
) -> Step | Verdict | None:
    """Fragments that the pool's store lacks are cut into it; many jobs share one worker. A worker
    that has ended says nothing of what the store has lost since: another one follows, a few times.
    """
    view, partition, model = snapshot.view, snapshot.partition, snapshot.model
    assert not isinstance(view, Unreachable), "nothing is prepared for a silent coordinator"
    wanted = {fragment.digest for fragment in document.fragments}
    lacking = wanted - view.fragments
    if not lacking:
        return None
    assert partition is not None, "`plan_for` has checked"
    assert model is not None, "`plan_for` has checked"
    assert snapshot.document is not None, "`plan_for` has checked"
    pool = snapshot.pool_name
    if (cause := offline(model.spec.source.uri, snapshot.settings)) is not None:
        return Step(cause)
    arguments = snapshot.document.arguments
    specs = [deliver_worker(partition, model, arguments, pool, each) for each in range(DELIVERIES)]
    workers = [worker_named(snapshot.workers, each.name) for each in specs]
    last = max((index for index, each in enumerate(workers) if each is not None), default=-1)
    waits = None
    if view.store is not None:
        waits = waits_for_room(snapshot, document, view.store, view.fragments)
    step: Step | Verdict | None = None
    if (worker := workers[last]) is not None:
        there = f"{len(wanted) - len(lacking)} of {len(wanted)} fragments"
        runs = f"deliver runs; {there} are in the store of {pool}"
        step = _delivering(worker, specs[last], view, runs)
        if worker.no_room:
            step = _without_room(worker, partition, waits, snapshot.now)
    if step is None and waits is not None:
        step = Step(waits)
    following = specs[last + 1 :]
    return step or _next_delivery(snapshot, partition, following, counted(len(lacking), "fragment"))


def _next_delivery(
    snapshot: InferenceJobSnapshot | PlacementSnapshot,
    partition: Partition,
    specs: Sequence[WorkerSpec],
    missing: str,
) -> Step | Verdict:
    """A worker of the first of these; there may be none left."""
    pool = snapshot.pool_name
    if not specs:
        text = (
            f"the store of {pool} lacks {missing} after {DELIVERIES} deliveries: its volume was "
            f"replaced, or another version of Shoal cut {partition.metadata.name}; make that anew"
        )
        return Verdict("FragmentsMissing", text)
    child = _owned_by(partition, worker_job(partition, specs[0], snapshot.settings))
    return Step(Cause("Delivering", f"{missing} to be delivered to the store of {pool}"), child)


def _without_room(worker: Worker, partition: Partition, waits: Cause | None, now: str) -> Step:
    """A delivery found no room: when there seems to be some, another one takes its place."""
    since = None if worker.ended_at is None else seconds_since(worker.ended_at, now)
    if waits is None and since is not None and since >= NO_ROOM_SECONDS:
        text = "there is room for the fragments now; they are delivered again"
        return Step(Cause("Delivering", text), removal=worker_key(partition, worker.name))
    return Step(waits or Cause(WAITING_FOR_ROOM, worker_text(worker, "the store has no room")))


def _delivering(
    worker: Worker, worker_spec: WorkerSpec, view: CoordinatorView, runs: str
) -> Step | Verdict | None:
    """The last delivery; None: it has ended, and the coordinator was asked since."""
    step = _step(worker, worker_spec, "Delivering", "DeliveryFailed", runs)
    if step is None and (worker.end_seen is None or view.begun <= worker.end_seen):
        text = "the fragments are delivered; the coordinator is asked whether it has them"
        return Step(Cause("Delivering", text))
    return step


def transfer_inputs(snapshot: InferenceJobSnapshot) -> Step | Verdict | None:
    """The inputs are transferred to the coordinator's volume."""
    job = snapshot.job
    worker_spec = input_transfer_worker(job, snapshot.pool_name)
    worker = worker_named(snapshot.workers, worker_spec.name)
    if worker is None:
        text = f"inputs are about to be transferred from {job.spec.inputs.uri}"
        child = worker_job(job, worker_spec, snapshot.settings)
        return Step(Cause("TransferringInputs", text), child)
    runs = f"{worker_spec.component} runs"
    return _step(worker, worker_spec, "TransferringInputs", "InputTransferFailed", runs)


def _step(
    worker: Worker, worker_spec: WorkerSpec, reason: str, failure: str, runs: str
) -> Step | Verdict | None:
    match worker.phase:
        case WorkerPhase.SUCCEEDED:
            return None
        case WorkerPhase.FAILED:
            text = worker_text(worker, f"{' '.join(worker_spec.command[:3])} failed")
            # Kubernetes deletes it after some minutes, and the next one tries again.
            return Step(Cause(WAITING_FOR_ROOM, text)) if worker.no_room else Verdict(failure, text)
        case WorkerPhase.PENDING | WorkerPhase.RUNNING:
            return Step(Cause(reason, worker_text(worker, runs)))
        case _:
            assert_never(worker.phase)


def _taken(job: InferenceJob, kind: str, there: Partition | Placement) -> Cause:
    """What is called as the job's own would be, and is another's."""
    name = job.metadata.name
    if OWNER_UID in there.metadata.labels:
        # Only a job of the same name makes one of that name, so that job is gone.
        return Cause(WAITING, f"the {kind} {name} of the job before is still being removed")
    text = f"there is a {kind} {name} already that is not this job's"
    return Cause("NameTaken", f"{text}; name the job otherwise, or refer to that one")


def _owned_by(owner: Partition, child: Manifest) -> Manifest:
    """A child of another object than the one that is reconciled: it outlives the job."""
    metadata = child["metadata"]
    assert isinstance(metadata, dict), "made just before"
    reference = owner_reference(owner, controller=True, blockOwnerDeletion=False)
    return {**child, "metadata": {**metadata, "ownerReferences": [reference]}}
