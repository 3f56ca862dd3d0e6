"""Activations that leave memory for the disk, where fragments need their room."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from shoal_agent.memory.demands import Demand
from shoal_agent.memory.residency import Ledger
from shoal_agent.runtime.in_background import begin
from shoal_agent.telemetry.logs import log
from shoal_agent.transport.activations import SpillFull
from shoal_agent.transport.buffers import Buffers


class Spilling:
    """What is being spilled, one after the other. `spill` brings at least so many bytes to disk."""

    def __init__(
        self, ledger: Ledger, buffers: Buffers, on_failed: Callable[[Sequence[Demand]], None]
    ) -> None:
        """`on_failed` receives what follows where the disk has no place."""
        self._ledger = ledger
        self._buffers = buffers
        self._on_failed = on_failed
        self._turn = asyncio.Lock()
        self.tasks: set[asyncio.Task[None]] = set()
        self.spill: Callable[[int], Awaitable[None]] = _nothing_to_spill

    def begin(self, digest: str | None) -> None:
        """Restore the ledger's invariant, beside what goes on; `digest` needs the room."""
        begin(self._spill_excess(digest), self.tasks)

    async def make_room(self, size: int) -> None:
        """Spill; where somebody else does already, less may be needed then: ask again."""
        waited = self._turn.locked()
        async with self._turn:
            if not waited:
                await self.spill(size)

    async def spill_all(self) -> bool:
        """Spill whatever can be; whether there is less in memory now."""
        before = self._ledger.reserved
        self._buffers.give_back()
        with suppress(SpillFull):
            await self.make_room(self._ledger.reserved)
        return self._ledger.reserved < before

    async def _spill_excess(self, digest: str | None) -> None:
        async with self._turn:
            self._buffers.make_room(self._ledger.excess)
            if (size := self._ledger.excess) == 0:
                return
            try:
                await self.spill(size)
            except SpillFull as error:
                log.warning("fragments give way to activations: %s", error)
                self._on_failed(self._ledger.fail_spill(digest))


async def _nothing_to_spill(_: int) -> None:
    """There is no session, so there are no activations."""
