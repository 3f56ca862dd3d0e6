"""Stops work in the event loop's thread that takes long: that thread can do nothing else meanwhile,
not even send a heartbeat."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final

LONG_SECONDS: Final = 0.25


class Watchdog:
    """Entered for each piece of work, by one thread. While there is work, a thread checks
    whether one piece takes too long; that thread ends after a while without work."""

    def __init__(self, stop: Callable[[], None], long_seconds: float = LONG_SECONDS) -> None:
        """`stop` is called, from the other thread, for work that has lasted between one and two
        times `long_seconds`, and again while it continues."""
        self._stop = stop
        self._long_seconds = long_seconds
        self._number = 0
        self._busy = False
        self._watched = False
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._number += 1
        self._busy = True
        with self._lock:
            if self._watched:
                return
            self._watched = True
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._busy = False

    def _watch(self) -> None:
        pause = threading.Event()
        seen = -1
        while True:
            pause.wait(self._long_seconds)
            with self._lock:
                if self._number == seen and not self._busy:
                    self._watched = False
                    return
            if self._busy and self._number == seen:
                self._stop()
            seen = self._number
