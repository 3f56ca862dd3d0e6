"""Keeps a run within the memory that there is: one of an item that is larger than those before it,
or of a fragment that has never run. It makes room by dropping pages of weights; where that is not
enough, it stops the run. It stops one that takes too long as well."""

import threading
from collections.abc import Callable
from time import perf_counter
from types import TracebackType
from typing import Final

from shoal_agent.runtime.failures import NoRoomForOutputs, Stopper
from shoal_agent.runtime.process_memory import MemoryMeter

_LOOK_SECONDS: Final = 0.001
_NEAR: Final = 8
"""Weights are dropped when one part in so many of the limit is left: between two looks a node may
take as much."""
OTHERS_BYTES: Final = 768 << 10
"""What a run and other threads take besides what is reckoned with: up to 0.3 MiB was measured. And
the kernel charges a group 256 KiB ahead on each processor: what another one has of it comes back
too late."""
_READING_ERROR_BYTES: Final = 256 << 10
"""What a process has in memory may seem to be so much more than it is (`process_memory`)."""
_KERNEL_BYTES: Final = 1792 << 10
_NO_KERNEL_BYTES: Final = 16 << 20
_KERNEL_SHARE: Final = 32

TRIAL_SECONDS: Final = 60.0
"""What is made up for a trial may be what no item is, and a loop have no end for it."""
READ_BYTES: Final = 4 << 20
"""Of weights that were dropped a run may read so much again before the guard looks, if they come
from the disk. From the page cache, 16 MiB came within a millisecond."""


def kernel_bytes(limit_bytes: int) -> int:
    """The kernel's own memory for a process is charged to its group: with 87 MiB, full buffers of
    sockets and tables of pages were 1.7 MiB more at work than in idleness. Small budgets have shown
    nothing of that: what goes through sockets there is small as well."""
    return min(_KERNEL_BYTES, max(0, limit_bytes - _NO_KERNEL_BYTES) // _KERNEL_SHARE)


def stop_bytes(limit_bytes: int, planned_bytes: int = 0) -> int:
    """Beyond how much a run is stopped. Something is left of the limit for what nobody knows of.
    But what takes no more than planned is not stopped for that: work takes as much, unguarded; nor
    for what the kernel's counter may be too high, where that is within the limit."""
    seen_bytes = min(planned_bytes + _READING_ERROR_BYTES, limit_bytes)
    return max(limit_bytes - OTHERS_BYTES, planned_bytes, seen_bytes)


class Guard:
    """Reads what this process uses a thousand times a second while a run lasts.

    Near the limit it has weights dropped: the run reads them again. The runtime stops between two
    nodes, and its arena is limited besides: so what one node takes at once may exceed the limit
    before the run ends, but not what all take together.
    """

    def __init__(
        self,
        meter: MemoryMeter,
        limit_bytes: int,
        stopper: Stopper,
        let_go: Callable[[], None] | None = None,
        planned_bytes: int = 0,
        *,
        come_slowly: bool = False,
    ) -> None:
        """`let_go` drops the weights; where they `come_slowly`, they are dropped again and again,
        since there is no room for all. `planned_bytes` is what this process may take all in all
        when all is as planned."""
        self._meter = meter
        self._stop_bytes = stop_bytes(limit_bytes, planned_bytes)
        self._near_bytes = limit_bytes - limit_bytes // _NEAR
        self._stopper = stopper
        self._let_go = let_go
        self._come_slowly = come_slowly
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory guard", daemon=True)
        self.dropped = False
        self.tripped = self.late = False

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

    def make_room(self, size_bytes: int) -> None:
        """Ask for what the run takes next outside of the arena. Raises `NoRoomForOutputs`."""
        at_most = self._meter.used_at_most_bytes() + size_bytes
        if self._let_go is not None and at_most > self._stop_bytes:
            self._let_go()
            self.dropped = True
        if self._meter.used_bytes() + size_bytes > self._stop_bytes:
            raise NoRoomForOutputs("there is no room for its outputs")

    def _watch(self) -> None:
        drop_bytes = self._after_drop(self._meter.used_at_most_bytes())
        while not self._ended.wait(_LOOK_SECONDS):
            if perf_counter() > self._stopper.until:
                self.late = True
                self._stopper.stop()
                return
            if self._meter.used_at_most_bytes() <= drop_bytes:
                continue
            used = self._meter.used_bytes()
            if self._let_go is not None and used > drop_bytes:
                self._let_go()
                self.dropped = True
                used = self._meter.used_bytes()
                drop_bytes = self._after_drop(used)
            if used > self._stop_bytes:  # the kernel kills where it finds no more
                self.tripped = True
                self._stopper.stop()
                return

    def _after_drop(self, used_bytes: int) -> int:
        """Beyond how much weights are to be dropped, now that they have been."""
        if not self._come_slowly:
            return self._near_bytes
        return min(used_bytes + READ_BYTES, self._near_bytes)
