"""Control messages that follow one another closely, sent together.

A message costs each side about as much as all else that a small task takes, whatever it holds. So
the writer of a busy stream lets a moment pass between two turns: what comes meanwhile leaves as one
message. As with Nagle's algorithm (RFC 896), a stream is busy while something on it waits for its
answer: then the moment is used, and nobody waits for longer than without it.

How long the moment is follows from how often something comes: long enough for a few to gather, but
no longer than `LONGEST_SECONDS`. Where not even two come in that time, as with tasks that compute,
there is nothing to gain and nobody waits.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Final, Generic, TypeVar

Message = TypeVar("Message")

BATCHED_MESSAGES: Final = 64
"""What one batch of control messages holds at most, so that it stays far below the limit of a
message. A receiver refuses more."""
UNSENT_MESSAGES: Final = 4096
"""What may wait in an outbox."""
WRITE_SECONDS: Final = 30.0
"""How long one write may take."""
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
        if busy and (wait := self._last + self.gap_seconds - monotonic()) > 0:
            await asyncio.sleep(wait)

    def leave(self, count: int, at: float | None = None) -> None:
        """So many things leave in the turn that begins now (`at`, by the monotonic clock)."""
        now = monotonic() if at is None else at
        interval = min((now - self._last) / max(count, 1), self._longest)
        self._interval += _WEIGHT * (interval - self._interval)
        self._last = now


class Outbox(Generic[Message]):
    """Messages that wait for a control stream, in order and bounded."""

    def __init__(self) -> None:
        self._unsent: deque[Message] = deque()
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._writing_since = math.inf

    def __len__(self) -> int:
        return len(self._unsent)

    @property
    def full(self) -> bool:
        """Whether the producer of messages must stop."""
        return len(self._unsent) >= UNSENT_MESSAGES

    def put(self, message: Message) -> None:
        """Have a message sent. Returns at once: whoever can wait asks `full` before."""
        self._unsent.append(message)
        self._filled.set()
        self._emptied.clear()

    async def sent(self) -> None:
        """Wait until all that was put has been written."""
        await self._emptied.wait()

    async def write_all(
        self,
        write: Callable[[Sequence[Message]], Awaitable[object]],
        busy: Callable[[], bool],
        *,
        longest_seconds: float = LONGEST_SECONDS,
    ) -> None:
        """Write what waits, `BATCHED_MESSAGES` at once at most, for ever; raises what `write`
        raises. `busy` and `longest_seconds`: see `Pace`."""
        pace = Pace(longest_seconds)
        while True:
            await self._filled.wait()
            await pace.turn(busy=busy())
            count = min(len(self._unsent), BATCHED_MESSAGES)
            messages = [self._unsent.popleft() for _ in range(count)]
            pace.leave(count)
            self._writing_since = monotonic()
            await write(messages)
            self._writing_since = math.inf
            if not self._unsent:
                self._filled.clear()
                self._emptied.set()

    async def watch(self) -> None:
        """Raise `TimeoutError` once a write takes longer than `WRITE_SECONDS`, late by a quarter
        at most. (A timer for each write would cost more than the write.)"""
        while monotonic() - self._writing_since <= WRITE_SECONDS:
            await asyncio.sleep(WRITE_SECONDS / 4)
        raise TimeoutError


class Allowance:
    """So many things a second, and some more at once (a token bucket)."""

    def __init__(self, per_second: float, burst: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._left = burst
        self._counted_at = monotonic()

    async def take(self) -> None:
        """Take one; waits until there is one."""
        self._earn()
        self._left -= 1
        if self._left < 0:
            await asyncio.sleep(-self._left / self._per_second)

    def take_now(self) -> bool:
        """Take one, if there is one."""
        self._earn()
        there = self._left >= 1
        self._left -= there
        return there

    def _earn(self) -> None:
        now = monotonic()
        earned = (now - self._counted_at) * self._per_second
        self._left = min(self._burst, self._left + earned)
        self._counted_at = now
