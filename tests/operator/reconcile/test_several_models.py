"""Placements of several models on one pool: the second sees what the first takes."""

from dataclasses import replace

from reconcile.rules import decide
from reconcile.test_placement import KEPT, PARTITION, devices, placement, see, used
from reconcile.values import NOW, SETTINGS, pool
from shoal_api.kinds import Placement
from shoal_api.kinds.placement import Cost, PlacementStatus
from shoal_operator.reconcile.snapshot import PlacementSnapshot
from shoal_protocol.digests import Digest

VIEW = devices("a", "b", "c", "d")


def of_another_model(first: Placement) -> Placement:
    """The same plan, of other fragments."""
    assert first.status is not None
    fragments = tuple(
        replace(each, digest=Digest(f"sha256:{each.fragment:063x}f"))
        for each in first.status.fragments
    )
    return replace(first, status=replace(first.status, fragments=fragments))


def planned_beside(*others: Placement) -> PlacementStatus:
    decision = decide(
        PlacementSnapshot(
            now=NOW,
            settings=SETTINGS,
            placement=placement(),
            partition=PARTITION,
            document=KEPT,
            pool=pool(),
            view=VIEW,
            beside=others,
        )
    )
    assert isinstance(decision.status, PlacementStatus)
    return decision.status


def test_the_second_takes_devices_that_the_first_leaves() -> None:
    first, _, status = see(placement(), devices("a"))
    assert set(used(status)) == {"a"}
    taken = of_another_model(first)
    assert taken.status is not None
    stages = tuple(replace(each, resident_bytes=20 << 20) for each in taken.status.stages)
    taken = replace(taken, status=replace(taken.status, stages=stages))
    assert "a" in used(planned_beside())
    assert "a" not in used(planned_beside(taken))


def test_what_has_the_same_fragments_takes_nothing_more() -> None:
    first, _, status = see(placement(), VIEW)
    assert used(planned_beside(first)) == used(status)


def test_where_both_do_not_fit_at_once_the_second_is_planned_alone_and_says_so() -> None:
    first, _, status = see(placement(), VIEW)
    taken = of_another_model(first)
    assert taken.status is not None
    full = tuple(
        replace(each, devices=("a", "b", "c", "d"), resident_bytes=24 << 20)
        for each in taken.status.stages
    )
    taken = replace(taken, status=replace(taken.status, stages=full))
    beside = planned_beside(taken)
    assert used(beside) == used(status)
    assert "beside other models there is no room on" in message(beside)


def test_the_second_sees_how_busy_the_first_keeps_its_devices_and_their_links() -> None:
    """By what was measured, where a job has run; else by what is predicted."""
    first, _, _ = see(placement(), VIEW)
    other = of_another_model(first)
    assert other.status is not None
    small = tuple(
        replace(
            each,
            resident_bytes=1 << 20,
            predicted_seconds=0.06 * len(each.devices),
            link_seconds=0.03 * len(each.devices),
        )
        for each in other.status.stages
    )
    busy = replace(other.status, stages=small, predicted=Cost(items_per_second=10.0))
    names = set(used(busy))
    predicted = planned_beside(replace(other, status=busy))
    shares = "40 % of its processor, 70 % of its link"
    assert message(predicted).count(shares) == len(names & set(used(predicted)))
    rested = replace(busy, measured=Cost(items_per_second=1.0))
    measured = planned_beside(replace(other, status=rested))
    assert "90 % of its processor" in message(measured)


def message(status: PlacementStatus) -> str:
    return next(each.message for each in status.conditions if each.type == "Planned")
