"""The next plan after the one in force: it gains enough for what it moves."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragment_pools import MIB, SECOND, device, every_division, partition, placed
from shoal_api.kinds.placement import Pin
from shoal_planner.alternatives import in_words
from shoal_planner.costs import Costs, Division, Span
from shoal_planner.devices import PoolDevice
from shoal_planner.goal import Goal
from shoal_planner.heuristics import Divisions
from shoal_planner.outcome import Infeasible, Plan
from shoal_planner.placement import plan, replan
from shoal_planner.replanning import GAIN, Situation, next_plan
from shoal_planner.search import Wishes
from shoal_planner.sharing import is_at_once
from shoal_protocol.choices import Objective
from shoal_protocol.partition import PartitionDocument


def divisions(of: Plan, pool: Sequence[PoolDevice]) -> Divisions:
    """As planned; devices that the pool does not have are left out."""
    devices = {each.name: each for each in pool}
    return tuple(
        Division(
            Span(stage.fragments[0], stage.fragments[-1] + 1),
            tuple(devices[name] for name in stage.devices if name in devices),
        )
        for stage in of.stages
    )


def moves(before: Divisions, after: Divisions, weights: Sequence[int]) -> int:
    """Bytes of weights that devices have to get."""
    held = {(i, d.name) for each in before for i in each.span.fragments for d in each.devices}
    after_ = {(i, d.name) for each in after for i in each.span.fragments for d in each.devices}
    return sum(weights[fragment] for fragment, _ in after_ - held)


def situation(
    document: PartitionDocument, pool: Sequence[PoolDevice], goal: Goal, before: Divisions
) -> Situation:
    return Situation(
        costs=Costs(document, goal.loading_items),
        pool=pool,
        goal=goal,
        wishes=Wishes(),
        before=before,
    )


def value(costs: Costs, goal: Goal, of: Divisions) -> int:
    return goal.value(*costs.totals(of))


def fits(costs: Costs, of: Divisions) -> bool:
    return all(
        division.devices and all(costs.at_once(division.span, each) for each in division.devices)
        for division in of
    )


@st.composite
def pools(draw: st.DrawFn, prefix: str, least: int) -> list[PoolDevice]:
    return [
        device(
            f"{prefix}{index}",
            budget=draw(st.integers(8, 24)) * MIB,
            flops=draw(st.integers(1, 4)) * SECOND,
            link_bytes_per_second=draw(st.sampled_from([None, 10**7])),
        )
        for index in range(draw(st.integers(least, 4)))
    ]


@st.composite
def documents(draw: st.DrawFn, most: int = 6) -> PartitionDocument:
    count = draw(st.integers(1, most))
    return partition(
        [draw(st.integers(1, 5)) * 10**8 for _ in range(count)],
        [draw(st.integers(2, 8)) * MIB for _ in range(count)],
        [draw(st.integers(0, 5)) * 10**5 for _ in range(count + 1)],
    )


@settings(max_examples=200, deadline=None)
@given(documents(), pools("d", 1), pools("new", 0), st.data())
def test_the_next_plan_is_near_the_best_and_moves_no_more_than_that(
    document: PartitionDocument, old: list[PoolDevice], new: list[PoolDevice], data: st.DataObject
) -> None:
    objective = data.draw(st.sampled_from(Objective))
    lost = data.draw(st.sets(st.sampled_from([each.name for each in old])))
    pool = [each for each in (*old, *new) if each.name not in lost]
    first = plan(document, old, objective)
    found = plan(document, pool, objective)
    if isinstance(first, Infeasible) or isinstance(found, Infeasible):
        return
    goal = Goal(objective)
    costs = Costs(document, goal.loading_items)
    before, best = divisions(first, pool), divisions(found, pool)
    if not fits(costs, best):
        return
    after = next_plan(situation(document, pool, goal, before), best)
    assert [i for each in after for i in each.span.fragments] == list(
        range(len(document.fragments))
    )
    names = [each.name for division in after for each in division.devices]
    assert len(names) == len(set(names))
    assert fits(costs, after)
    assert value(costs, goal, after) * (1 - GAIN) <= value(costs, goal, best)
    assert moves(before, after, costs.weights) <= moves(before, best, costs.weights)
    if fits(costs, before):
        assert value(costs, goal, after) <= value(costs, goal, before)
        if value(costs, goal, before) * (1 - GAIN) < value(costs, goal, best):
            assert after == before, "the gain was too small for a move"


@settings(max_examples=100, deadline=None)
@given(documents(4), pools("d", 2), st.sampled_from(Objective), st.data())
def test_after_a_loss_no_plan_near_the_best_moves_fewer_bytes(
    document: PartitionDocument, old: list[PoolDevice], objective: Objective, data: st.DataObject
) -> None:
    lost = data.draw(st.sampled_from(old))
    pool = [each for each in old if each != lost]
    first, found = plan(document, old, objective), plan(document, pool, objective)
    if not (is_at_once(first) and is_at_once(found)):
        return
    goal = Goal(objective)
    costs = Costs(document, goal.loading_items)
    before, best = divisions(placed(first), pool), divisions(placed(found), pool)
    after = next_plan(situation(document, pool, goal, before), best)
    enough = value(costs, goal, best) / (1 - GAIN)
    every = [
        tuple(Division(Span(span[0], span[-1] + 1), tuple(serving)) for span, serving in each)
        for each in every_division(document, pool)
    ]
    near = [each for each in every if fits(costs, each) and value(costs, goal, each) < enough]
    least = min(moves(before, each, costs.weights) for each in near)
    assert moves(before, after, costs.weights) == least


def replanned(
    before: str,
    document: PartitionDocument,
    pool: Sequence[PoolDevice],
) -> str:
    """`0-1 on a; 2 on b` -> the next plan, in the same words."""
    devices = {each.name: each for each in pool}
    parts = []
    for part in before.split("; "):
        span, names = part.split(" on ")
        first, _, last = span.partition("-")
        known = tuple(devices[name] for name in names.split(", ") if name in devices)
        parts.append(Division(Span(int(first), int(last or first) + 1), known))
    best = divisions(placed(plan(document, pool, Objective.THROUGHPUT)), pool)
    of = situation(document, pool, Goal(Objective.THROUGHPUT), tuple(parts))
    return in_words(next_plan(of, best))


def test_the_neighbours_of_a_lost_device_take_its_fragments_and_the_others_keep_theirs() -> None:
    document = partition([10**8] * 8, [4 * MIB] * 8)
    pool = [device(name, budget=16 * MIB) for name in "abd"]
    after = replanned("0-1 on a; 2-3 on b; 4-5 on c; 6-7 on d", document, pool)
    assert after in ("0-1 on a; 2-4 on b; 5-7 on d", "0-2 on a; 3-5 on b; 6-7 on d")


def test_a_device_that_is_alike_takes_the_place_of_a_lost_one() -> None:
    document = partition([10**8] * 6, [8 * MIB] * 6)
    pool = [device(name, budget=16 * MIB) for name in "abd"]
    assert replanned("0-1 on a; 2-3 on b; 4-5 on c", document, pool) == (
        "0-1 on a; 2-3 on b; 4-5 on d"
    )


def test_a_device_that_joins_takes_from_the_slowest_stage_alone() -> None:
    document = partition([10**8] * 3 + [5 * 10**8], [8 * MIB] * 4)
    pool = [device(name, budget=25 * MIB) for name in "abc"]
    assert replanned("0-2 on a; 3 on b", document, pool) == "0-2 on a; 3 on b, c"


def test_a_plan_in_force_stays_where_little_is_gained() -> None:
    document = partition([105 * 10**6, 10**8, 10**8, 95 * 10**6], [8 * MIB] * 4)
    pool = [device("a", budget=16 * MIB), device("b", budget=16 * MIB, flops=21 * SECOND // 20)]
    assert replanned("0-1 on a; 2-3 on b", document, pool) == "0-1 on a; 2-3 on b"


def test_a_pin_is_kept_when_fragments_move() -> None:
    document = partition([10**8] * 4, [8 * MIB] * 4)
    pool = [device(name, budget=16 * MIB) for name in "abcd"]
    pins = [Pin(fragment=0, device="a")]
    before = placed(plan(document, pool[:3], Objective.THROUGHPUT, pins=pins))
    left = [each for each in pool if each.name != before.homes()[3][0]]
    best = placed(plan(document, left, Objective.THROUGHPUT, pins=pins))
    after = replan(document, left, best, before.stages, pins)
    assert after.homes()[0] == ("a",)


def test_what_would_be_better_from_scratch_is_said_and_not_taken_for_little() -> None:
    document = partition([10**8] * 4, [8 * MIB] * 4)
    pool = [device("a", budget=24 * MIB), device("b", budget=24 * MIB, flops=21 * SECOND // 20)]
    best = placed(plan(document, pool, Objective.LATENCY))
    first, last = best.stages
    swapped = (replace(first, shares=last.shares), replace(last, shares=first.shares))
    after = replan(document, pool, best, swapped)
    assert [stage.devices for stage in after.stages] == [stage.devices for stage in swapped]
    lost = {each.alternative: each.reason for each in after.rejected}
    assert lost["best from scratch"] == "gains 2.4 %: not worth the fragments that would move"


@pytest.mark.minutes
def test_a_large_pool_that_loses_a_device_moves_few_fragments() -> None:
    """The bounded search for the best would move most of them."""
    document = partition(
        [10**8 * (1 + i * 7 % 9) for i in range(48)], [(4 + i % 6) * MIB for i in range(48)]
    )
    pool = [
        device(f"d{i:02}", budget=(40 + i % 8) * MIB, flops=SECOND * (1 + i % 8)) for i in range(24)
    ]
    before = placed(plan(document, pool, Objective.THROUGHPUT))
    left = [each for each in pool if each.name != before.homes()[0][0]]
    best = placed(plan(document, left, Objective.THROUGHPUT))
    after = replan(document, left, best, before.stages)
    old, new, ideal = (divisions(each, left) for each in (before, after, best))
    assert moves(old, new, [1] * 48) <= 12
    assert value(Costs(document), Goal(Objective.THROUGHPUT), new) * (1 - GAIN) <= value(
        Costs(document), Goal(Objective.THROUGHPUT), ideal
    )


def test_what_a_lost_device_served_goes_to_the_one_that_has_it_on_its_disk() -> None:
    document = partition([SECOND] * 2, [20 * MIB] * 2)
    second = document.fragments[1].digest
    pool = [device(name, cached=(second,) * (name == "d")) for name in "abcd"]
    best = placed(plan(document, pool[:2], Objective.LATENCY))
    left = [each for each in pool if each.name != "b"]
    ideal = placed(plan(document, [left[0], left[1]], Objective.LATENCY))
    after = replan(document, left, ideal, best.stages)
    assert [stage.devices for stage in after.stages] == [("a",), ("d",)]
