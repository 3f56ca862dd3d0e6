"""What is left for later when a grant is adopted: a fragment runs in it at once, and faster when it
was opened as it runs fastest. Inputs run meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future


class Finishing:
    """Done in the processor's thread, in parts, between two of which an input may run."""

    def __init__(
        self,
        widen: Callable[[str], Awaitable[Future[bool] | None]],
        pack: Callable[[str], Awaitable[bool]],
        on_change: Callable[[str], None],
    ) -> None:
        """`widen` and `pack` are the runtime's, in the processor's thread; `on_change` is told of a
        fragment that runs in another way from now on, before it does."""
        self._widen = widen
        self._pack = pack
        self._on_change = on_change

    async def finish(self, digest: str) -> None:
        while (opening := await self._widen(digest)) is not None:
            if await asyncio.wrap_future(opening):
                self._on_change(digest)
        while await self._pack(digest):
            pass
