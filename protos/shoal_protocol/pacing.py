"""Messages that follow one another closely, sent together.

A message costs each side about as much as all that a small task takes besides, whatever it holds.
So the writer of a busy stream takes a turn, and then lets a moment pass before the next: what comes
meanwhile goes as one. As with Nagle's algorithm (RFC 896), a stream is busy while something on it
waits for its answer: then the moment is filled, and nobody waits for longer than without it.

How long the moment is follows from how often something comes: long enough for a few to gather, but
no longer than `LONGEST_SECONDS`. Where not even two come in that time, as with tasks that compute,
there is nothing to gain and nobody waits.
"""

import asyncio
from typing import Final

BATCHED_MESSAGES: Final = 64
"""What one batch of control messages holds at most, so that it stays far below the limit of a
message."""
GATHERED: Final = 16
"""So many are waited for, where they come fast enough."""
LONGEST_SECONDS: Final = 0.01
_WEIGHT: Final = 0.125
"""Of the newest interval in the mean."""


class Pace:
    """One writer's turns."""

    def __init__(self, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._longest = longest_seconds
        self._interval = longest_seconds
        self._last = 0.0

    @property
    def gap_seconds(self) -> float:
        """The moment between two turns, while the stream is busy."""
        worth_it = 2 * self._interval < self._longest
        return min(self._longest, GATHERED * self._interval) if worth_it else 0.0

    async def turn(self, *, busy: bool) -> None:
        """Wait until the next turn."""
        loop = asyncio.get_running_loop()
        wait = self._last + self.gap_seconds - loop.time()
        if busy and wait > 0:
            await asyncio.sleep(wait)

    def leave(self, count: int, at: float | None = None) -> None:
        """So many things leave in the turn that begins now (`at`, by the event loop's clock)."""
        now = asyncio.get_running_loop().time() if at is None else at
        interval = min((now - self._last) / max(count, 1), self._longest)
        self._interval += _WEIGHT * (interval - self._interval)
        self._last = now
