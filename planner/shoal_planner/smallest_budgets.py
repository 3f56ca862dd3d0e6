"""The smallest budget with which so many equal devices hold consecutive fragments. Pure."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from shoal_planner.costs import Span
from shoal_protocol.units import Bytes

Needs: TypeAlias = Callable[[int], Iterable[int]]
"""What spans need that begin with a fragment, in bytes: the shortest first, up to the last one."""


def smallest_at_once(need: Callable[[Span], int], fragments: int, devices: int) -> Bytes:
    """Where each device holds all of its fragments at once; `need` is what a span's need then."""

    def needs(start: int) -> Iterator[int]:
        return (need(Span(start, end)) for end in range(start + 1, fragments + 1))

    return _smallest(needs, fragments, devices)


def _smallest(needs: Needs, fragments: int, devices: int) -> Bytes:
    """A fragment may need more alone than among others: what enters and leaves counts for those at
    the ends."""
    low, high = 0, [*needs(0)][-1]
    while low < high:
        middle = (low + high) // 2
        if _hold(devices, needs, fragments, middle):
            high = middle
        else:
            low = middle + 1
    return Bytes(low)


def _hold(devices: int, needs: Needs, fragments: int, most: int) -> bool:
    """Whether so many devices of which none needs more than `most` hold all: each has as many
    fragments as it can. A longer span may need less: its ends may be where less crosses."""
    start = 0
    for _ in range(devices):
        ends = [end for end, need in enumerate(needs(start), start + 1) if need <= most]
        if not ends:
            return False
        start = max(ends)
        if start == fragments:
            return True
    return False
