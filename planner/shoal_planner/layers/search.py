"""The best way through arcs and cuts: one dynamic program for every objective.

Theory. `best[arc][end]` is the least value of a pipeline that ends at a cut with the group of an
arc. It follows from the arcs before it, at every cut where the stage of this arc can start:

    before[arc][start] = min over arcs that lead here of best[that][start] joined with the crossing
    best[arc][end] = min over start of max(before[arc][start], floor[start, end]) + add[start, end]

For the period, joined is the maximum, the floor is the stage's period, and nothing is added. For
the first item, joined is the sum, the floor is the time to load, and the stage's latency is added;
stages and crossings above a given period count as impossible. So the two together give the front:
the least first item for every period that a plan can have, from which the plan of any objective
that grows with both is taken (`planning`).
"""

from collections.abc import Iterator
from functools import lru_cache
from math import inf
from typing import Final, NamedTuple

import numpy as np

from shoal_planner.layers.arcs import Arcs, Group, Stage, Stages
from shoal_planner.layers.costs import Costs
from shoal_planner.layers.cuts import Floats

EQUAL: Final = 1e-9
"""Times that differ by less count as equal."""


class Times(NamedTuple):
    """Seconds; of the first item with or without loading, as it was asked."""

    period: float
    first: float


def least_period(costs: Costs, arcs: Arcs) -> Stages | None:
    """The stages whose slowest part is the fastest; None: no plan fits."""
    return _Search(costs, arcs, first=False, cold=False, bound=inf).run()


def least_first(costs: Costs, arcs: Arcs, bound: float, *, cold: bool) -> Stages | None:
    """The stages that finish their first item soonest, with a period of at most `bound`."""
    return _Search(costs, arcs, first=True, cold=cold, bound=bound).run()


def times(costs: Costs, stages: Stages, *, cold: bool) -> Times:
    """What a plan gives."""
    period, first = 0.0, 0.0
    groups = [None, *(stage.group for stage in stages), None]
    for place, stage in enumerate(stages):
        per_item, slowest, delay = costs.crossing(groups[place], stage.group)
        moved = float(costs.cuts.crossing[stage.start])
        own, latency = costs.together(stage.group, stage.start, stage.end)
        period = max(period, per_item * moved, own)
        first += slowest * moved + delay
        if cold:
            first = max(first, costs.loads(stage.group, stage.start, stage.end))
        first += latency
    per_item, slowest, delay = costs.crossing(groups[-2], None)
    moved = float(costs.cuts.crossing[stages[-1].end])
    return Times(period=max(period, per_item * moved), first=first + slowest * moved + delay)


class _Search:
    def __init__(self, costs: Costs, arcs: Arcs, *, first: bool, cold: bool, bound: float) -> None:
        self.costs, self.arcs = costs, arcs
        self.first, self.cold, self.bound = first, cold, bound
        count = len(costs.cuts)
        self.before: list[Floats | None] = [None] * len(arcs.arcs)
        self.best: list[Floats] = []
        self.into: dict[int, list[int]] = {}
        self.add = lru_cache(max(4, (1 << 24) // count**2))(self._added)
        self.origin = np.full(count, inf)
        self.origin[0] = 0.0

    def run(self) -> Stages | None:
        scratch = np.empty((len(self.costs.cuts),) * 2)
        for number, (state, group, after) in enumerate(self.arcs.arcs):
            before = min_of([value for value, _ in self._arrivals(state, group)])
            self.before[number] = before
            self.best.append(self._stage(before, group, scratch))
            self.into.setdefault(after, []).append(number)
        ends = [self._through(best, group, None)[-1] for best, group in self._ends()]
        return self._traced(ends)

    def _ends(self) -> Iterator[tuple[Floats, Group]]:
        for best, (_, group, _) in zip(self.best, self.arcs.arcs, strict=True):
            yield best, group

    def _arrivals(self, state: int, group: Group) -> Iterator[tuple[Floats, int | None]]:
        """Values at every cut where a stage can start, each with the arc before it."""
        if state == 0:
            yield self._through(self.origin, None, group), None
        for number in self.into.get(state, ()):
            yield self._through(self.best[number], self.arcs.arcs[number][1], group), number

    def _through(self, values: Floats, before: Group | None, after: Group | None) -> Floats:
        """Across every cut."""
        per_item, slowest, delay = self.costs.crossing(before, after)
        crossing = self.costs.cuts.crossing
        if not self.first:
            return np.maximum(values, per_item * crossing)
        through = values + (slowest * crossing + delay)
        through[per_item * crossing > self.bound] = inf
        return through

    def _stage(self, before: Floats, group: Group, scratch: Floats) -> Floats:
        """[end]: the least over all starts that can be reached."""
        starts = np.flatnonzero(np.isfinite(before))
        if not len(starts):
            return np.full(len(before), inf)
        some = slice(int(starts[0]), int(starts[-1]) + 1)
        values = scratch[: some.stop - some.start]
        if not self.first:
            np.maximum(before[some, None], self.costs.stage(group).period[some], out=values)
        elif self.cold:
            np.maximum(before[some, None], self.costs.load(group)[some], out=values)
            values += self.add(group)[some]
        else:
            np.add(before[some, None], self.add(group)[some], out=values)
        least: Floats = values.min(axis=0)
        return least

    def _added(self, group: Group) -> Floats:
        stage = self.costs.stage(group)
        if self.bound == inf:
            return stage.latency
        return np.where(stage.period > self.bound, inf, stage.latency)

    def _traced(self, ends: list[float]) -> Stages | None:
        """The stages from the last to the first, by computing again which start was the least."""
        if not ends or min(ends) == inf:
            return None
        number: int | None = int(np.argmin(ends))
        end = len(self.costs.cuts) - 1
        stages: list[Stage] = []
        while number is not None:
            state, group, _ = self.arcs.arcs[number]
            before = self.before[number]
            assert before is not None
            start = int(np.argmin(self._column(before, group, end)))
            stages.append(Stage(start, end, group))
            arrivals = [(value[start], each) for value, each in self._arrivals(state, group)]
            number = min(arrivals, key=lambda each: float(each[0]))[1]
            end = start
        return tuple(reversed(stages))

    def _column(self, before: Floats, group: Group, end: int) -> Floats:
        stage = self.costs.stage(group)
        if not self.first:
            return np.maximum(before, stage.period[:, end])
        floor = np.maximum(before, self.costs.load(group)[:, end]) if self.cold else before
        return floor + self.add(group)[:, end]


def min_of(arrays: list[Floats]) -> Floats:
    """Element by element."""
    least = arrays[0].copy()
    for each in arrays[1:]:
        np.minimum(least, each, out=least)
    return least
