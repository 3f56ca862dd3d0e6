"""The calls of one coordinator that are not answered yet.

A worker waits for an answer for a moment only, so that a coordinator that hangs keeps no worker
from other pools and jobs. A call that takes longer goes on by itself, and what it changes is told
as always. Until it has ended nothing else is sent there; who wanted that is told of its end.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

PATIENCE_SECONDS: Final = 1.0
"""How long a worker waits; a coordinator answers within milliseconds."""

logger = logging.getLogger(__name__)


class CoordinatorFailed(Exception):
    """A call of a coordinator that is to be tried again: which pool, what, why."""

    def __init__(self, pool: str, method: str, reason: str) -> None:
        super().__init__(f"{method} at the coordinator of {pool}: {reason}")


@dataclass(slots=True)
class OpenCalls:
    """`changed` receives the parts of the view that calls were about which could not be made, or
    whose end nobody waited for.
    """

    pool: str
    changed: Callable[[Iterable[str]], None]
    _late: set[asyncio.Task[None]] = field(default_factory=set)
    _awaiting: set[str] = field(default_factory=set)

    async def make(
        self, method: str, part: str, call: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Make a call, and wait for its answer for a moment. Raises `CoordinatorFailed`."""
        if self._late:
            self._awaiting.add(part)
            raise CoordinatorFailed(self.pool, method, "it has not answered an earlier call yet")
        task = asyncio.create_task(call(), name=f"{method} at the coordinator of {self.pool}")
        try:
            await asyncio.wait({task}, timeout=PATIENCE_SECONDS)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            self._late.add(task)
            self._awaiting.add(part)
            task.add_done_callback(self._ended)
            raise CoordinatorFailed(self.pool, method, "it has not answered yet")
        if task.cancelled():  # As gRPC does with the calls of a channel that is closed.
            raise CoordinatorFailed(self.pool, method, "its connection was closed")
        task.result()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._late.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("%s", error, exc_info=_fault(error))
        if not self._late:
            parts, self._awaiting = self._awaiting, set()
            self.changed(parts)


def _fault(error: BaseException) -> BaseException | None:
    """An error that nobody was prepared for."""
    return None if isinstance(error, CoordinatorFailed) else error
