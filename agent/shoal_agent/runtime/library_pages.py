"""Pages of libraries: how many are in memory, and letting them go while nobody needs them.

A library page in memory is a clean page of a file. When it is dropped, nothing is lost: it is on
disk, and mostly in the page cache still, from where it returns when it is used. An idle agent needs
a few of them, a job needs more, and which ones depends on its model. So they are dropped whenever
the agent has been idle for a moment, and after each load, and those that return are counted apart
from what a fragment takes (`process_memory`).

Only mappings that are not writable and hold no page of this process's own (relocated tables do).
"""

import mmap
import os
import sys
from collections.abc import Iterable
from typing import Final

from shoal_agent.runtime.mapped_pages import PageRange, drop

_ENTRY_BYTES: Final = 8
_TOP_BYTE: Final = _ENTRY_BYTES - 1 if sys.byteorder == "little" else 0
_IS_RESIDENT: Final = bytes(top & 0xA0 == 0xA0 for top in range(256))
"""By the top byte of an entry in the kernel's pagemap: bit 63, in memory; bit 61, of a file."""


class LibraryPages:
    """Mappings of libraries in this process."""

    def __init__(self, mappings: Iterable[PageRange]) -> None:
        """Raises `OSError` where the kernel does not say which pages are in memory."""
        self._ranges = _merged(mappings)
        self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def resident_bytes(self) -> int:
        """Bytes of them in memory; counting takes a third of a millisecond."""
        return mmap.PAGESIZE * sum(map(self._resident_pages, self._ranges))

    def drop(self) -> None:
        """Let all of them go."""
        drop(self._ranges)

    def _resident_pages(self, pages: PageRange) -> int:
        count, first = pages.size // mmap.PAGESIZE, pages.start // mmap.PAGESIZE
        entries = os.pread(self._pagemap, count * _ENTRY_BYTES, first * _ENTRY_BYTES)
        return entries[_TOP_BYTE::_ENTRY_BYTES].translate(_IS_RESIDENT).count(1)


def _merged(ranges: Iterable[PageRange]) -> list[PageRange]:
    """Those that adjoin as one."""
    merged: list[PageRange] = []
    for each in sorted(ranges):
        if merged and merged[-1].end == each.start:
            merged[-1] = PageRange(merged[-1].start, each.end)
        else:
            merged.append(each)
    return merged
