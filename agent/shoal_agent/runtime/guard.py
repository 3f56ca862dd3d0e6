"""Stops a run that takes more memory than there is: one of an item that is larger than those before
it, or of a fragment that has never run."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final

from shoal_agent.runtime.failures import Stopper

_LOOK_SECONDS: Final = 0.001


class Guard:
    """Reads what this process uses a thousand times a second while a run lasts.

    The runtime stops between two nodes, and its arena is limited besides: so what one node takes at
    once may exceed the limit before the run ends, but not what all take together.
    """

    def __init__(self, used_bytes: Callable[[], int], limit_bytes: int, stopper: Stopper) -> None:
        self._used_bytes = used_bytes
        self._limit_bytes = limit_bytes
        self._stopper = stopper
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory guard", daemon=True)
        self.tripped = False

    def __enter__(self) -> "Guard":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            if self._used_bytes() > self._limit_bytes:
                self.tripped = True
                self._stopper.stop()
                return
