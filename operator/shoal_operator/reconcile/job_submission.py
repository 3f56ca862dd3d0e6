"""What an InferenceJob is submitted with, whether that was refused, and how it is stopped. Pure."""

from dataclasses import dataclass
from typing import Final, assert_never

from shoal_operator.reconcile.conditions import Cause
from shoal_operator.reconcile.decision import CancelJob, Manifest, ObjectKey, SubmitJob
from shoal_operator.reconcile.following import wanted_terms
from shoal_operator.reconcile.job_cuts import is_final, owns_partition
from shoal_operator.reconcile.job_preparation import Ready, Step, deliver
from shoal_operator.reconcile.job_status import Verdict
from shoal_operator.reconcile.names import job_id, retries
from shoal_operator.reconcile.retries import retried_items
from shoal_operator.reconcile.snapshot import InferenceJobSnapshot, Run, Unreachable
from shoal_operator.reconcile.store_room import WAITING_FOR_ROOM, can_ever_have
from shoal_protocol.choices import Precision
from shoal_protocol.partition import document_to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """How a run gets the newest plan and terms; `problem`: why it does not. `replaces`: that plan
    has other fragments, and the run is to be stopped for it. `waits`: for which there is no room.
    """

    replaces: bool = False
    calls: tuple[SubmitJob, ...] = ()
    children: tuple[Manifest, ...] = ()
    removals: tuple[ObjectKey, ...] = ()
    problem: str = ""
    waits: Cause | None = None


NOTHING_NEWER: Final = Newest()


def newest_for(snapshot: InferenceJobSnapshot, run: Run, ready: Ready) -> Newest:
    """Submit it again, where its plan or its terms are older. A plan of another cut has other
    fragments: they are delivered first. A run keeps its fragments, and is refused others; then it
    is stopped as for a suspension, and submitted with them. Items that have finished stay. Where
    the store has no room for both cuts, it goes on with the fragments that it has."""
    newer = (ready.plan, retries(snapshot.job)) > (run.plan, run.retry)
    if run.completing or (not newer and wanted_terms(snapshot) == run.terms):
        return NOTHING_NEWER
    refusal = refusal_of(snapshot, ready)
    replaces = newer and snapshot.refusal is not None and snapshot.refusal.other_way
    if refusal is not None and not replaces:
        return Newest(problem=f"the coordinator refuses the newest plan or terms: {refusal}")
    step = deliver(snapshot, ready.document) if newer else None
    if step is not None:
        return _delivered(snapshot, ready, step)
    replaced = Newest(replaces=True)
    return replaced if refusal is not None else Newest(calls=(submission(snapshot, ready),))


def _delivered(snapshot: InferenceJobSnapshot, ready: Ready, step: Step | Verdict) -> Newest:
    """How far the fragments of the newest plan are on their way."""
    match step:
        case Step(cause=Cause(reason=reason) as cause) if reason == WAITING_FOR_ROOM:
            return Newest(replaces=_gives_way(snapshot, ready), waits=cause)
        case Step():
            return Newest(children=step.children, removals=step.removals)
        case Verdict(message=message):
            return Newest(problem=f"the newest plan waits for its fragments: {message}")
        case _:
            assert_never(step)


def _gives_way(snapshot: InferenceJobSnapshot, ready: Ready) -> bool:
    """Whether a run is to be stopped so that the fragments that follow have its room: its own have
    no place any more, since the model was cut for what devices have now. Any other run goes on with
    those that it has."""
    view = snapshot.view
    if snapshot.before.finer_cut is None or isinstance(view, Unreachable) or view.store is None:
        return False
    model = snapshot.model
    return owns_partition(snapshot) and can_ever_have(
        ready.document, view.store, view.fragments, model
    )


def refusal_of(snapshot: InferenceJobSnapshot, ready: Ready) -> str | None:
    """Why the coordinator has refused just this already; None: it has not. A run keeps its
    fragments; when it has been stopped, the job may go on with others."""
    refusal = snapshot.refusal
    wanted = (ready.plan, wanted_terms(snapshot), retries(snapshot.job))
    if refusal is None or (refusal.other_way and snapshot.active_run is None):
        return None
    if (refusal.plan, refusal.terms, refusal.retry) != wanted:
        return None
    return refusal.message


def cancel(snapshot: InferenceJobSnapshot, reason: str) -> CancelJob:
    """Stop the job's run; what has finished stays."""
    return CancelJob(pool=snapshot.pool_name, job=job_id(snapshot.job), reason=reason)


def submission(snapshot: InferenceJobSnapshot, ready: Ready) -> SubmitJob:
    """A job that is ready, as its coordinator receives it."""
    spec = snapshot.job.spec
    return SubmitJob(
        pool=snapshot.pool_name,
        job=job_id(snapshot.job),
        partition=document_to_json(ready.document).encode(),
        stages=ready.stages,
        granted_bytes=ready.granted_bytes,
        predicted_seconds=ready.predicted_seconds,
        plan=ready.plan,
        mode=spec.mode.value,
        policy=spec.policy.value,
        backoff_limit=spec.backoff_limit,
        lossy=spec.transfer_precision is Precision.HALF,
        batch=0 if spec.batching is None else spec.batching.max_items,
        follow=spec.inputs.follow,
        terms=wanted_terms(snapshot),
        retry=retries(snapshot.job),
        retried_items=retried_items(snapshot.job),
        final_cut=is_final(snapshot),
    )
