"""The best divisions of a chain of fragments among the devices of a pool, large or small. Pure.

1. Where all groups of devices can be weighed, each division is (`search`).
2. Else the wide search finds good ones (`wide_search`), and what none goes below.
3. Then rules of thumb stand beside it, and devices that nobody uses help the slowest stage: so no
   division is worse than an even split, one by memory, the best single device, or replicas alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shoal_planner.costs import Division, Span, SpanCosts
from shoal_planner.device_costs import Holding
from shoal_planner.devices import PoolDevice
from shoal_planner.goal import Goal
from shoal_planner.heuristics import Divisions, by_memory, evenly, packed, with_spares
from shoal_planner.search import MAX_FOUND, Found, Wishes, search, serves
from shoal_planner.wide_search import bound_over_pairs, search_widely


def divided(
    costs: SpanCosts, pool: Sequence[PoolDevice], wishes: Wishes, goal: Goal, *, reloading: bool
) -> Found:
    """The best divisions, the best first. Where rates between pairs of devices are known, those are
    not in the search, and the value that no division goes below holds for any."""
    found = search(costs, pool, wishes, goal, reloading=reloading)
    if found is None or found.lower is None:
        known = () if found is None else found.divisions
        found = _widely(costs, pool, wishes, goal, known, reloading=reloading)
    if found.divisions and any(device.peers for device in pool):
        lower = bound_over_pairs(costs, pool, wishes, goal, reloading=reloading)
        return Found(found.divisions, lower)
    return found


def _widely(
    costs: SpanCosts,
    pool: Sequence[PoolDevice],
    wishes: Wishes,
    goal: Goal,
    known: Sequence[Divisions],
    *,
    reloading: bool,
) -> Found:
    wide = search_widely(costs, pool, wishes, goal, reloading=reloading)
    rules = [
        rule
        for rule in simple_splits(costs, pool, goal)
        if all(serves(costs, each, wishes, reloading=reloading) for each in rule)
    ]
    candidates = [*known, *wide.divisions, *rules]
    if wishes.preferred:
        kept = replace(wishes, required={**dict(wishes.preferred), **wishes.required})
        candidates += search_widely(costs, pool, kept, goal, reloading=reloading).divisions
    candidates += [with_spares(costs, each, pool, wishes) for each in (*wide.divisions[:1], *rules)]

    def order(divisions: Divisions) -> tuple[int, ...]:
        penalty = sum(
            wishes.penalty(each.span, [device.name for device in each.devices])
            for each in divisions
        )
        return goal.order(*costs.totals(divisions), penalty)

    ordered = sorted(dict.fromkeys(candidates), key=order)
    return Found(tuple(ordered[:MAX_FOUND]), wide.lower)


def simple_splits(costs: SpanCosts, pool: Sequence[PoolDevice], goal: Goal) -> Iterator[Divisions]:
    """What one would think of first; whether it fits is not asked."""
    yield evenly(costs, pool)
    yield by_memory(costs, pool)
    for holdings in ({Holding.WHOLE}, {Holding.WHOLE, Holding.IN_BLOCKS}):
        if (rule := packed(costs, pool, holdings)) is not None:
            yield rule
    whole = Span(0, costs.count)
    able = [each for each in pool if costs.at_once(whole, each)]
    alone = [(Division(whole, (each,)),) for each in able]
    if alone:
        yield min(alone, key=lambda each: goal.order(*costs.totals(each)))
        yield (Division(whole, tuple(sorted(able, key=_speed))),)


def _speed(device: PoolDevice) -> tuple[int, str]:
    return -device.flops_per_second, device.name
