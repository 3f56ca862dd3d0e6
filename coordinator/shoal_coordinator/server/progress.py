"""Whether the dispatcher moves, as the probes ask that run in threads of their own.

A dispatcher that fails at each tick, one whose event loop is stuck, and one that has failed and
whose process does not come to its end all look the same here: the time of the last tick that went
well gets old. A loop that is only busy has its ticks late, by seconds; one that has not had a
single one for a minute will not recover, and the process is to be started again.
"""

from collections.abc import Callable
from time import monotonic_ns
from typing import Final

STUCK_SECONDS: Final = 5.0
"""From then on it is not ready."""
HUNG_SECONDS: Final = 60.0
"""From then on it is not alive; a kubelet asks several times more before it acts."""


class Progress:
    """When the dispatcher moved last. `clock` gives monotonic nanoseconds."""

    def __init__(self, clock: Callable[[], int] = monotonic_ns) -> None:
        self._clock = clock
        self._at = clock()

    def moved(self) -> None:
        """It has moved, now."""
        self._at = self._clock()

    def problem(self) -> str | None:
        """Why it is not ready; None: it is."""
        return self._standing_since(STUCK_SECONDS)

    def hung(self) -> str | None:
        """Why it has to be started again; None: it has not."""
        return self._standing_since(HUNG_SECONDS)

    def _standing_since(self, limit: float) -> str | None:
        age = (self._clock() - self._at) / 1e9
        return f"the dispatcher has not moved for {age:.0f} s" if age > limit else None
