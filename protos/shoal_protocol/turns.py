"""How many items share a load, where a device loads the fragments of a job in turn.

The dispatcher admits so many for each such device, and plans reckon with as many."""

from collections.abc import Iterable
from typing import Final

from shoal_protocol.units import Bytes

LEAST_ITEMS: Final = 4
"""Items of a job that are admitted at once, at least, whatever they take."""
MOST_ITEMS: Final = 16
"""More of them shorten a period by little, and an item waits for all others of its turn."""
_ACTIVATION_BYTES: Final = 128 << 20
"""What lies between two fragments takes at most this much, but for the least items: half of what
the disk of a device with the default cache has for it."""


def items_in_turn(output_bytes: Iterable[Bytes | None]) -> int:
    """`output_bytes` are what the stages make of an item, as far as that is known."""
    largest = max((size or 0 for size in output_bytes), default=0)
    return min(MOST_ITEMS, max(LEAST_ITEMS, _ACTIVATION_BYTES // max(1, largest)))
