"""Several models on one pool: each plan has what those before it leave."""

from hypothesis import given
from hypothesis import strategies as st

from fragment_pools import MIB, device, partition, placed
from shoal_planner.explanation import summary
from shoal_planner.outcome import Plan
from shoal_planner.placement import plan
from shoal_planner.sharing import beside, is_at_once, left_over, taken_by
from shoal_protocol.choices import Objective

SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@given(SIZES, SIZES, st.lists(st.integers(4, 20), min_size=1, max_size=3))
def test_two_plans_together_keep_every_budget(
    first: list[int], second: list[int], budgets: list[int]
) -> None:
    pool = [device(f"d{number}", size * MIB) for number, size in enumerate(budgets)]
    models = [
        partition([10**8] * len(sizes), [size * MIB for size in sizes]) for sizes in (first, second)
    ]
    one = plan(models[0], pool, Objective.THROUGHPUT)
    if not is_at_once(one):
        return
    taken = taken_by([placed(one)])
    other = plan(models[1], left_over(pool, taken), Objective.THROUGHPUT)
    if is_at_once(other):
        together = taken_by([placed(one), placed(other)])
        assert all(
            together[each.name].held_bytes <= each.budget_bytes
            for each in pool
            if each.name in together
        )


def test_the_second_model_goes_where_the_first_leaves_room() -> None:
    pool = [device("one", 12 * MIB), device("two", 24 * MIB)]
    large = partition([10**8], [20 * MIB])
    taken = taken_by([placed(plan(large, pool, Objective.LATENCY))])
    assert set(taken) == {"two"}
    small = partition([10**8], [10 * MIB])
    second = placed(plan(small, left_over(pool, taken), Objective.LATENCY))
    assert second.homes() == (("one",),)


def test_a_device_that_serves_another_model_three_fifths_of_the_time_has_two_fifths_left() -> None:
    """The second stage works all the time, the first one three fifths of it."""
    pool = [device("one", 24 * MIB), device("two", 24 * MIB)]
    first = placed(plan(partition([6 * 10**8, 10**9], [20 * MIB] * 2), pool, Objective.THROUGHPUT))
    assert first.homes() == (("one",), ("two",))
    taken = taken_by([first])
    assert [taken[name].busy for name in ("one", "two")] == [0.6, 1.0]
    left = left_over(pool, taken)
    assert [each.flops_per_second for each in left] == [4 * 10**8, 25 * 10**7]
    second = beside(placed(plan(partition([10**8], [MIB]), left, Objective.LATENCY)), taken)
    assert second.homes() == (("one",),)
    assert second.latency_nanoseconds == 250_000_000
    assert "other models leave one 40 % of its processor and 4 MiB" in summary(second)


@given(SIZES, st.lists(st.integers(4, 20), min_size=1, max_size=4), st.sampled_from(Objective))
def test_no_device_is_busy_for_longer_than_there_is_time(
    sizes: list[int], budgets: list[int], objective: Objective
) -> None:
    pool = [
        device(f"d{number}", size * MIB, flops=10**9 * (1 + number))
        for number, size in enumerate(budgets)
    ]
    found = plan(partition([10**8] * len(sizes), [each * MIB for each in sizes]), pool, objective)
    if isinstance(found, Plan) and is_at_once(found):
        busy = [each.busy for each in taken_by([found]).values()]
        assert all(0 <= each <= 1 for each in busy)
        assert max(busy) == 1, "what is slowest limits all"


def test_a_plan_says_where_no_other_model_is() -> None:
    pool = [device("one", 12 * MIB), device("two", 24 * MIB)]
    taken = taken_by([placed(plan(partition([10**8], [20 * MIB]), pool, Objective.LATENCY))])
    second = placed(plan(partition([10**8], [10 * MIB]), left_over(pool, taken), Objective.LATENCY))
    assert "on devices that no other model uses" in summary(beside(second, taken))
