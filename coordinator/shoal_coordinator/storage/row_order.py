"""An array in Fortran order, written again row by row, in bounded memory.

In such a file the elements of one row (one index of the first axis) lie as far apart as the array
has rows, so that reading a row would mean reading all of it. Seen as a matrix, the file holds its
transpose; that is turned in tiles: as many elements of as many rows as fit a buffer, both as long
as can be, so that neither reading nor writing falls apart into single elements.
"""

import math
import os
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

BUFFER_BYTES: Final = 8 << 20
"""Of a tile; there are two at a time, as it was and turned."""


def turn(
    source: int, offset: int, target: int, rows: int, columns: int, element_bytes: int
) -> None:
    """Write the `rows` x `columns` matrix whose transpose stands in the file `source` from `offset`
    on to the file `target`, from its start. Raises `OSError`, `EOFError`."""
    element = np.dtype((np.void, element_bytes))
    room = max(1, BUFFER_BYTES // element_bytes)
    width = max(1, min(columns, max(math.isqrt(room), room // max(rows, 1))))
    height = max(1, min(rows, room // width))
    for first in range(0, columns, width):
        wide = min(width, columns - first)
        for top in range(0, rows, height):
            high = min(height, rows - top)
            tile = np.empty((wide, high), element)
            # Whole columns follow one another in the source, whole rows in the target.
            for column, piece in enumerate(_pieces(tile, whole=high == rows)):
                start = offset + ((first + column) * rows + top) * element_bytes
                _read(source, piece, start)
            turned = np.ascontiguousarray(tile.T)
            for row, piece in enumerate(_pieces(turned, whole=wide == columns)):
                start = ((top + row) * columns + first) * element_bytes
                _write(target, piece, start)


def _pieces(tile: npt.NDArray[np.void], *, whole: bool) -> Iterator[memoryview]:
    """The bytes of each line of a tile, or of all of them in one."""
    lines = tile.reshape(1, -1) if whole else tile
    for line in lines:
        yield line.view(np.uint8).data


def _read(descriptor: int, view: memoryview, at: int) -> None:
    while view:
        count = os.preadv(descriptor, [view], at)
        if not count:
            raise EOFError("it is shorter than it was")
        view, at = view[count:], at + count


def _write(descriptor: int, view: memoryview, at: int) -> None:
    while view:
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count
