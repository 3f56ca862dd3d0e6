"""Divisions on pools of many unequal devices, where there are too many groups to weigh them all.

1. Where the pool is not too large, the best way by all groups of devices (`ways`): exact as well,
   but for makespans, of which it knows only one device of a group that may have loaded first.
2. Else the devices stand in rows, by memory, by speed and by their links, and each row is divided
   into consecutive groups in the best way (Asteroid, "Dynamic Programming HPP Planning", has the
   row by memory). Then the best is improved by small moves: a device goes to another stage, to one
   of its own or to rest, two change places, and the cuts are chosen again for each.
3. Where none of these rows holds the chain, one that does is looked for (`fitting`), and stands
   beside them.
4. Of very many fragments not all borders are tried; each border then moves to the best of all.

Steps bound the work, no clock does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, isqrt
from typing import Final

from shoal_planner.costs import Span
from shoal_planner.fitting import fitted
from shoal_planner.heuristics import Divisions
from shoal_planner.layers.arcs import Arcs, fixed, number_of_subsets, row, subsets
from shoal_planner.layers.local_search import Groups, improved
from shoal_planner.search import Found, Question, Step, classes_of, named
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


def search_widely(question: Question) -> Found:
    """Good divisions, the best first."""
    times = _times(question)
    found = _of_all_groups(times)
    exact = found is not None and times.whole
    if found is None:
        found = _of_rows(times)
    if not found and not exact and (fits := fitted(question, times.classes)):
        times = _times(question, fits)
        found = _of_all_groups(times) or _of_rows(times, fits)
    divisions = tuple(_divisions(times, best) for best in found)
    if not times.whole:
        better = [_with_better_borders(question, each) for each in divisions[:1]]
        return Found((*better, *divisions[1:]), None)
    known = len(found) == 1 and found[0].lower is not None and not times.costs.cold
    return Found(divisions, found[0].lower if known else lower_bound(times))


def bound_over_pairs(question: Question) -> float | None:
    """The value that no division goes below, whatever the links between its devices; None: that is
    not known."""
    linkless = [
        replace(each, link_bytes_per_second=None, latency_nanoseconds=Nanoseconds(0), peers=())
        for each in question.pool
    ]
    times = _times(replace(question, pool=linkless))
    return lower_bound(times) if times.whole else None


def _times(question: Question, steps: Sequence[Step] = ()) -> SpanTimes:
    """Of all borders, or of as many, evenly spread, as can be weighed on all classes, and those
    between some steps."""
    classes, fragments = classes_of(question), question.costs.count
    most = max(_LEAST_BORDERS, isqrt(2 * _MOST_WEIGHED // len(classes)))
    count = min(fragments, most)
    ends = {fragments * place // count for place in range(count + 1)}
    return SpanTimes(question, classes, sorted(ends.union(each.span.end for each in steps)))


def _divisions(times: SpanTimes, best: Best) -> Divisions:
    steps = [Step(times.span(each.start, each.end), each.group) for each in best.stages]
    return named(steps, times.classes, times.wishes)


def _of_all_groups(times: SpanTimes) -> list[Best] | None:
    """The best; None: there are too many groups."""
    if number_of_subsets(times.sizes) * times.steps > _EXACT_STEPS:
        return None
    best = best_way(times, subsets(times.sizes))
    return [] if best is None else [best]


def _of_rows(times: SpanTimes, steps: Sequence[Step] = ()) -> list[Best]:
    """The best first, of the rows and of steps that are known to fit. What they are the best of are
    some groups only, so they give no bound."""
    arcs = [row(each, len(times.sizes)) for each in dict.fromkeys(_rows(times))]
    arcs += [fixed([each.chosen for each in steps])] if steps else []
    found = [best for each in arcs if (best := _quickly(times, each)) is not None]
    found.sort(key=lambda best: best.value)
    if not found:
        return []

    lines = Lines(times)

    def worth(groups: Groups) -> float:
        stages = lines.best(groups)
        return inf if stages is None else times.goal.value(*times.totals(stages))

    groups = tuple(stage.group for stage in found[0].stages)
    most = (len(groups) + sum(times.sizes)) * times.steps
    tries = _MOVE_STEPS // (most + _STEPS_OF_A_MOVE)
    better = best_way(times, fixed(improved(groups, times.sizes, worth, tries)))
    assert better is not None, "moves keep what fits"
    return [replace(better, lower=None), *found]


def _quickly(times: SpanTimes, arcs: Arcs) -> Best | None:
    """The best way of one time alone: for a makespan, that is the period."""
    if times.goal.objective is Objective.LATENCY:
        stages = least_latency(times, arcs, inf)
    else:
        stages = least_period(times, arcs)
    return None if stages is None else Best(stages, times.goal.value(*times.totals(stages)), None)


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


def _with_better_borders(question: Question, divisions: Divisions) -> Divisions:
    """Each border at the best place between its neighbours, until none moves."""
    best, moved = question.order(divisions), True
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
                if not all(map(question.serves, pair)):
                    continue
                if (value := question.order(changed)) < best:
                    divisions, best, moved = changed, value, True
    return divisions
