"""Which activations pass through the coordinator although their devices have addresses: those
between two devices of which one could not reach the other, for a while."""

from collections import OrderedDict
from typing import Final

from shoal_protocol.units import Nanoseconds, nanoseconds

RELAY_FOR: Final = nanoseconds(60)
MAXIMUM_PAIRS: Final = 4096
"""Beyond these, the pair that failed longest ago tries the direct way again."""


class RelayedPairs:
    """Pairs of devices, and until when activations from the one to the other are relayed."""

    def __init__(self) -> None:
        self._until: OrderedDict[tuple[str, str], Nanoseconds] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, source: str, target: str, now: Nanoseconds) -> None:
        """A device could not reach another."""
        self._until[source, target] = Nanoseconds(now + RELAY_FOR)
        self._until.move_to_end((source, target))
        if len(self._until) > MAXIMUM_PAIRS:
            self._until.popitem(last=False)

    def relayed(self, source: str, target: str, now: Nanoseconds) -> bool:
        """Whether what goes from one to the other is relayed now."""
        until = self._until.get((source, target))
        if until is None:
            return False
        if now >= until:
            del self._until[source, target]
            return False
        return True
