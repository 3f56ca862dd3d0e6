"""How many items of a job may be under way, as far as devices have had room for them."""

from dataclasses import dataclass
from typing import Final

_CALM: Final = 4
"""So many times as many items as may be under way end without a refusal before it is one more."""


@dataclass(slots=True, eq=False)
class Crowding:
    """A bound of a job's window, `most`; 0: none. `ended` items have without a refusal since it
    changed. It falls by one, and rises by one, as the window of a stream of packets does."""

    most: int = 0
    ended: int = 0

    def narrow(self, under_way: int) -> None:
        """Devices had no room for so many. The bound falls once for those that are there: until
        they have left, a further refusal says nothing new."""
        self.ended = 0
        if not self.most or under_way <= self.most:
            self.most = max(1, under_way - 1)

    def note_end(self) -> bool:
        """An item has ended; whether one more may be under way from now on."""
        if not self.most:
            return False
        self.ended += 1
        if self.ended < _CALM * self.most:
            return False
        self.most, self.ended = self.most + 1, 0
        return True
