"""Rows of tables that have gathered in memory: an item reads some, and those of many items stay.

A fragment with a table is reckoned with by the rows that one item reads. Where there is room, more
may stay, since they would have to be read again; the ledger says how much.
"""

from shoal_agent.memory.residency import Ledger
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.processor import Processor
from shoal_agent.transport.buffers import Buffers
from shoal_protocol.units import Bytes


class GatheredRows:
    """What of a device's fragments is in memory beyond what was planned for them."""

    def __init__(
        self,
        ledger: Ledger,
        processor: Processor,
        runtime: Runtime,
        buffers: Buffers,
    ) -> None:
        self._ledger = ledger
        self._buffers = buffers
        self._processor = processor
        self._runtime = runtime
        self._planned: dict[str, Bytes] = {}

    async def check(self, digest: str, taken: int) -> None:
        """A fragment has run, and all fragments took so much: rows that may not stay leave."""
        excess = taken - self._ledger.occupied
        if excess > 0 and not self._may_grow(digest, excess):
            await self._drop(digest)

    async def drop_all(self) -> None:
        """Let go what fragments have beyond their plans."""
        for grown in list(self._planned):
            await self._drop(grown)

    def planned_bytes(self, digest: str) -> Bytes:
        """What a fragment was loaded for, without what has gathered since."""
        return self._planned.get(digest, self._ledger.resident[digest])

    def forget(self, digest: str) -> None:
        self._planned.pop(digest, None)

    def _may_grow(self, digest: str, excess: int) -> bool:
        """Whether a fragment may keep the rows that have gathered of its tables."""
        reckoned = self._ledger.resident.get(digest, Bytes(0))
        planned = self._planned.get(digest, reckoned)
        most = self._runtime.table_bytes(digest) - (reckoned - planned)
        if most <= 0:
            return True  # it is reckoned with all that it has: what is more is not its rows
        if self._buffers.yields:
            return False  # a load has just had all rows dropped
        size = Bytes(min(excess, most))
        self._buffers.make_room(self._ledger.budget)
        grown = self._ledger.grow(digest, size, planned)
        if grown:
            self._planned[digest] = planned
        return grown

    async def _drop(self, digest: str) -> None:
        self._processor.note_gathered(digest)
        await self._processor.call(self._runtime.drop_weights, digest)
        if (planned := self._planned.pop(digest, None)) is not None:
            self._ledger.shrink(digest, planned)
