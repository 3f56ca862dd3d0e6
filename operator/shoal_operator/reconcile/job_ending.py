"""The end of an InferenceJob: results are transferred, the verdict is reported, and the run at the
coordinator is removed. Pure.
"""

from dataclasses import replace
from typing import assert_never

from shoal_api.conditions import TRANSFERRING_RESULTS
from shoal_api.kinds.inference_job import InferenceJobStatus
from shoal_operator.reconcile.conditions import TRUE, Cause, find
from shoal_operator.reconcile.decision import CancelJob, CoordinatorCall, Decision, RemoveJob
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
    pending_verdict,
    pool_name,
    status_before,
    terms_of,
    unreachable,
    verdict_of,
    with_run,
)
from shoal_operator.reconcile.names import job_id
from shoal_operator.reconcile.snapshot import (
    InferenceJobSnapshot,
    Run,
    Unreachable,
    Worker,
    WorkerPhase,
)
from shoal_operator.reconcile.times import seconds_since
from shoal_operator.reconcile.workers import (
    input_transfer_worker,
    result_transfer_worker,
    worker_job,
    worker_key,
    worker_named,
    worker_text,
)


def over(snapshot: InferenceJobSnapshot, run: Run | None) -> Decision:
    """The status stays; the run is removed, and the job itself when its time is up."""
    before, job, pool = status_before(snapshot), snapshot.job, pool_name(snapshot)
    failed = find(before.conditions, "Failed")
    has_results = failed is not None and failed.reason == RESULT_TRANSFER_FAILED
    has_results = has_results and job.metadata.deletion_timestamp is None
    own = {input_transfer_worker(job, pool).name, result_transfer_worker(job, pool).name}
    active = (WorkerPhase.PENDING, WorkerPhase.RUNNING)
    result = replace(
        decision(snapshot, before, ()),
        calls=() if has_results else _clear(snapshot, run),
        removals=tuple(
            worker_key(job, worker.name)
            for worker in snapshot.workers
            if worker.name in own and worker.phase in active
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


def _clear(snapshot: InferenceJobSnapshot, run: Run | None) -> tuple[CoordinatorCall, ...]:
    if run is None:
        return ()
    pool, name = pool_name(snapshot), job_id(snapshot.job)
    if not run.state.is_over:
        return (CancelJob(pool=pool, job=name, reason="its InferenceJob has ended"),)
    return (RemoveJob(pool=pool, job=name),)


def _result_transfer(snapshot: InferenceJobSnapshot) -> Worker | None:
    worker_spec = result_transfer_worker(snapshot.job, pool_name(snapshot))
    return worker_named(snapshot.workers, worker_spec.name)


def verdict_so_far(snapshot: InferenceJobSnapshot, run: Run | None) -> Verdict | None:
    """How the job ended: as the coordinator says, or as its status says during the transfer."""
    pending = pending_verdict(status_before(snapshot))
    if pending is None:
        return None if run is None else verdict_of(run, terms_of(snapshot.job))
    away = isinstance(snapshot.view, Unreachable)
    return pending if run is not None or away or _result_transfer(snapshot) is not None else None


def transfer_results(snapshot: InferenceJobSnapshot, verdict: Verdict, run: Run | None) -> Decision:
    """The results are transferred to where the user wants them, then the verdict is reported."""
    status, worker = with_run(snapshot, run), _result_transfer(snapshot)
    if run is not None and not run.state.is_over:
        stopping = _transferring(snapshot, status, verdict, "the run is being stopped")
        return replace(stopping, calls=_clear(snapshot, run), requeue_seconds=SOON_SECONDS)
    if not _may_have_results(snapshot, status):
        return end(snapshot, status, verdict, run)
    if worker is None:
        return _start_result_transfer(snapshot, status, verdict)
    match worker.phase:
        case WorkerPhase.PENDING | WorkerPhase.RUNNING:
            text = worker_text(worker, "results are being transferred")
            return _transferring(snapshot, status, verdict, text)
        case WorkerPhase.SUCCEEDED:
            return end(snapshot, status, verdict, run)
        case WorkerPhase.FAILED:
            text = worker_text(worker, "results could not be transferred")
            where = f"jobs/{job_id(snapshot.job)}/out on the coordinator's volume"
            text = f"{text}; until this job is deleted, the results are in {where}"
            verdict = Verdict(complete=False, reason=RESULT_TRANSFER_FAILED, message=text)
            return ended(snapshot, status, verdict)
        case _:
            assert_never(worker.phase)


def _start_result_transfer(
    snapshot: InferenceJobSnapshot, status: InferenceJobStatus, verdict: Verdict
) -> Decision:
    away, job = unreachable(snapshot), snapshot.job
    if away is not None:
        return _transferring(snapshot, status, verdict, away.message)
    text = f"results are about to be transferred to {job.spec.outputs.uri}"
    child = worker_job(job, result_transfer_worker(job, pool_name(snapshot)), snapshot.settings)
    return replace(_transferring(snapshot, status, verdict, text), children=(child,))


def _may_have_results(snapshot: InferenceJobSnapshot, status: InferenceJobStatus) -> bool:
    """Whether items have ended, or may have since the coordinator's last answer."""
    items = status.items
    if items is None:
        return False
    return items.succeeded + items.failed > 0 or isinstance(snapshot.view, Unreachable)


def _transferring(
    snapshot: InferenceJobSnapshot, status: InferenceJobStatus, verdict: Verdict, text: str
) -> Decision:
    """The verdict is known, and not reported yet."""
    reason = NOT_FAILED.reason if verdict.complete else verdict.reason
    complete, failed = Cause(TRANSFERRING_RESULTS, text), Cause(reason, verdict.message)
    return in_progress(snapshot, status, complete, failed=failed, requeue=LATER_SECONDS)


def end(
    snapshot: InferenceJobSnapshot, status: InferenceJobStatus, verdict: Verdict, run: Run | None
) -> Decision:
    """The verdict is reported, and the run removed."""
    seconds = snapshot.job.spec.ttl_seconds_after_finished
    requeue = None if seconds is None else max(1.0, float(seconds))
    result = ended(snapshot, status, verdict)
    return replace(result, calls=_clear(snapshot, run), requeue_seconds=requeue)
