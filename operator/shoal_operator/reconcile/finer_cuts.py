"""A fragment of a job's own Partition fits on no device, as measured: it is cut again, finer. Pure.

The coordinator fails the run then, and says which fragments those are, and which sizes items had
there that no plan knew. As long as a cut for these sizes, or dividing the fragments may help, that
is no verdict on the job: it is written into its Partition, the Placement plans the new fragments in
a new epoch, and the job is submitted again. Items that have finished stay so,
because results belong to the model and not to its cut.

What is to be divided is in the status, which is written before the Partition; so an operator that
dies in between, or decides twice, asks for the same cut. The next step follows only when what is in
force, cut and planned as the status says, has failed. A plan that is newer than that of the failed
run is run first. A Partition that the user has made is the user's, and stays as it is.
"""

from dataclasses import replace
from typing import Final

from shoal_api.fields import MAX_FRAGMENTS
from shoal_api.kinds.inference_job import FinerCut
from shoal_api.kinds.partition import OutgrownFragment, SeenShape
from shoal_operator.reconcile.conditions import FALSE, MAX_MESSAGE, shortened
from shoal_operator.reconcile.decision import Note
from shoal_operator.reconcile.job_preparation import (
    Ready,
    is_asked,
    is_cut_as_wanted,
    is_ours,
    plan_for,
    refusal_of,
)
from shoal_operator.reconcile.job_status import has_ended, pending_verdict
from shoal_operator.reconcile.retries import is_of_before
from shoal_operator.reconcile.snapshot import (
    DeviceState,
    InferenceJobSnapshot,
    Run,
    RunState,
    Unreachable,
)
from shoal_planner.finer_cuts import in_words, is_too_large, learned, to_divide
from shoal_protocol.partition import Outgrown

CUTTING_FINER: Final = "CuttingFiner"


def too_large_run(snapshot: InferenceJobSnapshot) -> Run | None:
    """The run, if a fragment of the job's own Partition fits on no device."""
    run, job = snapshot.run, snapshot.job
    if job.spec.model_ref is None or not is_ours(job, snapshot.partition):
        return None
    if run is None or run.state is not RunState.FAILED or not is_too_large(run.reason):
        return None
    return None if is_of_before(run, job) else run


def with_finer_cut(snapshot: InferenceJobSnapshot) -> InferenceJobSnapshot:
    """The snapshot with the next cut in the job's status, where what is in force turned out too
    large.
    """
    before, run, partition = snapshot.before, too_large_run(snapshot), snapshot.partition
    ended = has_ended(before) or pending_verdict(before) is not None
    if ended or run is None or partition is None or not _is_in_force(snapshot, run):
        return snapshot
    size, known, stored = partition.spec.max_fragment_size, before.finer_cut, snapshot.document
    if size is None or stored is None:
        return snapshot
    before_seen = {each.tensor: each.shape for each in partition.spec.seen}
    found: tuple[Outgrown, ...] = ()
    outgrown: tuple[OutgrownFragment, ...] = ()
    if (seen := learned(before_seen, run.seen)) is None:
        seen, found = before_seen, to_divide(stored.document, run.outgrown, before_seen)
        outgrown = (*(() if known is None else known.outgrown), *map(_shown, found))
        if not found or len(outgrown) > MAX_FRAGMENTS:
            return snapshot
    wanted = FinerCut(
        cuts=2 if known is None else known.cuts + 1,
        max_fragment_size_bytes=size,
        seen=tuple(SeenShape(tensor=name, shape=shape) for name, shape in seen.items()),
        outgrown=outgrown,
        message=shortened(in_words(run.message, found), MAX_MESSAGE),
    )
    return replace(snapshot, job=replace(snapshot.job, status=replace(before, finer_cut=wanted)))


def nothing_finer(snapshot: InferenceJobSnapshot, run: Run) -> str | None:
    """Why no finer cut helps a run that is too large (empty: there is none); None: one is being
    made, or planned.
    """
    known, partition = snapshot.before.finer_cut, snapshot.partition
    if known is None or partition is None:
        return "" if _is_in_force(snapshot, run) else None
    if _is_in_force(snapshot, run):
        return f"it was cut {known.cuts} times"
    if is_asked(partition, known):
        refusal = refusal_of(partition)
        if refusal is not None:
            return f"it cannot be cut finer: {refusal}"
    if (problem := _misplaced(snapshot)) is not None:
        return f"cut finer, it cannot be placed: {problem}"
    return None


def finer_note(snapshot: InferenceJobSnapshot) -> tuple[Note, ...]:
    """That the model is cut again, until its new fragments run: whoever decided that may have died
    before it said so.
    """
    known = snapshot.before.finer_cut
    if known is None or too_large_run(snapshot) is None:
        return ()
    return (Note("CutFiner", known.message, warning=True, since=f"cut {known.cuts}"),)


def _shown(each: Outgrown) -> OutgrownFragment:
    return OutgrownFragment(fragment=each.fragment, need_bytes=each.need_bytes)


def _is_in_force(snapshot: InferenceJobSnapshot, run: Run) -> bool:
    """Whether the newest cut and its newest plan are those of the run."""
    ready = plan_for(snapshot)
    return isinstance(ready, Ready) and ready.plan <= run.plan


def _misplaced(snapshot: InferenceJobSnapshot) -> str | None:
    """Why the newest cut has no place, though every device is there."""
    placement, view = snapshot.placement, snapshot.view
    planned = None if placement is None else placement.condition("Planned")
    if planned is None or planned.status is not FALSE or planned.reason != "Infeasible":
        return None
    away = isinstance(view, Unreachable) or any(
        device.state is not DeviceState.READY for device in view.devices
    )
    return None if away or not is_cut_as_wanted(snapshot) else planned.message
