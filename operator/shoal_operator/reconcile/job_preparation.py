"""What an InferenceJob needs before it can run: the objects it refers to, fragments in the pool's
store, and its inputs on the coordinator's volume. Pure.
"""

from dataclasses import dataclass

from shoal_api.fields import Condition
from shoal_api.kinds import InferenceJob, Partition, Placement
from shoal_api.schema import API_VERSION
from shoal_operator.reconcile.addresses import offline_text, outside, unsuitable
from shoal_operator.reconcile.condition_updates import FALSE, find, holds_for, message_of
from shoal_operator.reconcile.decision import Manifest
from shoal_operator.reconcile.job_status import Verdict, Waits, missing_pool
from shoal_operator.reconcile.names import OWNER_UID, uid_of
from shoal_operator.reconcile.partition import current_document, pool_budget
from shoal_operator.reconcile.pods import labels_of, metadata_of
from shoal_operator.reconcile.references import model_of, partition_of, placement_of, pool_of
from shoal_operator.reconcile.snapshot import (
    CoordinatorView,
    InferenceJobSnapshot,
    Worker,
    WorkerPhase,
)
from shoal_operator.reconcile.waiting import worker_named, worker_text
from shoal_operator.reconcile.workers import (
    WorkerSpec,
    deliver_worker,
    input_transfer_worker,
    worker_job,
)
from shoal_protocol.partition import PartitionDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A plan to run by; `plan` is its epoch."""

    document: PartitionDocument
    placement: Placement
    stages: tuple[tuple[str, ...], ...]
    plan: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How far a worker is: `child` is to be created; where `done`, nothing is left to do."""

    done: bool = False
    child: Manifest | None = None
    reason: str = ""
    message: str = ""


# ---- what the job refers to ----------------------------------------------------------------------


def own_children(snapshot: InferenceJobSnapshot) -> tuple[Manifest, ...]:
    """The Partition and the Placement that the job has made for itself."""
    job = snapshot.job
    children: list[Manifest] = []
    if job.spec.model_ref is not None and _is_ours(job, snapshot.partition):
        size = _cut_for(snapshot)
        if size is None:
            return ()
        model_ref = {"name": job.spec.model_ref.name}
        spec = {"modelRef": model_ref, "maxFragmentSize": size}
        children.append(_child(job, "Partition", spec))
    if job.spec.placement_ref is None and _is_ours(job, snapshot.placement):
        pool, partition = pool_of(job, None), partition_of(job, None)
        if snapshot.pool is None:
            return ()
        spec = {
            "partitionRef": {"name": partition},
            "poolRef": {"name": pool},
            "objective": job.spec.objective.value,
        }
        children.append(_child(job, "Placement", spec))
    return tuple(children)


def _cut_for(snapshot: InferenceJobSnapshot) -> int | None:
    """What the job's own Partition is cut for; once it is there, that stays."""
    there = snapshot.partition
    if there is not None and there.spec.max_fragment_size is not None:
        return there.spec.max_fragment_size
    return None if snapshot.pool is None else pool_budget(snapshot.pool)


def _is_ours(job: InferenceJob, there: Partition | Placement | None) -> bool:
    """Whether an object of the job's name is the job's, or may become it."""
    return there is None or there.metadata.labels.get(OWNER_UID) == uid_of(job)


def _child(job: InferenceJob, kind: str, spec: dict[str, object]) -> Manifest:
    labels = labels_of(job, kind.lower())
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": metadata_of(job, job.metadata.name, labels),
        "spec": spec,
    }


def unusable(snapshot: InferenceJobSnapshot) -> Verdict | None:
    """Why a job can never run: its addresses mean nothing in a cluster."""
    spec = snapshot.job.spec
    problems = [unsuitable(spec.inputs.uri), unsuitable(spec.outputs.uri)]
    if spec.inputs.uri.rstrip("/") == spec.outputs.uri.rstrip("/"):
        problems.append(f"results would be written over the inputs in {spec.inputs.uri}")
    problem = next((each for each in problems if each is not None), None)
    if problem is None:
        return None
    return Verdict(complete=False, reason="UnsuitableAddress", message=problem)


def refused_cut(snapshot: InferenceJobSnapshot) -> Verdict | None:
    """The job's own Partition cannot be cut: nobody will change it."""
    job, partition = snapshot.job, snapshot.partition
    if job.spec.model_ref is None or partition is None or not _is_ours(job, partition):
        return None
    known = partition.status.conditions if partition.status is not None else ()
    cut = find(known, "Cut")
    if cut is None or cut.status is not FALSE or cut.reason != "Refused":
        return None
    if cut.observed_generation != partition.metadata.generation:
        return None
    return Verdict(complete=False, reason="PartitionRefused", message=cut.message)


def plan_for(snapshot: InferenceJobSnapshot) -> Ready | Waits:
    """The plan to run by, or what it waits for."""
    waits = _addresses(snapshot) or _references(snapshot)
    if waits is not None:
        return waits
    placement = snapshot.placement
    assert placement is not None, "`_references` has checked"
    status, name = placement.status, placement.metadata.name
    known: tuple[Condition, ...] = () if status is None else status.conditions
    if status is None or not holds_for(known, "Planned", placement.metadata.generation or 0):
        planned = find(known, "Planned")
        if planned is None or planned.status is not FALSE:
            return Waits("PlacementNotPlanned", f"Placement {name} is not planned yet")
        return Waits(planned.reason, planned.message)
    document = current_document(snapshot.partition, snapshot.document)
    if document is None:
        partition = partition_of(snapshot.job, placement)
        return Waits("PartitionNotReady", f"Partition {partition} is not cut yet")
    homes = {index: stage.devices for stage in status.stages for index in stage.fragments}
    if sorted(homes) != list(range(len(document.fragments))):
        return Waits("PlacementNotPlanned", f"Placement {name} still plans other fragments")
    return Ready(
        document=document,
        placement=placement,
        stages=tuple(homes[index] for index in range(len(homes))),
        plan=status.epoch or 1,
    )


def _addresses(snapshot: InferenceJobSnapshot) -> Waits | None:
    spec = snapshot.job.spec
    if snapshot.settings.offline:
        for uri in (spec.inputs.uri, spec.outputs.uri):
            if outside(uri):
                return Waits("Offline", offline_text(uri))
    return None


def _references(snapshot: InferenceJobSnapshot) -> Waits | None:
    """What the job refers to and does not exist."""
    job, placement, partition = snapshot.job, snapshot.placement, snapshot.partition
    taken = [
        kind
        for kind, made, there in (
            ("Partition", job.spec.model_ref is not None, partition),
            ("Placement", job.spec.placement_ref is None, placement),
        )
        if made and not _is_ours(job, there)
    ]
    if taken:
        text = f"there is a {taken[0]} {job.metadata.name} already that is not this job's"
        return Waits("NameTaken", f"{text}; name the job otherwise, or refer to that one")
    model, pool = model_of(job, partition), pool_of(job, placement)
    looked_for = (
        ("Placement", placement_of(job), placement, job.spec.placement_ref is not None),
        ("DevicePool", pool, snapshot.pool, True),
        ("Partition", partition_of(job, placement), partition, job.spec.model_ref is None),
        ("Model", model, snapshot.model, True),
    )
    missing = [
        (kind, f"no {kind} {name}")
        for kind, name, there, given in looked_for
        if there is None and given
    ]
    if missing:
        reason = f"{missing[0][0].removeprefix('Device')}NotFound"
        return Waits(reason, f"there is {', and '.join(text for _, text in missing)}")
    leaving = missing_pool(snapshot)
    if leaving is not None:
        return Waits("PoolNotFound", leaving)
    if partition is None and _cut_for(snapshot) is None:
        return Waits("PoolNotReady", f"the budget of DevicePool {pool} is not known yet")
    return _unready(snapshot) or (
        Waits("Planning", "the plan is being made") if None in (placement, partition) else None
    )


def _unready(snapshot: InferenceJobSnapshot) -> Waits | None:
    """What is there, and says itself why it is not ready."""
    model, partition = snapshot.model, snapshot.partition
    for kind, there in (("Model", model), ("Partition", partition)):
        if there is None:
            continue
        known = there.status.conditions if there.status is not None else ()
        if not holds_for(known, "Ready", there.metadata.generation or 0):
            said = message_of(known, "Ready") or "waiting"
            return Waits(f"{kind}NotReady", f"{kind} {there.metadata.name} is not ready: {said}")
    return None


# ---- what is transferred to the coordinator ------------------------------------------------------


def deliver(snapshot: InferenceJobSnapshot, view: CoordinatorView, ready: Ready) -> Step | Verdict:
    """Fragments that the pool's store lacks are cut into it; many jobs share one worker."""
    lacking = {fragment.digest for fragment in ready.document.fragments} - view.fragments
    if not lacking:
        return Step(done=True)
    partition, model, stored = snapshot.partition, snapshot.model, snapshot.document
    assert partition is not None, "`plan_for` has checked"
    assert model is not None, "`plan_for` has checked"
    assert stored is not None, "`plan_for` has checked"
    if snapshot.settings.offline and outside(model.spec.source.uri):
        return Step(reason="Offline", message=offline_text(model.spec.source.uri))
    pool = ready.placement.spec.pool_ref.name
    worker_spec = deliver_worker(partition, model, stored.arguments, pool)
    worker = worker_named(snapshot.workers, worker_spec.name)
    if worker is None:
        return Step(
            child=_owned_by(partition, worker_job(partition, worker_spec, snapshot.settings)),
            reason="Delivering",
            message=f"{len(lacking)} fragments are about to be delivered to the store of {pool}",
        )
    if worker.phase is not WorkerPhase.SUCCEEDED:
        return _step(worker, worker_spec, "Delivering", "DeliveryFailed")
    if worker.end_seen is None or view.begun <= worker.end_seen:
        # The coordinator's last answer may be older than the delivery.
        return Step(
            reason="Delivering",
            message="the fragments are delivered; the coordinator is asked whether it has them",
        )
    return Verdict(
        complete=False,
        reason="FragmentsMissing",
        message=f"the store of {pool} lacks {len(lacking)} fragments after they were delivered: "
        f"its volume was replaced, or another version of Shoal cut {partition.metadata.name}; "
        "make that anew",
    )


def transfer_inputs(snapshot: InferenceJobSnapshot, pool: str) -> Step | Verdict:
    """The inputs are transferred to the coordinator's volume."""
    worker_spec = input_transfer_worker(snapshot.job, pool)
    worker = worker_named(snapshot.workers, worker_spec.name)
    if worker is None:
        return Step(
            child=worker_job(snapshot.job, worker_spec, snapshot.settings),
            reason="TransferringInputs",
            message=f"inputs are about to be transferred from {snapshot.job.spec.inputs.uri}",
        )
    return _step(worker, worker_spec, "TransferringInputs", "InputTransferFailed")


def _step(worker: Worker, worker_spec: WorkerSpec, reason: str, failure: str) -> Step | Verdict:
    match worker.phase:
        case WorkerPhase.SUCCEEDED:
            return Step(done=True)
        case WorkerPhase.FAILED:
            text = worker_text(worker, f"{' '.join(worker_spec.command[:3])} failed")
            return Verdict(complete=False, reason=failure, message=text)
        case _:
            return Step(reason=reason, message=worker_text(worker, f"{worker_spec.component} runs"))


def _owned_by(owner: Partition, manifest: Manifest) -> Manifest:
    """A child of another object than the one that is reconciled: it outlives the job."""
    metadata = manifest["metadata"]
    assert isinstance(metadata, dict), "made just before"
    reference = {
        "apiVersion": API_VERSION,
        "kind": "Partition",
        "name": owner.metadata.name,
        "uid": uid_of(owner),
        "controller": True,
        "blockOwnerDeletion": False,
    }
    return {**manifest, "metadata": {**metadata, "ownerReferences": [reference]}}
