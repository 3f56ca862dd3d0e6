"""A limit for ONNX Runtime's arena below the one that it was made with, for as long as a run lasts.

The arena's own limit is fixed when the process starts, and allows more than the budget, whatever
else is in memory. So what a run must not take is taken before it: values that nobody reads or
writes, so that only the arena reckons with them. They are of other regions than the first, as far
as those go, so that what is left is in one piece. A node that asks for more than that fails before
it has touched it, which no watching from outside can see to.

The arena keeps a table for each of its regions, which is in memory: one byte for 32. Those of what
is held are the agent's own, and no use of the fragment that runs. An agent whose budget has become
a twelfth of what it was has 7 MiB of them beside 19.
"""

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

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
SCRATCH_SHARE: Final = 32
"""Nodes take memory that they do not ask the arena for; the most that was measured is one byte for
43 that they have of the arena."""


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
        # That of the first region is one which the run needs anyway.
        self._meter.set_apart(max(0, tables - self._region_bytes // TABLE_SHARE))
        try:
            yield
        finally:
            self._size_bytes = 0
            self.empty_arena()
            self._meter.set_apart(0)

    def least_peak(
        self,
        run: Callable[[int, int], RunResult],
        planned_bytes: int,
        limit_bytes: int,
        *,
        used_bytes: int,
        coming_bytes: int,
        beside_bytes: int = 0,
    ) -> int:
        """The peak of a run within a limit, for which so much is planned, where so much is in use
        and so much on its way, and a node takes so much beside the arena, as far as that is known.
        `run` is given the limit, and what it may take for sure, near as that is to the limit. The
        arena has what is left without its table, what nodes take beside it and what the kernel
        does. Near the end of that tensors lie otherwise, and take more. So a run that takes more
        than planned runs once more with all of the arena, as work does; where a node failed, with
        an eighth of the limit more, but for what is known to come beside it, since it may have
        asked for far more than there is. Then the guard stops it, and has a sixteenth of the limit
        for what a node takes until it does. Raises as the run does."""
        first_bytes = limit_bytes - kernel_bytes(limit_bytes)
        left_bytes = first_bytes - used_bytes - coming_bytes - OTHERS_BYTES
        left_bytes = max(0, left_bytes - self._region_bytes // TABLE_SHARE)
        left_bytes = max(0, left_bytes - max(beside_bytes, left_bytes // SCRATCH_SHARE))
        certain_bytes = min(planned_bytes, limit_bytes)
        first = self._peak_within(left_bytes, lambda: run(first_bytes, certain_bytes))
        if isinstance(first, int) and first <= planned_bytes:
            return first
        self.empty_arena()  # the run that failed held some of it until now
        computed = isinstance(first, int) or first.computed
        more_bytes = self._arena_bytes
        if not computed:
            more_bytes = left_bytes + max(0, limit_bytes // _MORE_SHARE - beside_bytes)
        second_bytes = limit_bytes - coming_bytes - limit_bytes // _GUARDED_SHARE
        second = self._peak_within(more_bytes, lambda: run(second_bytes, 0))
        if isinstance(first, int):
            return first if isinstance(second, Exceeded) else min(first, second)
        if isinstance(second, Exceeded):
            raise Exceeded(str(first), max(first.peak_bytes, second.peak_bytes, limit_bytes + 1))
        return second

    def _peak_within(self, size_bytes: int, run: Callable[[], RunResult]) -> int | Exceeded:
        try:
            with self.hold(self._arena_bytes - size_bytes):
                return run().peak_bytes
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

    def _take(self) -> None:
        region = reserved(self._region_bytes) if self._size_bytes else None
        others = self._arena_bytes - self._region_bytes - SMALL_REGION_BYTES
        beyond = self._take_pieces(min(self._size_bytes, others))
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
