"""What devices were measured to take at most, and which were above their budgets when last.

Three things are measured: the peak of each task, the memory in use when telemetry is sent, and the
highest mark since the agent started, which also covers loads. That mark stays, so it counts once:
when it has grown. A coordinator that starts again receives the marks of agents that did not, and
counts those as of now. What is reported in the minute after a budget became smaller may have been
measured before, so it counts only where it is above both; so does what is reported in the first
minute of an agent whose budget was larger once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Final

from shoal_coordinator.server.wire import size
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.v1.session_pb2 import Executed, Hello, Telemetry

_KNOWN_DEVICES: Final = 10_000
_CHANGE_SECONDS: Final = 60.0


@dataclass(slots=True)
class _Marks:
    """Of one life of an agent: the highest measurement, and when one was above which budget, with
    the highest of those above that budget."""

    incarnation: int
    highest: int = 0
    budget: int | None = None
    above: int = 0
    at: float = 0.0
    budget_before: int = 0
    changed_at: float = -inf

    def note(self, measured: int, budget: int, now: float) -> None:
        measured = size(measured)
        self.highest = max(self.highest, measured)
        if now - self.changed_at < _CHANGE_SECONDS:
            budget = max(budget, self.budget_before)
        if measured > budget:
            self.above = max(measured, self.above if budget == self.budget else 0)
            self.budget, self.at = budget, now


class Excesses:
    """By device; what a device measured in an earlier life counts no more."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._marks: dict[str, _Marks] = {}

    def changed(self, hello: Hello, budget_before: int) -> None:
        """A device has another budget from now on."""
        known, now = self._of(hello), self._clock()
        if now - known.changed_at < _CHANGE_SECONDS:
            budget_before = max(budget_before, known.budget_before)
        known.budget_before, known.changed_at = budget_before, now

    def reported(self, hello: Hello, telemetry: Telemetry) -> None:
        """A device has sent telemetry."""
        known, measured = self._of(hello), telemetry.used_bytes
        if telemetry.peak_bytes > known.highest:
            measured = max(measured, telemetry.peak_bytes)
        known.note(measured, hello.budget_bytes, self._clock())

    def executed(self, hello: Hello, executed: Executed) -> None:
        """A device has finished a task."""
        self._of(hello).note(executed.peak_bytes, hello.budget_bytes, self._clock())

    def highest(self, device: str) -> int:
        """The most that a device was measured to take, in bytes, telemetry or not; 0 if unknown."""
        known = self._marks.get(device)
        return 0 if known is None else known.highest

    def of(self, device: str) -> pb.BudgetExcess | None:
        """The last excess of a device; None: there was none."""
        known = self._marks.get(device)
        if known is None or known.budget is None:
            return None
        seconds = self._clock() - known.at
        return pb.BudgetExcess(peak_bytes=known.above, budget_bytes=known.budget, seconds=seconds)

    def _of(self, hello: Hello) -> _Marks:
        known = self._marks.pop(hello.device, None)
        if known is None or known.incarnation != hello.incarnation:
            known = _Marks(hello.incarnation, changed_at=self._clock())
            known.budget_before = size(hello.largest_budget_bytes)
        self._marks[hello.device] = known
        while len(self._marks) > _KNOWN_DEVICES:
            del self._marks[next(iter(self._marks))]
        return known
