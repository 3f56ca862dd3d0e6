"""A limit for ONNX Runtime's arena below the one that it was made with, for as long as a run lasts.

The arena's own limit is fixed when the process starts, and allows all of the budget, whatever else
is in memory. So what a run must not take is taken before it: values that nobody reads. Their pages
are given back at once, only the arena reckons with them.
They are of other regions than the first, as far as those go, so that what is left is in one piece.
A node that asks for more than that fails before it has touched it, which no watching from outside
can see to.

The arena keeps a table for each of its regions, which is in memory: one byte for 32. Those of what
is held are the agent's own, and no use of the fragment that runs. An agent whose budget has become
a twelfth of what it was has 7 MiB of them beside 19.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import onnxruntime

from shoal_agent.runtime.arena import region_bytes, reserved
from shoal_agent.runtime.mapped_pages import drop, whole_pages
from shoal_agent.runtime.process_memory import MemoryMeter, trim
from shoal_protocol.arena_regions import REGION_BYTES

_SHRINK: Final = ("memory.enable_memory_arena_shrinkage", "cpu:0")
_NUMBER_BYTES: Final = 4
BYTES_OF_A_TABLE_BYTE: Final = 32
_TABLE_BYTES: Final = REGION_BYTES // BYTES_OF_A_TABLE_BYTE
"""Of the region that a run needs anyway."""
_PIECE_BYTES: Final = 1 << 20
_MOST_PIECES: Final = 32
"""Each is in memory for a moment."""


class Ballast:
    """Of the arena that a session of `rehearsal_model.tiny_model` uses."""

    def __init__(
        self, session: onnxruntime.InferenceSession, meter: MemoryMeter, limit_bytes: int
    ) -> None:
        """`limit_bytes` is the arena's."""
        self._session = session
        self._region_bytes = region_bytes(limit_bytes)
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
        self._meter.set_apart(max(0, self._meter.used_bytes() - before - _TABLE_BYTES))
        try:
            yield
        finally:
            self._size_bytes = 0
            self.empty_arena()
            self._meter.set_apart(0)

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
        beyond = self._take_pieces(self._size_bytes)
        del region
        self._take_pieces(self._size_bytes - beyond)

    def _take_pieces(self, size_bytes: int) -> int:
        """Take so much, or what there is; how much that was."""
        piece = max(_PIECE_BYTES, size_bytes // _MOST_PIECES // mmap.PAGESIZE * mmap.PAGESIZE)
        for start in range(0, size_bytes, piece):
            size = min(piece, size_bytes - start)
            try:
                self._held.append(self._make(size))
            except Exception:  # the runtime's have no common base; it is full then
                return start
            drop([whole_pages(self._held[-1].data_ptr(), size)])
        return size_bytes

    def _make(self, size_bytes: int) -> onnxruntime.OrtValue:
        count = onnxruntime.OrtValue.ortvalue_from_numpy(np.array([size_bytes // _NUMBER_BYTES]))
        return self._session.run_with_ort_values(["y"], {"count": count})[0]
