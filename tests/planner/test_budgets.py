"""Other budgets: the smallest that works is the smallest, and the plan is feasible there."""

from dataclasses import replace
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from fragment_pools import MIB, device, partition, placed
from shoal_planner.budgets import (
    MOST_BUDGETS,
    explain_budgets,
    fragment_at_budgets,
    with_other_budgets,
)
from shoal_planner.costs import Costs, Span
from shoal_planner.device_costs import Holding
from shoal_planner.goal import Goal
from shoal_planner.outcome import Infeasible, Plan
from shoal_planner.placement import plan
from shoal_planner.smallest_budgets import smallest_at_once
from shoal_protocol.choices import Objective
from shoal_protocol.units import Bytes


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 8))
def test_no_division_of_the_fragments_needs_less(sizes: list[int], devices: int) -> None:
    least = min(
        max(sum(sizes[start:end]) for start, end in pairwise((0, *cuts, len(sizes))))
        for count in range(min(devices, len(sizes)))
        for cuts in combinations(range(1, len(sizes)), count)
    )
    costs = Costs(partition([1] * len(sizes), sizes))
    assert smallest_at_once(costs.least, len(sizes), devices) == least


def test_with_the_smallest_budget_there_is_a_plan_and_with_a_byte_less_only_one_in_turn() -> None:
    document = partition([10**8] * 4, [20 * MIB] * 4, least=[7 * MIB, 5 * MIB, 6 * MIB, 8 * MIB])
    smallest = smallest_at_once(Costs(document).least, 4, 2)
    for budget, in_turn in ((smallest, False), (Bytes(smallest - 1), True)):
        pool = [device("a", budget=budget), device("b", budget=budget)]
        answer = placed(plan(document, pool, Objective.THROUGHPUT))
        assert any(stage.held(Holding.RELOADED) for stage in answer.stages) is in_turn
    below = [device("a", budget=8 * MIB - 1), device("b", budget=8 * MIB - 1)]
    assert isinstance(plan(document, below, Objective.THROUGHPUT), Infeasible)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 16)), min_size=1, max_size=7),
    st.integers(1, 4),
)
def test_loaded_in_turn_fragments_run_in_the_smallest_budget_and_not_in_a_byte_less(
    sizes: list[tuple[int, int]], devices: int
) -> None:
    """That is what the neediest fragment takes, whatever crosses: other items wait meanwhile."""
    least = [size * MIB for size, _ in sizes]
    crossing = [*(crosses * MIB // 4 for _, crosses in sizes), MIB]
    document = partition([10**8] * len(least), least, crossing=crossing)
    smallest = Costs(document).least_in_turn(Span(0, len(least)), waiting=True)

    def answer(budget: int) -> Plan | Infeasible:
        pool = [device(f"d{number}", budget=budget) for number in range(devices)]
        return plan(document, pool, Objective.THROUGHPUT)

    assert not isinstance(answer(smallest), Infeasible)
    refused = answer(smallest - 1)
    assert isinstance(refused, Infeasible)
    assert refused.need_bytes == smallest


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 16)), min_size=1, max_size=7),
    st.integers(1, 4),
    st.integers(1, 50),
)
def test_what_a_refusal_says_is_needed_suffices(
    sizes: list[tuple[int, int]], devices: int, budget_mib: int
) -> None:
    """However much less the devices have: whoever follows it is not refused again."""
    least = [size * MIB for size, _ in sizes]
    crossing = [*(crosses * MIB // 4 for _, crosses in sizes), MIB]
    document = partition([10**8] * len(least), least, crossing=crossing)

    def answer(budget: int) -> Plan | Infeasible:
        pool = [device(f"d{number}", budget=budget) for number in range(devices)]
        return plan(document, pool, Objective.THROUGHPUT)

    refused = answer(budget_mib * MIB)
    if isinstance(refused, Infeasible):
        assert refused.need_bytes is not None
        assert not isinstance(answer(refused.need_bytes), Infeasible)


def test_the_table_goes_from_all_resident_to_the_smallest_and_says_what_each_costs() -> None:
    document = partition([10**9] * 4, [20 * MIB] * 4, least=[7 * MIB, 5 * MIB, 6 * MIB, 8 * MIB])
    pool = [device("a"), device("b")]
    table = explain_budgets(with_other_budgets(document, pool, Goal(Objective.THROUGHPUT)))
    assert table.title == (
        "Smallest budget that works, cut as it is: 14 MiB on each of 2 devices; "
        "8 MiB where fragments are loaded in turn"
    )
    assert [row[0] for row in table.rows][:: len(table.rows) - 1] == ["40 MiB", "8 MiB"]
    assert [row[-1] for row in table.rows] == ["whole", *["in blocks"] * 3, *["in turn"] * 2]
    assert table.rows[0][1] != table.rows[-1][1]


def test_a_model_that_needs_all_it_needs_has_one_budget() -> None:
    document = partition([10**8], [20 * MIB])
    table = explain_budgets(with_other_budgets(document, [device("a")], Goal(Objective.LATENCY)))
    assert table.title.endswith("20 MiB on the device")
    assert [row[0] for row in table.rows] == ["20 MiB"]


def test_budgets_that_read_alike_have_one_row() -> None:
    document = partition([10**8], [20 * MIB], least=[20 * MIB - 600])
    table = explain_budgets(with_other_budgets(document, [device("a")], Goal(Objective.LATENCY)))
    assert [row[0] for row in table.rows] == ["20 MiB", "20 MiB"]
    assert [row[-1] for row in table.rows] == ["whole", "in blocks"]


def test_no_budget_is_said_to_work_where_sizes_are_unknown() -> None:
    known = partition([10**8, 10**8], [20 * MIB, 10 * MIB])
    one, other = known.fragments
    unknown = replace(known, fragments=(one, replace(other, activation_bytes=None)))
    others = with_other_budgets(unknown, [device("a")], Goal(Objective.LATENCY))
    assert others.at_least
    assert explain_budgets(others).title == (
        "No smaller budget than 20 MiB on the device works; some sizes are unknown, and more may "
        "be needed"
    )
    assert not with_other_budgets(known, [device("a")], Goal(Objective.LATENCY)).at_least


def test_a_budget_that_is_printed_suffices() -> None:
    least = 20 * MIB + 1
    table = explain_budgets(
        with_other_budgets(partition([10**8], [least]), [device("a")], Goal(Objective.LATENCY))
    )
    assert table.title.endswith("20.1 MiB on the device")
    assert [row[0] for row in table.rows] == ["20.1 MiB"]


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 3))
def test_a_fragment_takes_at_each_budget_what_a_plan_on_such_a_device_says(
    least: int, more: int, crossing: int
) -> None:
    sizes = [(least + more) * MIB]
    document = partition([10**8], sizes, [crossing * MIB] * 2, least=[least * MIB])
    costs, on = Costs(document), device("a")
    found = fragment_at_budgets(costs, 0, on)
    assert next(iter(found)) == costs.resident(Span(0, 1))
    for budget, (time, granted) in found.items():
        assert granted is None
        (stage,) = placed(
            plan(document, [replace(on, budget_bytes=budget)], Objective.THROUGHPUT)
        ).stages
        (share,) = stage.shares
        assert share.predicted == (time,)
    *_, smallest = found
    too_small = [replace(on, budget_bytes=Bytes(smallest - 1))]
    assert isinstance(plan(document, too_small, Objective.THROUGHPUT), Infeasible)


@given(st.sets(st.integers(1, 60), max_size=4))
def test_what_was_measured_within_a_grant_stands_at_the_budget_that_grants_it(
    granted_mib: set[int],
) -> None:
    document = partition([10**8], [40 * MIB], [MIB] * 2, least=[5 * MIB])
    costs, on, span = Costs(document), device("a"), Span(0, 1)
    granted = {each * MIB for each in granted_mib} | {0}
    found = fragment_at_budgets(costs, 0, on, granted)
    assert len(found) <= MOST_BUDGETS
    assert list(found) == sorted(found, reverse=True)
    most, *_, least = found
    assert (most, least) == (costs.resident(span), 5 * MIB)
    at = {grant: budget for budget, (_, grant) in found.items() if grant is not None}
    assert at.pop(0) == most, "as a whole"
    assert at.keys() <= {each for each in granted if 0 < each < 40 * MIB}
    for grant, budget in at.items():
        assert costs.grants(span, replace(on, budget_bytes=budget))[0] >= grant
        less = replace(on, budget_bytes=Bytes(budget - 1))
        assert budget == least or costs.grants(span, less)[0] < grant
    between = costs.grants(span, replace(on, budget_bytes=Bytes(20 * MIB)))[0]
    assert fragment_at_budgets(costs, 0, on, [between])[Bytes(20 * MIB)][1] == between
