"""The best divisions of a chain of fragments among the devices of a pool, large or small. Pure.

1. Where all groups of devices can be weighed, each division is (`search`).
2. Else the wide search finds good ones (`wide_search`), and what none goes below.
3. Then rules of thumb stand beside it, and devices that nobody uses help the slowest stage: so no
   division is worse than an even split, one by memory, the best single device, or replicas alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shoal_planner.costs import Division, Span
from shoal_planner.device_costs import Holding
from shoal_planner.devices import PoolDevice
from shoal_planner.heuristics import Divisions, by_memory, evenly, packed, with_spares
from shoal_planner.search import MAX_FOUND, Found, Question, search
from shoal_planner.wide_search import bound_over_pairs, search_widely


def divided(question: Question) -> Found:
    """The best divisions, the best first. Where rates between pairs of devices are known, those are
    not in the search, and the value that no division goes below holds for any."""
    found = search(question)
    if found is None or found.lower is None:
        found = _widely(question, () if found is None else found.divisions)
    if found.divisions and any(device.peers for device in question.pool):
        return Found(found.divisions, bound_over_pairs(question))
    return found


def _widely(question: Question, known: Sequence[Divisions]) -> Found:
    costs, pool, wishes = question.costs, question.pool, question.wishes
    wide = search_widely(question)
    rules = [rule for rule in simple_splits(question) if all(map(question.serves, rule))]
    candidates = [*known, *wide.divisions, *rules]
    if wishes.preferred:
        kept = replace(wishes, required={**dict(wishes.preferred), **wishes.required})
        candidates += search_widely(replace(question, wishes=kept)).divisions
    candidates += [with_spares(costs, each, pool, wishes) for each in (*wide.divisions[:1], *rules)]

    def order(divisions: Divisions) -> tuple[int, ...]:
        penalty = sum(
            wishes.penalty(each.span, [device.name for device in each.devices])
            for each in divisions
        )
        return question.order(divisions, penalty)

    ordered = sorted(dict.fromkeys(candidates), key=order)
    return Found(tuple(ordered[:MAX_FOUND]), wide.lower)


def simple_splits(question: Question) -> Iterator[Divisions]:
    """What one would think of first; whether it fits is not asked."""
    costs, pool = question.costs, question.pool
    yield evenly(costs, pool)
    yield by_memory(costs, pool)
    for holdings in ({Holding.WHOLE}, {Holding.WHOLE, Holding.IN_BLOCKS}):
        if (rule := packed(costs, pool, holdings)) is not None:
            yield rule
    whole = Span(0, costs.count)
    able = [each for each in pool if costs.at_once(whole, each)]
    alone = [(Division(whole, (each,)),) for each in able]
    if alone:
        yield min(alone, key=question.order)
        yield (Division(whole, tuple(sorted(able, key=_speed))),)


def _speed(device: PoolDevice) -> tuple[int, str]:
    return -device.flops_per_second, device.name
