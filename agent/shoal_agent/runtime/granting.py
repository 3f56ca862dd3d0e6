"""Grants carried out: fragments run within what the ledger says, in the order in which it said so.

The ledger reckons what a fragment gives back as free at once. That is right for loads, which are
opened in the processor's thread after it. An activation needs no processor: so what was lent goes
back in the processor first, and in the ledger then.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future

from shoal_agent.memory.demands import Grant
from shoal_agent.memory.residency import Ledger, short
from shoal_agent.runtime.failures import RuntimeFailed
from shoal_agent.runtime.in_background import begin
from shoal_agent.telemetry.counters import Counters
from shoal_agent.telemetry.logs import log
from shoal_protocol.manifest import FragmentDamaged
from shoal_protocol.units import Bytes, format_bytes

InProcessor = Callable[[str, Bytes], Awaitable[None]]


async def finish(
    widen: Callable[[str], Awaitable[Future[bool] | None]],
    pack: Callable[[str], Awaitable[bool]],
    on_change: Callable[[str], None],
    digest: str,
) -> None:
    """What is left for later when a grant is adopted: the fragment runs in it at once, and faster
    when it was opened as it runs fastest. `widen` and `pack` do a part of that in the processor's
    thread; between two, inputs run. `on_change` is called before it runs in another way."""
    while (opening := await widen(digest)) is not None:
        if await asyncio.wrap_future(opening):
            on_change(digest)
    while await pack(digest):
        pass


class Granting:
    """What is being granted."""

    def __init__(
        self,
        ledger: Ledger,
        grant: InProcessor,
        finish: Callable[[str], Coroutine[None, None, None]],
        counters: Counters,
        on_failed: Callable[[str, str], None],
    ) -> None:
        """`grant` lets a fragment run within so many bytes, in the processor's thread, and `finish`
        does what that left for later; `on_failed` receives each fragment that cannot, and why."""
        self._ledger = ledger
        self._grant = grant
        self._finish = finish
        self._counters = counters
        self._on_failed = on_failed
        self._taking_back = False
        self.tasks: set[asyncio.Task[object]] = set()
        self._finishing: set[asyncio.Task[object]] = set()

    def begin(self, grant: Grant) -> None:
        """Carry it out beside what goes on."""
        begin(self._carry_out(grant), self.tasks)

    def take_back(self) -> None:
        """Free what was lent, for activations to come."""
        if not self._taking_back and any(share.lent for share in self._ledger.shares.values()):
            self._taking_back = True
            begin(self._take_back(), self.tasks)

    async def wait(self) -> None:
        """Grants are carried out, also when whoever waits for them is cancelled."""
        while self.tasks:
            await asyncio.gather(*map(asyncio.shield, self.tasks), return_exceptions=True)

    async def close(self) -> None:
        """Wait for what is being granted, and leave what was to be done later."""
        await self.wait()
        for task in self._finishing:
            task.cancel()
        await asyncio.gather(*self._finishing, return_exceptions=True)

    async def _take_back(self) -> None:
        try:
            for digest, share in self._ledger.shares.items():
                if share.lent and not await self._carry_out(
                    Grant(digest=digest, size=Bytes(share.granted - share.lent))
                ):
                    return
            # What was granted meanwhile is granted again.
            for grant in self._ledger.take_back():
                await self._carry_out(grant)
        finally:
            self._taking_back = False

    async def _carry_out(self, grant: Grant) -> bool:
        """Let a fragment run within so many bytes; whether it can."""
        digest, size = grant.digest, grant.size
        if (share := self._ledger.shares.get(digest)) is not None:
            size = min(size, share.granted)  # it may have been granted less since
        try:
            await self._grant(digest, size)
        except (RuntimeFailed, FragmentDamaged, OSError) as error:
            if digest in self._ledger.resident:
                self._ledger.unload(digest)
                self._on_failed(digest, f"cannot run in {format_bytes(size)}: {error}")
            return False
        self._counters.grants += 1
        log.warning("%s runs within %s now", short(digest), format_bytes(size))
        begin(self._finish(digest), self._finishing)
        return True
