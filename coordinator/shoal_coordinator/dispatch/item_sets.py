"""Sets of items, of which there may be millions: as runs of consecutive numbers, since what has
ended of a job is mostly all of it, or all but a few."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Set
from itertools import chain
from operator import attrgetter
from typing import Final

_first: Final = attrgetter("start")


class ItemSet(Set[int]):
    """A set of numbers that does not change. It takes 16 bytes for each run, whatever its length;
    to find a number takes longer with their number, as a search does."""

    __slots__ = ("_count", "_ends", "_firsts")

    def __init__(self, items: Iterable[int] = (), *, runs: Iterable[range] = ()) -> None:
        """Of items, and of ranges whose step is 1, in any order."""
        firsts, ends = array("q"), array("q")
        alone = (range(item, item + 1) for item in items)
        for run in sorted(chain(alone, filter(None, runs)), key=_first):
            if ends and run.start <= ends[-1]:
                ends[-1] = max(ends[-1], run.stop)
            else:
                firsts.append(run.start)
                ends.append(run.stop)
        self._firsts, self._ends = firsts, ends
        self._count = sum(ends) - sum(firsts)

    @classmethod
    def of(cls, items: Iterable[int]) -> "ItemSet":
        """A set of these items: the same one, if it is one already."""
        return items if isinstance(items, cls) else cls(items)

    def __contains__(self, item: object) -> bool:
        if not isinstance(item, int):
            return False
        at = bisect_right(self._firsts, item) - 1
        return at >= 0 and item < self._ends[at]

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.runs())

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ItemSet):
            return self._firsts == other._firsts and self._ends == other._ends
        return super().__eq__(other)

    __hash__ = Set._hash  # that of an equal frozenset

    def __repr__(self) -> str:
        return f"ItemSet(runs={list(self.runs())})"

    def runs(self) -> Iterator[range]:
        """Its runs of consecutive numbers, as long as they can be, in order."""
        return map(range, self._firsts, self._ends)

    def plus(self, items: Iterable[int]) -> "ItemSet":
        """These items, and others."""
        if isinstance(items, ItemSet):
            return ItemSet(runs=chain(self.runs(), items.runs()))
        return ItemSet(items, runs=self.runs())

    def within(self, items: range) -> "ItemSet":
        """Those that are in a range, whose step is 1."""
        cut = (range(max(r.start, items.start), min(r.stop, items.stop)) for r in self.runs())
        return ItemSet(runs=cut)

    def next_absent(self, item: int) -> int:
        """The first number from `item` on that is not in the set."""
        at = bisect_right(self._firsts, item) - 1
        return max(item, self._ends[at]) if at >= 0 else item
