"""Cuts and devices chosen together, against brute force; and when a cut that exists gives way."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from fragment_pools import MIB, SECOND, cut_table, device, partition, placed
from random_profiles import profiles
from shoal_planner.costs import Division, Span
from shoal_planner.cut_tables import table_of
from shoal_planner.cuts import CutRequest, Refusal, choose_cuts
from shoal_planner.device_costs import Holding
from shoal_planner.devices import PoolDevice
from shoal_planner.goal import Goal
from shoal_planner.outcome import Infeasible
from shoal_planner.placement import plan
from shoal_planner.planned_cuts import TableCosts, choose_cut, cut_order, next_cut, rejected_cut
from shoal_planner.segments import Layout
from shoal_protocol.choices import Objective
from shoal_protocol.cut_table import CutTable, table_from_json, table_to_json
from shoal_protocol.units import Bytes


def every_plan(
    of: CutTable,
    pool: Sequence[PoolDevice],
    fits: Callable[[Span, PoolDevice], Holding | None],
) -> Iterator[tuple[Division, ...]]:
    """Every cut, with every way to give its fragments devices of their own that each fits."""
    for number in range(of.end):
        for inner in combinations(range(1, of.end), number):
            spans = [Span(*ends) for ends in pairwise((0, *inner, of.end))]
            for owner in product(range(-1, len(spans)), repeat=len(pool)):
                plan = tuple(
                    Division(span, tuple(d for d, o in zip(pool, owner, strict=True) if o == place))
                    for place, span in enumerate(spans)
                )
                if all(
                    each.devices and all(fits(each.span, d) for d in each.devices) for each in plan
                ):
                    yield plan


@st.composite
def questions(draw: st.DrawFn) -> tuple[CutTable, list[PoolDevice]]:
    count = draw(st.integers(1, 5))
    numbers = st.integers(0, 5)
    weights = [draw(numbers) * MIB for _ in range(count)]
    made = cut_table(
        [draw(numbers) * 10**8 for _ in range(count)],
        weights,
        [draw(numbers) * 10**5 for _ in range(count + 1)],
        [size + draw(st.integers(0, 4)) * size // 4 for size in weights]
        if draw(st.booleans())
        else (),
    )
    pool = [
        device(
            f"d{index}",
            budget=draw(st.integers(4, 24)) * MIB,
            flops=draw(st.integers(1, 3)) * SECOND,
            link_bytes_per_second=draw(st.sampled_from([None, 10**6, 10**7])),
            latency_nanoseconds=draw(st.sampled_from([0, 5_000_000])),
        )
        for index in range(draw(st.integers(1, 3)))
    ]
    return made, pool


@settings(max_examples=150, deadline=None)
@given(questions(), st.sampled_from(Objective))
def test_no_cut_on_no_devices_beats_the_planned_one(
    question: tuple[CutTable, list[PoolDevice]], objective: Objective
) -> None:
    of, pool = question
    goal = Goal(objective, 50)
    costs = TableCosts(of, goal.loading_items)
    chosen = choose_cut(of, pool, goal)
    # Devices that are filled to the brim are avoided as long as there is another way.
    with_room = [
        replace(each, budget_bytes=Bytes(each.budget_bytes - (640 << 10))) for each in pool
    ]
    for devices, fits in ((with_room, costs.at_once), (pool, costs.at_once), (pool, costs.holding)):
        values = [goal.value(*costs.totals(plan)) for plan in every_plan(of, devices, fits)]
        if values:
            assert chosen is not None
            assert chosen.value(goal) == min(values)
            return
    assert chosen is None or chosen.period is None, "it is planned where nothing fits at once"


def test_the_fast_device_gets_the_larger_fragment() -> None:
    of = cut_table([10**8] * 12, [MIB] * 12)
    pool = [device("slow", 20 * MIB), device("fast", 20 * MIB, flops=2 * SECOND)]
    chosen = choose_cut(of, pool, Goal(Objective.THROUGHPUT))
    assert chosen is not None
    sizes = {each.devices[0].name: len(each.span.fragments) for each in chosen.divisions}
    assert sizes == {"slow": 4, "fast": 8}
    assert chosen.tensors in {("t4",), ("t8",)}


def test_many_unequal_devices_are_given_borders_among_all_cuts() -> None:
    of = cut_table([10**8] * 48, [MIB] * 48)
    pool = [device(f"d{n}", 40 * MIB, flops=(n + 2) * SECOND) for n in range(6)]
    chosen = choose_cut(of, pool, Goal(Objective.THROUGHPUT))
    assert chosen is not None
    fair = 48 * 10**8 / sum(each.flops_per_second for each in pool) * SECOND
    assert chosen.period is not None
    assert chosen.period < 1.35 * fair


def test_what_no_pool_holds_at_once_is_cut_into_the_fewest_fragments_that_fit() -> None:
    of = cut_table([10**8] * 8, [4 * MIB] * 8)
    chosen = choose_cut(of, [device("small", 20 * MIB)], Goal(Objective.THROUGHPUT))
    assert chosen is not None
    assert chosen.period is None
    assert len(chosen.tensors) == 3


def test_what_has_room_in_memory_in_blocks_is_cut_finer_where_a_disk_has_no_room_for_it() -> None:
    of = cut_table([10**8] * 8, [4 * MIB] * 8, least=[4 * MIB] * 8)
    pool = [device("small", 20 * MIB)]
    whole = choose_cut(of, pool, Goal(Objective.THROUGHPUT))
    finer = choose_cut(
        of, [device("small", 20 * MIB, cache_bytes=18 * MIB)], Goal(Objective.THROUGHPUT)
    )
    assert whole is not None
    assert whole.tensors == ()
    assert finer is not None
    assert len(finer.tensors) == 3


def test_where_no_memory_is_left_for_frames_a_cut_is_made_in_which_other_items_wait() -> None:
    of = cut_table([10**8] * 4, [3 * MIB] * 4, [4 * MIB] * 5)
    chosen = choose_cut(of, [device("small", 13 * MIB)], Goal(Objective.THROUGHPUT))
    assert chosen is not None
    assert chosen.tensors == ("t2",)


@settings(max_examples=150, deadline=None)
@given(questions())
def test_there_is_a_planned_cut_where_there_is_one_whose_fragments_each_fit_a_device(
    question: tuple[CutTable, list[PoolDevice]],
) -> None:
    of, pool = question
    costs = TableCosts(of)
    cuts = [
        list(pairwise((0, *inner, of.end)))
        for number in range(of.end)
        for inner in combinations(range(1, of.end), number)
    ]
    some = any(
        all(any(costs.holding(Span(*ends), on) for on in pool) for ends in cut) for cut in cuts
    )
    assert (choose_cut(of, pool, Goal(Objective.THROUGHPUT)) is not None) == some


def test_a_layer_that_fits_nowhere_leaves_no_cut() -> None:
    of = cut_table([10**8] * 2, [MIB, 40 * MIB])
    assert choose_cut(of, [device("small", 20 * MIB)], Goal(Objective.THROUGHPUT)) is None


def test_a_cut_that_exists_stays_while_the_gain_is_small() -> None:
    of = cut_table([10**8] * 20, [MIB] * 20)
    goal = Goal(Objective.THROUGHPUT)
    equal = [device("one", 30 * MIB), device("two", 30 * MIB)]
    first = choose_cut(of, equal, goal)
    assert first is not None
    assert first.tensors == ("t10",)
    little = [equal[0], device("two", 30 * MIB, flops=SECOND * 11 // 10)]
    assert choose_cut(of, little, goal) != first
    kept = next_cut(of, little, goal, first.tensors)
    assert kept is not None
    assert kept.tensors == first.tensors
    much = [equal[0], device("two", 30 * MIB, flops=2 * SECOND)]
    changed = next_cut(of, much, goal, first.tensors)
    assert changed is not None
    assert changed.tensors != first.tensors


def test_a_cut_that_the_devices_cannot_hold_any_more_gives_way() -> None:
    of = cut_table([10**8] * 20, [MIB] * 20)
    goal = Goal(Objective.THROUGHPUT)
    pool = [device("a", 16 * MIB), device("b", 16 * MIB), device("c", 32 * MIB)]
    changed = next_cut(of, pool, goal, ())
    assert changed is not None
    assert changed.tensors


def test_fragments_that_are_loaded_in_turn_anyway_are_not_cut_again() -> None:
    of = cut_table([10**8] * 8, [4 * MIB] * 8)
    current = ("t1", "t2", "t3", "t4", "t5", "t6", "t7")
    kept = next_cut(of, [device("small", 20 * MIB)], Goal(Objective.THROUGHPUT), current)
    assert kept is not None
    assert kept.tensors == current


@settings(max_examples=100, deadline=None)
@given(profiles())
def test_a_table_has_what_the_cuts_of_its_profile_need(profile: object) -> None:
    layout = Layout(profile)  # type: ignore[arg-type]
    of = table_of(layout.profile)
    assert table_from_json(table_to_json(of)) == of
    positions = choose_cuts(layout.profile, CutRequest(tensors=of.tensors)) if of.tensors else ()
    assert not isinstance(positions, Refusal)
    assert len(positions) == len(of.tensors)
    ends = (0, *positions, len(layout.profile.nodes))
    for start in range(of.end):
        for end in range(start + 1, of.end + 1):
            known, segment = of.candidate(start, end), layout.segment(ends[start], ends[end])
            assert known.resident_bytes == segment.resident_bytes
            assert known.flops == segment.flops
            assert known.least_bytes <= known.resident_bytes


def test_of_cuts_that_fit_in_no_way_the_one_that_needs_the_least_says_what_would_do() -> None:
    goal = Goal(Objective.THROUGHPUT)
    needs = [Infeasible(problem="", need_bytes=Bytes(size)) for size in (41, 36, 38)]
    assert min(needs, key=lambda each: cut_order(each, goal)).need_bytes == 36


def test_a_cut_that_is_held_at_once_while_other_items_wait_comes_before_one_in_turn() -> None:
    pool, goal = [device("a", budget=21 * MIB)], Goal(Objective.THROUGHPUT)
    at_once = partition([10**9], [20 * MIB], [12 * MIB, 0])
    in_turn = partition([10**8] * 2, [14 * MIB] * 2, [MIB, MIB, 0])
    best, lost = (placed(plan(each, pool, goal.objective)) for each in (at_once, in_turn))
    assert (best.waiting, best.reloading) == (True, False)
    assert (lost.waiting, lost.reloading) == (False, True)
    assert cut_order(best, goal) < cut_order(lost, goal)
    assert rejected_cut(2, lost, best).reason == "devices would load its fragments in turn"


def test_of_cuts_in_turn_the_faster_one_wins_though_other_items_wait() -> None:
    pool, goal = [device("a", budget=21 * MIB)], Goal(Objective.THROUGHPUT)
    fewer = partition([10**8] * 2, [20 * MIB] * 2, [12 * MIB, MIB, 0])
    more = partition([10**8] * 6, [12 * MIB] * 6, [MIB] * 6 + [0])
    best, lost = (placed(plan(each, pool, goal.objective)) for each in (fewer, more))
    assert (best.reloading, best.waiting) == (True, True)
    assert (lost.reloading, lost.waiting) == (True, False)
    assert cut_order(best, goal) < cut_order(lost, goal)
    assert "an item every" in rejected_cut(6, lost, best).reason


def test_a_faster_cut_that_lost_because_other_items_would_wait_says_so() -> None:
    pool, goal = [device("a", budget=21 * MIB)], Goal(Objective.THROUGHPUT)
    faster = partition([10**8], [20 * MIB], [12 * MIB, 0])
    finer = partition([10**9] * 2, [9 * MIB] * 2, [MIB // 8, MIB // 8, 0])
    lost, best = (placed(plan(each, pool, goal.objective)) for each in (faster, finer))
    assert (lost.waiting, best.waiting) == (True, False)
    assert not best.reloading
    assert cut_order(best, goal) < cut_order(lost, goal)
    assert (lost.period_nanoseconds or 0) < (best.period_nanoseconds or 0)
    assert rejected_cut(1, lost, best).reason.startswith("other items would wait on disk")
