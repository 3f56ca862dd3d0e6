"""A limit for ONNX Runtime's arena below the one that it was made with, for as long as a run lasts.

The arena's own limit is fixed when the process starts, and allows all of the budget, whatever else
is in memory. So what a run must not take is taken before it: values that nobody reads. Their pages
are given back at once, only the arena reckons with them. A node that asks for more than what is
left fails before it has touched it, which no watching from outside can see to.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import onnxruntime

from shoal_agent.runtime.mapped_pages import PageRange, drop

_NUMBER_BYTES: Final = 4
_PIECE_BYTES: Final = 1 << 20
_MOST_PIECES: Final = 32
"""Each is in memory for a moment."""


class Ballast:
    """Of the arena that a session of `rehearsal_model.tiny_model` uses."""

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._session = session
        self._size_bytes = 0
        self._held: list[onnxruntime.OrtValue] = []

    @contextmanager
    def hold(self, size_bytes: int) -> Iterator[None]:
        """Leave the arena so much less, in whole pages."""
        self._size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._take()
        try:
            yield
        finally:
            self._size_bytes = 0
            self._held.clear()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Hold nothing for a moment, so that the arena can be emptied."""
        self._held.clear()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        size_bytes = self._size_bytes
        piece = max(_PIECE_BYTES, size_bytes // _MOST_PIECES // mmap.PAGESIZE * mmap.PAGESIZE)
        try:
            for start in range(0, size_bytes, piece):
                size = min(piece, size_bytes - start)
                self._held.append(self._make(size))
                drop([_whole_pages(self._held[-1].data_ptr(), size)])
        except Exception:  # noqa: S110 - the runtime's have no common base; it is full then
            pass

    def _make(self, size_bytes: int) -> onnxruntime.OrtValue:
        count = onnxruntime.OrtValue.ortvalue_from_numpy(np.array([size_bytes // _NUMBER_BYTES]))
        return self._session.run_with_ort_values(["y"], {"count": count})[0]


def _whole_pages(start: int, size: int) -> PageRange:
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    return PageRange(first, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE)
