"""A Placement that prefetches has its fragments brought to its devices before there is a job."""

from dataclasses import replace

from reconcile.rules import decide, name_of
from reconcile.test_partition import ready_model
from reconcile.test_placement import KEPT, PARTITION, UNREACHABLE, devices, placement
from reconcile.values import NOW, SETTINGS, condition, pool, word
from shoal_api.kinds.placement import NearState, PlacementStatus
from shoal_operator.reconcile.decision import Decision, PlaceFragments
from shoal_operator.reconcile.snapshot import (
    CoordinatorView,
    Placed,
    PlacementSnapshot,
    Worker,
    WorkerPhase,
)

DIGESTS = frozenset(each.digest for each in KEPT.document.fragments)


def planned(*, prefetch: bool = True) -> PlacementSnapshot:
    """A plan that is in force, on a pool whose store lacks the fragments."""
    first = PlacementSnapshot(
        now=NOW,
        settings=SETTINGS,
        placement=placement(prefetch=prefetch),
        partition=PARTITION,
        document=KEPT,
        pool=pool(),
        view=devices("n1", "n2", "n3"),
        model=ready_model(),
    )
    status = decide(first).status
    assert isinstance(status, PlacementStatus)
    return replace(first, placement=replace(first.placement, status=status))


def delivered(snapshot: PlacementSnapshot) -> PlacementSnapshot:
    assert isinstance(snapshot.view, CoordinatorView)
    return replace(snapshot, view=replace(snapshot.view, fragments=DIGESTS))


def placed(snapshot: PlacementSnapshot, *states: NearState, problem: str = "") -> PlacementSnapshot:
    """The coordinator has answered."""
    call = call_of(decide(snapshot))
    pairs = [(index, name) for index, names in enumerate(call.stages) for name in names]
    fragments = tuple(
        (index, name, state) for (index, name), state in zip(pairs, states, strict=True)
    )
    return replace(snapshot, placed=Placed(fragments=fragments, problem=problem))


def call_of(decision: Decision) -> PlaceFragments:
    (call,) = decision.calls
    assert isinstance(call, PlaceFragments)
    return call


def test_fragments_that_the_store_lacks_are_delivered_first() -> None:
    decision = decide(planned())
    assert word(decision.status, "Prefetched") == "False Delivering"
    (worker,) = decision.children
    assert "-deliver-" in name_of(worker)
    assert decision.calls == ()
    failed = Worker(name=name_of(worker), phase=WorkerPhase.FAILED, message="the disk is full")
    refused = decide(replace(planned(), workers=(failed,)))
    assert word(refused.status, "Prefetched") == "False DeliveryFailed"
    assert condition(refused.status, "Prefetched").message == "the disk is full"
    assert word(refused.status, "Planned") == "True Planned"


def test_the_devices_of_the_plan_are_asked_and_what_they_have_is_reported() -> None:
    before = delivered(planned())
    decision = decide(before)
    assert word(decision.status, "Prefetched") == "False Prefetching"
    call = call_of(decision)
    assert isinstance(decision.status, PlacementStatus)
    assert call.stages == tuple(
        stage.devices for stage in decision.status.stages for _ in stage.fragments
    )
    count = sum(map(len, call.stages))
    there = placed(before, *[NearState.CACHED] * (count - 1), NearState.RESIDENT)
    done = decide(there)
    assert word(done.status, "Prefetched") == "True Prefetched"
    text = f"{count} of {count} fragments are on their devices, 1 of them in memory"
    assert condition(done.status, "Prefetched").message == text
    assert isinstance(done.status, PlacementStatus)
    assert [each.state for each in done.status.prefetched][-1] is NearState.RESIDENT
    assert done.calls == (call,), "the lease is renewed"
    assert done.requeue_seconds is not None
    assert done.requeue_seconds <= 60


def test_a_device_that_is_away_keeps_it_from_being_prefetched() -> None:
    before = delivered(planned())
    count = sum(map(len, call_of(decide(before)).stages))
    away = placed(before, NearState.ABSENT, *[NearState.RESIDENT] * (count - 1))
    assert word(decide(away).status, "Prefetched") == "False Prefetching"
    too_large = placed(before, *[NearState.ABSENT] * count, problem="fragment 0 needs 9 MiB")
    decision = decide(too_large)
    assert word(decision.status, "Prefetched") == "False CannotBeHeld"
    assert condition(decision.status, "Prefetched").message == "fragment 0 needs 9 MiB"


def test_a_coordinator_that_is_away_is_not_called() -> None:
    away = replace(delivered(planned()), view=UNREACHABLE)
    decision = decide(away)
    assert word(decision.status, "Prefetched") == "Unknown CoordinatorUnreachable"
    assert decision.calls == ()


def test_without_prefetch_nothing_is_asked_and_what_was_asked_ends() -> None:
    before = delivered(planned(prefetch=False))
    decision = decide(before)
    assert (decision.calls, decision.status.condition("Prefetched")) == ((), None)
    ended = call_of(decide(replace(before, placed=Placed())))
    assert ended.stages == ()
