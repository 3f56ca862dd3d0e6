"""Planning at the level of layers, against brute force and by examples."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.layer_pools import Plan, every_plan, graphs, pools, weigh
from shoal_planner.layers.graph import LayerGraph, Pool
from shoal_planner.layers.planning import plan
from shoal_planner.layers.plans import LayerPlan, Unplaceable
from shoal_protocol.choices import Objective

ITEMS = 20


def value(objective: Objective, times: tuple[float, float]) -> float:
    period, first = times
    match objective:
        case Objective.THROUGHPUT:
            return period
        case Objective.LATENCY:
            return first
        case Objective.MAKESPAN:
            return first + (ITEMS - 1) * period


def as_weighed(answer: LayerPlan, pool: Pool) -> Plan:
    named = {device.name: device for device in pool.devices}
    return [
        (frozenset(stage.layers), [named[name] for name in stage.devices])
        for stage in answer.stages
    ]


def no_plan_is_better(graph: LayerGraph, pool: Pool, objective: Objective) -> None:
    cold = objective is Objective.MAKESPAN
    values = [
        value(objective, weigh(graph, pool, each, cold=cold)) for each in every_plan(graph, pool)
    ]
    answer = plan(graph, pool, objective, ITEMS)
    if min(values) == inf:
        assert isinstance(answer, Unplaceable)
        return
    assert isinstance(answer, LayerPlan), answer
    own = weigh(graph, pool, as_weighed(answer, pool), cold=cold)
    assert (answer.times.period, answer.times.first) == pytest.approx(own, abs=1e-9)
    assert answer.value == pytest.approx(min(values), abs=1e-9)
    assert answer.gap == 0


@settings(max_examples=200, deadline=None)
@given(graphs(), pools(), st.sampled_from(Objective))
def test_no_plan_of_any_cuts_and_groups_is_better(
    graph: LayerGraph, pool: Pool, objective: Objective
) -> None:
    no_plan_is_better(graph, pool, objective)


@pytest.mark.minutes
@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=2000, deadline=None)
@given(graphs(most=10), pools(most=3), st.sampled_from(Objective))
def test_no_plan_is_better_with_ten_layers(
    graph: LayerGraph, pool: Pool, objective: Objective
) -> None:
    no_plan_is_better(graph, pool, objective)


@pytest.mark.minutes
@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=300, deadline=None)
@given(graphs(most=6), pools(most=5), st.sampled_from(Objective))
def test_no_plan_is_better_with_five_devices(
    graph: LayerGraph, pool: Pool, objective: Objective
) -> None:
    no_plan_is_better(graph, pool, objective)
