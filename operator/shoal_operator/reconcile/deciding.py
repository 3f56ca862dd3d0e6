"""What is to be done about an object of any kind, and whether the cluster lets the operator do it.

What a decision asks for may be refused: by a quota, an admission rule, a storage class that cannot
grow, or because a name is taken. By then the status is written, so the next reconciliation reports
it: Ready (of an InferenceJob: Complete) is False, and says what was refused. A new spec is not
Ready before its children were applied, because the cluster may still refuse them. Pure.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, assert_never

from shoal_api.conditions import holds
from shoal_api.kinds import AnyKind, DevicePool, InferenceJob
from shoal_operator.reconcile.conditions import (
    FALSE,
    TRUE,
    ConditionUpdate,
    next_condition,
)
from shoal_operator.reconcile.decision import Applied, Decision, Manifest, Note
from shoal_operator.reconcile.device_pool import pool_notes, reconcile_device_pool
from shoal_operator.reconcile.inference_job import reconcile_inference_job
from shoal_operator.reconcile.model import reconcile_model
from shoal_operator.reconcile.partition import reconcile_partition
from shoal_operator.reconcile.placement import reconcile_placement
from shoal_operator.reconcile.prefetching import with_prefetch
from shoal_operator.reconcile.snapshot import (
    DevicePoolSnapshot,
    InferenceJobSnapshot,
    ModelSnapshot,
    PartitionSnapshot,
    PlacementSnapshot,
    Snapshot,
)

NOT_APPLIED: Final = "NotApplied"
APPLYING: Final = "Applying"


def decide(snapshot: Snapshot, applied: Applied | None) -> Decision:
    """What is to be done. `applied`: what came of the decision before this one; None where this
    operator has not carried out any about the object.
    """
    about = subject(snapshot)
    if isinstance(snapshot, DevicePoolSnapshot):
        known = applied or Applied(generation=0)
        is_new = known.generation == about.generation
        snapshot = replace(snapshot, not_resized=known.not_resized if is_new else "")
    decision = reconcile(snapshot)
    update = _override(about, decision, applied)
    if update is not None:
        decision = _instead(decision, about, update, snapshot.now)
    if isinstance(about, DevicePool):
        ready = decision.status.condition("Ready")
        assert ready is not None, "every decision about a pool has Ready"
        decision = replace(decision, notes=(*decision.notes, *pool_notes(about, ready)))
    return decision


def _instead(decision: Decision, about: AnyKind, update: ConditionUpdate, now: str) -> Decision:
    """The decision with one condition replaced."""
    changed = next_condition(about, update, now)
    known = tuple(
        changed if each.type == update.type else each for each in decision.status.conditions
    )
    notes = decision.notes
    if update.reason == NOT_APPLIED:
        notes = (*notes, Note(NOT_APPLIED, update.message, warning=True))
    return replace(decision, status=replace(decision.status, conditions=known), notes=notes)


def reconcile(snapshot: Snapshot) -> Decision:
    """What is to be done, if nothing is refused."""
    match snapshot:
        case ModelSnapshot():
            return reconcile_model(snapshot)
        case PartitionSnapshot():
            return reconcile_partition(snapshot)
        case DevicePoolSnapshot():
            return reconcile_device_pool(snapshot)
        case PlacementSnapshot():
            return with_prefetch(snapshot, reconcile_placement(snapshot))
        case InferenceJobSnapshot():
            return reconcile_inference_job(snapshot)
        case _:
            assert_never(snapshot)


def subject(snapshot: Snapshot) -> AnyKind:
    """The object that a snapshot is about."""
    about: AnyKind
    match snapshot:
        case (
            ModelSnapshot(model=about)
            | PartitionSnapshot(partition=about)
            | DevicePoolSnapshot(pool=about)
            | PlacementSnapshot(placement=about)
            | InferenceJobSnapshot(job=about)
        ):
            return about
        case _:
            assert_never(snapshot)


def _override(
    about: AnyKind, decision: Decision, applied: Applied | None
) -> ConditionUpdate | None:
    """What replaces the decision's own condition; None: nothing does."""
    type_ = "Complete" if isinstance(about, InferenceJob) else "Ready"
    after, generation = decision.status.conditions, about.generation
    if any(holds(after, end) for end in ("Complete", "Failed")):
        return None
    before = about.condition(type_)
    is_new = before is None or before.observed_generation != generation
    if applied is None and before is not None and not is_new and before.reason == NOT_APPLIED:
        return ConditionUpdate(type_, FALSE, NOT_APPLIED, before.message)
    if applied is not None and applied.generation == generation and applied.refused:
        return ConditionUpdate(type_, FALSE, NOT_APPLIED, "; ".join(applied.refused))
    unknown = applied is None or applied.generation != generation
    untried = is_new or (before is not None and before.reason == APPLYING)
    if untried and unknown and decision.children and holds(after, type_):
        return ConditionUpdate(type_, FALSE, APPLYING, f"generation {generation} is being applied")
    return None


def refused_status(
    kind: str, status: Manifest, message: str, generation: int, now: str
) -> Manifest | None:
    """The status of an object that cannot be read, as JSON: as it is, with one condition
    that says what is wrong. None: an object that has ended stays as it ended.
    """
    type_ = "Planned" if kind == InferenceJob.__name__ else "Ready"
    listed = status.get("conditions")
    given = listed if isinstance(listed, list) else []
    known = {str(each.get("type")): each for each in given if isinstance(each, Mapping)}
    if any(known.get(end, {}).get("status") == TRUE for end in ("Complete", "Failed")):
        return None
    before = known.get(type_, {})
    since = before.get("lastTransitionTime") if before.get("status") == FALSE else None
    known[type_] = {
        "type": type_,
        "status": FALSE.value,
        "reason": "Invalid",
        "message": message,
        "observedGeneration": generation,
        "lastTransitionTime": since or now,
    }
    return {**status, "conditions": list(known.values())}
