"""What is asked of many spans of fragments takes as long for a long one as for a short one."""

import sys
from itertools import combinations
from types import FrameType

from hypothesis import given
from hypothesis import strategies as st

from fragment_pools import MIB, device, partition
from shoal_planner.costs import Costs, Span
from shoal_planner.device_costs import Holding
from shoal_planner.ranges import Maxima, sums_of


@given(st.lists(st.integers(), min_size=1, max_size=20))
def test_sums_and_maxima_of_any_range_are_those_of_its_amounts(amounts: list[int]) -> None:
    maxima, sums = Maxima(amounts), sums_of(amounts)
    for start, end in combinations(range(len(amounts) + 1), 2):
        assert maxima.of(start, end) == max(amounts[start:end])
        assert sums[end] - sums[start] == sum(amounts[start:end])


def calls_to_find_how_it_is_held(fragments: int) -> int:
    """Of functions and generators, where a device loads all of a chain in turn."""
    costs = Costs(partition([10**9] * fragments, [20 * MIB] * fragments))
    span, tight, calls = Span(0, fragments), device("a", 24 * MIB), 0
    assert costs.holding(span, tight) is Holding.RELOADED  # what is worked out once, is

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        costs.holding(span, tight)
    finally:
        sys.setprofile(None)
    return calls


def test_how_a_long_chain_is_held_is_found_in_as_many_steps_as_for_a_short_one() -> None:
    assert calls_to_find_how_it_is_held(400) == calls_to_find_how_it_is_held(4) > 0
