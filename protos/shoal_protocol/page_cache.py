"""What the kernel keeps of files in memory. It charges that to the group of the process that has
read or written them, whether anybody has it mapped or not; and where a group has no room left, it
may take what is mapped and in use first."""

import os
from typing import BinaryIO, Final

WRITTEN_BYTES: Final = 4 << 20
"""What is written of a file before it leaves memory for the disk, where it is not to stay."""


def cache_in_small_pages(file: BinaryIO) -> None:
    """Have the kernel read nothing ahead of what is read of an open file. What it reads ahead, it
    caches in large pieces, and a whole piece comes into the memory of a process that touches a page
    of it in a mapping: a row of a table brings 1 MiB and more."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)


def uncache(descriptor: int, size_bytes: int = 0) -> None:
    """Have the kernel drop the first bytes of an open file (0: all), but for pages that are mapped
    or not written to the disk yet. Raises `OSError`."""
    os.posix_fadvise(descriptor, 0, size_bytes, os.POSIX_FADV_DONTNEED)
