"""A fragment of a job's own Partition fits on no device, as measured, or since budgets were lowered
or devices have left: it is cut again. Pure.

The coordinator fails the run then, and says which fragments those are, and which sizes items had
there that no plan knew. As long as a cut for these sizes, or dividing the fragments may help, that
is no verdict on the job: it is written into its Partition, the Placement plans the new fragments in
a new epoch, and the job is submitted again. Items that have finished stay so,
because results belong to the model and not to its cut.

What is to be divided is in the status, which is written before the Partition; so an operator that
dies in between, or decides twice, asks for the same cut. The next step follows only when what is in
force, cut and planned as the status says, has failed. A plan that is newer than that of the failed
run is run first. A Partition that the user has made is the user's, and stays as it is.

Where no device has what the cut was made for any more, and its fragments have no place (the planner
says that, with the budgets that devices report), the model is cut for what there is, from the
beginning: what was divided, was in another cut. That has to last: a limit may be lowered for a
moment, and a device may be back (`job_cuts.other_size`). A run that is active goes on meanwhile,
and is stopped when the new fragments are planned and delivered (`job_submission`).

Where a finer cut is not possible, that is the verdict if sizes are known: the items are alike. Else
the cut before runs once more, for the last time (`final`): each item that is too large fails by
itself, and the others run. How that run ends is the verdict. The status says which cut that is, as
no Partition does any more; and the run says that it is final, as its plan may be that of the run
before.
"""

from dataclasses import replace
from typing import Final

from shoal_api.fields import MAX_FRAGMENTS
from shoal_api.kinds import Partition, Placement
from shoal_api.kinds.inference_job import Fallback, FinerCut
from shoal_api.kinds.partition import OutgrownFragment, SeenShape
from shoal_operator.reconcile.conditions import MAX_MESSAGE, Cause, shortened
from shoal_operator.reconcile.decision import Note
from shoal_operator.reconcile.job_cuts import (
    AWAY_SECONDS,
    is_asked,
    is_cut_as_wanted,
    is_final,
    lacks_devices,
    may_have_more,
    misplaced,
    other_size,
    owns_partition,
    refusal_of,
    seconds_without_plan,
    without_place,
)
from shoal_operator.reconcile.job_preparation import Ready, plan_for
from shoal_operator.reconcile.job_status import WAITING, has_ended, pending_verdict
from shoal_operator.reconcile.planned_cuts import cuts_of, is_planned
from shoal_operator.reconcile.pool_budgets import have_changed, is_cut_for_pools
from shoal_operator.reconcile.retries import is_of_before
from shoal_operator.reconcile.snapshot import (
    DeviceState,
    InferenceJobSnapshot,
    Run,
    RunState,
    Unreachable,
)
from shoal_operator.reconcile.workers import cuts
from shoal_planner.finer_cuts import (
    has_unknown_sizes,
    in_words,
    is_too_large,
    learned,
    to_divide,
)
from shoal_protocol.partition import Outgrown
from shoal_protocol.units import format_bytes

CUTTING_FINER: Final = "CuttingFiner"


def too_large_run(snapshot: InferenceJobSnapshot) -> Run | None:
    """The run, if a fragment of the job's own Partition fits on no device."""
    run = snapshot.run
    if run is None or not owns_partition(snapshot) or not _was_too_large(run):
        return None
    return None if is_of_before(run, snapshot.job) else run


def _was_too_large(run: Run) -> bool:
    return run.state is RunState.FAILED and is_too_large(run.reason)


def with_finer_cut(snapshot: InferenceJobSnapshot) -> InferenceJobSnapshot:
    """The snapshot with the next cut in the job's status, where what is in force turned out too
    large, or has no place in smaller budgets.
    """
    before, run = snapshot.before, too_large_run(snapshot)
    if has_ended(before) or pending_verdict(before) is not None or not owns_partition(snapshot):
        return snapshot
    wanted = _cut_for_budgets(snapshot)
    if wanted is None and run is not None:
        wanted = _final_cut(snapshot, run) or _finer_cut(snapshot, run)
    if wanted is None:
        return snapshot
    return replace(snapshot, job=replace(snapshot.job, status=replace(before, finer_cut=wanted)))


def _cut_for_budgets(snapshot: InferenceJobSnapshot) -> FinerCut | None:
    """The cut for what devices have now; None: that there is stays. What was divided, was in
    another cut; what items have shown stays true."""
    known, other = snapshot.before.finer_cut, other_size(snapshot)
    if other is None:
        return None
    (size, why), partition = other, snapshot.partition
    assert partition is not None, "`other_size` has checked"
    text = f"{why}; now it is cut for {format_bytes(size)}"
    return FinerCut(
        cuts=2 if known is None else known.cuts + 1,
        max_fragment_size_bytes=size,
        seen=partition.spec.seen,
        message=shortened(text, MAX_MESSAGE),
    )


def _finer_cut(snapshot: InferenceJobSnapshot, run: Run) -> FinerCut | None:
    """The next cut; None: there is none, or what is in force has not run yet."""
    partition, known, stored = snapshot.partition, snapshot.before.finer_cut, snapshot.document
    if partition is None or stored is None or is_final(snapshot):
        return None
    spec = partition.spec
    if spec.max_fragment_size is None or not _is_in_force(snapshot, run):
        return None
    before_seen = {each.tensor: each.shape for each in spec.seen}
    found: tuple[Outgrown, ...] = ()
    outgrown: tuple[OutgrownFragment, ...] = ()
    if (seen := learned(before_seen, run.seen)) is None:
        seen, found = before_seen, to_divide(stored.document, run.outgrown, before_seen)
        outgrown = (*spec.outgrown, *map(_shown, found))
        if not found or len(outgrown) > MAX_FRAGMENTS:
            return None
    fallback = None
    if has_unknown_sizes(stored.document) and run.succeeded + run.failed < run.items:
        fallback = Fallback(seen=spec.seen, outgrown=spec.outgrown)
    return FinerCut(
        cuts=2 if known is None else known.cuts + 1,
        max_fragment_size_bytes=spec.max_fragment_size,
        seen=tuple(SeenShape(tensor=name, shape=shape) for name, shape in seen.items()),
        outgrown=outgrown,
        fallback=fallback,
        message=shortened(in_words(run.message, found), MAX_MESSAGE),
    )


def _final_cut(snapshot: InferenceJobSnapshot, run: Run) -> FinerCut | None:
    """The cut before the newest one, where that is not possible; None: it is, or nothing else may
    help.
    """
    known, why = snapshot.before.finer_cut, _impossible(snapshot)
    if known is None or known.fallback is None or why is None:
        return None
    text = f"{run.message}; {why}; now each item that is too large fails by itself"
    return FinerCut(
        cuts=known.cuts - 1,
        max_fragment_size_bytes=known.max_fragment_size_bytes,
        seen=known.fallback.seen,
        outgrown=known.fallback.outgrown,
        final=True,
        message=shortened(text, MAX_MESSAGE),
    )


def nothing_finer(snapshot: InferenceJobSnapshot, run: Run) -> str | None:
    """Why no finer cut helps a run that is too large (empty: there is none); None: one is being
    made, or planned.
    """
    known = snapshot.before.finer_cut
    if not _is_in_force(snapshot, run):
        return _impossible(snapshot)
    if known is None:
        return ""
    return "it cannot be cut finer" if known.final else f"it was cut {known.cuts} times"


def awaited(snapshot: InferenceJobSnapshot, plan: int) -> Cause | None:
    """What a run that was too large by this plan waits for: devices of it that are missing, or the
    plan without them."""
    run, placement = too_large_run(snapshot), snapshot.placement
    if run is None or placement is None or plan > run.plan or not lacks_devices(snapshot):
        return None
    return Cause(WAITING, f"{run.message}; {placement.message('Ready')}")


def another_follows(snapshot: InferenceJobSnapshot, run: Run) -> bool:
    """Whether a run is too large whose cut follows from what devices have: a Placement chooses it,
    or it is made for the budgets of pools. Another cut may follow then. Else the run's end is the
    verdict; also where that is refused, or none has followed for a while."""
    partition, placement = snapshot.partition, snapshot.placement
    if not _was_too_large(run) or partition is None:
        return False
    if not (is_planned(partition) or is_cut_for_pools(partition)):
        return False
    if isinstance(ready := plan_for(snapshot), Ready):
        return ready.plan > run.plan
    if placement is None or refusal_of(partition) is not None or _next_is_refused(snapshot):
        return False
    recent = without_place(snapshot) is None or seconds_without_plan(snapshot) < AWAY_SECONDS
    return recent or _is_to_be_cut(snapshot, partition, placement)


def _next_is_refused(snapshot: InferenceJobSnapshot) -> bool:
    """Whether the Partition keeps its cut, since the next one was refused."""
    return any(worker.refused and cuts(worker.name) for worker in snapshot.workers)


def _is_to_be_cut(
    snapshot: InferenceJobSnapshot, partition: Partition, placement: Placement
) -> bool:
    """Whether a Partition is not cut for what devices have now, or the plan for it has to come."""
    stored, view = snapshot.document, snapshot.view
    if stored is None or isinstance(view, Unreachable):
        return False
    if is_planned(partition):
        chosen = None if placement.status is None else placement.status.cut
        return chosen is not None and cuts_of(stored) != chosen.cuts
    if snapshot.pool is not None and have_changed([snapshot.pool], stored):
        return True
    least = max(each.least_bytes for each in stored.document.fragments)
    return any(
        least <= each.budget_bytes for each in view.devices if each.state is DeviceState.READY
    )


def waits_for_cut(snapshot: InferenceJobSnapshot, missing: Cause) -> Cause:
    """How a job waits for a plan: `missing` says what that waits for. Where its run was too large,
    another cut follows."""
    run, text = snapshot.run, missing.message
    if run is not None and not is_of_before(run, snapshot.job) and another_follows(snapshot, run):
        text = f"{run.message}; {text}"
    return Cause(WAITING, text)


def finer_note(snapshot: InferenceJobSnapshot) -> tuple[Note, ...]:
    """That the model is cut again, until its new fragments run: whoever decided that may have died
    before it said so.
    """
    known = snapshot.before.finer_cut
    if known is None or (too_large_run(snapshot) is None and is_cut_as_wanted(snapshot)):
        return ()
    reason = "CannotCutFiner" if known.final else "CutFiner"
    return (Note(reason, known.message, warning=True, since=f"cut {known.cuts}"),)


def _shown(each: Outgrown) -> OutgrownFragment:
    return OutgrownFragment(fragment=each.fragment, need_bytes=each.need_bytes)


def _is_in_force(snapshot: InferenceJobSnapshot, run: Run) -> bool:
    """Whether the newest cut and its newest plan are those of the run, which is as final. While
    devices of the plan are missing, another one may follow."""
    ready = plan_for(snapshot)
    newest = isinstance(ready, Ready) and ready.plan <= run.plan and not lacks_devices(snapshot)
    return newest and run.final_cut == is_final(snapshot)


def _impossible(snapshot: InferenceJobSnapshot) -> str | None:
    """Why the newest cut cannot be run; None: it may be."""
    known, partition = snapshot.before.finer_cut, snapshot.partition
    if known is None or partition is None:
        return None
    refusal = refusal_of(partition) if is_asked(partition, known) else None
    if refusal is not None:
        more = may_have_more(snapshot, partition)
        return None if more else f"it cannot be cut finer: {refusal}"
    problem = _misplaced(snapshot)
    return None if problem is None else f"cut finer, it cannot be placed: {problem}"


def _misplaced(snapshot: InferenceJobSnapshot) -> str | None:
    """Why the newest cut has no place. A final one had one before: it waits for that."""
    if is_final(snapshot) or not is_cut_as_wanted(snapshot):
        return None
    return misplaced(snapshot)
