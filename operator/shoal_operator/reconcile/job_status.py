"""An InferenceJob's status: its conditions, its counts, and the verdict at its end. Pure.

Five conditions: Planned, Suspended, Complete, Failed, WithinBudget. While a job is in progress,
Complete is False and its reason says how far the job is. Between the end of the run and the end of
the job (results are transferred) the reason of Failed, which is still False, has the verdict
already; so it is known even when the coordinator no longer exists.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from shoal_api.columns import as_rate, print_job
from shoal_api.conditions import COMPLETING, TRANSFERRING_RESULTS, holds
from shoal_api.kinds import InferenceJob
from shoal_api.kinds.inference_job import InferenceJobStatus, ItemCounts, ItemFailure, TierHits
from shoal_operator.reconcile.budgets import job_budget
from shoal_operator.reconcile.conditions import (
    FALSE,
    TRUE,
    Cause,
    ConditionUpdate,
    as_before,
    shortened,
    with_conditions,
)
from shoal_operator.reconcile.decision import Decision, Note, Terms
from shoal_operator.reconcile.job_cuts import refusal_of
from shoal_operator.reconcile.names import STORE, coordinator_name, job_folder, model_of
from shoal_operator.reconcile.snapshot import (
    DeviceState,
    InferenceJobSnapshot,
    Run,
    RunState,
    Unreachable,
)
from shoal_operator.reconcile.times import as_time, instant
from shoal_protocol.copying import copied
from shoal_protocol.units import counted

SOON_SECONDS: Final = 2.0
LATER_SECONDS: Final = 15.0
RUNNING_SECONDS: Final = 60.0
"""While a job runs, its coordinator reports changes; this is for the rate, which always changes."""
NOT_FAILED: Final = Cause("NotFailed")
WAITING: Final = "Waiting"
RESULT_TRANSFER_FAILED: Final = "ResultTransferFailed"
POOL_NOT_FOUND: Final = "PoolNotFound"
PARTITION_REFUSED: Final = "PartitionRefused"
_FAILURES: Final = 8
_DEADLINE: Final = "DeadlineExceeded"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a job ends: Complete, or Failed with a reason."""

    reason: str
    message: str
    complete: bool = False


def has_ended(status: InferenceJobStatus) -> bool:
    """Whether a terminal condition holds; it is never left again."""
    return holds(status.conditions, "Complete") or holds(status.conditions, "Failed")


def is_running(job: InferenceJob) -> bool:
    """Whether its first task has started, and it has not ended; one that waits for a plan has no
    run, and its Partition may be cut anew."""
    status = job.status
    if status is None or status.start_time is None or job.spec.suspend:
        return False
    complete = status.condition("Complete")
    waits = complete is not None and complete.reason == WAITING
    return not waits and not has_ended(status)


def has_results_on_volume(job: InferenceJob) -> bool:
    """Whether the coordinator's volume has results of the job that are nowhere else."""
    status = job.status
    if status is None or job.metadata.deletion_timestamp is not None:
        return False
    if status.items is None or not status.items.succeeded:
        return False
    failed = status.condition("Failed")
    stayed = failed is not None and failed.reason == RESULT_TRANSFER_FAILED
    return stayed or not has_ended(status)


def terms_of(job: InferenceJob) -> Terms:
    """What of a job may change while it runs. The deadline is the coordinator's own bound, should
    the operator be away when the time is up.
    """
    spec = job.spec
    return Terms(
        priority=spec.priority,
        parallelism=spec.parallelism or 0,
        active_deadline_seconds=float(spec.active_deadline_seconds or 0),
    )


# ---- the coordinator -----------------------------------------------------------------------------


def missing_pool(snapshot: InferenceJobSnapshot) -> str | None:
    """That the job's pool does not exist or is being deleted; None: it exists, or its
    name is not known yet.
    """
    name = snapshot.pool_name
    if not name:
        return None
    if snapshot.pool is None:
        return f"there is no DevicePool {name}"
    leaves = snapshot.pool.metadata.deletion_timestamp is not None
    return f"DevicePool {name} is being deleted" if leaves else None


def unreachable(snapshot: InferenceJobSnapshot) -> Cause | None:
    """Why the coordinator does not answer; None: it does."""
    if not isinstance(snapshot.view, Unreachable):
        return None
    missing, items = missing_pool(snapshot), snapshot.before.items
    if missing is None:
        text = f"the coordinator does not answer: {snapshot.view.reason}"
        return Cause("CoordinatorUnreachable", text)
    pool, stored = snapshot.pool_name, ""
    if items is not None and items.succeeded:
        stored = (
            f"; the {items.succeeded} finished items of {items.total} stay on the volume claim "
            f"{coordinator_name(pool)} as long as this job exists"
        )
    advice = f"; create DevicePool {pool} again to resume, or delete the job"
    return Cause(POOL_NOT_FOUND, missing + stored + advice)


# ---- the verdict ---------------------------------------------------------------------------------


def verdict_of(run: Run, job: InferenceJob) -> Verdict | None:
    """How a run has ended; None while it runs, and when it was only stopped, also by a deadline
    that is no longer the job's.

    The coordinator knows the job's folders on its volume; they are named by the job's addresses.
    """
    verdict = _told(run, terms_of(job))
    if verdict is None:
        return None
    text = verdict.message
    for folder, address in (("in", job.spec.inputs.uri), ("out", job.spec.outputs.uri)):
        text = text.replace(f"{STORE}/{job_folder(job, folder)}", address)
    return replace(verdict, message=text)


def _told(run: Run, terms: Terms) -> Verdict | None:
    """What the coordinator says of a run that has ended, and was not only stopped."""
    deadline = run.terms.active_deadline_seconds
    if run.reason == _DEADLINE and deadline != terms.active_deadline_seconds:
        return None
    match run.state:
        case RunState.COMPLETE if not run.failed:
            rate = f"; {as_rate(run.items_per_second)}" if run.items_per_second > 0 else ""
            text = f"{counted(run.items, 'item')} in {run.seconds:.3g} s{rate}"
            return Verdict("AllItemsSucceeded", text, complete=True)
        case RunState.COMPLETE | RunState.FAILED if run.failed:
            text = f"{run.failed} of {counted(run.items, 'item')} failed"
            if run.failures:
                item, place, reason = run.failures[0]
                named = place or f"item {item}"
                text += f"; first: {reason if reason.startswith(named) else f'{named}: {reason}'}"
            reason = "ItemsFailed" if run.reason in ("", "ItemsFailed") else run.reason
            if reason != "ItemsFailed":
                text = run.message if text in run.message else f"{run.message}; {text}"
            return Verdict(_word(reason), text)
        case RunState.FAILED:
            text = run.message or "the coordinator gives no reason"
            return Verdict(_word(run.reason or "RunFailed"), text)
        case _:
            return None


def pending_verdict(status: InferenceJobStatus) -> Verdict | None:
    """The verdict that the status has already while results are transferred."""
    complete, failed = status.condition("Complete"), status.condition("Failed")
    if complete is None or failed is None or complete.reason != TRANSFERRING_RESULTS:
        return None
    if failed.reason == NOT_FAILED.reason:
        return Verdict("AllItemsSucceeded", failed.message, complete=True)
    return Verdict(failed.reason, failed.message)


def _word(text: str) -> str:
    """A reason as a condition may have it: what another process says is not trusted."""
    letters = "".join(each for each in text if each.isascii() and each.isalnum())[:64]
    return letters if letters[:1].isalpha() else "RunFailed"


# ---- the status ----------------------------------------------------------------------------------


def with_run(snapshot: InferenceJobSnapshot) -> InferenceJobStatus:
    """The status before, with what the coordinator says of the run, if it says anything."""
    before, run = snapshot.before, snapshot.run
    if run is None:
        return before
    started = before.start_time
    if started is None and run.started_seconds > 0:
        started = as_time(min(run.started_seconds, instant(snapshot.now)))
    resident, cached, idle, evict = run.tier_hits
    return replace(
        before,
        start_time=started,
        items=_counts(before.items, run),
        items_per_second=max(0.0, run.items_per_second),
        tier_hits=TierHits(resident=resident, cached=cached, idle=idle, evict=evict),
        failures=tuple(
            ItemFailure(
                item=item, input=shortened(place, 1024) or None, reason=shortened(reason, 1024)
            )
            for item, place, reason in run.failures[:_FAILURES]
        ),
    )


def _counts(before: ItemCounts | None, run: Run) -> ItemCounts:
    """How far a run is. One that goes on after a restart has none until its inputs are counted."""
    if before is not None and run.items == 0 and not run.state.is_over:
        return replace(before, active=0)
    return copied(
        ItemCounts,
        run,
        total=run.items,
        active=0 if run.state.is_over else run.active,
        following=run.following and not run.state.is_over,
    )


def in_progress(
    snapshot: InferenceJobSnapshot,
    complete: Cause,
    *,
    failed: Cause = NOT_FAILED,
    planned: ConditionUpdate | None = None,
    status: InferenceJobStatus | None = None,
    requeue: float = SOON_SECONDS,
) -> Decision:
    """A job in progress: `complete` says how far it is. `planned`: the condition of its plan, where
    that is not the one that was written last; `status`, where that is not the one of its run.
    """
    updates = [
        planned or planned_before(snapshot),
        not_suspended(snapshot),
        ConditionUpdate("Complete", FALSE, *complete),
        ConditionUpdate("Failed", FALSE, *failed),
    ]
    result = decision(snapshot, status or with_run(snapshot), updates)
    return replace(result, requeue_seconds=requeue)


def decision(
    snapshot: InferenceJobSnapshot, status: InferenceJobStatus, updates: Sequence[ConditionUpdate]
) -> Decision:
    """The status with conditions (without updates, as they are) and columns."""
    job = snapshot.job
    if updates:
        ran = frozenset(() if snapshot.run is None else snapshot.run.devices)
        started, placement = status.start_time, snapshot.placement
        budget = job_budget(job, started, placement, ran, snapshot.view, snapshot.now)
        status = with_conditions(status, job, [*updates, budget], snapshot.now)
    status = replace(status, observed_generation=job.generation)
    status = print_job(status, model_of(job, snapshot.partition), snapshot.pool_name or None)
    notes = _started(snapshot.before, status) + _pool_deleted(status)
    return Decision(status=status, notes=notes)


def planned_before(snapshot: InferenceJobSnapshot) -> ConditionUpdate:
    """The condition of the plan that was written last."""
    waiting = ConditionUpdate("Planned", FALSE, "Waiting", "there is no plan yet")
    return as_before(snapshot.job, "Planned") or waiting


def _planned_at_last(snapshot: InferenceJobSnapshot) -> ConditionUpdate:
    """The same of a job that ends. It waits no more for a cut that was refused."""
    before, partition = planned_before(snapshot), snapshot.partition
    if before.status is not FALSE or partition is None:
        return before
    refusal = refusal_of(partition)
    return (
        before if refusal is None else ConditionUpdate("Planned", FALSE, PARTITION_REFUSED, refusal)
    )


def not_suspended(snapshot: InferenceJobSnapshot) -> ConditionUpdate:
    known = snapshot.job.condition("Suspended")
    resumed = known is not None and (known.status is not FALSE or known.reason == "Resumed")
    return ConditionUpdate("Suspended", FALSE, "Resumed" if resumed else "NotSuspended")


def ended(
    snapshot: InferenceJobSnapshot, verdict: Verdict, status: InferenceJobStatus | None = None
) -> Decision:
    cause = Cause(verdict.reason, verdict.message)
    failed = ConditionUpdate("Failed", TRUE, *cause)
    # A coordinator's message may begin with the reason.
    said = verdict.message.removeprefix(f"{verdict.reason}: ")
    text = f"{verdict.reason}: {said}"
    if verdict.complete:
        failed, text = ConditionUpdate("Failed", FALSE, *NOT_FAILED), verdict.message
    complete = ConditionUpdate("Complete", TRUE if verdict.complete else FALSE, *cause)
    status = replace(status or with_run(snapshot), completion_time=snapshot.now)
    if status.items is not None:
        status = replace(status, items=replace(status.items, active=0, following=False))
    updates = [_planned_at_last(snapshot), not_suspended(snapshot), complete, failed]
    result = decision(snapshot, status, updates)
    note = Note("FinishedJob", text, warning=not verdict.complete)
    return replace(result, notes=(*result.notes, note))


def _started(before: InferenceJobStatus, after: InferenceJobStatus) -> tuple[Note, ...]:
    if before.start_time is not None or after.start_time is None or after.items is None:
        return ()
    return (Note("StartedJob", f"{counted(after.items.total, 'item')}", since=after.start_time),)


def _pool_deleted(status: InferenceJobStatus) -> tuple[Note, ...]:
    """That a job which has begun has no pool any more."""
    complete = status.condition("Complete")
    if complete is None or complete.reason != POOL_NOT_FOUND or status.items is None:
        return ()
    return (Note(POOL_NOT_FOUND, complete.message, warning=True),)


def progress(run: Run) -> Cause:
    """How far a run is that has not ended."""
    if run.state is RunState.PENDING:
        return Cause("Starting", "the coordinator has the job and starts it")
    failed = f", {run.failed} failed" if run.failed else ""
    text = f"{run.succeeded} of {counted(run.items, 'item')} succeeded{failed}"
    if waits_for_more(run):
        return Cause("Running", f"{run.succeeded:,} items succeeded{failed}, waiting for more")
    if run.completing:
        return Cause(COMPLETING, f"{text}; the coordinator completes their results")
    return Cause("Running", f"{text}, {run.active} are active")


def waits_for_more(run: Run) -> bool:
    """Whether a run has done all that has come, and takes what comes."""
    done = run.succeeded + run.failed == run.items
    return run.state is RunState.RUNNING and run.following and done


def lost_devices(snapshot: InferenceJobSnapshot) -> tuple[Note, ...]:
    """Devices of the plan that the coordinator has given up. That one leaves in order is wanted,
    and nothing to warn of."""
    placement, view = snapshot.placement, snapshot.view
    if placement is None or placement.status is None or isinstance(view, Unreachable):
        return ()
    used = {name for stage in placement.status.stages for name in stage.devices}
    lost = {
        device.name
        for device in view.devices
        if device.state is DeviceState.LOST and not device.has_left
    }
    return tuple(
        Note("LostDevice", f"{name} is lost; its tasks go to other devices", warning=True)
        for name in sorted(used & lost)
    )
