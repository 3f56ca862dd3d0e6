"""The division of memory among fragments: against brute force, and against SwapNet's."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_agent.memory.allocation import SECONDS_PER_BYTE, UNITS, Delay, Point, divide, urgency_of

MIB = 1 << 20
Curve = Sequence[Point]


def cost_of(curves: Sequence[Curve], grants: Sequence[int]) -> float:
    """What a division costs: that of the largest point that each grant allows."""
    return sum(
        min(point.cost for point in curve if point.granted <= grant)
        for curve, grant in zip(curves, grants, strict=True)
    )


def by_swapnet(
    curves: Sequence[Curve], available: int, urgencies: Sequence[float]
) -> list[int] | None:
    """Equation 1 of SwapNet. What it grants below the least of a fragment comes from the others."""
    if sum(curve[0].granted for curve in curves) > available:
        return None
    needs = [curve[-1].granted for curve in curves]
    scores = [
        urgency * curve[0].cost / max(1, curve[-1].granted)
        for curve, urgency in zip(curves, urgencies, strict=True)
    ]
    number, all_needs, all_scores = len(curves), max(1, sum(needs)), sum(scores) or 1.0
    grants = [
        int(
            need / all_needs * (1 - 1 / number) * available
            + score / all_scores * available / number
        )
        for need, score in zip(needs, scores, strict=True)
    ]
    least = [curve[0].granted for curve in curves]
    grants = [max(grant, low) for grant, low in zip(grants, least, strict=True)]
    for index in sorted(range(number), key=lambda index: least[index] - grants[index]):
        grants[index] -= max(0, min(sum(grants) - available, grants[index] - least[index]))
    return grants


@st.composite
def curves(draw: st.DrawFn, most: int = 60) -> list[Point]:
    """One that falls with the grant, evenly or not."""
    grants = sorted(draw(st.sets(st.integers(0, most), min_size=1, max_size=4)))
    costs = sorted(draw(st.lists(st.integers(0, 50), min_size=len(grants), max_size=len(grants))))
    return [Point(grant, cost) for grant, cost in zip(grants, reversed(costs), strict=True)]


some_curves = st.lists(curves(), min_size=1, max_size=4)


@given(some_curves, st.integers(0, 200))
def test_no_other_division_costs_less(given_curves: list[list[Point]], available: int) -> None:
    fitting = [
        (sum(point.cost for point in chosen), sum(point.granted for point in chosen))
        for chosen in itertools.product(*given_curves)
        if sum(point.granted for point in chosen) <= available
    ]
    found = divide(given_curves, available)
    if found is None:
        assert fitting == []
    else:
        assert sum(found) <= available
        assert (cost_of(given_curves, found), sum(found)) == min(fitting)


@given(
    st.lists(st.tuples(curves(), st.floats(0.1, 10)), min_size=1, max_size=4),
    st.integers(0, 200),
)
def test_it_costs_at_most_what_the_division_of_swapnet_costs(
    with_urgency: list[tuple[list[Point], float]], available: int
) -> None:
    plain = [curve for curve, _ in with_urgency]
    urgencies = [urgency for _, urgency in with_urgency]
    urgent = [[Point(p.granted, p.cost * u) for p in curve] for curve, u in with_urgency]
    baseline, found = by_swapnet(plain, available, urgencies), divide(urgent, available)
    assert (baseline is None) == (found is None)
    if baseline is not None and found is not None:
        assert sum(baseline) <= available
        assert cost_of(urgent, found) <= cost_of(urgent, baseline) + 1e-9


@given(st.lists(curves(most=100_000), min_size=1, max_size=6), st.integers(UNITS, 400_000))
def test_rounding_to_units_never_grants_more_than_there_is(
    given_curves: list[list[Point]], available: int
) -> None:
    found = divide(given_curves, available)
    if found is not None:
        assert sum(found) <= available
    else:
        least = sum(curve[0].granted for curve in given_curves)
        assert least > available - len(given_curves) * (available // UNITS)


def test_the_fragment_that_runs_more_often_gets_the_room() -> None:
    rare, often = [Point(10, 100), Point(50, 0)], [Point(10, 100 * 8), Point(50, 0)]
    assert divide([rare, often], 70) == (10, 50)
    assert divide([often, rare], 70) == (50, 10)


def test_a_delay_is_fitted_where_grants_differ_and_assumed_where_they_do_not() -> None:
    delay = Delay()
    for _ in range(20):
        delay.observe(100 * MIB, 0.3)
    assert delay.seconds_per_byte == SECONDS_PER_BYTE
    for _ in range(20):
        delay.observe(0, 0.1)
    assert delay.seconds_per_byte == pytest.approx(0.2 / (100 * MIB))
    assert delay.runs == 40


def test_a_hundred_more_of_priority_counts_twice() -> None:
    assert urgency_of(0) == 1
    assert urgency_of(100) == 2
    assert urgency_of(-200) == 1 / 4
    assert urgency_of(2**31 - 1) == urgency_of(1000) == 1024, "a coordinator may say anything"
