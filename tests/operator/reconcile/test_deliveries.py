"""Fragments that the store of a pool lacks are delivered to it, and again where they leave it."""

from collections.abc import Mapping
from dataclasses import replace

from reconcile.rules import decide, name_of
from reconcile.test_inference_job import PLANNED
from reconcile.values import NOW, condition, word
from shoal_operator.reconcile.decision import Manifest
from shoal_operator.reconcile.snapshot import (
    CoordinatorView,
    InferenceJobSnapshot,
    Worker,
    WorkerPhase,
)
from shoal_operator.reconcile.workers import delivers

assert isinstance(PLANNED.view, CoordinatorView)
EMPTY = replace(PLANNED, view=replace(PLANNED.view, fragments=frozenset()))
SEEN = PLANNED.view.begun - 1


def deliveries(snapshot: InferenceJobSnapshot) -> list[Manifest]:
    """The deliveries that begin now."""
    return [child for child in decide(snapshot).children if delivers(name_of(child))]


def ended(delivery: Manifest, seen: float | None = SEEN) -> Worker:
    # The clocks of the cluster are not asked: its worker may have ended tomorrow, or yesterday.
    at = "2026-02-28T11:00:00Z"
    phase = WorkerPhase.SUCCEEDED
    return Worker(name=name_of(delivery), phase=phase, ended_at=at, end_seen=seen)


def test_fragments_that_the_store_lacks_are_delivered_by_a_worker_of_the_partition() -> None:
    (delivery,) = deliveries(EMPTY)
    metadata = delivery["metadata"]
    assert isinstance(metadata, Mapping)
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["controller"]) == ("Partition", "ocr", True)
    failed = Worker(
        name=name_of(delivery), phase=WorkerPhase.FAILED, message="disk full", ended_at=NOW
    )
    decision = decide(replace(EMPTY, workers=(failed,)))
    assert word(decision.status, "Failed") == "True DeliveryFailed"


def test_a_delivery_tells_how_many_fragments_have_come() -> None:
    assert isinstance(PLANNED.view, CoordinatorView)
    (delivery,) = deliveries(EMPTY)
    runs = Worker(name=name_of(delivery), phase=WorkerPhase.RUNNING)
    first, *others = sorted(PLANNED.view.fragments)
    total = len(others) + 1
    for there in ((), (first,)):
        view = replace(PLANNED.view, fragments=frozenset(there))
        decision = decide(replace(EMPTY, view=view, workers=(runs,)))
        told = condition(decision.status, "Complete").message
        assert f"{len(there)} of {total} fragments are in the store of" in told


def test_a_delivery_that_failed_before_a_job_was_made_is_begun_again_for_it() -> None:
    (delivery,) = deliveries(EMPTY)
    before = "2026-03-01T11:58:00Z"
    failed = Worker(
        name=name_of(delivery), phase=WorkerPhase.FAILED, message="full", ended_at=before
    )
    decision = decide(replace(EMPTY, workers=(failed,)))
    assert word(decision.status, "Failed") == "False NotFailed"
    assert [key.name for key in decision.removals] == [failed.name]


def test_a_store_is_asked_again_after_a_delivery_was_seen_to_end() -> None:
    (delivery,) = deliveries(EMPTY)
    for seen in (None, SEEN + 1, SEEN + 2):
        just = replace(EMPTY, workers=(ended(delivery, seen),))
        assert word(decide(just).status, "Complete") == "False Delivering"
        assert deliveries(just) == []


def test_fragments_that_leave_the_store_after_a_delivery_are_delivered_again_a_few_times() -> None:
    snapshot, begun = EMPTY, list[str]()
    while delivery := deliveries(snapshot):
        assert word(decide(snapshot).status, "Complete") == "False Delivering"
        begun.append(name_of(delivery[0]))
        # Workers that have ended are removed after a while, the oldest first.
        snapshot = replace(snapshot, workers=(*snapshot.workers[-1:], ended(delivery[0])))
    assert len(set(begun)) == len(begun) == 3
    assert word(decide(snapshot).status, "Failed") == "True FragmentsMissing"
    workers = (*snapshot.workers, *PLANNED.workers)
    back = decide(replace(PLANNED, workers=workers))
    assert word(back.status, "Complete") == "False TransferringInputs"
