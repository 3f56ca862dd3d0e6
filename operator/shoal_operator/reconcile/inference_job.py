"""InferenceJob: planned, prepared, run, results transferred; Complete or Failed. Pure.

The semantics are those of `batch/v1` Job: suspend stops the run and resume continues it, the
deadline counts while the job is not suspended, a terminal condition is never left, except by a
retry of a failed job (`retries`), and the job may delete itself later.

In order of precedence:

1. it has ended, or is being deleted: only its run at the coordinator is removed; that of a failed
   job stays until the job is deleted, so that it can be retried;
2. its run has ended, or can only wait for inputs that do not come: results are transferred, then
   the verdict is reported; not where another cut may help (`finer_cuts`): it is prepared again;
3. the deadline has passed: the run is stopped, finished results are transferred, Failed;
4. it is suspended: the run is stopped;
5. it runs, or is prepared: plan, its turn, fragments, inputs, submission.

A coordinator that does not answer gets no call; the counts stay as they were.
What the coordinator knows of the run is the truth. Where it answers and does not know a run that
was seen before, its volume was replaced (or it forgot a run that ended long ago): the inputs are
transferred again and the job is submitted again; stored results are not made again.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from shoal_api.conditions import TRANSFERRING_RESULTS, holds
from shoal_api.kinds.inference_job import InferenceJobStatus
from shoal_operator.reconcile.conditions import (
    FALSE,
    TRUE,
    UNKNOWN,
    Cause,
    ConditionUpdate,
)
from shoal_operator.reconcile.decision import (
    CoordinatorCall,
    Decision,
    RemoveJob,
)
from shoal_operator.reconcile.finer_cuts import (
    CUTTING_FINER,
    another_follows,
    awaited,
    finer_note,
    nothing_finer,
    too_large_run,
    waits_for_cut,
    with_finer_cut,
)
from shoal_operator.reconcile.following import (
    active_followers,
    input_worker,
    lacks_inputs,
    takes_more,
)
from shoal_operator.reconcile.job_preparation import (
    Ready,
    Step,
    deliver,
    own_children,
    plan_for,
    preceded_by,
    refused_cut,
    transfer_inputs,
    unusable,
)
from shoal_operator.reconcile.job_running import running
from shoal_operator.reconcile.job_status import (
    LATER_SECONDS,
    NOT_FAILED,
    RESULT_TRANSFER_FAILED,
    SOON_SECONDS,
    Verdict,
    decision,
    ended,
    has_ended,
    in_progress,
    missing_pool,
    pending_verdict,
    planned_before,
    unreachable,
    verdict_of,
    with_run,
)
from shoal_operator.reconcile.job_submission import cancel, refusal_of, submission
from shoal_operator.reconcile.names import job_folder, job_id
from shoal_operator.reconcile.retries import failed_before, is_of_before, with_retry
from shoal_operator.reconcile.snapshot import (
    InferenceJobSnapshot,
    Run,
    Unreachable,
    Worker,
    WorkerPhase,
)
from shoal_operator.reconcile.store_room import WAITING_FOR_ROOM, room_notes
from shoal_operator.reconcile.times import seconds_since
from shoal_operator.reconcile.workers import (
    input_transfer_worker,
    result_transfer_worker,
    worker_job,
    worker_key,
    worker_named,
    worker_text,
)


def reconcile_inference_job(snapshot: InferenceJobSnapshot) -> Decision:
    """What is to be done about an InferenceJob."""
    deleted = snapshot.job.metadata.deletion_timestamp is not None
    if not deleted:
        snapshot = with_retry(snapshot)
    if has_ended(snapshot.before) or deleted:
        return _over(snapshot)
    snapshot = with_finer_cut(snapshot)
    verdict = _verdict_so_far(snapshot)
    if verdict is not None:
        return _transfer(snapshot, verdict)
    left = _seconds_left(snapshot)
    if left is not None and left <= 0:
        return _stop(snapshot)
    if snapshot.job.spec.suspend:
        return _suspend(snapshot)
    wanted = _proceed(snapshot)
    if left is None:
        return wanted
    return replace(wanted, requeue_seconds=min(wanted.requeue_seconds or left, left))


# ---- 1. it has ended, or is being deleted --------------------------------------------------------


def _over(snapshot: InferenceJobSnapshot) -> Decision:
    """The status stays; the run is removed, and the job itself when its time is up."""
    before, job, pool = snapshot.before, snapshot.job, snapshot.pool_name
    own = {input_transfer_worker(job, pool).name, result_transfer_worker(job, pool).name}
    active = (WorkerPhase.PENDING, WorkerPhase.RUNNING)
    result = replace(
        decision(snapshot, before, ()),
        calls=_clear(snapshot, keep=_may_be_retried(snapshot)),
        removals=(
            *active_followers(snapshot),
            *(
                worker_key(job, worker.name)
                for worker in snapshot.workers
                if worker.name in own and worker.phase in active
            ),
        ),
        notes=(),
    )
    seconds = job.spec.ttl_seconds_after_finished
    if seconds is None or not has_ended(before):
        return result
    ended_at = max(
        condition.last_transition_time
        for condition in before.conditions
        if condition.type in ("Complete", "Failed") and condition.status is TRUE
    )
    left = seconds - seconds_since(ended_at, snapshot.now)
    if left <= 0:
        return replace(result, delete_self=True)
    return replace(result, requeue_seconds=max(1.0, left))


def _may_be_retried(snapshot: InferenceJobSnapshot) -> bool:
    """Whether a job has failed: its run stays, with inputs and results, until it is deleted."""
    deleted = snapshot.job.metadata.deletion_timestamp is not None
    return holds(snapshot.before.conditions, "Failed") and not deleted


def _clear(snapshot: InferenceJobSnapshot, *, keep: bool) -> tuple[CoordinatorCall, ...]:
    """Stop the run of a job that has ended, then remove it, unless it is to be kept."""
    if snapshot.active_run is not None:
        return (cancel(snapshot, "its InferenceJob has ended"),)
    if snapshot.run is None or keep:
        return ()
    return (RemoveJob(pool=snapshot.pool_name, job=job_id(snapshot.job)),)


# ---- 2. its run has ended ------------------------------------------------------------------------


def _result_transfer(snapshot: InferenceJobSnapshot) -> Worker | None:
    worker_spec = result_transfer_worker(snapshot.job, snapshot.pool_name)
    return worker_named(snapshot.workers, worker_spec.name)


def _verdict_so_far(snapshot: InferenceJobSnapshot) -> Verdict | None:
    """How the job ended: as the coordinator says, or as its status says during the transfer."""
    run, pending = snapshot.run, pending_verdict(snapshot.before)
    if pending is None:
        return None if run is None else _verdict(snapshot, run) or lacks_inputs(snapshot, run)
    away = isinstance(snapshot.view, Unreachable)
    return pending if run is not None or away or _result_transfer(snapshot) is not None else None


def _verdict(snapshot: InferenceJobSnapshot, run: Run) -> Verdict | None:
    """What the coordinator says, unless another cut may help."""
    if is_of_before(run, snapshot.job) or another_follows(snapshot, run):
        return None
    verdict = verdict_of(run, snapshot.job)
    if verdict is None or too_large_run(snapshot) is None:
        return verdict
    why = nothing_finer(snapshot, run)
    if why is None:
        return None
    return replace(verdict, message="; ".join(filter(None, [verdict.message, why])))


def _transfer(snapshot: InferenceJobSnapshot, verdict: Verdict) -> Decision:
    """The results are transferred to where the user wants them, then the verdict is reported."""
    worker = _result_transfer(snapshot)
    followers, runs = active_followers(snapshot), snapshot.active_run is not None
    if runs or followers:
        stopping = _transferring(snapshot, verdict, "the run is being stopped")
        calls = _clear(snapshot, keep=True) if runs else ()
        return replace(stopping, calls=calls, removals=followers, requeue_seconds=SOON_SECONDS)
    if not _may_have_results(snapshot):
        return _end(snapshot, verdict)
    if worker is None:
        return _start_result_transfer(snapshot, verdict)
    match worker.phase:
        case WorkerPhase.PENDING | WorkerPhase.RUNNING:
            text = worker_text(worker, "results are being transferred")
            return _transferring(snapshot, verdict, text)
        case WorkerPhase.SUCCEEDED:
            return _end(snapshot, verdict)
        case WorkerPhase.FAILED:
            text = worker_text(worker, "results could not be transferred")
            where = f"{job_folder(snapshot.job, 'out')} on the coordinator's volume"
            text = f"{text}; until this job is deleted, the results are in {where}"
            return ended(snapshot, Verdict(RESULT_TRANSFER_FAILED, text))
        case _:
            assert_never(worker.phase)


def _start_result_transfer(snapshot: InferenceJobSnapshot, verdict: Verdict) -> Decision:
    away, job = unreachable(snapshot), snapshot.job
    if away is not None:
        return _transferring(snapshot, verdict, away.message)
    text = f"results are about to be transferred to {job.spec.outputs.uri}"
    child = worker_job(job, result_transfer_worker(job, snapshot.pool_name), snapshot.settings)
    return replace(_transferring(snapshot, verdict, text), children=(child,))


def _may_have_results(snapshot: InferenceJobSnapshot) -> bool:
    """Whether items have ended, or may have since the coordinator's last answer."""
    items = with_run(snapshot).items
    if items is None:
        return False
    return items.succeeded + items.failed > 0 or isinstance(snapshot.view, Unreachable)


def _transferring(snapshot: InferenceJobSnapshot, verdict: Verdict, text: str) -> Decision:
    """The verdict is known, and not reported yet."""
    reason = NOT_FAILED.reason if verdict.complete else verdict.reason
    complete, failed = Cause(TRANSFERRING_RESULTS, text), Cause(reason, verdict.message)
    return in_progress(snapshot, complete, failed=failed, requeue=LATER_SECONDS)


def _end(
    snapshot: InferenceJobSnapshot, verdict: Verdict, status: InferenceJobStatus | None = None
) -> Decision:
    """The verdict is reported, and the run removed where nothing of it can be retried."""
    seconds = snapshot.job.spec.ttl_seconds_after_finished
    requeue = None if seconds is None else max(1.0, float(seconds))
    result = ended(snapshot, verdict, status)
    calls = _clear(snapshot, keep=not verdict.complete)
    return replace(result, calls=calls, requeue_seconds=requeue)


# ---- 3. the deadline -----------------------------------------------------------------------------


def _seconds_left(snapshot: InferenceJobSnapshot) -> float | None:
    """Until the deadline. It counts from when the job began not to be suspended, as in
    `batch/v1`."""
    seconds = snapshot.job.spec.active_deadline_seconds
    known = snapshot.job.condition("Suspended")
    if seconds is None or snapshot.job.spec.suspend:
        return None
    if known is None or known.status is not FALSE:
        return float(seconds)
    retry = snapshot.before.retry
    since = max(known.last_transition_time, "" if retry is None else retry.time)
    return seconds - seconds_since(since, snapshot.now)


def _stop(snapshot: InferenceJobSnapshot) -> Decision:
    """The run is stopped; finished results are transferred once the coordinator answers."""
    seconds = snapshot.job.spec.active_deadline_seconds
    text = f"the job was active for longer than {seconds} s"
    verdict = Verdict("DeadlineExceeded", text)
    if snapshot.run is None and not isinstance(snapshot.view, Unreachable):
        return _end(snapshot, verdict)
    if snapshot.active_run is None:
        return _transfer(snapshot, verdict)
    result = in_progress(snapshot, Cause("Stopping", text))
    return replace(result, calls=(cancel(snapshot, text),))


# ---- 4. suspended --------------------------------------------------------------------------------


def _suspend(snapshot: InferenceJobSnapshot) -> Decision:
    status = with_run(snapshot)
    away, missing = unreachable(snapshot), missing_pool(snapshot)
    calls: tuple[CoordinatorCall, ...] = ()
    requeue: float | None = None
    if snapshot.active_run is not None:
        suspended = ConditionUpdate("Suspended", FALSE, "Suspending", "the run is being stopped")
        calls, requeue = (cancel(snapshot, "suspended"),), SOON_SECONDS
    elif away is not None and missing is None and holds(status.conditions, "Planned"):
        suspended, requeue = ConditionUpdate("Suspended", UNKNOWN, *away), LATER_SECONDS
    else:
        text = "" if away is None or missing is None else f"; {away.message}"
        suspended = ConditionUpdate("Suspended", TRUE, "Suspended", f"spec.suspend is true{text}")
        if status.items is not None:
            status = replace(status, items=replace(status.items, active=0))
    updates = [
        planned_before(snapshot),
        suspended,
        ConditionUpdate("Complete", FALSE, "Suspended", "spec.suspend is true"),
        ConditionUpdate("Failed", FALSE, *NOT_FAILED),
    ]
    removals = active_followers(snapshot)
    wanted = replace(decision(snapshot, status, updates), calls=calls, removals=removals)
    return replace(wanted, requeue_seconds=requeue)


# ---- 5. in progress ------------------------------------------------------------------------------


def _proceed(snapshot: InferenceJobSnapshot) -> Decision:
    hopeless = unusable(snapshot) or refused_cut(snapshot)
    if hopeless is not None and snapshot.run is None:
        return _end(snapshot, hopeless)
    if snapshot.active_run is not None:
        return running(snapshot, snapshot.active_run)
    ready, away = plan_for(snapshot), unreachable(snapshot)
    if isinstance(ready, Cause):
        result = _waiting(snapshot, ready)
    elif away is not None:
        result = in_progress(snapshot, away, planned=ready.planned, requeue=LATER_SECONDS)
    elif missing := awaited(snapshot, ready.plan):
        result = in_progress(snapshot, missing, planned=ready.planned)
    elif stale := failed_before(snapshot):
        result = _retried(snapshot, ready, stale)
    else:
        result = _prepare(snapshot, ready)
    return replace(
        result,
        children=(*own_children(snapshot), *result.children),
        notes=(*result.notes, *finer_note(snapshot)),
    )


def _waiting(snapshot: InferenceJobSnapshot, missing: Cause) -> Decision:
    """Waits for an object that the job refers to, or for a finer cut. The counts of a run that was
    seen stay.
    """
    planned = ConditionUpdate("Planned", FALSE, *missing)
    if (finer := snapshot.before.finer_cut) is not None and too_large_run(snapshot) is not None:
        cutting = Cause(CUTTING_FINER, f"{finer.message}: {missing.message}")
        return in_progress(snapshot, cutting, planned=planned, requeue=LATER_SECONDS)
    status, away = snapshot.before, unreachable(snapshot)
    complete = waits_for_cut(snapshot, missing)
    if away is not None and status.items is not None:
        complete = away
        if missing_pool(snapshot) is None:
            planned = planned_before(snapshot)
    return in_progress(snapshot, complete, planned=planned, status=status, requeue=LATER_SECONDS)


def _prepare(snapshot: InferenceJobSnapshot, ready: Ready) -> Decision:
    """Fragments and inputs are transferred, both at once; then the job is submitted."""
    status, pool = with_run(snapshot), snapshot.pool_name
    steps = [deliver(snapshot, ready.document)]
    if snapshot.run is None:
        inputs = input_worker(snapshot.job, pool).name
        if status.items is not None and worker_named(snapshot.workers, inputs) is not None:
            return _run_lost(snapshot, ready, inputs)
        # Without what was seen of a run that is lost.
        status = InferenceJobStatus(
            conditions=status.conditions,
            start_time=status.start_time,
            finer_cut=status.finer_cut,
            retry=status.retry,
        )
        if (queued := preceded_by(snapshot)) is not None:
            return in_progress(snapshot, queued, planned=ready.planned, status=status)
        if not takes_more(snapshot.job) and not _waits_for_room(steps[0]):
            steps.append(transfer_inputs(snapshot))
    failed = next((step for step in steps if isinstance(step, Verdict)), None)
    if failed is not None:
        return _end(snapshot, failed, status)
    undone = [step for step in steps if isinstance(step, Step)]
    if undone:
        cause = undone[0].cause
        requeue = LATER_SECONDS if cause.reason == WAITING_FOR_ROOM else SOON_SECONDS
        result = in_progress(snapshot, cause, planned=ready.planned, status=status, requeue=requeue)
        return replace(
            result,
            children=tuple(child for step in undone for child in step.children),
            removals=tuple(key for step in undone for key in step.removals),
            notes=(*result.notes, *room_notes(snapshot, cause)),
        )
    refusal = refusal_of(snapshot, ready)
    if refusal is not None:
        why = refusal or f"the coordinator of {pool} refused the job and gave no reason"
        return _end(snapshot, Verdict("SubmissionRefused", why), status)
    submitting = Cause("Submitting", f"the job is being submitted to the coordinator of {pool}")
    result = in_progress(snapshot, submitting, planned=ready.planned, status=status)
    return replace(result, calls=(submission(snapshot, ready),))


def _waits_for_room(step: Step | Verdict | None) -> bool:
    """Whether a delivery waits for room: inputs would take more of it away."""
    return isinstance(step, Step) and step.cause.reason == WAITING_FOR_ROOM


def _retried(snapshot: InferenceJobSnapshot, ready: Ready, stale: Sequence[Worker]) -> Decision:
    """The workers that failed before the retry make room for others."""
    names = ", ".join(worker.name for worker in stale)
    retrying = Cause("Retrying", f"what failed before is removed: {names}")
    result = in_progress(snapshot, retrying, planned=ready.planned)
    return replace(
        result, removals=tuple(worker_key(snapshot.job, worker.name) for worker in stale)
    )


def _run_lost(snapshot: InferenceJobSnapshot, ready: Ready, inputs: str) -> Decision:
    """The coordinator does not know a run that was seen: its inputs may be gone as well, so the
    worker that transferred them is removed first; then the job is prepared again.
    """
    lost = Cause("RunLost", "the coordinator does not know the run any more; the job starts again")
    result = in_progress(snapshot, lost, planned=ready.planned)
    return replace(result, removals=(worker_key(snapshot.job, inputs),))
