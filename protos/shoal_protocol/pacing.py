"""Control messages that follow one another closely, sent together.

A message costs each side about as much as all that a small task takes besides, whatever it holds.
So a stream's writer takes one turn, and then lets a moment pass before the next: what comes
meanwhile goes as one. A stream on which little happens never waits.
"""

import asyncio
from typing import Final

BATCHED_MESSAGES: Final = 64
"""What one batch holds at most, so that it stays far below the limit of a message."""
PACE_SECONDS: Final = 0.002


class Pace:
    """One writer's turns, at least `seconds` apart."""

    def __init__(self, seconds: float = PACE_SECONDS) -> None:
        self._seconds = seconds
        self._next = 0.0

    async def turn(self) -> None:
        """Wait until the next turn, which begins with the return."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now < self._next:
            await asyncio.sleep(self._next - now)
            now = loop.time()
        self._next = now + self._seconds
