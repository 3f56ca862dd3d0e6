"""What fragments take of a device's disk. Pure.

A resident fragment is mapped from there. So what a device holds at once is on its disk together;
of what it loads in turn, one by one has to have room. Files that fragments share count for each:
which ones they are is not known before a cut is made.
"""

from collections.abc import Sequence
from typing import Final

from shoal_planner.devices import PoolDevice
from shoal_planner.ranges import Maxima, sums_of
from shoal_protocol.partition import Fragment

_NODE_BYTES: Final = 1 << 10
"""Of the graph's file: a node takes 100 to 500 bytes of it in the models of the tests."""


class Stored:
    """What the files of a partition's fragments take: their weights, and their graphs."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        sizes = [each.weight_bytes + each.nodes * _NODE_BYTES for each in fragments]
        self._sums, self._maxima = sums_of(sizes), Maxima(sizes)

    def together(self, start: int, end: int) -> int:
        """Bytes of the fragments `[start, end)`."""
        return self._sums[end] - self._sums[start]

    def largest(self, start: int, end: int) -> int:
        """Bytes of the largest of them."""
        return self._maxima.of(start, end)


def has_room(device: PoolDevice, stored_bytes: int) -> bool:
    """Whether the device's disk has room for so much."""
    return device.cache_bytes is None or stored_bytes <= device.cache_bytes
