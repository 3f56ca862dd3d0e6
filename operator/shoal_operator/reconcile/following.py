"""A job that follows its inputs: what is copied to and from its coordinator while it runs. Pure.

Two workers copy what is new, one to the coordinator's volume, one from it, for as long as the job
runs. They only make it early: when spec.end is true, the first is removed and a worker transfers
what it has missed; only then the coordinator receives the end. Results are transferred once more
after the run, as of any job. Where that worker fails, the job does as well, when the items that
have come are done; while they are not, what failed is tried again.
"""

from collections.abc import Iterator
from dataclasses import replace

from shoal_api.kinds import InferenceJob
from shoal_operator.reconcile.conditions import Cause
from shoal_operator.reconcile.decision import Decision, Manifest, Note, ObjectKey, Terms
from shoal_operator.reconcile.job_preparation import Step, transfer_inputs
from shoal_operator.reconcile.job_status import (
    SOON_SECONDS,
    Verdict,
    progress,
    terms_of,
    waits_for_more,
)
from shoal_operator.reconcile.snapshot import InferenceJobSnapshot, Run, WorkerPhase
from shoal_operator.reconcile.workers import (
    WorkerSpec,
    input_follower,
    input_transfer_worker,
    result_follower,
    worker_job,
    worker_key,
    worker_named,
    worker_text,
)

_ACTIVE = (WorkerPhase.PENDING, WorkerPhase.RUNNING)
_HELD_UP = (WorkerPhase.PENDING, WorkerPhase.FAILED)


def follows(job: InferenceJob) -> bool:
    """Whether inputs that come while the job runs are taken too."""
    return job.spec.inputs.follow


def takes_more(job: InferenceJob) -> bool:
    """Whether that has not been ended."""
    return follows(job) and not job.spec.end


def input_worker(job: InferenceJob, pool: str) -> WorkerSpec:
    """The worker that brings the inputs now."""
    return (input_follower if takes_more(job) else input_transfer_worker)(job, pool)


def wanted_terms(snapshot: InferenceJobSnapshot) -> Terms:
    """The job's terms; the end is one of them when the last inputs are transferred."""
    job, run = snapshot.job, snapshot.run
    worker = worker_named(snapshot.workers, input_transfer_worker(job, snapshot.pool_name).name)
    transferred = worker is not None and worker.phase is WorkerPhase.SUCCEEDED
    known = run is not None and run.terms.end
    ends = follows(job) and (known or (job.spec.end and transferred))
    return replace(terms_of(job), end=ends)


def lacks_inputs(snapshot: InferenceJobSnapshot, run: Run) -> Verdict | None:
    """Why a job has to end without its last inputs: they cannot be transferred, and the items of
    those that came are done.
    """
    if snapshot.job.spec.suspend or not waits_for_more(run):
        return None
    return _failed_transfer(snapshot, run)


def how_far(snapshot: InferenceJobSnapshot, run: Run) -> Cause:
    """How far a run is, and what keeps inputs from coming, or results."""
    cause, failed = progress(run), _failed_transfer(snapshot, run)
    if failed is not None:
        also = [f"inputs could not be transferred: {failed.message}"]
    else:
        also = [f"{what} are not copied: {why}" for what, why in _held_up(snapshot)]
    return Cause(cause.reason, "; ".join([cause.message, *also]))


def _held_up(snapshot: InferenceJobSnapshot) -> Iterator[tuple[str, str]]:
    """What is not copied while the job runs, and what its worker or the scheduler says."""
    job, pool = snapshot.job, snapshot.pool_name
    if not follows(job):
        return
    for what, each in (
        ("inputs", input_worker(job, pool)),
        ("results", result_follower(job, pool)),
    ):
        worker = worker_named(snapshot.workers, each.name)
        if worker is not None and worker.phase in _HELD_UP and worker.message:
            yield what, worker_text(worker, "")


def _failed_transfer(snapshot: InferenceJobSnapshot, run: Run) -> Verdict | None:
    job = snapshot.job
    if not follows(job) or takes_more(job) or run.terms.end:
        return None
    step = transfer_inputs(snapshot)
    return step if isinstance(step, Verdict) else None


def active_followers(snapshot: InferenceJobSnapshot) -> tuple[ObjectKey, ...]:
    """The workers that copy what is new, to remove them."""
    job, pool = snapshot.job, snapshot.pool_name
    own = {input_follower(job, pool).name, result_follower(job, pool).name}
    return tuple(
        worker_key(job, worker.name)
        for worker in snapshot.workers
        if worker.name in own and worker.phase in _ACTIVE
    )


def with_followers(snapshot: InferenceJobSnapshot, run: Run, decision: Decision) -> Decision:
    """The decision about a job that runs, with what is copied meanwhile."""
    job, pool = snapshot.job, snapshot.pool_name
    if not follows(job):
        return decision
    followers = [result_follower(job, pool)]
    if takes_more(job):
        followers.append(input_follower(job, pool))
    decision = _begin(snapshot, followers, decision)
    return decision if takes_more(job) or run.terms.end else _last_inputs(snapshot, decision)


def _begin(
    snapshot: InferenceJobSnapshot, followers: list[WorkerSpec], decision: Decision
) -> Decision:
    children: list[Manifest] = []
    notes: list[Note] = []
    for each in followers:
        worker = worker_named(snapshot.workers, each.name)
        if worker is None:
            children.append(worker_job(snapshot.job, each, snapshot.settings))
        elif worker.phase is WorkerPhase.FAILED:
            notes.append(Note("CopyingFailed", worker_text(worker, "it failed"), warning=True))
    return replace(
        decision,
        children=(*decision.children, *children),
        notes=(*decision.notes, *notes),
    )


def _last_inputs(snapshot: InferenceJobSnapshot, decision: Decision) -> Decision:
    """The follower is removed, then what it has not copied is transferred."""
    job, soon = snapshot.job, min(decision.requeue_seconds or SOON_SECONDS, SOON_SECONDS)
    decision = replace(decision, requeue_seconds=soon)
    follower = worker_named(snapshot.workers, input_follower(job, snapshot.pool_name).name)
    if follower is not None and follower.phase in _ACTIVE:
        return replace(decision, removals=(worker_key(job, follower.name),))
    match transfer_inputs(snapshot):
        case Step(child=dict(child)):
            return replace(decision, children=(*decision.children, child))
        case Verdict(message=message):
            note = Note("InputTransferFailed", message, warning=True)
            return replace(decision, notes=(*decision.notes, note))
        case _:
            return decision
