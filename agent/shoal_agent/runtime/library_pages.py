"""Pages of libraries: how many are in memory, and letting them go while nobody needs them.

A library page in memory is a clean page of a file. When it is dropped, nothing is lost: it is on
disk, and mostly in the page cache still, from where it returns when it is used. An idle agent needs
a few of them, a job needs more, and which ones depends on its model. So they are dropped whenever
the agent has been idle for a moment, and after each load, and those that return are counted apart
from what a fragment takes (`process_memory`).

Only mappings that are not writable and hold no page of this process's own (relocated tables do).
The linear algebra that numpy brings is an exception: its tables are writable, and the kernel maps
most of them when it is loaded. Nobody calls it, so nobody writes to a page between the look at what
is this process's own and the drop of the rest.
"""

import contextlib
import mmap
import os
import re
from collections.abc import Iterable
from typing import Final

from shoal_agent.runtime.mapped_pages import PageRange, are_resident, drop

_TABLES_OF_LINEAR_ALGEBRA: Final = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) rw-p .*/lib(?:\w*openblas|gfortran|quadmath)[^/]*$", re.MULTILINE
)


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
        return are_resident(self._pagemap, pages).count(1)


def drop_unused_tables() -> None:
    """Let go what is in memory of the tables of linear algebra, but for what was written to."""
    with contextlib.suppress(OSError):  # a hardened container
        drop(_clean_pages(_tables_of_linear_algebra()))


def _tables_of_linear_algebra() -> list[PageRange]:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        found = _TABLES_OF_LINEAR_ALGEBRA.findall(maps.read())
    return [PageRange(int(start, 16), int(end, 16)) for start, end in found]


def _clean_pages(ranges: Iterable[PageRange]) -> list[PageRange]:
    """What of them is in memory as it is in the file."""
    clean = []
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for pages in ranges:
            for run in re.finditer(b"\x01+", are_resident(pagemap.fileno(), pages)):
                start, end = (pages.start + index * mmap.PAGESIZE for index in run.span())
                clean.append(PageRange(start, end))
    return clean


def _merged(ranges: Iterable[PageRange]) -> list[PageRange]:
    """Those that adjoin as one."""
    merged: list[PageRange] = []
    for each in sorted(ranges):
        if merged and merged[-1].end == each.start:
            merged[-1] = PageRange(merged[-1].start, each.end)
        else:
            merged.append(each)
    return merged
