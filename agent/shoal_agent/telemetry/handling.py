"""What handling takes of the processor besides computing: for each task and each transfer, and for
each byte of a transfer. Under a quota of processor time it is paid like the computing.

Every `_TASKS` runs give an observation: how many tasks and transfers, how many bytes, and the
processor time of this process beyond that of the runs. Both costs are fitted to the last
observations, by the least squares of their relative errors. The tasks of one job all bring about as
many bytes, and then no fit tells the two costs apart; so their usual proportion counts a little.
Until there are observations, a probe of a link suggests both.

A device that waits between messages wakes up for each of them, and handles each by itself. What a
plan has to know is the cost on a device that has as much to do as it can. So an observation counts
by how busy the processor was.

A run of anything else, such as a load, and a rest begin an observation anew. What is known changes
only when it has changed much: plans are made anew for it.
"""

from collections import deque
from collections.abc import Callable, Collection
from time import monotonic, process_time
from typing import Final, NamedTuple

from shoal_protocol.speeds import Speed

_TASKS: Final = 16
_OBSERVATIONS: Final = 16
_REST_SECONDS: Final = 1.0
_CHANGE: Final = 1.1
_EACH_BYTES: Final = 160 << 10
"""What a task or a transfer usually takes, as bytes of a transfer."""
_OF_A_PROBE: Final = 1.6
"""What a byte of an activation takes to one of a probe: it is encoded, checked and put together."""
_USUAL_SECONDS_PER_BYTE: Final = 4e-9
"""Of an activation, where no probe has measured a link: all of them stay on this host."""
_PROPORTION: Final = 1.0
"""How much the usual proportion counts, where an observation counts one."""
_LEAST: Final = 0.1
"""Of what is usual, what either cost is at least."""


class Handling(NamedTuple):
    """Processor time of a task or a transfer, and of a byte."""

    seconds: float
    seconds_per_byte: float


class Moved(NamedTuple):
    """What this process has sent and received for tasks."""

    transfers: int
    size_bytes: int


class _Observation(NamedTuple):
    handled: int
    size_bytes: int
    seconds: float
    weight: float


class HandlingMeter:
    """Fed by whoever runs tasks."""

    def __init__(
        self,
        moved: Callable[[], Moved] = lambda: Moved(0, 0),
        used_seconds: Callable[[], float] = process_time,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`used_seconds` counts this process's processor time, `clock` seconds."""
        self._moved, self._used, self._clock = moved, used_seconds, clock
        self._observations: deque[_Observation] = deque(maxlen=_OBSERVATIONS)
        self._known: Handling | None = None
        self._processors = 1.0
        self.begin()

    def measured(self, speed: Speed) -> None:
        """The calibration has found this."""
        self._processors = min(1.0, speed.processors or 1.0)

    def begin(self) -> None:
        """Observe from now on."""
        self._tasks, self._computed = 0, 0.0
        self._moved_before, self._used_before = self._moved(), self._used()
        self._began = self._ended = self._clock()

    def ran(self, tasks: int, seconds: float, processor_seconds: float) -> None:
        """So many tasks of a fragment ran together."""
        if self._clock() - seconds - self._ended > _REST_SECONDS:
            self.begin()
            return
        self._tasks, self._computed = self._tasks + tasks, self._computed + processor_seconds
        self._ended = self._clock()
        if self._tasks >= _TASKS:
            self._observe()
            self.begin()

    def _observe(self) -> None:
        used, passed = self._used() - self._used_before, self._ended - self._began
        if used <= self._computed or passed <= 0:
            return
        (transfers, size), before = self._moved(), self._moved_before
        busy = min(1.0, used / passed / self._processors)
        self._observations.append(
            _Observation(
                handled=self._tasks + transfers - before.transfers,
                size_bytes=size - before.size_bytes,
                seconds=used - self._computed,
                weight=busy**2,
            )
        )

    def read(self, probed_seconds_per_byte: float | None) -> Handling | None:
        """What is known, with what a probe measured of a byte; None: nothing was measured."""
        per_byte = _USUAL_SECONDS_PER_BYTE
        if probed_seconds_per_byte is not None:
            per_byte = probed_seconds_per_byte * _OF_A_PROBE
        elif not self._observations:
            return None
        now = _fitted(self._observations, Handling(_EACH_BYTES * per_byte, per_byte))
        if self._known is None or any(map(_differ, now, self._known)):
            self._known = now
        return self._known


def _fitted(observations: Collection[_Observation], usual: Handling) -> Handling:
    """The costs that fit best, by what part of an observation each misses: the solution of two
    linear equations, for what they are to what is usual."""
    if not observations:
        return usual
    each_squared, product, byte_squared = _PROPORTION, -_PROPORTION, _PROPORTION
    each_sum, byte_sum = 0.0, 0.0
    for observed in observations:
        each = observed.handled * usual.seconds / observed.seconds
        byte = observed.size_bytes * usual.seconds_per_byte / observed.seconds
        each_squared += observed.weight * each**2
        byte_squared += observed.weight * byte**2
        product += observed.weight * each * byte
        each_sum += observed.weight * each
        byte_sum += observed.weight * byte
    determinant = each_squared * byte_squared - product**2
    each = (each_sum * byte_squared - byte_sum * product) / determinant
    byte = (byte_sum * each_squared - each_sum * product) / determinant
    return Handling(max(_LEAST, each) * usual.seconds, max(_LEAST, byte) * usual.seconds_per_byte)


def _differ(one: float, other: float) -> bool:
    return not other / _CHANGE < one < other * _CHANGE
