"""A Placement with `prefetch: true`: the devices of its plan have its fragments before there is a
job. Pure.

Fragments that the pool's store lacks are delivered to it, as for a job. Then the coordinator is
asked, again and again, to have the devices fetch and load them: that is a lease, so nothing has to
be undone when the Placement is deleted.
"""

from dataclasses import replace
from typing import Final

from shoal_api.fields import ConditionStatus
from shoal_api.kinds.placement import NearState, PlacementStatus, Prefetched
from shoal_operator.reconcile.conditions import (
    FALSE,
    TRUE,
    UNKNOWN,
    Cause,
    ConditionUpdate,
    next_condition,
)
from shoal_operator.reconcile.decision import Decision, PlaceFragments
from shoal_operator.reconcile.job_preparation import Step, deliver
from shoal_operator.reconcile.job_status import Verdict
from shoal_operator.reconcile.partition import current_document
from shoal_operator.reconcile.plans import in_force, served_by
from shoal_operator.reconcile.snapshot import PlacementSnapshot, Unreachable
from shoal_protocol.partition import PartitionDocument, document_to_json

SOON_SECONDS: Final = 5.0
RENEWAL_SECONDS: Final = 60.0
"""A third of the lease (`PlaceFragments`)."""


def with_prefetch(snapshot: PlacementSnapshot, decision: Decision) -> Decision:
    """The decision about the plan, and what is to be fetched by it."""
    if not snapshot.placement.spec.prefetch:
        return _without(snapshot, decision)
    document = current_document(snapshot.partition, snapshot.document)
    assert isinstance(decision.status, PlacementStatus)
    planned = replace(snapshot.placement, status=decision.status)
    stages = () if document is None else in_force(planned, document)
    if isinstance(snapshot.view, Unreachable):
        cause = Cause("CoordinatorUnreachable", snapshot.view.reason)
        return _reported(snapshot, decision, UNKNOWN, cause)
    if document is None or not stages or not planned.holds("Planned"):
        return _reported(snapshot, decision, FALSE, Cause("NotPlanned", "there is no plan yet"))
    match None if snapshot.model is None else deliver(snapshot, document):
        case Verdict(reason=reason, message=message):
            return _reported(snapshot, decision, FALSE, Cause(reason, message))
        case Step(cause=cause) as step:
            return replace(
                _reported(snapshot, decision, FALSE, cause),
                children=(*decision.children, *step.children),
                removals=(*decision.removals, *step.removals),
            )
        case None:
            return _placing(snapshot, decision, document, planned.status or decision.status)


def _placing(
    snapshot: PlacementSnapshot,
    decision: Decision,
    document: PartitionDocument,
    status: PlacementStatus,
) -> Decision:
    names, granted = served_by(status.stages)
    call = PlaceFragments(
        pool=snapshot.pool_name,
        placement=snapshot.placement.metadata.name,
        partition=document_to_json(document).encode(),
        stages=names,
        granted_bytes=granted,
    )
    wanted = sum(map(len, names))
    placed = () if snapshot.placed is None else snapshot.placed.fragments
    there = sum(state is not NearState.ABSENT for _, _, state in placed)
    resident = sum(state is NearState.RESIDENT for _, _, state in placed)
    text = f"{there} of {wanted} fragments are on their devices, {resident} of them in memory"
    if snapshot.placed is not None and snapshot.placed.problem:
        cause = Cause("CannotBeHeld", snapshot.placed.problem)
        result = _reported(snapshot, decision, FALSE, cause)
    elif there < wanted:
        result = _reported(snapshot, decision, FALSE, Cause("Prefetching", text))
    else:
        result = _reported(snapshot, decision, TRUE, Cause("Prefetched", text))
        result = replace(result, requeue_seconds=_sooner(decision, RENEWAL_SECONDS))
    return replace(result, calls=(*decision.calls, call))


def _without(snapshot: PlacementSnapshot, decision: Decision) -> Decision:
    """Nothing is prefetched any more."""
    if snapshot.placed is None or isinstance(snapshot.view, Unreachable):
        return decision
    document = current_document(snapshot.partition, snapshot.document)
    if document is None:
        return decision  # the lease ends
    ended = PlaceFragments(
        pool=snapshot.pool_name,
        placement=snapshot.placement.metadata.name,
        partition=document_to_json(document).encode(),
    )
    return replace(decision, calls=(*decision.calls, ended))


def _reported(
    snapshot: PlacementSnapshot, decision: Decision, status: ConditionStatus, cause: Cause
) -> Decision:
    """With the condition Prefetched, and where each fragment is."""
    update = ConditionUpdate("Prefetched", status, *cause)
    condition = next_condition(snapshot.placement, update, snapshot.now)
    assert isinstance(decision.status, PlacementStatus)
    placed = () if snapshot.placed is None else snapshot.placed.fragments
    reported = replace(
        decision.status,
        conditions=(*decision.status.conditions, condition),
        prefetched=tuple(
            Prefetched(fragment=fragment, device=device, state=state)
            for fragment, device, state in placed
        ),
    )
    return replace(decision, status=reported, requeue_seconds=_sooner(decision, SOON_SECONDS))


def _sooner(decision: Decision, seconds: float) -> float:
    return min(decision.requeue_seconds or seconds, seconds)
