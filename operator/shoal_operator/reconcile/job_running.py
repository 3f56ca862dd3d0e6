"""An InferenceJob whose run is active: how far it is, and what it is given meanwhile. Pure.

A run goes on by the newest plan and on the newest terms. It keeps its fragments, though. Where the
newest plan has others, since the Partition was cut anew, the run is stopped as for a suspension as
soon as these are delivered, and the job is submitted again. What has finished stays. Where the
store has no room for them beside its own, it goes on with its own, to its end if need be; one whose
own have no place any more is stopped first.
"""

from dataclasses import replace
from typing import Final

from shoal_operator.reconcile.conditions import Cause
from shoal_operator.reconcile.decision import Decision, Manifest, Note
from shoal_operator.reconcile.finer_cuts import finer_note
from shoal_operator.reconcile.following import active_followers, how_far, with_followers
from shoal_operator.reconcile.job_cuts import is_asked, is_cut_as_wanted, without_place
from shoal_operator.reconcile.job_preparation import Ready, own_children, plan_for
from shoal_operator.reconcile.job_status import (
    LATER_SECONDS,
    RUNNING_SECONDS,
    SOON_SECONDS,
    in_progress,
    lost_devices,
    planned_before,
)
from shoal_operator.reconcile.job_submission import NOTHING_NEWER, cancel, newest_for
from shoal_operator.reconcile.snapshot import InferenceJobSnapshot, Run
from shoal_operator.reconcile.store_room import room_notes

CUT_ANEW: Final = "CutAnew"


def running(snapshot: InferenceJobSnapshot, run: Run) -> Decision:
    """What is to be done about a job whose run is active."""
    ready, complete, planned = plan_for(snapshot), how_far(snapshot, run), planned_before(snapshot)
    newest = NOTHING_NEWER
    if isinstance(ready, Ready):
        planned, newest = ready.planned, newest_for(snapshot, run, ready)
        if newest.replaces:
            return _replaced(snapshot, ready, newest.waits)
        if newest.waits is not None:
            planned = replace(planned, reason=newest.waits.reason)
            planned = replace(planned, message=f"{planned.message}; {newest.waits.message}")
            complete = Cause(complete.reason, f"{complete.message}; {newest.waits.message}")
        if newest.problem:
            complete = Cause(complete.reason, f"{complete.message}; {newest.problem}")
    elif (waits := _waits(snapshot, ready)) is not None:
        complete = Cause(complete.reason, f"{complete.message}; {waits}")
    waiting = newest.waits is not None or without_place(snapshot) is not None
    requeue = LATER_SECONDS if waiting else RUNNING_SECONDS
    result = in_progress(snapshot, complete, planned=planned, requeue=requeue)
    result = replace(
        result,
        notes=(
            *result.notes,
            *lost_devices(snapshot),
            *finer_note(snapshot),
            *room_notes(snapshot, newest.waits),
        ),
        calls=newest.calls,
        children=(*_other_cut(snapshot), *newest.children),
        removals=newest.removals,
    )
    return with_followers(snapshot, run, result)


def _waits(snapshot: InferenceJobSnapshot, missing: Cause) -> str | None:
    """That its fragments have no place, or that others are made."""
    finer = snapshot.before.finer_cut
    if finer is not None and not is_cut_as_wanted(snapshot):
        return f"{finer.message}: {missing.message}"
    return without_place(snapshot)


def _other_cut(snapshot: InferenceJobSnapshot) -> tuple[Manifest, ...]:
    """The job's own Partition, where it is to be cut in another way."""
    finer, partition = snapshot.before.finer_cut, snapshot.partition
    if finer is None or partition is None or is_asked(partition, finer):
        return ()
    return own_children(snapshot)


def _replaced(snapshot: InferenceJobSnapshot, ready: Ready, waits: Cause | None) -> Decision:
    """The run is stopped; when it has ended, the job is submitted with the newest plan."""
    name = "the model" if snapshot.partition is None else snapshot.partition.metadata.name
    text = f"{name} was cut anew: the run goes on with the new fragments, finished items stay"
    if waits is not None:
        text = f"{text}; these wait until those that it had have left: {waits.message}"
    result = in_progress(
        snapshot, Cause(CUT_ANEW, text), planned=ready.planned, requeue=SOON_SECONDS
    )
    note = Note(CUT_ANEW, text, since=f"epoch {ready.plan}")
    return replace(
        result,
        calls=(cancel(snapshot, f"{name} was cut anew"),),
        removals=active_followers(snapshot),
        notes=(*result.notes, note),
    )
