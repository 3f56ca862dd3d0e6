"""A slow link, pretended: the bulk that leaves the agent, and fragments that come, are paced.

For the devices that one machine pretends to be in local mode, in user space. The rate is that of
one shared link in each direction (what comes from another agent was paced by that one); the latency
is a delay of each frame that leaves, during which others are under way already, as on a real link.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic

import grpc

STREAM_ERRORS = (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError)
"""What writing to or reading from a stream that has broken raises."""

Write = Callable[[bytes], Awaitable[None]]


class Uplink:
    """The pretended link: bits per second, and seconds one way. Zero is none of either."""

    def __init__(self, rate_bits_per_second: float = 0.0, latency_seconds: float = 0.0) -> None:
        self._seconds_per_byte = 8 / rate_bits_per_second if rate_bits_per_second else 0.0
        self.latency_seconds = latency_seconds
        self._free_at = 0.0

    @property
    def shaped(self) -> bool:
        """Whether anything is slowed down."""
        return bool(self._seconds_per_byte or self.latency_seconds)

    async def depart(self, size: int) -> None:
        """Wait until the link has carried so many bytes."""
        if not self._seconds_per_byte:
            return
        now = monotonic()
        self._free_at = max(now, self._free_at) + size * self._seconds_per_byte
        await asyncio.sleep(self._free_at - now)


class DelayLine:
    """Writes frames in order, each `latency_seconds` after it left."""

    def __init__(self, uplink: Uplink, write: Write) -> None:
        self._uplink = uplink
        self._write = write
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._wake = asyncio.Event()
        self._failure: BaseException | None = None
        self._task = asyncio.create_task(self._run(), name="delay line")

    async def write(self, frame: bytes) -> None:
        """Take a frame; returns when it has left. Raises what an earlier write raised."""
        if self._failure is not None:
            raise self._failure
        await self._uplink.depart(len(frame))
        self._under_way.append((monotonic() + self._uplink.latency_seconds, frame))
        self._wake.set()

    async def close(self) -> None:
        """Forget what is under way."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        while True:
            while not self._under_way:
                self._wake.clear()
                await self._wake.wait()
            due, frame = self._under_way.popleft()
            await asyncio.sleep(max(0.0, due - monotonic()))
            try:
                await self._write(frame)
            except STREAM_ERRORS as error:  # told to whoever writes next
                self._failure = error
                return
