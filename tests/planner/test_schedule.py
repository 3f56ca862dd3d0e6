"""The predicted schedule keeps to the plan that it is drawn from."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragment_pools import MIB, device, partition, placed
from shoal_planner.figures import PlanFigures, figures
from shoal_planner.placement import plan
from shoal_planner.schedule import Phase, schedule
from shoal_protocol.choices import Objective


@st.composite
def plans(draw: st.DrawFn) -> PlanFigures:
    count, sizes = draw(st.integers(1, 4)), st.integers(0, 5)
    document = partition(
        [draw(st.integers(1, 5)) * 10**8 for _ in range(count)],
        [10 * MIB] * count,
        [draw(sizes) * 10**5 for _ in range(count + 1)],
        least=[4 * MIB] * count,
    )
    pool = [
        device(
            f"d{index}",
            budget=draw(st.integers(14, 24)) * MIB,
            flops=draw(st.integers(1, 3)) * 10**9,
            link_bytes_per_second=draw(st.sampled_from([None, 10**6, 10**7])),
            latency_nanoseconds=draw(st.sampled_from([0, 5_000_000])),
        )
        for index in range(draw(st.integers(1, 4)))
    ]
    return figures(placed(plan(document, pool, draw(st.sampled_from(Objective)))))


@given(plans(), st.integers(1, 8))
def test_items_take_as_long_as_the_plan_predicts(of: PlanFigures, items: int) -> None:
    ends = max(bar.end for bar in schedule(of, items))
    latency = of.predicted.latency_seconds or 0.0
    period = max(stage.period_seconds or 0.0 for stage in of.stages)
    one_each = all(len(stage.devices) == 1 for stage in of.stages)
    predicted = latency + (items - 1) * period
    if one_each and of.objective == Objective.MAKESPAN:
        assert ends <= predicted * (1 + 1e-9), "while a stage loads, others go on"
    elif one_each:
        assert ends == pytest.approx(predicted)
    elif items == 1:
        assert ends <= latency * (1 + 1e-9), "the latency is that of the slowest device"


@given(plans(), st.integers(1, 8))
def test_a_device_does_one_item_at_a_time_in_each_way_and_an_item_one_thing_at_a_time(
    of: PlanFigures, items: int
) -> None:
    lanes, ways = defaultdict(list), defaultdict(list)
    for bar in schedule(of, items):
        lane = "processor" if bar.phase in (Phase.READ, Phase.COMPUTE) else bar.phase
        lanes[bar.device, lane].append(bar)
        ways[bar.item].append(bar)
    assert sorted(ways) == list(range(items))
    for bars in (*lanes.values(), *ways.values()):
        for before, after in pairwise(sorted(bars, key=lambda bar: (bar.begin, bar.end))):
            assert after.begin >= before.end - 1e-9


def test_what_is_not_predicted_has_no_schedule() -> None:
    document = partition([None], [10 * MIB])
    answer = placed(plan(document, [device("a")], Objective.THROUGHPUT))
    assert schedule(figures(answer), 3) == ()
