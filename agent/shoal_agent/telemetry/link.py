"""What this device's link carries, from transfers that happen anyway: no probe takes of it.

A transfer may have waited for others, or for its receiver. So the fastest of the large ones of the
last minutes counts, and the shortest of the round trips. What was measured ages: a link that was
moved elsewhere shows within minutes. A report changes only when the link has: plans are made anew
for it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

LARGE_BYTES: Final = 256 << 10
"""A smaller transfer measures the round trip rather than the rate."""
AGE_SECONDS: Final = 600.0
_SAMPLES: Final = 64
_CHANGE: Final = 1.5


@dataclass(slots=True)
class _Best:
    """The least of the last samples, as it was reported when it last changed much."""

    clock: Callable[[], float]
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    reported: float | None = None

    def add(self, value: float) -> None:
        self.samples.append((self.clock(), value))

    def read(self) -> float | None:
        oldest = self.clock() - AGE_SECONDS
        least = min((value for at, value in self.samples if at >= oldest), default=None)
        if (
            least is None
            or self.reported is None
            or not 1 / _CHANGE < least / self.reported < _CHANGE
        ):
            self.reported = least
        return self.reported


class LinkMeter:
    """The link of one device: to its peers and to the coordinator."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """`clock` counts seconds."""
        self._seconds_per_byte = _Best(clock)
        self._round_trip = _Best(clock)

    def transferred(self, size_bytes: int, seconds: float) -> None:
        """So many bytes were sent and acknowledged, or fetched."""
        if size_bytes >= LARGE_BYTES and seconds > 0:
            self._seconds_per_byte.add(seconds / size_bytes)

    def pinged(self, seconds: float) -> None:
        if seconds > 0:
            self._round_trip.add(seconds)

    @property
    def bytes_per_second(self) -> float | None:
        """None: no large transfer of late."""
        least = self._seconds_per_byte.read()
        return None if least is None else 1 / least

    @property
    def round_trip_seconds(self) -> float | None:
        return self._round_trip.read()
