"""InferenceJob: planned, prepared, run, results transferred; Complete or Failed. Pure.

The semantics are those of `batch/v1` Job: suspend stops the run and resume continues it, the
deadline counts while the job is not suspended, a terminal condition is never left, and the job may
delete itself later.

In order of precedence:

1. it has ended, or is being deleted: only its run at the coordinator is removed;
2. its run has ended: results are transferred, then the verdict is reported;
3. the deadline has passed: the run is stopped, finished results are transferred, Failed;
4. it is suspended: the run is stopped;
5. it runs, or is prepared: plan, its turn, fragments, inputs, submission.

A coordinator that does not answer gets no call; the counts stay as they were.
What the coordinator knows of the run is the truth. Where it answers and does not know a run that
was seen before, its volume was replaced (or it forgot a run that ended long ago): the inputs are
transferred again and the job is submitted again; stored results are not made again.
"""

from dataclasses import replace
from typing import assert_never

from shoal_api.conditions import holds
from shoal_api.kinds.inference_job import InferenceJobStatus
from shoal_operator.reconcile.condition_updates import (
    FALSE,
    TRUE,
    UNKNOWN,
    ConditionUpdate,
    find,
    message_of,
)
from shoal_operator.reconcile.decision import (
    CancelJob,
    CoordinatorCall,
    Decision,
    SubmitJob,
)
from shoal_operator.reconcile.job_ending import (
    end,
    key,
    over,
    pool_name,
    transfer_results,
    verdict_so_far,
)
from shoal_operator.reconcile.job_preparation import (
    Ready,
    Step,
    deliver,
    own_children,
    plan_for,
    refused_cut,
    transfer_inputs,
    unusable,
)
from shoal_operator.reconcile.job_status import (
    NOT_FAILED,
    Verdict,
    Waits,
    decision,
    has_ended,
    in_progress,
    lost_devices,
    missing_pool,
    planned_before,
    progress,
    status_before,
    terms_of,
    unreachable,
    with_run,
)
from shoal_operator.reconcile.names import job_id
from shoal_operator.reconcile.priorities import preceded_by
from shoal_operator.reconcile.snapshot import (
    CoordinatorView,
    InferenceJobSnapshot,
    Run,
    Unreachable,
)
from shoal_operator.reconcile.times import seconds_since
from shoal_operator.reconcile.waiting import (
    LATER_SECONDS,
    RUNNING_SECONDS,
    SOON_SECONDS,
    worker_named,
)
from shoal_operator.reconcile.workers import (
    input_transfer_worker,
)
from shoal_protocol.choices import Precision
from shoal_protocol.partition import document_to_json


def reconcile_inference_job(snapshot: InferenceJobSnapshot) -> Decision:
    """What is to be done about an InferenceJob."""
    before, run = status_before(snapshot), run_of(snapshot)
    if has_ended(before) or snapshot.job.metadata.deletion_timestamp is not None:
        return over(snapshot, run)
    verdict = verdict_so_far(snapshot, run)
    if verdict is not None:
        return transfer_results(snapshot, verdict, run)
    overdue = _overdue(snapshot)
    if overdue is not None:
        return _stop(snapshot, overdue, run)
    if snapshot.job.spec.suspend:
        return _suspend(snapshot, run)
    wanted = _proceed(snapshot, run)
    deadline = _seconds_left(snapshot)
    if deadline is not None:
        wanted = replace(wanted, requeue_seconds=min(wanted.requeue_seconds or deadline, deadline))
    return wanted


def run_of(snapshot: InferenceJobSnapshot) -> Run | None:
    """The run as the coordinator knows it; None where it does not, or does not answer."""
    match snapshot.view:
        case Unreachable():
            return None
        case CoordinatorView(runs=runs):
            return runs.get(job_id(snapshot.job))
        case _:
            assert_never(snapshot.view)


# ---- 3. the deadline -----------------------------------------------------------------------------


def _seconds_left(snapshot: InferenceJobSnapshot) -> float | None:
    """Until the deadline. It counts from when the job began not to be suspended, as in
    `batch/v1`."""
    seconds = snapshot.job.spec.active_deadline_seconds
    known = find(status_before(snapshot).conditions, "Suspended")
    if seconds is None or snapshot.job.spec.suspend:
        return None
    if known is None or known.status is not FALSE:
        return float(seconds)
    return seconds - seconds_since(known.last_transition_time, snapshot.now)


def _overdue(snapshot: InferenceJobSnapshot) -> Verdict | None:
    left = _seconds_left(snapshot)
    if left is None or left > 0:
        return None
    seconds = snapshot.job.spec.active_deadline_seconds
    message = f"the job was active for longer than {seconds} s"
    return Verdict(complete=False, reason="DeadlineExceeded", message=message)


def _stop(snapshot: InferenceJobSnapshot, verdict: Verdict, run: Run | None) -> Decision:
    """The run is stopped; finished results are transferred once the coordinator answers."""
    if run is None and not isinstance(snapshot.view, Unreachable):
        return end(snapshot, status_before(snapshot), verdict, None)
    if run is None or run.state.is_over:
        return transfer_results(snapshot, verdict, run)
    result = in_progress(
        snapshot, with_run(snapshot, run), "Stopping", verdict.message, requeue=SOON_SECONDS
    )
    call = CancelJob(pool=pool_name(snapshot), job=job_id(snapshot.job), reason=verdict.message)
    return replace(result, calls=(call,))


# ---- 4. suspended --------------------------------------------------------------------------------


def _suspend(snapshot: InferenceJobSnapshot, run: Run | None) -> Decision:
    before = status_before(snapshot)
    status = before if run is None else with_run(snapshot, run)
    away, missing = unreachable(snapshot), missing_pool(snapshot)
    calls: tuple[CoordinatorCall, ...] = ()
    requeue: float | None = None
    if run is not None and not run.state.is_over:
        suspended = ConditionUpdate("Suspended", FALSE, "Suspending", "the run is being stopped")
        calls = (CancelJob(pool=pool_name(snapshot), job=job_id(snapshot.job), reason="suspended"),)
        requeue = SOON_SECONDS
    elif away is not None and missing is None and holds(before.conditions, "Planned"):
        suspended = ConditionUpdate("Suspended", UNKNOWN, away.reason, away.message)
        requeue = LATER_SECONDS
    else:
        text = "" if away is None or missing is None else f"; {away.message}"
        suspended = ConditionUpdate("Suspended", TRUE, "Suspended", f"spec.suspend is true{text}")
        if status.items is not None:
            status = replace(status, items=replace(status.items, active=0))
    updates = [
        planned_before(snapshot),
        suspended,
        ConditionUpdate("Complete", FALSE, "Suspended", "spec.suspend is true"),
        ConditionUpdate("Failed", FALSE, NOT_FAILED),
    ]
    return replace(decision(snapshot, status, updates, requeue=requeue), calls=calls)


# ---- 5. in progress ------------------------------------------------------------------------------


def _proceed(snapshot: InferenceJobSnapshot, run: Run | None) -> Decision:
    hopeless = unusable(snapshot) or refused_cut(snapshot)
    if hopeless is not None and run is None:
        return end(snapshot, status_before(snapshot), hopeless, None)
    if run is not None and not run.state.is_over:
        return _running(snapshot, run)
    ready = plan_for(snapshot)
    if isinstance(ready, Waits):
        return _waiting(snapshot, ready)
    match snapshot.view:
        case Unreachable():
            away = unreachable(snapshot)
            assert away is not None, "it does not answer"
            result = in_progress(
                snapshot,
                status_before(snapshot),
                away.reason,
                away.message,
                planned=_planned(ready),
                requeue=LATER_SECONDS,
            )
            return replace(result, children=own_children(snapshot))
        case CoordinatorView():
            prepared = _prepare(snapshot, snapshot.view, ready, run)
            return replace(prepared, children=(*own_children(snapshot), *prepared.children))
        case _:
            assert_never(snapshot.view)


def _waiting(snapshot: InferenceJobSnapshot, waits: Waits) -> Decision:
    """Waits for an object that the job refers to. The counts of a run that was seen stay."""
    status = status_before(snapshot)
    planned = ConditionUpdate("Planned", FALSE, waits.reason, waits.message)
    reason, message, away = "Waiting", waits.message, unreachable(snapshot)
    if away is not None and status.items is not None:
        reason, message = away.reason, away.message
        if missing_pool(snapshot) is None:
            planned = planned_before(snapshot)
    result = in_progress(snapshot, status, reason, message, planned=planned, requeue=LATER_SECONDS)
    return replace(result, children=own_children(snapshot))


def _planned(ready: Ready) -> ConditionUpdate:
    status = ready.placement.status
    message = "" if status is None else message_of(status.conditions, "Planned")
    return ConditionUpdate("Planned", TRUE, "Planned", message)


def _running(snapshot: InferenceJobSnapshot, run: Run) -> Decision:
    ready = plan_for(snapshot)
    status = with_run(snapshot, run)
    planned = _planned(ready) if isinstance(ready, Ready) else planned_before(snapshot)
    reason, message = progress(run)
    calls = tuple[CoordinatorCall, ...]()
    if isinstance(ready, Ready) and _is_behind(snapshot, ready, run):
        if _refused(snapshot, ready):
            assert snapshot.refusal is not None, "`_refused` has checked"
            refusal = snapshot.refusal.message
            message += f"; the coordinator refuses the newest plan or terms: {refusal}"
        else:
            calls = (_submission(snapshot, ready),)
    result = in_progress(
        snapshot, status, reason, message, planned=planned, requeue=RUNNING_SECONDS
    )
    return replace(result, notes=(*result.notes, *lost_devices(snapshot)), calls=calls)


def _is_behind(snapshot: InferenceJobSnapshot, ready: Ready, run: Run) -> bool:
    """Whether the coordinator uses an older plan, or other terms than those wanted."""
    return ready.plan > run.plan or terms_of(snapshot.job) != run.terms


def _prepare(
    snapshot: InferenceJobSnapshot, view: CoordinatorView, ready: Ready, run: Run | None
) -> Decision:
    """Fragments and inputs are brought, both at once; then the job is submitted."""
    before = status_before(snapshot)
    pool = ready.placement.spec.pool_ref.name
    if run is None and before.items is not None:
        inputs = input_transfer_worker(snapshot.job, pool).name
        if worker_named(snapshot.workers, inputs) is not None:
            return _run_lost(snapshot, ready, inputs)
        before = _as_new(before)
    queued = preceded_by(snapshot) if run is None else None
    if queued is not None:
        return in_progress(
            snapshot,
            before,
            queued.reason,
            queued.message,
            planned=_planned(ready),
            requeue=SOON_SECONDS,
        )
    steps = [deliver(snapshot, view, ready)]
    if run is None:
        steps.append(transfer_inputs(snapshot, pool))
    undone: list[Step] = []
    for step in steps:
        match step:
            case Verdict():
                return end(snapshot, before, step, run)
            case Step(done=False):
                undone.append(step)
    status = before if run is None else with_run(snapshot, run)
    if undone:
        result = in_progress(
            snapshot,
            status,
            undone[0].reason,
            undone[0].message,
            planned=_planned(ready),
            requeue=SOON_SECONDS,
        )
        children = tuple(step.child for step in undone if step.child is not None)
        return replace(result, children=children)
    if _refused(snapshot, ready):
        assert snapshot.refusal is not None, "`_refused` has checked"
        message = snapshot.refusal.message
        verdict = Verdict(complete=False, reason="SubmissionRefused", message=message)
        return end(snapshot, status, verdict, run)
    text = f"the job is being submitted to the coordinator of {pool}"
    result = in_progress(
        snapshot, status, "Submitting", text, planned=_planned(ready), requeue=SOON_SECONDS
    )
    return replace(result, calls=(_submission(snapshot, ready),))


def _run_lost(snapshot: InferenceJobSnapshot, ready: Ready, inputs: str) -> Decision:
    """The coordinator does not know a run that was seen: its inputs may be gone as well, so the
    worker that brought them goes first, and then all begins again.
    """
    message = "the coordinator does not know the run any more; the job starts again"
    before = status_before(snapshot)
    result = in_progress(
        snapshot, before, "RunLost", message, planned=_planned(ready), requeue=SOON_SECONDS
    )
    return replace(result, removals=(key(snapshot, inputs),))


def _as_new(before: InferenceJobStatus) -> InferenceJobStatus:
    """The status without what was seen of a run."""
    return InferenceJobStatus(conditions=before.conditions, start_time=before.start_time)


def _refused(snapshot: InferenceJobSnapshot, ready: Ready) -> bool:
    """Whether the coordinator has refused just this already."""
    refusal = snapshot.refusal
    if refusal is None:
        return False
    return (refusal.plan, refusal.terms) == (ready.plan, terms_of(snapshot.job))


def _submission(snapshot: InferenceJobSnapshot, ready: Ready) -> SubmitJob:
    spec = snapshot.job.spec
    return SubmitJob(
        pool=ready.placement.spec.pool_ref.name,
        job=job_id(snapshot.job),
        partition=document_to_json(ready.document).encode(),
        stages=ready.stages,
        plan=ready.plan,
        mode=spec.mode.value,
        policy=spec.policy.value,
        backoff_limit=spec.backoff_limit,
        lossy=spec.transfer_precision is Precision.HALF,
        terms=terms_of(snapshot.job),
    )
