"""What an InferenceJob is submitted with, whether that was refused, and how it is stopped. Pure."""

from dataclasses import dataclass
from typing import Final

from shoal_operator.reconcile.decision import CancelJob, Manifest, SubmitJob
from shoal_operator.reconcile.following import wanted_terms
from shoal_operator.reconcile.job_cuts import is_final
from shoal_operator.reconcile.job_preparation import Ready, Step, deliver
from shoal_operator.reconcile.names import job_id, retries
from shoal_operator.reconcile.retries import retried_items
from shoal_operator.reconcile.snapshot import InferenceJobSnapshot, Run
from shoal_protocol.choices import Precision
from shoal_protocol.partition import document_to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """How a run gets the newest plan and terms; `problem`: why it does not. `replaces`: that plan
    has other fragments, and the run is to be stopped for it."""

    replaces: bool = False
    calls: tuple[SubmitJob, ...] = ()
    children: tuple[Manifest, ...] = ()
    problem: str = ""


NOTHING_NEWER: Final = Newest()


def newest_for(snapshot: InferenceJobSnapshot, run: Run, ready: Ready) -> Newest:
    """Submit it again, where its plan or its terms are older. A plan of another cut has other
    fragments: they are delivered first. A run keeps its fragments, and is refused others; then it
    is stopped as for a suspension, and submitted with them. Items that have finished stay."""
    newer = (ready.plan, retries(snapshot.job)) > (run.plan, run.retry)
    if run.completing or (not newer and wanted_terms(snapshot) == run.terms):
        return NOTHING_NEWER
    refusal = refusal_of(snapshot, ready)
    replaces = newer and snapshot.refusal is not None and snapshot.refusal.other_way
    if refusal is not None and not replaces:
        return Newest(problem=f"the coordinator refuses the newest plan or terms: {refusal}")
    match deliver(snapshot, ready.document) if newer else None:
        case None if refusal is not None:
            return Newest(replaces=True)
        case None:
            return Newest(calls=(submission(snapshot, ready),))
        case Step(child=child):
            return Newest(children=() if child is None else (child,))
        case failed:
            return Newest(problem=f"the newest plan waits for its fragments: {failed.message}")


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
