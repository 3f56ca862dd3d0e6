"""The elements of arrays, in the one form in which they travel and are stored."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def little_endian(array: Array) -> Array:
    if array.dtype.byteorder == ">":
        return array.astype(array.dtype.newbyteorder("<"))
    return array


def truths(array: Array) -> Array:
    """With 0 or 1 for each truth value: what was viewed as such, like a mask of 0 and 255, has
    other bytes, which NumPy takes for true, and receivers refuse."""
    if array.dtype == bool and array.view(np.uint8).max(initial=0) > 1:
        sound: Array = array.view(np.uint8) != 0
        return sound
    return array
