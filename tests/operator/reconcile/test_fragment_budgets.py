"""Placements and Devices say in which budgets fragments run, and how long a task takes there."""

from dataclasses import replace
from typing import Any

import pytest

from reconcile.test_device_pool import see as see_pool
from reconcile.test_device_pool import shown, view
from reconcile.test_placement import KEPT, PARTITION, device, placement, see
from reconcile.values import MIB
from shoal_api.kinds import Placement
from shoal_api.kinds.device import MAX_PLANNED, PlannedFragment
from shoal_api.kinds.placement import MAX_BUDGETS, FragmentBudgets
from shoal_operator.reconcile.snapshot import ConnectedDevice, CoordinatorView, StoredDocument
from shoal_protocol.speeds import FragmentTime, Speed

LATER, FAST = "2026-03-01T12:01:00Z", Speed(processors=2.0)


def swappable(least_mib: int = 6) -> StoredDocument:
    """Fragments of 20 MiB that run in less."""
    fragments = tuple(
        replace(each, least_bytes=least_mib * MIB) for each in KEPT.document.fragments
    )
    return replace(KEPT, document=replace(KEPT.document, fragments=fragments))


def planned(*devices: ConnectedDevice, of: StoredDocument | None = None, **more: Any) -> Placement:
    seen = CoordinatorView(begun=0.0, devices=devices, runs={}, fragments=frozenset())
    made, _, _ = see(
        more.pop("placement", placement()), seen, of_what=(PARTITION, of or swappable()), **more
    )
    return made


def test_a_placement_says_in_how_little_each_fragment_runs_and_how_long_it_takes_there() -> None:
    status = planned(*map(device, "abc")).status
    assert status is not None
    assert [each.fragment for each in status.budgets] == [0, 1, 2]
    assert [name for each in status.budgets for name in each.devices] == ["a", "b", "c"]
    for each, memory in zip(status.budgets, status.fragments, strict=True):
        sizes = [time.budget_bytes for time in each.times]
        assert sizes == sorted(sizes, reverse=True)
        assert len(sizes) >= 4
        assert memory.least_bytes == each.least_budget_bytes == sizes[-1] == 6 * MIB
        assert memory.resident_bytes < sizes[0] < 21 * MIB
        seconds = [time.seconds or 0.0 for time in each.times]
        assert seconds == sorted(seconds), "it reads more again in less"
        assert (seconds[0], seconds[-1]) == (memory.resident_seconds, memory.least_seconds)
        assert not any(time.measured for time in each.times)


def ran(name: str, seconds: float, **within: float) -> ConnectedDevice:
    """A device on which a task of the first fragment takes so long, and within `at_MIB` so."""
    grants = tuple((int(at.removeprefix("at_")) * MIB, took) for at, took in within.items())
    digest = KEPT.document.fragments[0].digest
    times = (FragmentTime(digest=digest, task_seconds=seconds, within=grants),)
    return replace(device(name), times=times)


def of_the_first(*devices: ConnectedDevice) -> FragmentBudgets:
    status = planned(*devices).status
    assert status is not None
    (found,) = [each for each in status.budgets if each.fragment == 0]
    return found


def test_what_a_device_has_measured_is_in_place_of_the_estimate_and_told_apart() -> None:
    estimate = of_the_first(*map(device, "abc"))
    slow = 3 * (estimate.times[0].seconds or 0.0)
    whole, *less = of_the_first(*(ran(name, slow, at_0=slow) for name in "abc")).times
    assert whole.measured
    assert whole.seconds == pytest.approx(slow)
    assert not any(each.measured for each in less)
    assert all((each.seconds or 0.0) > slow for each in less)


def test_what_was_reckoned_from_runs_in_blocks_is_not_called_measured() -> None:
    estimate = of_the_first(*map(device, "abc"))
    slow = 3 * (estimate.times[0].seconds or 0.0)
    whole, *_ = of_the_first(*(ran(name, slow) for name in "abc")).times
    assert not whole.measured
    assert whole.seconds == pytest.approx(slow, rel=0.01)


def test_what_a_device_has_run_in_blocks_is_measured_there_and_corrects_what_is_beside_it() -> None:
    base = of_the_first(*map(device, "abc"))
    whole, *_, least = (each.seconds or 0.0 for each in base.times)
    took = whole + 4 * (least - whole)
    found = of_the_first(*(ran(name, whole, at_6=took) for name in "abc"))
    assert [each.measured for each in found.times] == [False, False, False, False, True]
    assert found.times[-1].seconds == pytest.approx(took)
    assert found.least_budget_bytes == base.least_budget_bytes
    for now, before in zip(found.times[1:-1], base.times[1:-1], strict=True):
        more = (before.seconds or 0.0) - whole
        assert now.seconds == pytest.approx(whole + 4 * more, rel=0.1)
    between = of_the_first(*(ran(name, whole, at_12=took) for name in "abc")).times
    (at,) = [each for each in between if each.measured]
    assert 12 * MIB < at.budget_bytes < 14 * MIB
    assert at.seconds == pytest.approx(took)
    assert len(between) == len(base.times) + 1


def test_devices_of_a_stage_that_differ_are_told_apart_and_others_told_once() -> None:
    whole = replace(device("c", budget=90 * MIB), speed=FAST)
    alike = (device("a", budget=90 * MIB), device("b", budget=80 * MIB))
    status = planned(*alike, whole).status
    assert status is not None
    (stage,) = status.stages
    assert set(stage.devices) == {"a", "b", "c"}
    told = [each.devices for each in status.budgets if each.fragment == 0]
    assert sorted(map(sorted, told)) == [["a", "b"], ["c"]]


def test_where_times_cannot_be_predicted_the_smallest_budget_is_told_all_the_same() -> None:
    of = swappable()
    fragments = tuple(replace(each, flops=None) for each in of.document.fragments)
    status = planned(
        *map(device, "abc"), of=replace(of, document=replace(of.document, fragments=fragments))
    ).status
    assert status is not None
    assert {each.least_budget_bytes for each in status.budgets} == {6 * MIB}
    assert {time.seconds for each in status.budgets for time in each.times} == {None}


def test_nothing_is_written_again_while_nothing_has_changed() -> None:
    first = planned(*map(device, "abc"))
    assert planned(*map(device, "abc"), placement=first, now=LATER) == first
    on = view(*map(device, "abc"))
    once = shown(see_pool(view=on, placements=(first,)))
    again = shown(see_pool(view=on, placements=(first,), devices=once))
    assert again == once


def fragments_of(name: str, *placements: Placement) -> tuple[PlannedFragment, ...]:
    found = shown(see_pool(view=view(*map(device, "abc")), placements=placements))
    (status,) = [each.status for each in found if each.metadata.name == f"shelf-{name}"]
    assert status is not None
    return status.fragments


def test_a_device_says_what_the_plan_gives_to_it() -> None:
    of = planned(*map(device, "abc"))
    assert of.status is not None
    (known,) = fragments_of("b", of)
    (told,) = [each for each in of.status.budgets if "b" in each.devices]
    assert (known.placement, known.fragment) == ("rec-3-shelf", told.fragment)
    assert known.digest == KEPT.document.fragments[told.fragment].digest
    assert (known.least_budget_bytes, known.times) == (told.least_budget_bytes, told.times)
    assert fragments_of("b") == ()


def test_a_fragment_of_several_plans_is_told_once_as_the_newest_says() -> None:
    old = planned(*map(device, "abc"))
    metadata = replace(old.metadata, name="newer", creation_timestamp=LATER)
    (known,) = fragments_of("a", old, replace(old, metadata=metadata))
    assert known.placement == "newer"


def test_a_device_of_many_plans_has_a_status_that_ends() -> None:
    of = planned(*map(device, "abc"))
    assert of.status is not None
    (memory, *_), (told, *_) = of.status.fragments, of.status.budgets
    count = 2 * MAX_PLANNED
    assert count <= MAX_BUDGETS
    many = replace(
        of.status,
        fragments=tuple(
            replace(memory, fragment=number, digest=f"sha256:{number:064x}")
            for number in range(count)
        ),
        budgets=tuple(replace(told, fragment=number) for number in range(count)),
    )
    assert len(fragments_of("a", replace(of, status=many))) == MAX_PLANNED
