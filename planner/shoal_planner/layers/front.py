"""The best plan of an objective among given arcs and cuts, by walking the front of period and first
item (`search`): the next plan must have a smaller period than the last, so its first item comes no
sooner. It ends where no smaller period can make up for that."""

from dataclasses import dataclass
from math import inf

from shoal_planner.goal import Goal
from shoal_planner.layers.arcs import Arcs, Stages
from shoal_planner.layers.costs import Costs
from shoal_planner.layers.search import EQUAL, Times, least_first, least_period, times
from shoal_protocol.choices import Objective


@dataclass(frozen=True, slots=True)
class Found:
    """The best plan that was found, and what none among these arcs and cuts goes below."""

    stages: Stages
    times: Times
    lower: float


def order(goal: Goal, times: Times) -> tuple[float, float]:
    """What is compared: of equal values, the smaller other time is better."""
    other = times.first if goal.objective is Objective.THROUGHPUT else times.period
    return goal.value(*times), other


def best(costs: Costs, arcs: Arcs, goal: Goal, max_steps: float) -> Found | None:
    """None: no plan fits. The search ends when so many steps were taken."""
    narrow = least_period(costs, arcs)
    if narrow is None:
        return None
    period = times(costs, narrow, cold=goal.cold).period
    bound = period * (1 + EQUAL)
    stages = least_first(costs, arcs, bound, cold=goal.cold)
    assert stages is not None, "a plan with this period was just found"
    known = Found(stages, times(costs, stages, cold=goal.cold), period)
    if goal.objective is Objective.THROUGHPUT:
        return known
    rounds = max(1, int(max_steps / arcs.steps(len(costs.cuts))) - 2)
    return _walked(costs, arcs, goal, known, rounds)


def _walked(costs: Costs, arcs: Arcs, goal: Goal, known: Found, rounds: int) -> Found:
    """From the largest period to `known`, the plan with the least, or as many rounds as allowed."""
    least, bound, lower = known.times.period, inf, 0.0
    chosen = known
    per_period = 0 if goal.objective is Objective.LATENCY else goal.items - 1
    for _ in range(rounds):
        stages = least_first(costs, arcs, bound, cold=goal.cold)
        if stages is None:
            return Found(chosen.stages, chosen.times, goal.value(*chosen.times))
        here = times(costs, stages, cold=goal.cold)
        if order(goal, here) < order(goal, chosen.times):
            chosen = Found(stages, here, 0.0)
        value = goal.value(*chosen.times)
        lower = here.first + per_period * least
        if lower > value * (1 + EQUAL) or here.period <= least * (1 + EQUAL):
            return Found(chosen.stages, chosen.times, value)
        bound = here.period * (1 - EQUAL)
        if per_period:
            bound = min(bound, (value - here.first) / per_period)
    return Found(chosen.stages, chosen.times, min(lower, goal.value(*chosen.times)))
