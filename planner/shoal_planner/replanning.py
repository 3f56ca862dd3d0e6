"""From the plan in force to the next: no more moves than the gain is worth. Pure.

Each fragment that a device has to get costs a transfer, a preparation and items that start over. So
the best plan takes the place of the one in force only where that is worse by `GAIN`. Where it is,
or where devices were lost, the next plan is the one that moves the fewest bytes of weights among
those that the best one does not beat by `GAIN`. What a device has on its disk need not move:

- of *all* divisions, where the search can weigh them all, with what moves as its penalty;
- else of those that *local moves* lead to (Asteroid, "lightweight pipeline replay"): a border
  between two stages moves, a device goes to another stage, to one of its own or to rest, two
  devices change places. From the plan in force each step is the one that helps most, first what
  does not fit, then the goal. From the plan that this ends in, and from the best one, steps lead
  back to fewer bytes, as long as the plan stays good enough.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from operator import itemgetter
from typing import Final

from shoal_planner.costs import Costs, Division, Span
from shoal_planner.devices import PoolDevice
from shoal_planner.heuristics import Divisions
from shoal_planner.search import Question, Wishes, search

GAIN: Final = 0.1
"""Of the value of the plan in force."""
MAX_TRIES: Final = 30_000
"""Plans that are weighed for local moves."""
_STEP: Final = 0.01
"""A move that gains less is not worth its fragments."""

Near = Callable[[Divisions], bool]
Key = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Situation(Question):
    """What plans are made for. `before` is the one in force, without the devices that were lost, so
    that a stage may have none left."""

    costs: Costs
    before: Divisions = ()


def next_plan(situation: Situation, best: Divisions) -> Divisions:
    """The best plan, the one before, or that with local moves."""
    weighing, before = _Weighing(situation), situation.before
    enough = weighing.value(best) / (1 - GAIN)

    def near(each: Divisions) -> bool:
        return weighing.unfit(each) == 0 and weighing.value(each) < enough

    if before == best or near(before):
        return before
    found = [each for each in _sparing(situation, enough) if near(each)]
    if not found:
        changed = _improved(weighing, before, situation.pool, enough)
        starts = [each for each in (changed, best) if near(each)] or [best]
        found = [_thinned(weighing, each, situation.pool, near) for each in starts]
    return min((*found, best), key=lambda each: (weighing.moves(each), weighing.value(each)))


def _sparing(situation: Situation, enough: float) -> Sequence[Divisions]:
    """What moves the least and is good enough; empty where not all can be weighed."""
    of, costs = situation, situation.costs
    in_force = {
        (fragment, device.name)
        for division in of.before
        for fragment in division.span.fragments
        for device in division.devices
    }
    cached = {(fragment, name) for name, its in of.wishes.cached.items() for fragment in its}
    present = frozenset(in_force | cached)
    wishes = Wishes(required=of.wishes.required, present=present, weights=costs.weights)
    found = search(replace(of, wishes=wishes, goal=of.goal.sparing(enough)))
    return () if found is None or found.lower is None else found.divisions


def _thinned(
    weighing: "_Weighing", found: Divisions, pool: Sequence[PoolDevice], near: Near
) -> Divisions:
    """After local moves to fewer bytes, as long as what is left is good enough."""
    moves, left = weighing.moves(found), MAX_TRIES
    while left > 0:
        others = list(islice(_moved(found, pool), left))
        left -= len(others)
        fewer = sorted(
            (
                (count, place)
                for place, each in enumerate(others)
                if (count := weighing.moves(each)) < moves
            )
        )
        better = next(
            ((count, others[place]) for count, place in fewer if near(others[place])), None
        )
        if better is None:
            return found
        moves, found = better
    return found


def improve(situation: Situation, found: Divisions) -> Divisions:
    """A division, changed by local moves as long as they help."""
    weighing = _Weighing(situation)
    return found if weighing.unfit(found) else _improved(weighing, found, situation.pool)


class _Weighing:
    """What divisions are worth, and how much moves for them."""

    def __init__(self, situation: Situation) -> None:
        self._of = situation
        cached = situation.wishes.cached
        self._held = {each.name: set(cached.get(each.name, ())) for each in situation.pool}
        for division in situation.before:
            for device in division.devices:
                self._held[device.name].update(division.span.fragments)
        self._unfit = cache(self._excess)
        self._times = cache(lambda division: situation.costs.totals((division,)))
        self._together = situation.costs.cold or any(each.peers for each in situation.pool)

    def moves(self, divisions: Divisions) -> int:
        """Bytes of weights that devices have to get."""
        weights = self._of.costs.weights
        return sum(
            weights[fragment]
            for division in divisions
            for device in division.devices
            for fragment in division.span.fragments
            if fragment not in self._held[device.name]
        )

    def unfit(self, divisions: Divisions) -> int:
        """Bytes that have no room; 0: every device holds its fragments at once."""
        return sum(map(self._unfit, divisions))

    def value(self, divisions: Divisions) -> int:
        if self._together:  # what a stage costs depends on the others
            return self._of.value(divisions)
        times = [self._times(division) for division in divisions]
        return self._of.goal.value(max(each for each, _ in times), sum(each for _, each in times))

    def key(self, divisions: Divisions) -> Key:
        """What is to be small."""
        unfit = self.unfit(divisions)
        return (unfit, 0 if unfit else self.value(divisions), self.moves(divisions))

    def _excess(self, division: Division) -> int:
        of, span, devices = self._of, division.span, division.devices
        least = of.costs.least(span)
        if of.reloading or (of.waiting and len(span) == 1):
            least = of.costs.least_in_turn(span, waiting=of.waiting)
        if not devices or not of.wishes.allow(span, [device.name for device in devices]):
            return max(1, least)
        return sum(
            0 if of.fits(span, device) else max(1, least - device.budget_bytes)
            for device in devices
        )


def _improved(
    weighing: _Weighing, before: Divisions, pool: Sequence[PoolDevice], enough: float = 0.0
) -> Divisions:
    """After the best move of each round; until none helps, or too many were tried. Where moves lead
    below `enough`, the one of them that moves the fewest fragments is the last."""
    now, key, left = before, weighing.key(before), MAX_TRIES
    while left > 0:
        weighed = [(weighing.key(each), each) for each in islice(_moved(now, pool), left)]
        left -= len(weighed)
        ends = [each for each in weighed if each[0][0] == 0 and each[0][1] < enough]
        if ends:
            return min(ends, key=lambda each: each[0][::-1])[1]
        best, found = min(weighed, key=itemgetter(0), default=(key, now))
        helps = best[0] < key[0] or (best[0] == key[0] and best[1] < key[1] * (1 - _STEP))
        if not helps:
            return now
        now, key = found, best
    return now


def _moved(now: Divisions, pool: Sequence[PoolDevice]) -> Iterator[Divisions]:
    used = {device.name for division in now for device in division.devices}
    spares: dict[PoolDevice, PoolDevice] = {}
    for device in pool:
        if device.name not in used:  # of those that are alike, one is enough
            spares.setdefault(replace(device, name=""), device)
    yield from _with_other_borders(now)
    for place, division in enumerate(now):
        for device in division.devices:
            rest = tuple(each for each in division.devices if each != device)
            without = _replaced(now, place, Division(division.span, rest))
            if rest:
                yield without
            yield from _joined(without, device, but=place)
    for spare in spares.values():
        yield from _joined(now, spare, but=None)
        yield from _with_a_stage_more(now, spare)
    yield from _with_two_exchanged(now)


def _with_other_borders(now: Divisions) -> Iterator[Divisions]:
    for place in range(len(now) - 1):
        one, other = now[place], now[place + 1]
        for border in range(one.span.start, other.span.end + 1):
            if border != one.span.end:
                parts = (
                    Division(Span(one.span.start, border), one.devices),
                    Division(Span(border, other.span.end), other.devices),
                )
                left = tuple(each for each in parts if each.span.start < each.span.end)
                yield (*now[:place], *left, *now[place + 2 :])


def _joined(now: Divisions, device: PoolDevice, but: int | None) -> Iterator[Divisions]:
    """The device in each stage but one."""
    for place, division in enumerate(now):
        if place != but:
            yield _replaced(now, place, Division(division.span, (*division.devices, device)))


def _with_a_stage_more(now: Divisions, device: PoolDevice) -> Iterator[Divisions]:
    """The device takes the first or the last fragments of a stage."""
    for place, division in enumerate(now):
        span = division.span
        for border in range(span.start + 1, span.end):
            first, last = Span(span.start, border), Span(border, span.end)
            for devices in ((division.devices, (device,)), ((device,), division.devices)):
                parts = (Division(first, devices[0]), Division(last, devices[1]))
                yield (*now[:place], *parts, *now[place + 1 :])


def _with_two_exchanged(now: Divisions) -> Iterator[Divisions]:
    for one in range(len(now)):
        for other in range(one + 1, len(now)):
            for mine in now[one].devices:
                for its in now[other].devices:
                    first = _exchanged(now[one], mine, its)
                    second = _exchanged(now[other], its, mine)
                    yield _replaced(_replaced(now, one, first), other, second)


def _exchanged(division: Division, one: PoolDevice, other: PoolDevice) -> Division:
    devices = tuple(other if each == one else each for each in division.devices)
    return Division(division.span, devices)


def _replaced(now: Divisions, place: int, by: Division) -> Divisions:
    return (*now[:place], by, *now[place + 1 :])
