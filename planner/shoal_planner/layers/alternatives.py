"""The plans that one would think of first, weighed as the chosen one is."""

from collections.abc import Sequence
from math import prod

from shoal_planner.goal import Goal
from shoal_planner.layers.arcs import Arcs, Stage, Stages, row, singles, units
from shoal_planner.layers.costs import Costs
from shoal_planner.layers.front import Found, best
from shoal_planner.layers.plans import Alternative, format_seconds
from shoal_planner.layers.search import EQUAL, times


def rejected(costs: Costs, goal: Goal, chosen: Found, max_steps: float) -> tuple[Alternative, ...]:
    """Those that differ from the chosen plan."""
    sizes = [len(members) for members in costs.classes]
    whole = len(costs.cuts) - 1
    single = [(Stage(0, whole, unit),) for unit in units(len(sizes))]
    plans: list[tuple[str, Stages | None]] = [
        ("single device", min(single, key=lambda each: _value(costs, goal, each))),
        ("even split", even_split(costs)),
        ("split by memory", split_by_memory(costs)),
        ("all replicas", (Stage(0, whole, tuple(sizes)),)),
        ("row by memory", row_by_memory(costs, goal, max_steps)),
        ("without replicas", without_replicas(costs, goal, max_steps)),
    ]
    return tuple(
        _weighed(costs, goal, name, stages, chosen)
        for name, stages in plans
        if stages and stages != chosen.stages
    )


def even_split(costs: Costs) -> Stages:
    """As many layers on each device, in the order of the pool."""
    order = _places(costs)
    return _by_amounts(costs, order, [1.0] * len(order))


def split_by_memory(costs: Costs) -> Stages:
    """Layers in proportion to the devices' memory, the roomiest first."""
    order = sorted(_places(costs), key=lambda place: -costs.like[place].budget_bytes)
    most = max(1.0, float(costs.resident.max()))
    return _by_amounts(costs, order, [min(costs.like[p].budget_bytes, most) for p in order])


def row_by_memory(costs: Costs, goal: Goal, max_steps: float) -> Stages | None:
    """Asteroid's heuristic: consecutive groups of the devices in the order of their memory."""
    order = sorted(_places(costs), key=lambda place: -costs.like[place].budget_bytes)
    return _searched(costs, row(order, len(costs.classes)), goal, max_steps)


def without_replicas(costs: Costs, goal: Goal, max_steps: float) -> Stages | None:
    sizes = [len(members) for members in costs.classes]
    states = prod(size + 1 for size in sizes)
    if states * len(sizes) * len(costs.cuts) ** 2 > max_steps:
        return None
    return _searched(costs, singles(sizes), goal, max_steps)


def _searched(costs: Costs, arcs: Arcs, goal: Goal, max_steps: float) -> Stages | None:
    if arcs.steps(len(costs.cuts)) > max_steps / 4:
        return None
    found = best(costs, arcs, goal, max_steps / 4)
    return found.stages if found else None


def _by_amounts(costs: Costs, order: Sequence[int], amounts: Sequence[float]) -> Stages:
    """One device after the other, each with its part of the layers; the cuts nearest to it."""
    layers = costs.cuts.inside.sum(axis=1)
    total, wanted, start = sum(amounts), 0.0, 0
    stages = []
    for number, (place, amount) in enumerate(zip(order, amounts, strict=True)):
        wanted += amount / total * len(costs.cuts.graph.layers)
        last = number == len(order) - 1
        able = [end for end in range(len(costs.cuts)) if costs.cuts.after[start, end]]
        if not able:
            break
        end = able[-1] if last else min(able, key=lambda end: (abs(layers[end] - wanted), end))
        stages.append(Stage(start, end, units(len(costs.classes))[place]))
        start = end
    return tuple(stages)


def _weighed(costs: Costs, goal: Goal, name: str, stages: Stages, chosen: Found) -> Alternative:
    given = times(costs, stages, cold=goal.cold)
    value, best_value = goal.value(*given), goal.value(*chosen.times)
    if value == float("inf"):
        return Alternative(name=name, reason=_unfit(costs, stages))
    who = f"{name} ({', '.join(_names(costs, stages))})" if len(stages) == 1 else name
    against = f"against {format_seconds(best_value)}"
    what = {"Throughput": "an item every", "Latency": "an item takes", "Makespan": "all items take"}
    reason = f"{what[goal.objective]} {format_seconds(value)}, {against}"
    if value <= best_value * (1 + EQUAL):
        reason = "is as good; the chosen plan is better in the other time, or comes first"
    return Alternative(name=who, reason=reason, times=given, value=value)


def _unfit(costs: Costs, stages: Stages) -> str:
    for stage in stages:
        for place, count in enumerate(stage.group):
            need = float(costs.least[stage.start, stage.end])
            if count and need > costs.like[place].budget_bytes:
                name = costs.like[place].name
                return f"a layer for {name} needs more memory than it has"
    return "does not fit"


def _value(costs: Costs, goal: Goal, stages: Stages) -> float:
    return goal.value(*times(costs, stages, cold=goal.cold))


def _names(costs: Costs, stages: Stages) -> list[str]:
    return [
        member.name
        for place, count in enumerate(stages[0].group)
        for member in costs.classes[place][:count]
    ]


def _places(costs: Costs) -> list[int]:
    """The class of each device, in the order of the pool."""
    of = {device.name: place for place, each in enumerate(costs.classes) for device in each}
    return [of[device.name] for device in costs.pool.devices]
