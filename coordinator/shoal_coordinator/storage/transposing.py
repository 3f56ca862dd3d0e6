"""Matrices in files, transposed."""

import math
import os
from typing import BinaryIO, Final

import numpy as np

TILE_BYTES: Final = 8 << 20
"""Of two files in memory, while one is the other transposed."""


def copy_in_c_order(
    source: BinaryIO, offset: int, target: BinaryIO, *, rows: int, columns: int, element_bytes: int
) -> None:
    """Write the `rows` x `columns` matrix whose transpose begins at `offset` of `source` to the
    start of `target`. Both files are mapped, so nobody else may be able to cut them short. Raises
    `OSError` if the disk is full.

    The elements of one row lie as far apart as there are rows, so that reading a row would mean
    reading all of it. NumPy transposes tile by tile: as many elements of as many rows as fit, both
    as long as can be, so that neither file is touched element by element.
    """
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
