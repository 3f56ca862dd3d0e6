"""The best way through the spans of a chain, by groups of devices that follow one another. Pure.

Theory. An *arc* leads from one state to another and gives a group of devices a stage
(`layers.arcs`). The best value of a prefix that ends in a state follows from the states before it:

    best[after][end] = min over arcs into it, and over start, of
                       best[before][start] joined with values[group][end][start]

For periods, joined is the maximum; for latencies it is the sum, and stages with a longer period
than a given one count as impossible. The two together give the least latency for every period that
a division can have, and from these the best division of any goal.

What no division goes below, whatever its groups, is a Lagrangian bound: in a division with a
period, each device is busy with an item for no longer than that. So for any weights of the devices
that add up to one, the period is at least the sum, over the stages, of the least weighted period
among the devices, and that is at least the shortest way through all spans. The weights are improved
step by step: a device that is busy on the shortest way counts more in the next.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import islice, repeat
from math import exp, inf, sqrt
from operator import add, mul
from typing import Final, NamedTuple

from shoal_planner.costs import Span
from shoal_planner.device_costs import DeviceCost
from shoal_planner.layers.arcs import Arcs, Group, Stage, Stages, fixed
from shoal_planner.search import DeviceClass, Question
from shoal_protocol.choices import Objective

_ROUNDS: Final = 200
_FRONT: Final = 8
"""Periods for which a makespan asks the least latency."""
_EQUAL: Final = 1e-9
_REMEMBERED: Final = 1 << 19
"""Times of groups, 32 bytes each."""
_BEGINNINGS: Final = 1 << 10
"""Rows that are remembered: those of a few dozen orders."""

Row = list[float]
Values = Sequence[Row]
"""Nanoseconds by end (from the first border on), then by start; infinite where it cannot be."""
Join = Callable[[float, float], float]
Way = Callable[[Row, Group], Iterable[Iterable[float]]]
"""What the spans on a group give, by end and by start, with what was best before each of them."""


class Times(NamedTuple):
    """Of the devices of a group together: one item every so often; when the first device has
    fetched, and how long it takes then (`DeviceCost`)."""

    periods: Values
    fetches: Values
    latencies: Values


Waiting = tuple[Values, Values]
"""Fetches and latencies of a group, as in `Times`: a search for the least period asks for none."""


class Sharing(NamedTuple):
    """Of the devices of a group, where loads count: the items that they do in a nanosecond, those
    that they miss until they have loaded, and when the first one has."""

    rates: Values
    missed: Values
    begins: Values


class SpanTimes:
    """Period and latency of the spans between borders (`ends`) on groups of classes of devices."""

    def __init__(
        self, question: Question, classes: Sequence[DeviceClass], ends: Sequence[int]
    ) -> None:
        self.question, self.classes, self.ends = question, classes, ends
        self.costs, self.wishes, self.goal = question.costs, question.wishes, question.goal
        self.sizes = tuple(len(each.devices) for each in classes)
        most = _REMEMBERED // self.steps
        self.periods = lru_cache(2 * most)(self._periods_of)
        self._waits = lru_cache(most)(self._waits_of)
        self._sharing = lru_cache(most)(self._sharing_of)

    @property
    def count(self) -> int:
        return len(self.ends) - 1

    @property
    def steps(self) -> int:
        """What an arc takes, in spans that are looked at."""
        return self.count * (self.count + 1) // 2 + 15 * self.count + 40

    @property
    def whole(self) -> bool:
        """Whether all borders are among these."""
        return self.count == self.costs.count

    def span(self, start: int, end: int) -> Span:
        return Span(self.ends[start], self.ends[end])

    @cached_property
    def own(self) -> list[Times]:
        """Of each class, what one device by itself takes."""
        return [times for times, _ in self._alone]

    @cached_property
    def _alone(self) -> list[tuple[Times, Sharing]]:
        return [self._of_class(each) for each in self.classes]

    def _of_class(self, each: DeviceClass) -> tuple[Times, Sharing]:
        rows: list[list[Row]] = [[] for _ in range(6)]
        for end in range(1, self.count + 1):
            costs = [self._cost(each, self.span(start, end)) for start in range(end)]
            for row, values in zip(rows, zip(*map(_values, costs), strict=True), strict=True):
                row.append(list(values))
        return Times(*rows[:3]), Sharing(*rows[3:])

    def _cost(self, each: DeviceClass, span: Span) -> DeviceCost | None:
        if not self.question.fits(span, each.like):
            return None
        if not self.wishes.allow(span, [each.devices[0].name]):
            return None
        return self.costs.on(span, each.like)

    def group(self, group: Group) -> Times:
        """As of the group without one device, and that one beside it. Where one cannot serve a
        span, the group cannot."""
        return Times(self.periods(group), *self._waits(group))

    def _periods_of(self, group: Group) -> Values:
        if self._is_none(group):
            return self._never
        rest, last = _without_one(group)
        its = self.own[last].periods
        if not any(rest):
            return its
        if self.costs.cold:
            return _mean_periods(self._sharing(group), self.costs.loading_items)
        return _joined(_shared, self.periods(rest), its)

    def _waits_of(self, group: Group) -> Waiting:
        if self._is_none(group):
            return self._never, self._never
        rest, last = _without_one(group)
        _, fetches, latencies = self.own[last]
        if not any(rest):
            return fetches, latencies
        others = self._waits(rest)
        if self.costs.cold:
            return _first(others, (fetches, latencies))
        return fetches, _joined(max, others[1], latencies)

    def _sharing_of(self, group: Group) -> Sharing:
        rest, last = _without_one(group)
        _, its = self._alone[last]
        if not any(rest):
            return its
        rates, missed, begins = zip(self._sharing(rest), its, strict=True)
        return Sharing(_joined(add, *rates), _joined(add, *missed), _joined(min, *begins))

    def _is_none(self, group: Group) -> bool:
        return not any(group) or (sum(group) > 1 and not self.wishes.replicas)

    @cached_property
    def _never(self) -> Values:
        return [[inf] * end for end in range(1, self.count + 1)]

    def totals(self, stages: Stages) -> tuple[float, float]:
        """Period and latency of a whole division."""
        period, latency = 0.0, 0.0
        for each in stages:
            times = self.group(each.group)
            own, fetched, took = (values[each.end - 1][each.start] for values in times)
            period, latency = max(period, own), max(latency, fetched) + took
        return period, latency


def _values(cost: DeviceCost | None) -> tuple[float, ...]:
    """As in Times and in Sharing."""
    if cost is None:
        return inf, inf, inf, 0.0, inf, inf
    begin, rate = float(cost.fetch + cost.load), 1 / cost.period
    return float(cost.period), float(cost.fetch), float(cost.latency), rate, begin * rate, begin


def _without_one(group: Group) -> tuple[Group, int]:
    """The group without one of its last class, and that class."""
    last = max(place for place, count in enumerate(group) if count)
    return (*group[:last], group[last] - 1, *group[last + 1 :]), last


def _joined(join: Join, one: Values, other: Values) -> Values:
    return [list(map(join, *rows)) for rows in zip(one, other, strict=True)]


def _first(one: Waiting, other: Waiting) -> Waiting:
    """Fetches and latencies of the one that is done first with an item that waits for it."""
    fetches, latencies = [], []
    for rows in zip(*one, *other, strict=True):
        chosen = list(map(_sooner, *rows))
        fetches.append([fetched for fetched, _ in chosen])
        latencies.append([took for _, took in chosen])
    return fetches, latencies


def _sooner(fetched: float, took: float, its_fetched: float, it_took: float) -> tuple[float, float]:
    """Of one device and another; where one cannot, they cannot."""
    one, other = fetched + took, its_fetched + it_took
    if max(one, other) == inf:
        return inf, inf
    return (fetched, took) if one <= other else (its_fetched, it_took)


def _mean_periods(sharing: Sharing, items: int) -> Values:
    """As `device_costs.mean_period`, if all of them have loaded before the items are done."""
    return [
        [
            ((items + lost) / rate - first) / items if lost < inf else inf
            for rate, lost, first in zip(*rows, strict=True)
        ]
        for rows in zip(*sharing, strict=True)
    ]


def _shared(one: float, other: float) -> float:
    """The period of two that add their rates."""
    both = one + other
    return one * other / both if both < inf else inf


@dataclass(frozen=True, slots=True)
class Best:
    """The best division among arcs; none among them has a lower value than `lower`;
    None: that is not known."""

    stages: Stages
    value: float
    lower: float | None


def best_way(times: SpanTimes, arcs: Arcs) -> Best | None:
    """None: no division of these arcs fits."""
    goal = times.goal
    if goal.objective is Objective.LATENCY:
        stages = least_latency(times, arcs, inf)
        return None if stages is None else _exact(times, stages)
    narrow = least_period(times, arcs)
    if narrow is None:
        return None
    least, _ = times.totals(narrow)
    stages = least_latency(times, arcs, least * (1 + _EQUAL))
    assert stages is not None, "a division with this period was just found"
    found = _exact(times, stages)
    return found if goal.objective is Objective.THROUGHPUT else _walked(times, arcs, found)


def _exact(times: SpanTimes, stages: Stages) -> Best:
    value = times.goal.value(*times.totals(stages))
    return Best(stages, value, value)


def _walked(times: SpanTimes, arcs: Arcs, found: Best) -> Best:
    """From the largest period to the least, which `found` has; each next one must be smaller, so
    its latency is no less. It ends where no smaller period can make up for that."""
    goal = times.goal
    least, bound, lower = times.totals(found.stages)[0], inf, 0.0
    for _ in range(_FRONT):
        stages = least_latency(times, arcs, bound)
        if stages is None:
            return Best(found.stages, found.value, found.value)
        period, latency = times.totals(stages)
        if (value := goal.value(period, latency)) < found.value:
            found = Best(stages, value, 0.0)
        lower = goal.value(least, latency)
        if lower >= found.value or period <= least * (1 + _EQUAL):
            return Best(found.stages, found.value, found.value)
        bound = min(period * (1 - _EQUAL), (found.value - latency) / max(1, goal.items - 1))
    return Best(found.stages, found.value, min(lower, found.value))


def least_period(times: SpanTimes, arcs: Arcs) -> Stages | None:
    """The division whose slowest stage is the fastest."""
    return _best_of(times.count, arcs, _by_period(times))


def least_latency(times: SpanTimes, arcs: Arcs, bound: float) -> Stages | None:
    """The division with the least latency among those with a period of at most `bound`."""
    return _best_of(times.count, arcs, _by_latency(times, bound))


class Lines:
    """The best ways by groups in a given order, or by the first few of them: of one time alone, for
    a makespan the period. What orders that begin alike have in common is worked out once."""

    def __init__(self, times: SpanTimes) -> None:
        self._count = times.count
        by_latency = times.goal.objective is Objective.LATENCY
        self._way = _by_latency(times, inf) if by_latency else _by_period(times)
        self._row = lru_cache(_BEGINNINGS)(self._row_after)

    def best(self, groups: tuple[Group, ...]) -> Stages | None:
        """None: no division of these groups fits."""
        best = {place: self._row(groups[:place]) for place in range(len(groups) + 1)}
        came = {place + 1: [place] * (self._count + 1) for place in range(len(groups))}
        return _stages(self._count, fixed(groups), self._way, best, came)

    def _row_after(self, groups: tuple[Group, ...]) -> Row:
        if not groups:
            return _start(self._count)
        return [inf, *map(min, self._way(self._row(groups[:-1]), groups[-1]))]


def _by_period(times: SpanTimes) -> Way:
    def way(before: Row, group: Group) -> Iterable[Iterable[float]]:
        return map(partial(map, max, before), times.periods(group))

    return way


def _by_latency(times: SpanTimes, bound: float) -> Way:
    @lru_cache(None)
    def latencies(group: Group) -> Values:
        periods, _, latencies = times.group(group)
        if bound == inf:
            return latencies
        return [
            [each if period <= bound else inf for each, period in zip(*both, strict=True)]
            for both in zip(latencies, periods, strict=True)
        ]

    def way(before: Row, group: Group) -> Iterable[Iterable[float]]:
        if not times.costs.cold:
            return map(partial(map, add, before), latencies(group))
        ready = map(partial(map, max, before), times.group(group).fetches)
        return map(partial(map, add), ready, latencies(group))

    return way


def _best_of(count: int, arcs: Arcs, way: Way) -> Stages | None:
    best = {0: _start(count)}
    came: dict[int, list[int]] = {}
    for number, (state, group, after) in enumerate(arcs.arcs):
        if (before := best.get(state)) is None:
            continue
        here = best.setdefault(after, [inf] * (count + 1))
        last = came.setdefault(after, [0] * (count + 1))
        for end, found in enumerate(map(min, way(before, group)), 1):
            if found < here[end]:
                here[end], last[end] = found, number
    return _stages(count, arcs, way, best, came)


def _start(count: int) -> Row:
    """What is best where no device is used."""
    return [0.0] + [inf] * count


def _stages(
    count: int, arcs: Arcs, way: Way, best: Mapping[int, Row], came: Mapping[int, Sequence[int]]
) -> Stages | None:
    """The way back from the best state in which all spans are served; `came` by state and end: the
    number of the arc."""
    state = min(best, key=lambda each: best[each][count])
    if best[state][count] == inf:
        return None
    stages, end = [], count
    while end:
        before_state, group, _ = arcs.arcs[came[state][end]]
        joined = list(next(islice(way(best[before_state], group), end - 1, None)))
        start = joined.index(min(joined))
        stages.append(Stage(start, end, group))
        state, end = before_state, start
    return tuple(reversed(stages))


# ---- what no division goes below -----------------------------------------------------------------


def lower_bound(times: SpanTimes) -> float:
    """Of the goal's value; infinite where not even a device that served all stages could."""
    goal = times.goal
    per_period = {Objective.THROUGHPUT: 1, Objective.LATENCY: 0}.get(goal.objective, goal.items - 1)
    periods = [each.periods for each in times.own]
    ends = range(times.count)
    fixed = [[0.0] * (end + 1) for end in ends]
    if goal.objective is not Objective.THROUGHPUT:
        latencies = [each.latencies for each in times.own]
        fixed = [list(map(min, *(of[end] for of in latencies), repeat(inf))) for end in ends]
        for end in ends:  # the first stage waits until it has fetched
            fixed[end][0] = min(of.fetches[end][0] + of.latencies[end][0] for of in times.own)
    logs, best = [0.0] * len(times.sizes), 0.0
    for number in range(1, _ROUNDS + 1 if per_period else 2):
        scale = [exp(each - max(logs)) for each in logs]
        total = sum(map(mul, scale, times.sizes))
        weights = [each / total for each in scale]
        edges = fixed
        if per_period:
            edges = [_weighted(periods, weights, end, per_period, fixed[end]) for end in ends]
        bound, busy = _shortest(times, edges, weights)
        best = max(best, bound)
        if bound == inf or not max(busy):
            break
        logs = [log + each / max(busy) / sqrt(number) for log, each in zip(logs, busy, strict=True)]
    return best


def _weighted(
    periods: Sequence[Values], weights: Sequence[float], end: int, factor: int, fixed: Row
) -> Row:
    """By start: the least weighted period among the classes, and what is added."""
    each = [
        map(mul, of[end], repeat(weight * factor))
        for of, weight in zip(periods, weights, strict=True)
    ]
    return list(map(add, fixed, map(min, *each, repeat(inf))))


def _shortest(
    times: SpanTimes, edges: Sequence[Row], weights: Sequence[float]
) -> tuple[float, list[float]]:
    """The shortest way through all spans, and how busy it keeps each device."""
    reached, came = [0.0], [0]
    for parts in edges:
        joined = list(map(add, reached, parts))
        reached.append(min(joined))
        came.append(joined.index(reached[-1]))
    busy, end = [0.0] * len(weights), times.count
    while end and reached[-1] < inf:
        start = came[end]
        taken = [each.periods[end - 1][start] for each in times.own]
        place = min(range(len(taken)), key=lambda each: weights[each] * taken[each])
        busy[place] += taken[place] / times.sizes[place]
        end = start
    return reached[-1], busy
