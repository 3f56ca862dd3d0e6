"""A budget larger than any before: the arena of activations is made anew for it, once no fragment
is open. Loads that have begun end first, and what is resident is given up, to be loaded again.

A budget may change again meanwhile. The last one that was told is adopted, at once if it needs no
larger arena.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from shoal_agent.memory.residency import Ledger
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.processor import Processor


class Enlarging:
    """Of one agent's arena."""

    def __init__(
        self,
        ledger: Ledger,
        runtime: Runtime,
        processor: Processor,
        turn: asyncio.Lock,
        loading: Mapping[str, asyncio.Event],
        close: Callable[[str], Awaitable[object]],
    ) -> None:
        """Within `turn` no load begins; those that have begun are `loading`; `close` lets a
        fragment go."""
        self._ledger = ledger
        self._runtime = runtime
        self._processor = processor
        self._turn = turn
        self._loading = loading
        self._close = close
        self._told_bytes = int(ledger.budget)

    async def make_room(self, budget_bytes: int) -> tuple[int | None, Sequence[str]]:
        """What to adopt of a budget that was told (None: nothing, another was told meanwhile), and
        the fragments that were given up for it: whoever is told of them may load them again, so
        the budget is to be adopted first."""
        self._told_bytes = budget_bytes
        gone: tuple[str, ...] = ()
        if budget_bytes > self._runtime.limit_bytes:
            async with self._turn:
                for loaded in tuple(self._loading.values()):
                    await loaded.wait()
                if budget_bytes == self._told_bytes:
                    gone = tuple(self._ledger.resident)
                    for digest in gone:
                        await self._close(digest)
                    await self._processor.call(self._runtime.enlarge, budget_bytes)
        if budget_bytes != self._told_bytes:
            return None, gone
        return min(budget_bytes, self._runtime.limit_bytes), gone
