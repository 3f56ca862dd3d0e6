"""A first division of a chain among many unequal devices, where memory is scarce. Pure.

Which devices can hold which spans is a packing problem: where there are too many groups of devices
to weigh, the rows that a wide search tries may all leave something over, though there is a way. So
many partial divisions are kept for each prefix of the chain: those whose devices have the least
memory, since they leave the most for the rest. Devices count by what they can hold; how fast they
are does not matter here. Each takes as many fragments as it can, which leaves no less room for what
follows than if it took fewer. A device that fragments are pinned to takes all of those or nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import nsmallest
from typing import Final, NamedTuple

from shoal_planner.costs import Span
from shoal_planner.devices import PoolDevice
from shoal_planner.search import Counts, DeviceClass, Question, Step

_STEPS: Final = 400_000
"""Partial divisions that are looked at: about half a second."""
_FEWEST: Final = 8
"""Partial divisions of a prefix that are kept in any case."""


class _Limits(NamedTuple):
    """What matters of a device for what it can hold."""

    budget_bytes: int
    single: bool
    cache_bytes: int | None
    pinned: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Devices that can hold the same: one of them, for each device its class, the fastest first,
    and which fragments are pinned to it."""

    like: PoolDevice
    places: tuple[int, ...]
    pinned: frozenset[int]


_Came = tuple[int, int]
"""The start of the last span, and the kind of the device that has it."""


def fitted(question: Question, classes: Sequence[DeviceClass]) -> tuple[Step, ...] | None:
    """Each span on one device; None: no way was found."""
    kinds, count = _kinds(question, classes), question.costs.count

    @cache
    def end_of(place: int, start: int) -> int:
        return _furthest(question, kinds[place], start)

    budgets = [each.like.budget_bytes for each in kinds]
    most = max(_FEWEST, _STEPS // (count * len(kinds)))
    reached: list[dict[Counts, _Came]] = [{} for _ in range(count + 1)]
    reached[0][(0,) * len(kinds)] = (0, 0)

    def memory(used: Counts) -> tuple[int, Counts]:
        return sum(map(int.__mul__, used, budgets)), used

    for start in range(count):
        reached[start] = {
            used: reached[start][used] for used in nsmallest(most, reached[start], key=memory)
        }
        for used in reached[start]:
            for place, kind in enumerate(kinds):
                if used[place] < len(kind.places) and (end := end_of(place, start)) > start:
                    reached[end].setdefault(_changed(used, place, 1), (start, place))
    if not reached[count]:
        return None
    way = _way_back(reached, min(reached[count], key=memory))
    return _steps([*way][::-1], kinds, len(classes))


def _kinds(question: Question, classes: Sequence[DeviceClass]) -> list[_Kind]:
    alike: dict[_Limits, list[int]] = {}
    for place, each in enumerate(classes):
        alike.setdefault(_limits(question, each), []).append(place)
    kinds = []
    for limits, places in alike.items():
        fastest = sorted(places, key=lambda place: -classes[place].like.flops_per_second)
        devices = tuple(place for place in fastest for _ in classes[place].devices)
        kinds.append(_Kind(classes[places[0]].devices[0], devices, limits.pinned))
    return kinds


def _limits(question: Question, devices: DeviceClass) -> _Limits:
    required, like = question.wishes.required, devices.like
    name = devices.devices[0].name
    pinned = frozenset(fragment for fragment, device in required.items() if device == name)
    return _Limits(like.budget_bytes, like.single, like.cache_bytes, pinned)


def _furthest(question: Question, kind: _Kind, start: int) -> int:
    """Where the longest span ends that begins there and has a place on such a device; `start`: none
    does. A longer span may need less: what crosses its end may be less."""
    device, furthest = kind.like, start
    for end in range(start + 1, question.costs.count + 1):
        span = Span(start, end)
        if question.outgrows(span, device):
            break
        if not question.wishes.allow(span, [device.name]) or not question.fits(span, device):
            continue
        if all(fragment in span for fragment in kind.pinned):
            furthest = end
    return furthest


def _changed(used: Counts, place: int, by: int) -> Counts:
    return (*used[:place], used[place] + by, *used[place + 1 :])


def _way_back(reached: Sequence[dict[Counts, _Came]], used: Counts) -> Iterator[tuple[Span, int]]:
    end = len(reached) - 1
    while end:
        start, place = reached[end][used]
        yield Span(start, end), place
        used, end = _changed(used, place, -1), start


def _steps(
    way: Sequence[tuple[Span, int]], kinds: Sequence[_Kind], classes: int
) -> tuple[Step, ...]:
    left = [iter(each.places) for each in kinds]
    none = (0,) * classes
    return tuple(Step(span, _changed(none, next(left[place]), 1)) for span, place in way)
