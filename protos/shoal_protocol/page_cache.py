"""What the kernel keeps of files in memory. It charges that to the group of the process that has
read or written them, whether anybody has it mapped or not; and where a group has no room left, it
may take what is mapped and in use first."""

import os
from typing import BinaryIO, Final

PASSING_BYTES: Final = 4 << 20
"""Of a file that passes through a device: what of it may be in memory. Larger than the largest
pages in which the kernel caches files."""


def cache_in_small_pages(file: BinaryIO) -> None:
    """Have the kernel read nothing ahead of what is read of an open file. What it reads ahead, it
    caches in large pieces, and a whole piece comes into the memory of a process that touches a page
    of it in a mapping: a row of a table brings 1 MiB and more."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)


def uncache(descriptor: int, start: int = 0, size_bytes: int = 0) -> None:
    """Have the kernel drop so many bytes of an open file from one on (0: all that follow), but for
    pages that are mapped or not written to the disk yet. It looks at each page of these that it
    has. Raises `OSError`."""
    os.posix_fadvise(descriptor, start, size_bytes, os.POSIX_FADV_DONTNEED)
