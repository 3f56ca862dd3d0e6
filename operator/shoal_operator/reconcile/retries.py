"""A failed job that is retried: it is in progress again, and what its last run left is no verdict
any more. One that takes inputs as they come is retried while it runs. Pure.

Level-triggered: the job's spec has the number of the retry that is wanted, its status the one that
was begun last, and its run at the coordinator the one that it is of. Any other job that runs, or
one that is Complete, is not retried.
"""

from dataclasses import replace

from shoal_api.conditions import holds
from shoal_api.kinds import InferenceJob
from shoal_api.kinds.inference_job import RetryStatus
from shoal_operator.reconcile.conditions import FALSE, TRUE
from shoal_operator.reconcile.following import takes_more
from shoal_operator.reconcile.job_status import NOT_FAILED
from shoal_operator.reconcile.names import retries
from shoal_operator.reconcile.snapshot import InferenceJobSnapshot, Run, Worker, WorkerPhase


def with_retry(snapshot: InferenceJobSnapshot) -> InferenceJobSnapshot:
    """The snapshot of a job in progress, where a further retry is wanted and possible."""
    job, before = snapshot.job, snapshot.before
    wanted = 0 if job.spec.retry is None else job.spec.retry.number
    live = takes_more(job) and not holds(before.conditions, "Complete")
    if wanted <= retries(job) or not (live or holds(before.conditions, "Failed")):
        return snapshot
    reason, message = NOT_FAILED
    conditions = tuple(
        replace(
            each, status=FALSE, reason=reason, message=message, last_transition_time=snapshot.now
        )
        if each.type == "Failed" and each.status is TRUE
        else each
        for each in before.conditions
    )
    status = replace(
        before,
        conditions=conditions,
        completion_time=None,
        retry=RetryStatus(number=wanted, time=snapshot.now),
    )
    return replace(snapshot, job=replace(job, status=status))


def is_of_before(run: Run, job: InferenceJob) -> bool:
    """Whether a run has ended that a retry is to follow."""
    return run.state.is_over and run.retry < retries(job)


def failed_before(snapshot: InferenceJobSnapshot) -> tuple[Worker, ...]:
    """The workers that failed before the job was retried, or made (a delivery is of several jobs):
    they are to be made again."""
    retry, made_at = snapshot.before.retry, snapshot.job.metadata.creation_timestamp or ""
    return tuple(
        worker
        for worker in snapshot.workers
        if worker.phase is WorkerPhase.FAILED
        and worker.ended_at is not None
        and (worker.ended_at < made_at or (retry is not None and worker.ended_at <= retry.time))
    )


def retried_items(job: InferenceJob) -> tuple[int, ...]:
    """The failed items that the last retry tries again; none: all."""
    spec = job.spec.retry
    return () if spec is None or spec.number != retries(job) else spec.items
