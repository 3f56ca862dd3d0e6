"""How the memory of a device is shared among the fragments that it holds. Pure.

In blocks, the bytes beyond what each needs at least go where each saves the most reading. That is
the best there is, since the saving grows in proportion. What is loaded in turn gets all that is
left, if it is not whole within that.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Final, NamedTuple, assert_never

from shoal_planner.device_costs import Holding
from shoal_planner.loads import paged_bytes, saving_per_byte
from shoal_planner.ranges import Maxima, sums_of
from shoal_protocol.partition import Fragment
from shoal_protocol.units import Bytes

_NOISE: Final = 16
"""One part in so many of a budget is not granted to weights: what the transport takes varies,
by 0.6 MiB under load."""
_REMEMBERED: Final = 128
"""Rooms: what crosses the ends of spans has few sizes in most models."""


class Room(NamedTuple):
    """A device's budget, and what other items take of it that wait."""

    budget_bytes: int
    waiting_bytes: int

    @property
    def beside(self) -> int:
        """What a whole fragment may need."""
        return self.budget_bytes - self.waiting_bytes

    @property
    def granted(self) -> int:
        """What there is for blocks."""
        return self.budget_bytes - max(self.waiting_bytes, self.budget_bytes // _NOISE)


class Grants:
    """Of a partition's fragments."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self._fragments = fragments
        self._paged_in_turn = lru_cache(_REMEMBERED)(self._sums_in_turn)

    def of(self, start: int, end: int, holding: Holding, room: Room) -> tuple[Bytes, ...]:
        """What each of the fragments `[start, end)` gets."""
        fragments = self._fragments[start:end]
        match holding:
            case Holding.WHOLE:
                return tuple(Bytes(each.resident_bytes) for each in fragments)
            case Holding.IN_BLOCKS:
                return self.shared(start, end, room.granted)
            case Holding.RELOADED:
                return tuple(_in_turn(each, room) for each in fragments)
            case _:
                assert_never(holding)

    def paged(self, start: int, end: int, holding: Holding, room: Room) -> int:
        """Bytes of weights that all of these read again for each item."""
        if holding is not Holding.RELOADED:
            granted = self.of(start, end, holding, room)
            return sum(map(paged_bytes, self._fragments[start:end], granted))
        if self._largest.of(start, end) <= room.beside:
            return 0
        sums = self._paged_in_turn(room)
        return sums[end] - sums[start]

    def shared(self, start: int, end: int, room: int) -> tuple[Bytes, ...]:
        """What each of the fragments `[start, end)` gets of so many bytes; the least at least."""
        fragments = self._fragments[start:end]
        granted = {each.index: each.least_bytes for each in fragments}
        spare = max(0, room - sum(granted.values()))
        for each in sorted(fragments, key=lambda each: self._places[each.index]):
            more = min(spare, each.resident_bytes - each.least_bytes)
            granted[each.index] += more
            spare -= more
        return tuple(map(Bytes, granted.values()))

    def _sums_in_turn(self, room: Room) -> list[int]:
        paged = [0] * len(self._fragments)
        for each in self._in_parts:
            paged[each.index] = paged_bytes(each, _in_turn(each, room))
        return sums_of(paged)

    @cached_property
    def _largest(self) -> Maxima:
        return Maxima([each.resident_bytes for each in self._fragments])

    @cached_property
    def _in_parts(self) -> Sequence[Fragment]:
        """Those that need less in blocks than as a whole: no others read weights again."""
        return [each for each in self._fragments if each.least_bytes < each.resident_bytes]

    @cached_property
    def _places(self) -> list[int]:
        """Of each fragment when spare bytes are granted: who saves most goes first."""
        savers = sorted(self._fragments, key=saving_per_byte, reverse=True)
        places = {each.index: place for place, each in enumerate(savers)}
        return [places[index] for index in range(len(places))]


def _in_turn(fragment: Fragment, room: Room) -> Bytes:
    """All that it needs, or in blocks what there is."""
    is_whole = fragment.resident_bytes <= room.beside
    return Bytes(fragment.resident_bytes if is_whole else max(fragment.least_bytes, room.granted))
