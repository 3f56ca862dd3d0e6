"""The fragments that a cut under a limit could have. Pure.

Where as few as possible are asked for, a cut that is found by going as far as the limit allows each
time says how many suffice. Then only those fragments are looked at that are part of a cut into no
more: to where one begins, fragments lead that are few enough, and what is behind it does not take
more of them than are left, however little each needs besides what is added up.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from shoal_planner.chains import Candidate, Table
from shoal_planner.least_limit import added_bytes
from shoal_planner.segments import FIXED_BYTES, Growing, Layout


@dataclass(frozen=True, slots=True)
class Limited:
    """Between these positions; those that are `excused` may be over the limit. The `cost` of one is
    what it needs, unless another is asked for."""

    layout: Layout
    positions: Sequence[int]
    limit: int
    cost: Callable[[Growing], int] | None = None
    excused: Collection[tuple[int, int]] = ()
    _rows: dict[int, list[Candidate]] = field(default_factory=dict)

    def table(self) -> Table:
        """Every fragment that could be."""
        return [self._row(start) for start in range(len(self.positions) - 1)]

    def shortest(self) -> Table:
        """Those that a cut into as few as possible can have."""
        count, last = self._enough(), len(self.positions) - 1
        if count is None or self.excused:
            return self.table()
        before = tuple(accumulate(added_bytes(self.layout), initial=0))
        room = self.limit - FIXED_BYTES
        fewest = {0: 0}  # fragments that lead to a position
        table: Table = []
        for start, position in enumerate(self.positions[:-1]):
            left = count - fewest.get(start, count)
            is_hopeful = left and before[-1] - before[position] <= left * room
            row = self._row(start) if is_hopeful else []
            if left == 1:
                row = [each for each in row if each.end == last]
            table.append(row)
            for each in row:
                fewest[each.end] = min(fewest.get(each.end, count), count - left + 1)
        return table

    def _enough(self) -> int | None:
        """How many fragments suffice; None: that takes a search."""
        at, count = 0, 0
        while at < len(self.positions) - 1:
            row = self._row(at)
            if not row:
                return None
            at, count = row[-1].end, count + 1
        return count

    def _row(self, start: int) -> list[Candidate]:
        """The fragments that begin at a position."""
        if (known := self._rows.get(start)) is not None:
            return known
        position, row = self.positions[start], list[Candidate]()
        growing = Growing(self.layout, position)
        for end in range(start + 1, len(self.positions)):
            growing.grow_to(self.positions[end])
            need = growing.resident_bytes
            if need <= self.limit or (position, self.positions[end]) in self.excused:
                cost = need if self.cost is None else self.cost(growing)
                row.append(Candidate(end, cost, growing.incoming_bytes))
            elif growing.least_bytes > self.limit:
                break
        self._rows[start] = row
        return row
