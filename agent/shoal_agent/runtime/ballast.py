"""A limit for ONNX Runtime's arena below the one that it was made with, for as long as a run lasts.

The arena's own limit is fixed when the process starts, and allows more than the budget, whatever
else is in memory. So what a run must not take is taken before it: values that nobody reads or
writes, so that only the arena reckons with them. What is left is in one piece: of the first region,
where that is enough, else of those after it. A node that asks for more than that fails before it
has touched it, which no watching from outside can see to.

The arena keeps a table for each of its regions, which is in memory: one byte for 32. Those of what
is held are the agent's own, and no use of the fragment that runs. An agent whose budget has become
a twelfth of what it was has 7 MiB of them beside 19.
"""

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
import onnxruntime

from shoal_agent.runtime.arena import region_bytes, reserved
from shoal_agent.runtime.failures import Exceeded
from shoal_agent.runtime.guard import OTHERS_BYTES, kernel_bytes
from shoal_agent.runtime.process_memory import MemoryMeter, trim
from shoal_agent.runtime.results import RunResult
from shoal_protocol.arena_regions import SMALL_REGION_BYTES, TABLE_SHARE

_SHRINK: Final = ("memory.enable_memory_arena_shrinkage", "cpu:0")
_PIECE_BYTES: Final = 1 << 20
_MOST_PIECES: Final = 32
_MORE_SHARE: Final = 8
_GUARDED_SHARE: Final = 16
_LEAST_SPARE_BYTES: Final = OTHERS_BYTES // 2
"""A run that is stopped has taken up to 0.2 MiB more than it was to take."""
_MAY_GROW: Final = 2
"""By how much a run may take more with all of the arena: 1.75 was measured."""
SCRATCH_SHARE: Final = 32
"""Nodes take memory that they do not ask the arena for; the most that was measured is one byte for
43 that they have of the arena."""


class Room(NamedTuple):
    """What there is for a run: a limit for the whole process, which is planned to take so much
    then, has so much in use and so much on its way. A node takes so much beside the arena, as far
    as that is known; and so much comes with the weights that the run reads."""

    limit_bytes: int
    planned_bytes: int
    used_bytes: int
    coming_bytes: int
    beside_bytes: int = 0
    weight_bytes: int = 0
    in_blocks: bool = False

    @property
    def certain_bytes(self) -> int:
        """What the process may take for sure: what is planned. A plan may leave nothing."""
        return min(self.planned_bytes, self.limit_bytes - _LEAST_SPARE_BYTES)


class Peak(NamedTuple):
    """Of a run within a limit. `bounded`: it keeps to it only where the arena has no more than that
    leaves, not as work runs."""

    size_bytes: int
    bounded: bool = False


class Ballast:
    """Of the arena that a session of `rehearsal_model.tiny_model` uses."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        meter: MemoryMeter,
        budget_bytes: int,
        arena_bytes: int,
    ) -> None:
        """`budget_bytes` is what the arena was made for, `arena_bytes` what it may take."""
        self._session = session
        self._region_bytes = region_bytes(budget_bytes)
        self._arena_bytes = arena_bytes
        self._meter = meter
        self._size_bytes = 0
        self._held: list[onnxruntime.OrtValue] = []

    @contextmanager
    def hold(self, size_bytes: int) -> Iterator[None]:
        """Leave the arena, which is empty, so much less, in whole pages."""
        if size_bytes <= 0:
            yield
            return
        self._size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        before = self._meter.used_bytes()
        self._take()
        tables = self._meter.used_bytes() - before
        # One that the run needs anyway is its own.
        self._meter.set_apart(max(0, tables - self._table_bytes(self._arena_bytes - size_bytes)))
        try:
            yield
        finally:
            self._size_bytes = 0
            self.empty_arena()
            self._meter.set_apart(0)

    def least_peak(
        self,
        run: Callable[[int, int], RunResult],
        room: Room,
        goes_on: Callable[[], None] | None = lambda: None,
    ) -> Peak:
        """The peak of a run. `run` is given a limit, and what it may take for sure, near as that is
        to the limit. First the arena has what is left without its table, weights, what nodes take
        beside it and what the kernel does; but no less than is planned. A run that fails there may
        have asked for far more than there is, or have found no place where little is left: it runs
        once more with an eighth of the limit beyond that, as far as the arena, its table and the
        weights are within the limit. What has passed, with more than half of the limit, runs once
        more with all of the arena, as work does, after a call of `goes_on` (None: it does not):
        tensors lie otherwise then, and may take twice as much, or less. In these runs the guard has
        a sixteenth of the limit for what a node takes until it ends. Raises as the run does."""
        limit_bytes, planned_bytes = room.limit_bytes, room.planned_bytes
        first_bytes = limit_bytes - kernel_bytes(limit_bytes)
        left_bytes, most_bytes = self._left(room, first_bytes), self._most(room, limit_bytes)
        first = self._peak_within(left_bytes, run, first_bytes, room.certain_bytes)
        if isinstance(first, int) and _MAY_GROW * first <= limit_bytes:
            return Peak(first)
        last, guarded_bytes = first, limit_bytes - room.coming_bytes - limit_bytes // _GUARDED_SHARE
        if isinstance(first, Exceeded) and not first.computed:
            more_bytes = left_bytes + max(0, limit_bytes // _MORE_SHARE - room.beside_bytes)
            more_bytes = max(left_bytes, min(more_bytes, most_bytes))
            last = self._peak_within(more_bytes, run, guarded_bytes, 0)
        if goes_on is not None and (isinstance(last, int) or last.computed):
            goes_on()
            planned = first if isinstance(first, int) and first <= planned_bytes else 0
            certain_bytes = room.certain_bytes if planned else 0
            last = self._peak_within(self._arena_bytes, run, guarded_bytes, certain_bytes)
            fits = isinstance(last, int) and last <= max(guarded_bytes, certain_bytes)
            if isinstance(last, int) and (fits or isinstance(first, Exceeded)):
                return Peak(max(planned, last))
        if isinstance(first, int):
            return Peak(first, bounded=True)
        taken_bytes = last.peak_bytes if isinstance(last, Exceeded) else last
        raise Exceeded(str(first), max(first.peak_bytes, taken_bytes, limit_bytes + 1))

    def _left(self, room: Room, size_bytes: int) -> int:
        """For the arena, of so many bytes; but no less than is planned. Of blocks, that is with the
        arena's table: they stream weights as well, and what they touch of an arena with more room
        would come on top of those."""
        left_bytes = self._most(room, size_bytes - OTHERS_BYTES)
        left_bytes -= max(room.beside_bytes, left_bytes // SCRATCH_SHARE)
        if room.in_blocks:
            planned_bytes = self._most(room, room.certain_bytes)
        else:
            planned_bytes = room.certain_bytes - room.used_bytes - room.coming_bytes
            planned_bytes -= room.weight_bytes
        return max(0, left_bytes, planned_bytes - room.beside_bytes)

    def _most(self, room: Room, size_bytes: int) -> int:
        """What the arena may have of so many bytes, with its table, beside all that is known to
        come."""
        left_bytes = size_bytes - room.used_bytes - room.coming_bytes - room.weight_bytes
        least_bytes = min(left_bytes - self._region_bytes // TABLE_SHARE, self._region_bytes)
        return max(0, least_bytes, left_bytes - self._table_bytes(left_bytes))

    def _peak_within(
        self,
        size_bytes: int,
        run: Callable[[int, int], RunResult],
        limit_bytes: int,
        planned_bytes: int,
    ) -> int | Exceeded:
        self.empty_arena()  # a run before, which failed, held some of it until now
        try:
            with self.hold(self._arena_bytes - size_bytes):
                return run(limit_bytes, planned_bytes).peak_bytes
        except Exceeded as error:
            # Without frames, which hold values.
            return Exceeded(str(error), error.peak_bytes, computed=error.computed)

    @property
    def holds(self) -> bool:
        """Whether some of the arena is held back."""
        return self._size_bytes > 0

    def empty_arena(self) -> None:
        """Give back what is not in use of the arena, but for what is held."""
        options = onnxruntime.RunOptions()
        options.add_run_config_entry(*_SHRINK)
        self._held.clear()
        try:
            self._session.run(None, {"count": np.ones(1, np.int64)}, options)
            trim()
        finally:
            self._take()

    def _table_bytes(self, left_bytes: int) -> int:
        """What the table takes of a region that work would have where so much is left."""
        is_beyond = left_bytes > self._region_bytes
        size_bytes = min(2 * self._region_bytes, self._others_bytes) if is_beyond else 0
        return max(size_bytes, self._region_bytes) // TABLE_SHARE

    @property
    def _others_bytes(self) -> int:
        return self._arena_bytes - self._region_bytes - SMALL_REGION_BYTES

    def _take(self) -> None:
        if not self._size_bytes:
            return
        region, left_bytes = reserved(self._region_bytes), self._arena_bytes - self._size_bytes
        if region is not None and left_bytes > self._region_bytes:
            self._held.append(region)
            left = reserved(left_bytes)
            self._take_pieces(self._size_bytes - self._region_bytes)
            del left
            return
        beyond = self._take_pieces(min(self._size_bytes, self._others_bytes))
        del region
        self._take_pieces(self._size_bytes - beyond)

    def _take_pieces(self, size_bytes: int) -> int:
        """Take so much, or what there is; how much that was. No piece is so small that it would be
        of the first region, where nodes have what is small: that would lie in the way elsewhere."""
        taken, pieces = 0, max(1, min(_MOST_PIECES, size_bytes // _PIECE_BYTES))
        while taken < size_bytes:
            piece = max(-(-(size_bytes - taken) // pieces), SMALL_REGION_BYTES + mmap.PAGESIZE)
            piece = -(-piece // mmap.PAGESIZE) * mmap.PAGESIZE
            if (value := reserved(piece)) is None:
                break  # it is full
            self._held.append(value)
            taken, pieces = taken + piece, max(1, pieces - 1)
        return taken
