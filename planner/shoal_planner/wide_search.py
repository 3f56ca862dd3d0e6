"""Divisions on pools of many unequal devices, where there are too many groups to weigh them all.

1. Where the pool is not too large, the best way by all groups of devices (`ways`): exact as well,
   but for makespans, of which it knows only one device of a group that may have loaded first.
2. Else the devices stand in rows, by memory, by speed and by their links, and each row is divided
   into consecutive groups in the best way (Asteroid, "Dynamic Programming HPP Planning", has the
   row by memory). Then the best is improved by small moves: a device goes to another stage, to one
   of its own or to rest, two change places, and the cuts are chosen again for each.
3. Of very many fragments not all borders are tried; each border then moves to the best of all.

Steps bound the work, no clock does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, isqrt
from typing import Final

from shoal_planner.costs import Span, SpanCosts
from shoal_planner.devices import PoolDevice
from shoal_planner.goal import Goal
from shoal_planner.heuristics import Divisions
from shoal_planner.layers.arcs import Arcs, fixed, number_of_subsets, row, subsets
from shoal_planner.layers.local_search import Groups, improved
from shoal_planner.search import (
    DeviceClass,
    Found,
    Step,
    Wishes,
    classes_of,
    named,
    serves,
)
from shoal_planner.ways import (
    Best,
    Lines,
    SpanTimes,
    best_way,
    least_latency,
    least_period,
    lower_bound,
)
from shoal_protocol.choices import Objective
from shoal_protocol.units import Nanoseconds

_EXACT_STEPS: Final = 6_000_000
"""Of all arcs: about a second."""
_MOVE_STEPS: Final = 40_000_000
_STEPS_OF_A_MOVE: Final = 6_000
"""What a move takes besides its stages."""
_MOST_WEIGHED: Final = 25_000
"""Spans on classes of devices."""
_LEAST_BORDERS: Final = 12
_LONGEST_ROW: Final = 32


def search_widely(
    costs: SpanCosts, pool: Sequence[PoolDevice], wishes: Wishes, goal: Goal, *, reloading: bool
) -> Found:
    """Good divisions, the best first."""
    times = _times(costs, classes_of(pool, wishes), wishes, reloading=reloading)
    found = _of_all_groups(times, goal)
    if found is None:
        found = _of_rows(times, goal)
    divisions = tuple(_divisions(times, best) for best in found)
    if not times.whole:
        better = [_with_better_borders(times, each, goal) for each in divisions[:1]]
        return Found((*better, *divisions[1:]), None)
    exact = len(found) == 1 and found[0].lower is not None and not costs.cold
    return Found(divisions, found[0].lower if exact else lower_bound(times, goal))


def bound_over_pairs(
    costs: SpanCosts, pool: Sequence[PoolDevice], wishes: Wishes, goal: Goal, *, reloading: bool
) -> float | None:
    """The value that no division goes below, whatever the links between its devices; None: that is
    not known."""
    linkless = [
        replace(each, link_bytes_per_second=None, latency_nanoseconds=Nanoseconds(0), peers=())
        for each in pool
    ]
    times = _times(costs, classes_of(linkless, wishes), wishes, reloading=reloading)
    return lower_bound(times, goal) if times.whole else None


def _times(
    costs: SpanCosts, classes: Sequence[DeviceClass], wishes: Wishes, *, reloading: bool
) -> SpanTimes:
    """Of all borders, or of as many, evenly spread, as can be weighed on all classes."""
    most = max(_LEAST_BORDERS, isqrt(2 * _MOST_WEIGHED // len(classes)))
    count = min(costs.count, most)
    ends = [costs.count * place // count for place in range(count + 1)]
    return SpanTimes(costs, classes, ends, wishes, reloading=reloading)


def _divisions(times: SpanTimes, best: Best) -> Divisions:
    steps = [Step(times.span(each.start, each.end), each.group) for each in best.stages]
    return named(steps, times.classes, times.wishes)


def _of_all_groups(times: SpanTimes, goal: Goal) -> list[Best] | None:
    """The best; None: there are too many groups."""
    if number_of_subsets(times.sizes) * times.steps > _EXACT_STEPS:
        return None
    best = best_way(times, subsets(times.sizes), goal)
    return [] if best is None else [best]


def _of_rows(times: SpanTimes, goal: Goal) -> list[Best]:
    """The best first. What they are the best of are some groups only, so they give no bound."""
    arcs = [row(each, len(times.sizes)) for each in dict.fromkeys(_rows(times))]
    found = [best for each in arcs if (best := _quickly(times, each, goal)) is not None]
    found.sort(key=lambda best: best.value)
    if not found:
        return []

    lines = Lines(times, goal)

    def worth(groups: Groups) -> float:
        stages = lines.best(groups)
        return inf if stages is None else goal.value(*times.totals(stages))

    groups = tuple(stage.group for stage in found[0].stages)
    most = (len(groups) + sum(times.sizes)) * times.steps
    tries = _MOVE_STEPS // (most + _STEPS_OF_A_MOVE)
    better = best_way(times, fixed(improved(groups, times.sizes, worth, tries)), goal)
    assert better is not None, "moves keep what fits"
    return [replace(better, lower=None), *found]


def _quickly(times: SpanTimes, arcs: Arcs, goal: Goal) -> Best | None:
    """The best way of one time alone: for a makespan, that is the period."""
    if goal.objective is Objective.LATENCY:
        stages = least_latency(times, arcs, inf)
    else:
        stages = least_period(times, arcs)
    return None if stages is None else Best(stages, goal.value(*times.totals(stages)), None)


def _rows(times: SpanTimes) -> Iterator[tuple[int, ...]]:
    """The classes of the devices in a row: by memory, by speed and by their links, from either end.
    A pinned device stands where its fragment is."""
    wanted = {device: fragment for fragment, device in sorted(times.wishes.required.items())}
    free, pinned = [], []
    for place, each in enumerate(times.classes):
        fragment = wanted.get(each.devices[0].name)
        if fragment is None:
            free += [place] * len(each.devices)
        else:
            pinned.append((fragment, place))
    like = [each.like for each in times.classes]
    by_memory = sorted(free, key=lambda place: -like[place].budget_bytes)
    by_speed = sorted(free, key=lambda place: -like[place].flops_per_second)
    by_link = sorted(free, key=lambda place: -(like[place].link_bytes_per_second or inf))
    for one in (by_memory, by_speed, by_link):
        ablest = one[: max(1, _LONGEST_ROW - len(pinned))]
        for order in (ablest, ablest[::-1]):
            line = list(order)
            for fragment, place in sorted(pinned):
                line.insert(round(fragment / times.costs.count * len(line)), place)
            yield tuple(line)


def _with_better_borders(times: SpanTimes, divisions: Divisions, goal: Goal) -> Divisions:
    """Each border at the best place between its neighbours, until none moves."""
    costs, moved = times.costs, True
    best = goal.order(*costs.totals(divisions))
    while moved:
        moved = False
        for place in range(len(divisions) - 1):
            one, other = divisions[place], divisions[place + 1]
            for border in range(one.span.start + 1, other.span.end):
                pair = (
                    replace(one, span=Span(one.span.start, border)),
                    replace(other, span=Span(border, other.span.end)),
                )
                changed = (*divisions[:place], *pair, *divisions[place + 2 :])
                if not all(
                    serves(costs, each, times.wishes, reloading=times.reloading) for each in pair
                ):
                    continue
                if (value := goal.order(*costs.totals(changed))) < best:
                    divisions, best, moved = changed, value, True
    return divisions
