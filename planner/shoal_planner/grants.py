"""How the memory of a device is shared among the fragments that it holds in blocks. Pure.

The bytes beyond what each needs at least go where each saves the most reading. That is the best
there is, since the saving grows in proportion.
"""

from collections.abc import Sequence
from functools import cached_property

from shoal_planner.loads import saving_per_byte
from shoal_protocol.partition import Fragment
from shoal_protocol.units import Bytes


class Grants:
    """Of a partition's fragments."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self._fragments = fragments

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

    @cached_property
    def _places(self) -> list[int]:
        """Of each fragment when spare bytes are granted: who saves most goes first."""
        savers = sorted(self._fragments, key=saving_per_byte, reverse=True)
        places = {each.index: place for place, each in enumerate(savers)}
        return [places[index] for index in range(len(places))]
