"""The end of an InferenceJob: results are transferred, the verdict is reported, and the run at the
coordinator is removed. Pure.
"""

from dataclasses import replace
from typing import assert_never

from shoal_api.conditions import TRANSFERRING_RESULTS
from shoal_api.kinds.inference_job import InferenceJobStatus
from shoal_operator.reconcile.condition_updates import FALSE, TRUE, ConditionUpdate, find
from shoal_operator.reconcile.decision import (
    CancelJob,
    CoordinatorCall,
    Decision,
    ObjectKey,
    RemoveJob,
)
from shoal_operator.reconcile.job_status import (
    NOT_FAILED,
    RESULT_TRANSFER_FAILED,
    Verdict,
    decision,
    ended,
    has_ended,
    not_suspended,
    pending_verdict,
    planned_before,
    status_before,
    terms_of,
    unreachable,
    verdict_of,
    with_run,
)
from shoal_operator.reconcile.names import job_id, namespace_of
from shoal_operator.reconcile.references import pool_of
from shoal_operator.reconcile.snapshot import (
    InferenceJobSnapshot,
    Run,
    Unreachable,
    WorkerPhase,
)
from shoal_operator.reconcile.times import seconds_since
from shoal_operator.reconcile.waiting import LATER_SECONDS, SOON_SECONDS, worker_named, worker_text
from shoal_operator.reconcile.workers import (
    WorkerSpec,
    input_transfer_worker,
    result_transfer_worker,
    worker_job,
    worker_key,
)


def over(snapshot: InferenceJobSnapshot, run: Run | None) -> Decision:
    """The status stays; the run is removed, and the job itself when its time is up."""
    before, job = status_before(snapshot), snapshot.job
    result = decision(snapshot, before, [])
    failed = find(before.conditions, "Failed")
    kept = failed is not None and failed.reason == RESULT_TRANSFER_FAILED
    kept = kept and job.metadata.deletion_timestamp is None
    result = replace(result, calls=() if kept else _clear(snapshot, run), notes=())
    active = (WorkerPhase.PENDING, WorkerPhase.RUNNING)
    names = _own_workers(snapshot)
    idle = [each.name for each in snapshot.workers if each.name in names and each.phase in active]
    result = replace(result, removals=tuple(key(snapshot, name) for name in idle))
    seconds = job.spec.ttl_seconds_after_finished
    if seconds is None or not has_ended(before):
        return result
    over = max(
        (
            condition.last_transition_time
            for condition in before.conditions
            if condition.type in ("Complete", "Failed") and condition.status is TRUE
        ),
        default=snapshot.now,
    )
    left = seconds - seconds_since(over, snapshot.now)
    return replace(
        result, delete_self=left <= 0, requeue_seconds=max(1.0, left) if left > 0 else None
    )


def _clear(snapshot: InferenceJobSnapshot, run: Run | None) -> tuple[CoordinatorCall, ...]:
    if run is None:
        return ()
    pool, name = pool_name(snapshot), job_id(snapshot.job)
    if not run.state.is_over:
        return (CancelJob(pool=pool, job=name, reason="its InferenceJob has ended"),)
    return (RemoveJob(pool=pool, job=name),)


def _own_workers(snapshot: InferenceJobSnapshot) -> frozenset[str]:
    pool = pool_name(snapshot)
    worker_specs = (
        input_transfer_worker(snapshot.job, pool),
        result_transfer_worker(snapshot.job, pool),
    )
    return frozenset(worker_spec.name for worker_spec in worker_specs)


def pool_name(snapshot: InferenceJobSnapshot) -> str:
    return pool_of(snapshot.job, snapshot.placement) or ""


def key(snapshot: InferenceJobSnapshot, name: str) -> ObjectKey:
    return worker_key(namespace_of(snapshot.job), name)


def verdict_so_far(snapshot: InferenceJobSnapshot, run: Run | None) -> Verdict | None:
    """How the job ended: as the coordinator says, or as its status says during the transfer."""
    pending = pending_verdict(status_before(snapshot))
    if pending is not None:
        worker_spec = result_transfer_worker(snapshot.job, pool_name(snapshot))
        worker = worker_named(snapshot.workers, worker_spec.name)
        known = run is not None or worker is not None or isinstance(snapshot.view, Unreachable)
        return pending if known else None
    return None if run is None else verdict_of(run, terms_of(snapshot.job))


def transfer_results(snapshot: InferenceJobSnapshot, verdict: Verdict, run: Run | None) -> Decision:
    """The results are transferred to where the user wants them, then the verdict is reported."""
    status = status_before(snapshot) if run is None else with_run(snapshot, run)
    if run is not None and not run.state.is_over:
        text = "the run is being stopped"
        transferring = replace(
            _transferring(snapshot, status, verdict, text), requeue_seconds=SOON_SECONDS
        )
        return replace(transferring, calls=_clear(snapshot, run))
    if not _may_have_results(snapshot, status):
        return end(snapshot, status, verdict, run)
    worker_spec = result_transfer_worker(snapshot.job, pool_name(snapshot))
    worker = worker_named(snapshot.workers, worker_spec.name)
    if worker is None:
        return _start_result_transfer(snapshot, status, verdict, worker_spec)
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
            return ended(snapshot, status, verdict, run)
        case _:
            assert_never(worker.phase)


def _start_result_transfer(
    snapshot: InferenceJobSnapshot,
    status: InferenceJobStatus,
    verdict: Verdict,
    worker_spec: WorkerSpec,
) -> Decision:
    away = unreachable(snapshot)
    if away is not None:
        return _transferring(snapshot, status, verdict, away.message)
    text = f"results are about to be transferred to {snapshot.job.spec.outputs.uri}"
    child = worker_job(snapshot.job, worker_spec, snapshot.settings)
    return replace(_transferring(snapshot, status, verdict, text), children=(child,))


def _may_have_results(snapshot: InferenceJobSnapshot, status: InferenceJobStatus) -> bool:
    """Whether items have ended, or may have since their coordinator was last heard of."""
    items = status.items
    if items is None:
        return False
    return items.succeeded + items.failed > 0 or isinstance(snapshot.view, Unreachable)


def _transferring(
    snapshot: InferenceJobSnapshot, status: InferenceJobStatus, verdict: Verdict, text: str
) -> Decision:
    """The verdict is known, and not reported yet."""
    reason = NOT_FAILED if verdict.complete else verdict.reason
    updates = [
        planned_before(snapshot),
        not_suspended(snapshot),
        ConditionUpdate("Complete", FALSE, TRANSFERRING_RESULTS, text),
        ConditionUpdate("Failed", FALSE, reason, verdict.message),
    ]
    return decision(snapshot, status, updates, requeue=LATER_SECONDS)


def end(
    snapshot: InferenceJobSnapshot, status: InferenceJobStatus, verdict: Verdict, run: Run | None
) -> Decision:
    result = ended(snapshot, status, verdict, run)
    seconds = snapshot.job.spec.ttl_seconds_after_finished
    requeue = None if seconds is None else max(1.0, float(seconds))
    return replace(result, calls=_clear(snapshot, run), requeue_seconds=requeue)
