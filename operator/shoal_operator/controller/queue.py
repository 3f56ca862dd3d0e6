"""The work queue: keys, each at most once in the queue and with one worker at a time.

    add -> waiting (until due) -> ready -> taken -> done
                                    ^        | added meanwhile: ready again, once
                                    +--------+

Invariant: a key is in at most one of waiting and ready, and taken by at most one worker. Of several
due times the earliest counts.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

FIRST_BACKOFF_SECONDS: Final = 0.5
LAST_BACKOFF_SECONDS: Final = 120.0


class WorkQueue(Generic[K]):
    """`chance` gives numbers from 0 up to 1, for jitter."""

    def __init__(self, chance: Callable[[], float]) -> None:
        self._loop = asyncio.get_running_loop()
        self._chance = chance
        self._ready: OrderedDict[K, float] = OrderedDict()
        self._filled = asyncio.Event()
        self._waiting: dict[K, asyncio.TimerHandle] = {}
        self._taken: dict[K, tuple[float, float]] = {}
        """Since when a key was ready, and when it was taken."""
        self._again: set[K] = set()
        self._failures: dict[K, int] = {}
        self.moved_at = self._loop.time()

    def add(self, key: K, delay_seconds: float = 0.0) -> None:
        """Enqueue it, now or after a delay; an earlier time wins over a later one."""
        if delay_seconds <= 0:
            self._make_ready(key)
            return
        if key in self._ready:
            return
        due = self._loop.time() + delay_seconds
        timer = self._waiting.get(key)
        if timer is not None and timer.when() <= due:
            return
        self._stop_timer(key)
        self._waiting[key] = self._loop.call_at(due, self._make_ready, key)

    async def take(self) -> K:
        """The next key; `done` must follow."""
        while not self._ready:
            self._filled.clear()
            await self._filled.wait()
        key, since = self._ready.popitem(last=False)
        self._taken[key] = (since, self._loop.time())
        return key

    def done(self, key: K) -> None:
        """The worker has finished with it, well or not."""
        self._taken.pop(key, None)
        self.moved_at = self._loop.time()
        if key in self._again:
            self._again.discard(key)
            self._make_ready(key)

    def succeeded(self, key: K) -> None:
        """Forget the failures of a key."""
        self._failures.pop(key, None)

    def failed(self, key: K) -> float:
        """Enqueue it again with backoff; the delay in seconds."""
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        longest = min(FIRST_BACKOFF_SECONDS * 2.0 ** min(count, 16), LAST_BACKOFF_SECONDS)
        # Jitter, so that what failed together is not retried together.
        delay = longest * (0.5 + 0.5 * self._chance())
        self.add(key, delay)
        return delay

    def drop(self, key: K) -> None:
        """The object is gone; a worker that has taken the key finishes."""
        self._stop_timer(key)
        self._ready.pop(key, None)
        self._failures.pop(key, None)
        self._again.discard(key)

    def close(self) -> None:
        """Cancel all timers."""
        for key in tuple(self._waiting):
            self._stop_timer(key)

    @property
    def depth(self) -> int:
        """Keys that are ready."""
        return len(self._ready)

    @property
    def waiting(self) -> int:
        """Keys that become ready later."""
        return len(self._waiting)

    def waited_seconds(self, key: K) -> float:
        """How long a key that is taken had been ready."""
        ready, taken = self._taken[key]
        return taken - ready

    def longest_taken_seconds(self) -> float:
        """How long the slowest worker has had its key."""
        oldest = min((taken for _, taken in self._taken.values()), default=None)
        return 0.0 if oldest is None else self._loop.time() - oldest

    def stuck_seconds(self) -> float:
        """How long keys have been ready without any worker finishing anything."""
        oldest = min(self._ready.values(), default=None)
        if oldest is None:
            return 0.0
        return self._loop.time() - max(oldest, self.moved_at)

    def _stop_timer(self, key: K) -> None:
        timer = self._waiting.pop(key, None)
        if timer is not None:
            timer.cancel()

    def _make_ready(self, key: K) -> None:
        self._stop_timer(key)
        if key in self._taken:
            self._again.add(key)
        elif key not in self._ready:
            self._ready[key] = self._loop.time()
            self._filled.set()
