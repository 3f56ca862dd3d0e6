"""Messages that follow one another closely, sent together.

A message costs each side about as much as all that a small task takes besides, whatever it holds.
So the writer of a busy stream takes a turn, and then lets a moment pass before the next: what comes
meanwhile goes as one. As with Nagle's algorithm (RFC 896), a stream is busy while something on it
waits for its answer: then the moment is filled, and nobody waits for longer than without it.
"""

import asyncio
from typing import Final

BATCHED_MESSAGES: Final = 64
"""What one batch of control messages holds at most, so that it stays far below the limit of a
message."""
PACE_SECONDS: Final = 0.004


class Pace:
    """One writer's turns; on a busy stream at least `seconds` apart."""

    def __init__(self, seconds: float = PACE_SECONDS) -> None:
        self._seconds = seconds
        self._next = 0.0

    async def turn(self, *, busy: bool) -> None:
        """Wait until the next turn, which begins with the return."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if busy and now < self._next:
            await asyncio.sleep(self._next - now)
            now = loop.time()
        self._next = now + self._seconds
