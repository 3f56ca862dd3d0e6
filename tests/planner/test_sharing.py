"""Several models on one pool: each plan has what those before it leave."""

from hypothesis import given
from hypothesis import strategies as st

from fragment_pools import MIB, device, partition, placed
from shoal_planner.placement import plan
from shoal_planner.sharing import held_bytes, is_at_once, left_over
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
    held = held_bytes([placed(one)])
    other = plan(models[1], left_over(pool, held), Objective.THROUGHPUT)
    if is_at_once(other):
        together = held_bytes([placed(one), placed(other)])
        assert all(together.get(each.name, 0) <= each.budget_bytes for each in pool)


def test_the_second_model_goes_where_the_first_leaves_room() -> None:
    pool = [device("one", 12 * MIB), device("two", 24 * MIB)]
    large = partition([10**8], [20 * MIB])
    held = held_bytes([placed(plan(large, pool, Objective.LATENCY))])
    assert set(held) == {"two"}
    small = partition([10**8], [10 * MIB])
    beside = placed(plan(small, left_over(pool, held), Objective.LATENCY))
    assert beside.homes() == (("one",),)
