"""Where one fragment is divided that takes more than was planned for it.

What it took beyond its estimate is laid on its nodes in equal parts: where it came from, nobody
knows. It is divided in two whose larger part is as small as can be by that measure, or nearly so:
then where the fewest bytes cross.

Each side of a cut holds what crosses it. Where that is much at most positions, both parts may take
as much as the whole, and so may parts of theirs: a cut once made stays. There the fragment is
divided at once in as many parts as it takes, at positions which fewer bytes cross.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from shoal_planner.chains import Candidate, Table, cheapest, least_to_end, starts_of
from shoal_planner.profile import Role
from shoal_planner.segments import Growing, Layout

NEAR: Final = 4
"""The larger part may be so much of its least larger, one part of so many, for fewer bytes."""
LESS: Final = 8
"""A part is smaller than the whole by one part in so many, or dividing so does not help."""
MOST_STEPS: Final = 100_000
"""Nodes that a search for several parts visits at most; it visits a node once per position."""


class Parts:
    """Where nodes `start` to `end` of a model, which take `need_bytes` at least, can be divided,
    and what parts take. `crossing`: bytes over each position of the model. With two parts both
    sizes are monotone: the left part grows with the position, and the right one shrinks."""

    def __init__(
        self, layout: Layout, crossing: Sequence[int], start: int, end: int, need_bytes: int
    ) -> None:
        self._layout, self._crossing, self._start, self._end = layout, crossing, start, end
        self._positions = tuple(each for each in layout.legal if start < each < end)
        estimate = layout.segment(start, end).resident_bytes
        self._excess = max(0, need_bytes - estimate)
        self._whole = estimate + self._excess
        runs = [node.role is not Role.CONSTANT for node in layout.profile.nodes]
        self._before = list(accumulate(runs, initial=0))

    def divide(self, times: int) -> tuple[int, ...]:
        """Where it is divided: in two, and its halves in turn, so many times, or in several parts
        at once; empty: it cannot be."""
        if not times or not self._positions:
            return ()
        middle, most = self._best(), self._whole - self._whole // LESS
        if self._larger(middle) > most and (several := self._several(most)):
            return several
        halves = ((self._start, middle), (middle, self._end))
        left, right = (
            Parts(self._layout, self._crossing, *each, self._size(*each)).divide(times - 1)
            for each in halves
        )
        return (*left, middle, *right)

    def _best(self) -> int:
        """Of the positions near the middle, by size, that over which the fewest bytes cross."""
        positions = self._positions
        number = bisect_left(positions, True, key=lambda at: self._left(at) >= self._right(at))
        middle = min(positions[max(0, number - 1) : number + 1], key=self._larger)
        most = self._larger(middle) * (NEAR + 1) // NEAR
        first = bisect_left(positions, True, key=lambda at: self._right(at) <= most)
        last = bisect_left(positions, True, key=lambda at: self._left(at) > most)
        near = positions[first:last] or (middle,)
        return min(near, key=lambda at: (self._crossing[at], abs(at - middle), at))

    def _several(self, most: int) -> tuple[int, ...]:
        """Where it is divided so that no part takes more than `most`, nor more than is near the
        least that the largest can take: in as few parts as that needs, where the fewest bytes
        cross; empty: it cannot be."""
        positions = (self._start, *self._narrow(), self._end)
        table = self._table(positions, most)
        largest = _least_largest(table)
        if largest is None:
            return ()
        near = min(most, largest * (NEAR + 1) // NEAR)
        table = [[each for each in row if each.cost <= near] for row in table]
        count = least_to_end(table)[0]
        assert count is not None
        chosen = cheapest(table, starts_of(table, count), lambda each: each.incoming_bytes)
        return tuple(positions[each.end] for each in chosen[:-1])

    def _narrow(self) -> list[int]:
        """The positions that are tried: those over which the fewest bytes cross."""
        tried = max(1, MOST_STEPS // (self._end - self._start))
        return sorted(sorted(self._positions, key=lambda at: (self._crossing[at], at))[:tried])

    def _table(self, positions: Sequence[int], most: int) -> Table:
        """The parts that take no more than `most`."""
        table: Table = []
        for number, start in enumerate(positions[:-1]):
            growing, row = Growing(self._layout, start), list[Candidate]()
            for place in range(number + 1, len(positions)):
                growing.grow_to(positions[place])
                share = self._share(start, growing.end)
                if growing.least_bytes + share > most:
                    break
                if (size := growing.resident_bytes + share) <= most:
                    row.append(Candidate(place, size, growing.incoming_bytes))
            table.append(row)
        return table

    def _larger(self, position: int) -> int:
        return max(self._left(position), self._right(position))

    def _left(self, position: int) -> int:
        return self._size(self._start, position)

    def _right(self, position: int) -> int:
        return self._size(position, self._end)

    def _size(self, start: int, end: int) -> int:
        return self._layout.segment(start, end).resident_bytes + self._share(start, end)

    def _share(self, start: int, end: int) -> int:
        """Of what was taken beyond the estimate."""
        return self._excess * self._nodes(start, end) // self._nodes(self._start, self._end)

    def _nodes(self, start: int, end: int) -> int:
        return self._before[end] - self._before[start]


def _least_largest(table: Table) -> int | None:
    """The least that the largest part can take, with any number of parts; None: no chain of parts
    leads to the end."""
    best: list[int | None] = [None] * len(table) + [0]
    for start in range(len(table) - 1, -1, -1):
        found = [
            max(each.cost, rest) for each in table[start] if (rest := best[each.end]) is not None
        ]
        best[start] = min(found, default=None)
    return best[0]
