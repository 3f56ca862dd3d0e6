"""Runs in the event loop's own thread, of fragments that take next to no time.

What costs as much as such a run is done for several of them: clocks are read once for all that run
together, a `Stopper` serves until it was used, and the peak is read after every `_PEAK_EVERY`th
call. The kernel's mark forgets nothing meanwhile. Where weights may come into memory run by run,
rows of a table, it is read after each.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final, TypeVar

from shoal_agent.runtime.failures import OutOfBudget, Stopper, Terminated
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_agent.runtime.results import kept
from shoal_agent.runtime.watchdog import Watchdog
from shoal_protocol.tensors import Array

_PEAK_EVERY: Final = 64
FEW_BYTES: Final = 1 << 20
"""Of weights: so many more in memory than were measured last do no harm."""

Feed = TypeVar("Feed")


class InPassing:
    """Whoever uses it runs one at a time."""

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self._watchdog = Watchdog(self._stop)
        self._stopper = Stopper()
        self._runs = False
        self._passed = 0
        self._peak_bytes = 0

    def run(
        self,
        run: Callable[[Feed, Stopper], list[Array]],
        feeds: Sequence[Feed],
        processor: Callable[[], float],
    ) -> tuple[list[list[Array]], float, float] | None:
        """Run with each of these: the outputs of each, and the part of both times that each had.
        `processor` is the clock of its time. None: it took long, or much; it is to be done the
        other way."""
        try:
            with self._watchdog:
                self._runs = True
                started, used = perf_counter(), processor()
                outputs = [kept(run(feed, self._stopper)) for feed in feeds]
                seconds = (perf_counter() - started) / len(feeds)
                used_seconds = (processor() - used) / len(feeds)
        except (Terminated, OutOfBudget):
            return None
        finally:
            self._runs = False
            if self._stopper.stopped:
                self._stopper = Stopper()
        return outputs, seconds, used_seconds

    def peak_bytes(self, weight_bytes: int) -> int:
        """The peak since the last run of the other kind, as it was read last; `weight_bytes` are
        those of the fragment that ran."""
        if weight_bytes > FEW_BYTES or self._passed % _PEAK_EVERY == 0:
            self._peak_bytes = self._meter.peak_since_begin_bytes()
        self._passed += 1
        return self._peak_bytes

    def begin_peak(self) -> None:
        """There was a run of the other kind."""
        self._passed = 0

    def _stop(self) -> None:
        if self._runs:
            self._stopper.stop()
