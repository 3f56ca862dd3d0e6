"""The plan of a graph on a pool: which groups of devices run which layers, and why not otherwise.

1. Take the graph's legal cuts, or fewer where there are too many.
2. Where all groups can be tried within the steps allowed: search among them all.
3. Else divide rows of devices, improve the best by small moves, both with few cuts; then choose its
   cuts again among all.
4. Say what no plan can beat: the gap to it is zero where the search was exact.
5. Weigh the plans that one would think of first.

The steps bound the work, no clock does: equal questions get equal answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Final

from shoal_planner.goal import Goal
from shoal_planner.layers.alternatives import rejected
from shoal_planner.layers.arcs import Arcs, fixed, number_of_subsets, row, subsets
from shoal_planner.layers.bounds import bounds
from shoal_planner.layers.costs import Costs
from shoal_planner.layers.cuts import Cuts, cuts_of
from shoal_planner.layers.front import Found, best, order
from shoal_planner.layers.graph import LayerGraph, Pool
from shoal_planner.layers.local_search import Groups, improved
from shoal_planner.layers.plans import LayerPlan, Unplaceable, stage_plans
from shoal_planner.layers.search import least_first, least_period, times
from shoal_planner.layers.shortest import shortest
from shoal_protocol.choices import Objective

MAX_STEPS: Final = 10**9
MAX_CUTS: Final = 1300
_COARSE_CUTS: Final = 160


def plan(
    graph: LayerGraph,
    pool: Pool,
    objective: Objective,
    items: int = 1,
    max_steps: float = MAX_STEPS,
) -> LayerPlan | Unplaceable:
    """The best plan; `items` matter to Makespan only, which alone counts loading."""
    goal = Goal(objective, items)
    costs = Costs(cuts_of(graph, _shares(graph, pool), MAX_CUTS), pool)
    sizes = [len(members) for members in costs.classes]
    exact = _exact_arcs(sizes, len(costs.cuts), max_steps)
    found = (
        best(costs, exact, goal, max_steps) if exact else _bounded(costs, goal, sizes, max_steps)
    )
    if found is None:
        return _unplaceable(costs)
    lower = found.lower
    if not (exact and costs.cuts.complete):
        lower = goal.value(*bounds(costs, cold=goal.cold))
    return LayerPlan(
        objective=objective,
        items=items,
        stages=stage_plans(costs, found.stages),
        times=found.times,
        value=goal.value(*found.times),
        lower_bound=min(lower, goal.value(*found.times)),
        rejected=rejected(costs, goal, found, max_steps),
    )


def _shares(graph: LayerGraph, pool: Pool) -> tuple[float, ...]:
    """What each layer is of the whole model's time, over all kinds of devices."""
    like = [members[0] for members in pool.alike()]
    times = [[device.seconds(layer) for layer in graph.layers] for device in like]
    totals = [max(sum(each), 1e-12) for each in times]
    return tuple(
        sum(each[index] / total for each, total in zip(times, totals, strict=True))
        for index in range(len(graph.layers))
    )


def _exact_arcs(sizes: Sequence[int], cuts: int, max_steps: float) -> Arcs | None:
    """All groups of all devices, where the search among them is short enough."""
    if number_of_subsets(sizes) * cuts * cuts > max_steps:
        return None
    arcs = subsets(sizes)
    return arcs if arcs.steps(cuts) <= max_steps else None


def _bounded(fine: Costs, goal: Goal, sizes: Sequence[int], max_steps: float) -> Found | None:
    """Rows and small moves with few cuts, then the best cuts of the groups that won."""
    coarse = Costs(_coarse(fine.cuts, fine, sizes, max_steps), fine.pool)
    ways = [row(order, len(sizes)) for order in _rows(fine)]
    if goal.objective is Objective.LATENCY:
        ways.append(fixed(_once(shortest(fine).groups, sizes)))
    founds = [found for arcs in ways if (found := best(coarse, arcs, goal, max_steps / 8))]
    if not founds:
        return None  # the roomiest device begins a row, so a layer fits nowhere
    first = min(founds, key=lambda each: order(goal, each.times))
    judge = _Judge(coarse, goal)
    groups = tuple(stage.group for stage in first.stages)
    tries = int(max_steps / 4 / (len(groups) * len(coarse.cuts) ** 2 + 100_000))
    better = improved(groups, sizes, judge, tries)
    refined = best(fine, fixed(better), goal, max_steps / 4)
    assert refined is not None, "the cuts of a plan are among all"
    return refined


def _once(groups: Groups, sizes: Sequence[int]) -> Groups:
    """Without those that would use more devices than there are."""
    left, kept = list(sizes), []
    for group in groups:
        place = group.index(1)
        if left[place]:
            left[place] -= 1
            kept.append(group)
    return tuple(kept)


@dataclass(frozen=True)
class _Judge:
    """What groups in a given order are worth with their best cuts."""

    costs: Costs
    goal: Goal

    def __call__(self, groups: Groups) -> float:
        arcs = fixed(groups)
        if self.goal.objective is Objective.LATENCY:
            stages = least_first(self.costs, arcs, inf, cold=False)
        else:
            stages = least_period(self.costs, arcs)
        if stages is None:
            return inf
        return self.goal.value(*times(self.costs, stages, cold=self.goal.cold))


def _coarse(cuts: Cuts, costs: Costs, sizes: Sequence[int], max_steps: float) -> Cuts:
    affordable = sqrt(max_steps / 8 / max(1, sum(sizes) ** 2 / 2))
    most = max(3 * sum(sizes), min(_COARSE_CUTS, int(affordable)))
    return cuts if len(cuts) <= most else cuts_of(cuts.graph, _shares(cuts.graph, costs.pool), most)


def _rows(costs: Costs) -> list[tuple[int, ...]]:
    """Devices by memory (Asteroid), by speed from either end, and along their fastest links."""
    members = [place for place, each in enumerate(costs.classes) for _ in each]
    speed = costs.capacity
    by_memory = sorted(members, key=lambda place: -costs.like[place].budget_bytes)
    by_speed = sorted(members, key=lambda place: -speed[place])
    along, left = [by_speed[0]], by_speed[1:]
    while left:
        near = min(left, key=lambda place: costs.slowness(along[-1], place))
        along.append(near)
        left.remove(near)
    orders = (by_memory, by_speed, by_speed[::-1], along)
    return list(dict.fromkeys(map(tuple, orders)))


def _unplaceable(costs: Costs) -> Unplaceable:
    layers = costs.cuts.graph.layers
    neediest = max(layers, key=lambda each: each.weight_bytes + each.activation_bytes)
    return Unplaceable(
        layer=neediest.name,
        need_bytes=neediest.weight_bytes + neediest.activation_bytes,
        budgets=tuple((each.name, each.budget_bytes) for each in costs.pool.devices),
    )
