"""Lists of short values in a protobuf file, stepped over many at a time.

Each value of an attribute's list has a field of its own: decision trees of 40 MiB are 12 million
fields. Read one by one they take half a minute. Here a list is found by its form alone: the same
tag again and again, each time followed by a value.
"""

import mmap
from typing import Final

import numpy as np

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES: Final = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES: Final = 10
CHUNK_BYTES: Final = 1 << 20


def listed(data: mmap.mmap, tag: int, position: int, end: int) -> tuple[int, int]:
    """How many values of a field of this tag follow at `position`, and where the last of them ends.

    At most as many as `CHUNK_BYTES` hold, and of texts those shorter than 128 bytes: there may be
    more behind, and what is no such value is left to the caller.
    """
    end = min(end, position + CHUNK_BYTES)
    if tag >= 0x80 or position >= end or data[position] != tag:
        return 0, position
    wire = tag & 7
    if wire == _BYTES:
        return _texts(data, tag, position, end)
    chunk = np.frombuffer(data[position:end], np.uint8)
    if wire == _VARINT:
        count, length = _varints(chunk, tag)
    elif wire in _FIXED_BYTES:
        count, length = _fixed(chunk, tag, 1 + _FIXED_BYTES[wire])
    else:
        count = length = 0
    return count, position + length


def _texts(data: mmap.mmap, tag: int, position: int, end: int) -> tuple[int, int]:
    count = 0
    while position + 1 < end and data[position] == tag and (length := data[position + 1]) < 0x80:
        if position + 2 + length > end:
            break
        position += 2 + length
        count += 1
    return count, position


def _fixed(chunk: np.ndarray, tag: int, stride: int) -> tuple[int, int]:
    whole = len(chunk) // stride
    count = _leading(chunk[: whole * stride : stride] == tag)
    return count, count * stride


def _varints(chunk: np.ndarray, tag: int) -> tuple[int, int]:
    """Only the last byte of a number is below 128, and a tag is one such byte: they alternate."""
    ends = np.flatnonzero(chunk < 0x80)
    ends = ends[: len(ends) // 2 * 2]
    tags, values = ends[0::2], ends[1::2]
    starts = np.concatenate(([0], values[:-1] + 1))
    lengths = values - tags
    good = (tags == starts) & (chunk[tags] == tag) & (lengths <= _MAX_VARINT_BYTES)
    count = _leading(good)
    return count, int(values[count - 1]) + 1 if count else 0


def _leading(good: np.ndarray) -> int:
    """How many are true before the first that is not."""
    return len(good) if good.all() else int(good.argmin())
