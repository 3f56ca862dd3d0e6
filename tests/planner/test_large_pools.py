"""Pools of many unequal devices: plans against exact ones, against a bound, and against splits."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragment_pools import MIB, SECOND, cut_table, device, partition, placed, reloads
from shoal_api.kinds.placement import Pin
from shoal_planner.costs import Costs
from shoal_planner.devices import PeerLink, PoolDevice
from shoal_planner.explanation import summary
from shoal_planner.goal import Goal
from shoal_planner.outcome import Plan, Rejected
from shoal_planner.placement import plan, replan
from shoal_planner.planned_cuts import choose_cut
from shoal_planner.replanning import GAIN
from shoal_planner.search import Question, Wishes, search
from shoal_planner.wide_search import bound_over_pairs, search_widely
from shoal_protocol.choices import Objective, PinPolicy
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import Bytes, Nanoseconds


@st.composite
def documents(draw: st.DrawFn) -> PartitionDocument:
    count = draw(st.integers(1, 5))
    numbers = st.integers(0, 5)
    sizes = [draw(st.integers(1, 5)) * MIB for _ in range(count)]
    return partition(
        [draw(numbers) * 10**8 for _ in range(count)],
        sizes,
        [draw(numbers) * 10**5 for _ in range(count + 1)],
        least=[size * draw(st.integers(2, 4)) // 4 for size in sizes],
    )


@st.composite
def pools(draw: st.DrawFn, most: int = 4) -> list[PoolDevice]:
    return [
        device(
            f"d{index:02}",
            budget=draw(st.integers(2, 9)) * MIB,
            flops=draw(st.integers(1, 5)) * SECOND,
            link_bytes_per_second=draw(st.sampled_from([None, 10**6, 10**7])),
            latency_nanoseconds=draw(st.sampled_from([0, 5_000_000])),
        )
        for index in range(draw(st.integers(1, most)))
    ]


@settings(max_examples=100, deadline=None)
@given(documents(), pools(), st.sampled_from(Objective), st.data())
def test_the_way_by_all_groups_is_as_good_as_the_best_of_all_divisions(
    document: PartitionDocument,
    pool: list[PoolDevice],
    objective: Objective,
    data: st.DataObject,
) -> None:
    goal = Goal(objective)
    costs = Costs(document, goal.loading_items)
    last = len(document.fragments) - 1
    required = {data.draw(st.integers(0, last)): pool[0].name} if data.draw(st.booleans()) else {}
    wishes = Wishes(required=required, replicas=data.draw(st.booleans()))
    question = Question(costs=costs, pool=pool, goal=goal, wishes=wishes)
    exact = search(question)
    assert exact is not None
    wide = search_widely(question)
    assert bool(wide.divisions) == bool(exact.divisions)
    if exact.divisions:
        best, found = (question.value(each.divisions[0]) for each in (exact, wide))
        assert wide.lower is not None
        rounding = goal.value(1, 1)
        assert wide.lower <= best + rounding
        if objective is not Objective.MAKESPAN or wide.gap(found) == 0:
            assert abs(found - best) <= rounding


@settings(max_examples=50, deadline=None)
@given(documents(), pools(3), st.sampled_from(Objective), st.data())
def test_no_division_goes_below_the_bound_whatever_the_links_between_pairs(
    document: PartitionDocument,
    pool: list[PoolDevice],
    objective: Objective,
    data: st.DataObject,
) -> None:
    rates = st.sampled_from([10**5, 10**8, None])
    linked = [
        replace(
            each,
            peers=tuple(
                PeerLink(other.name, data.draw(rates), Nanoseconds(0))
                for other in pool
                if other is not each
            ),
        )
        for each in pool
    ]
    goal = Goal(objective)
    costs = Costs(document, goal.loading_items)
    question = Question(costs=costs, pool=linked, goal=goal)
    exact, bound = search(question), bound_over_pairs(question)
    assert exact is not None
    assert bound is not None
    for divisions in exact.divisions:
        assert bound <= goal.value(*costs.totals(divisions)) + goal.value(1, 1)


# ---- a dozen and more ----------------------------------------------------------------------------


def unequal(chance: random.Random, count: int) -> list[PoolDevice]:
    """Devices that differ tenfold in speed, sixfold in memory, and links three hundredfold."""
    return [
        device(
            f"d{index:02}",
            budget=chance.randint(10, 60) * MIB,
            flops=chance.randint(10, 100) * 10**8,
            link_bytes_per_second=int(10 ** chance.uniform(6, 8.5)),
            latency_nanoseconds=chance.randint(0, 3) * 10**6,
        )
        for index in range(count)
    ]


def model(chance: random.Random, count: int) -> PartitionDocument:
    """A hundred MiB in all."""
    parts = [chance.random() + 0.1 for _ in range(count)]
    return partition(
        [chance.randint(10, 100) * 10**8 // count for _ in range(count)],
        [int(100 * MIB * part / sum(parts)) for part in parts],
        [int(10 ** chance.uniform(3.5, 5.7)) for _ in range(count + 1)],
    )


def value_of(answer: Plan | Rejected, objective: Objective) -> int:
    assert answer.period_nanoseconds is not None
    assert answer.latency_nanoseconds is not None
    return Goal(objective).value(answer.period_nanoseconds, answer.latency_nanoseconds)


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.minutes), 2])
def test_a_plan_on_a_dozen_unequal_devices_is_near_its_bound_and_beats_every_simple_split(
    seed: int, objective: Objective
) -> None:
    chance = random.Random(seed)  # noqa: S311 - a fixed seed
    document, pool = model(chance, 16), unequal(chance, 12 + 2 * seed)
    answer = placed(plan(document, pool, objective))
    assert answer.gap is not None
    assert answer.gap < 0.35
    for lost in answer.rejected:
        if lost.period_nanoseconds is not None and "load them in turn" not in lost.reason:
            assert value_of(answer, objective) <= value_of(lost, objective), lost
    if answer.gap:
        assert "search cut short, a plan could be better by" in summary(answer)


@pytest.mark.parametrize("objective", [Objective.THROUGHPUT, Objective.LATENCY])
@pytest.mark.parametrize("seed", range(4))
def test_a_dozen_devices_that_differ_a_little_are_planned_nearly_as_well_as_a_dozen_of_few_kinds(
    seed: int, objective: Objective
) -> None:
    """Of devices of few kinds, all divisions can be weighed. A little more memory makes each of
    them a kind of its own, and no plan worse."""
    chance = random.Random(seed)  # noqa: S311 - a fixed seed
    document = model(chance, 4)
    kinds = [(chance.randint(20, 70), chance.randint(10, 100)) for _ in range(2)]
    pool = [
        device(f"d{index:02}", budget=kinds[index % 2][0] * MIB, flops=kinds[index % 2][1] * 10**8)
        for index in range(12)
    ]
    exact = placed(plan(document, pool, objective))
    assert exact.gap == 0
    near = [
        replace(each, budget_bytes=Bytes(each.budget_bytes + number))
        for number, each in enumerate(pool)
    ]
    found = placed(plan(document, near, objective))
    assert value_of(found, objective) <= 1.1 * value_of(exact, objective)
    assert found.gap is not None
    assert value_of(found, objective) <= (1 + found.gap + 1e-6) * value_of(exact, objective)


@pytest.mark.parametrize("objective", Objective)
def test_cuts_are_planned_for_sixteen_unequal_devices_with_a_stated_gap(
    objective: Objective,
) -> None:
    chance = random.Random(1)  # noqa: S311 - a fixed seed
    parts = [chance.random() + 0.1 for _ in range(24)]
    of = cut_table(
        [chance.randint(10, 100) * 10**7 for _ in range(24)],
        [int(60 * MIB * part / sum(parts)) for part in parts],
        [int(10 ** chance.uniform(3.5, 5.7)) for _ in range(25)],
    )
    found = choose_cut(of, unequal(chance, 16), Goal(objective))
    assert found is not None
    assert found.gap is not None
    assert found.gap < 0.35


def test_pins_are_kept_where_devices_are_many_and_unequal() -> None:
    chance = random.Random(7)  # noqa: S311 - a fixed seed
    document, pool = model(chance, 12), unequal(chance, 14)
    pins = [Pin(fragment=2, device="d03"), Pin(fragment=9, device="d07")]
    answer = placed(plan(document, pool, Objective.THROUGHPUT, pins=pins))
    assert answer.homes()[2] == ("d03",)
    assert answer.homes()[9] == ("d07",)


def test_a_pin_that_costs_nothing_is_kept_where_devices_are_many_and_unequal() -> None:
    """Its device has a twin, which has the fragment otherwise."""
    chance = random.Random(7)  # noqa: S311 - a fixed seed
    document, pool = model(chance, 12), unequal(chance, 14)
    free = placed(plan(document, pool, Objective.LATENCY))
    home = free.homes()[0][0]
    twin = next(replace(each, name="twin") for each in pool if each.name == home)
    pins = [Pin(fragment=0, device="twin", policy=PinPolicy.PREFERRED)]
    answer = placed(plan(document, [*pool, twin], Objective.LATENCY, pins=pins))
    assert "twin" in answer.homes()[0]


def test_a_model_of_very_many_fragments_is_planned_with_fewer_borders_first() -> None:
    chance = random.Random(3)  # noqa: S311 - a fixed seed
    document: PartitionDocument = model(chance, 80)
    pool: Sequence[PoolDevice] = unequal(chance, 12)
    answer = placed(plan(document, pool, Objective.LATENCY))
    assert answer.gap is None
    assert "a better plan may exist" in summary(answer)


# ---- a device is lost, or joins ------------------------------------------------------------------


@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([Objective.THROUGHPUT, Objective.LATENCY]), st.data())
def test_after_a_loss_or_a_join_a_dozen_devices_keep_what_is_not_concerned(
    seed: int, objective: Objective, data: st.DataObject
) -> None:
    """The next plan is near the best, and moves no more fragments than that."""
    chance = random.Random(seed)  # noqa: S311 - a fixed seed
    document, pool = model(chance, 16), unequal(chance, 12)
    before = plan(document, pool, objective)
    if not isinstance(before, Plan) or reloads(before):
        return
    used = sorted({name for home in before.homes() for name in home})
    gone = data.draw(st.sampled_from([*used, ""]))
    joined = () if gone else (device("new", budget=40 * MIB, flops=5 * SECOND),)
    now = [each for each in (*pool, *joined) if each.name != gone]
    best = plan(document, now, objective)
    if not isinstance(best, Plan) or reloads(best):
        return
    after = replan(document, now, best, before.stages)
    assert value_of(after, objective) * (1 - GAIN) <= value_of(best, objective)
    assert moves(before, after) <= moves(before, best)
    if not gone and value_of(before, objective) * (1 - GAIN) < value_of(best, objective):
        assert after.homes() == before.homes(), "the gain was too small for a move"


def test_after_losses_few_fragments_move_besides_the_lost_ones() -> None:
    """The sum over several pools; the best plans from scratch would move many more."""
    moved = lost = from_scratch = 0
    for seed in range(3):
        chance = random.Random(seed)  # noqa: S311 - a fixed seed
        document, pool = model(chance, 16), unequal(chance, 12)
        before = placed(plan(document, pool, Objective.THROUGHPUT))
        gone = chance.choice(sorted({name for home in before.homes() for name in home}))
        now = [each for each in pool if each.name != gone]
        best = placed(plan(document, now, Objective.THROUGHPUT))
        after = replan(document, now, best, before.stages)
        moved += moves(before, after)
        from_scratch += moves(before, best)
        lost += sum(gone in home for home in before.homes())
    assert moved <= 3 * lost
    assert 2 * moved <= from_scratch


def held(of: Plan, name: str) -> set[int]:
    return {fragment for fragment, home in enumerate(of.homes()) if name in home}


def moves(before: Plan, after: Plan) -> int:
    """Fragments that devices have to get."""
    names = {name for home in after.homes() for name in home}
    return sum(len(held(after, name) - held(before, name)) for name in names)
