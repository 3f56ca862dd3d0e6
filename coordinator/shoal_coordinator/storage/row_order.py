"""An array in Fortran order, copied in C order in bounded memory.

In such a file the elements of one row (one index of the first axis) lie as far apart as the array
has rows, so that reading a row would mean reading all of it. NumPy transposes it tile by tile
between two maps: as many elements of as many rows as fit a tile, both as long as can be, so that
neither side is touched element by element.
"""

import math
import os
from typing import BinaryIO, Final

import numpy as np

TILE_BYTES: Final = 8 << 20


def copy_in_c_order(
    source: BinaryIO, offset: int, target: BinaryIO, *, rows: int, columns: int, element_bytes: int
) -> None:
    """Write the `rows` x `columns` matrix whose transpose begins at `offset` of `source` to the
    start of `target`. Both files are mapped, so nobody else may be able to cut them short. Raises
    `OSError` if the disk is full."""
    if not rows * columns:
        return
    os.posix_fallocate(target.fileno(), 0, rows * columns * element_bytes)
    element = np.dtype((np.void, element_bytes))
    old = np.memmap(source, element, "r", offset, (columns, rows)).T
    new = np.memmap(target, element, "r+", 0, (rows, columns))
    room = max(1, TILE_BYTES // element_bytes)
    width = max(1, min(columns, max(math.isqrt(room), room // rows)))
    height = max(1, min(rows, room // width))
    for left in range(0, columns, width):
        for top in range(0, rows, height):
            tile = slice(top, top + height), slice(left, left + width)
            new[tile] = old[tile]
