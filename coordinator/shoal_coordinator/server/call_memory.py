"""What the items of all calls may take of this process's memory together, from their first byte
until they are answered. Whoever has no room waits, and not for ever: a client that takes no answers
holds what it has sent."""

import asyncio
from typing import Final

import grpc

from shoal_coordinator.server.refusals import CallRefused
from shoal_coordinator.storage.array_limits import default_item_bytes
from shoal_protocol.units import Bytes, format_bytes

ITEM_BYTES: Final = 1 << 30
WAIT_SECONDS: Final = 60.0


class CallMemory:
    """`most_bytes` in all; one item may take that, and no more than `item_bytes`."""

    def __init__(self, most_bytes: int | None = None, wait_seconds: float = WAIT_SECONDS) -> None:
        """By default a quarter of the memory that this process may use."""
        self.most_bytes = default_item_bytes() if most_bytes is None else most_bytes
        self.item_bytes = min(ITEM_BYTES, self.most_bytes)
        self._wait_seconds = wait_seconds
        self._taken_bytes = 0
        self._given_back = asyncio.Event()

    async def take(self, size_bytes: int) -> None:
        """Wait until there is room. Raises `CallRefused`."""
        if self.lacks(size_bytes):
            try:
                async with asyncio.timeout(self._wait_seconds):
                    while self.lacks(size_bytes):
                        self._given_back.clear()
                        await self._given_back.wait()
            except TimeoutError:
                raise self._refusal(size_bytes) from None
        self._taken_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self._taken_bytes -= size_bytes
        self._given_back.set()

    def lacks(self, size_bytes: int) -> bool:
        """Whether there is no room for so much now."""
        return self._taken_bytes + size_bytes > self.most_bytes

    def _refusal(self, size_bytes: int) -> CallRefused:
        need, have = format_bytes(Bytes(size_bytes)), format_bytes(Bytes(self.most_bytes))
        taken = format_bytes(Bytes(self._taken_bytes))
        reason = (
            f"an item of {need} found no room in {self._wait_seconds:g} s: items of all calls have "
            f"{taken} of {have}, a quarter of the coordinator's memory; give it more, call it with "
            "fewer items at a time, or take the answers"
        )
        return CallRefused(reason, grpc.StatusCode.RESOURCE_EXHAUSTED)
