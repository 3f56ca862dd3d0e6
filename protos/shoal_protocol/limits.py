"""What one caller may take of a server: concurrent calls, and time without progress.

Both limits count per caller or per stream, so that one certificate holder that reads nothing, sends
nothing or drips does not starve the others.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc

STALL_SECONDS: Final = 30.0
STALL_BYTES: Final = 64 << 10
_Result = TypeVar("_Result")


class Stalled(Exception):
    """A peer made too little progress in the time allowed."""


class StallWatch:
    """Enforces a minimum rate on one stream: `minimum_bytes` in every `seconds` of waiting.

    `wait` for each read or write of the stream, then report its bytes with `progress`. Only time
    inside `wait` counts, so a slow disk on this side is not blamed on the peer. A silent peer and
    one that drips are both given up after `seconds`.
    """

    def __init__(self, *, seconds: float = STALL_SECONDS, minimum_bytes: int = STALL_BYTES) -> None:
        self._seconds = seconds
        self._minimum = minimum_bytes
        self._left = seconds
        self._moved = 0

    async def wait(self, operation: Awaitable[_Result]) -> _Result:
        """The operation's result. Raises `Stalled`, and then the operation has been cancelled; for
        a read or write of a gRPC stream this cancels the call.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        timeout = asyncio.timeout(self._left)
        try:
            async with timeout:
                return await operation
        except TimeoutError:
            if timeout.expired():
                raise Stalled(
                    f"stalled: {self._moved} bytes in {self._seconds:g} s, fewer than "
                    f"{self._minimum}; check the peer and its link"
                ) from None
            raise
        finally:
            self._left = max(0.0, self._left - (loop.time() - began))

    def progress(self, moved_bytes: int) -> None:
        """So many bytes have passed; enough of them start the next period."""
        self._moved += moved_bytes
        if self._moved >= self._minimum:
            self._moved, self._left = 0, self._seconds


async def end_stalled(context: grpc.aio.ServicerContext[Any, Any], error: Stalled) -> None:
    """End a call with DEADLINE_EXCEEDED, also if its peer is gone meanwhile."""
    with contextlib.suppress(grpc.aio.InternalError):
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))


class TooManyCalls(Exception):
    """A caller has as many calls waiting as it may."""


@dataclass(slots=True, eq=False)
class _Caller:
    running: asyncio.Semaphore
    calls: int = 0


class CallLimiter:
    """Shares `total` concurrent calls among callers: each runs at most `each`, and may have
    `waiting` more in its queue.

    A caller's excess waits behind its own calls and takes no place from others.
    """

    def __init__(self, *, total: int, each: int, waiting: float = math.inf) -> None:
        self._running = asyncio.Semaphore(total)
        self._each = each
        self._most = each + waiting
        self._callers: dict[str, _Caller] = {}

    @contextlib.asynccontextmanager
    async def turn(self, caller: str | None) -> AsyncIterator[None]:
        """One call of a caller, once there is room for it; None: a caller without a name, as behind
        a Unix socket, for whom the total alone counts. Raises `TooManyCalls` at once.
        """
        if caller is None:
            async with self._running:
                yield
            return
        own = self._callers.setdefault(caller, _Caller(asyncio.Semaphore(self._each)))
        if own.calls >= self._most:
            reason = f"{caller} has {own.calls} calls of this kind open; wait for one to end"
            raise TooManyCalls(reason)
        own.calls += 1
        try:
            async with own.running, self._running:
                yield
        finally:
            own.calls -= 1
            if not own.calls:
                del self._callers[caller]
