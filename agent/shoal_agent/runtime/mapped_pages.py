"""Pages of mapped files: which addresses there are, bringing them into memory, dropping them.

The kernel maps more than is touched: with a page come its neighbours in the page cache
(fault-around), or the whole huge page; and that goes as a whole when a part of it is dropped. So
what is dropped is a range of pages, and not what was read of it.

Dropping is safe where nothing was written: what a private mapping was written to would be lost.
ONNX Runtime writes to no weights that it has mapped (a test sees to that).

And it is safe for as long as the file stays mapped there: then the addresses are used again, and
anonymous memory that is dropped is zeros. The kernel has no call that drops pages of files only. So
whoever drops pages holds on to what has mapped them, and knows them from what was mapped before and
after: not from paths, for another session may have mapped the same file, and end at any time.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal_agent.memory.swapping import HUGE_PAGE_BYTES
from shoal_protocol.page_cache import uncache

READ_AHEAD_BYTES: Final = 8 << 20
"""What the kernel may hold for a process that reads a file in huge pages: those that it reads ahead
cannot be taken back until they have come from the disk. MiniLM was killed for it in 18 MiB."""
_MADV_NORMAL: Final = 0
_MADV_RANDOM: Final = 1
_MADV_WILLNEED: Final = 3
_MADV_HUGEPAGE: Final = 14
_MADV_NOHUGEPAGE: Final = 15
_MADV_PAGEOUT: Final = 21
_MADV_POPULATE_READ: Final = 22
_PIECE_BYTES: Final = 1 << 20
_REQUEST_BYTES: Final = 128 << 10
"""The kernel cuts longer ones to what a disk takes at once, which is no less than that."""
_SAMPLES: Final = 4
_MADV_DONTNEED: Final = 4
_ENTRY_BYTES: Final = 8
_TOP_BYTE: Final = _ENTRY_BYTES - 1 if sys.byteorder == "little" else 0
_IS_RESIDENT: Final = bytes(top & 0xA0 == 0xA0 for top in range(256))
"""By the top byte of an entry in the kernel's pagemap: bit 63, in memory; bit 61, of a file."""


@dataclass(frozen=True, slots=True, order=True)
class PageRange:
    """Addresses of whole pages."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class MappedFile:
    """Where what begins at an `offset` of a file is mapped, in bytes."""

    path: str
    pages: PageRange
    offset: int


def size_of(ranges: Iterable[PageRange]) -> int:
    return sum(each.size for each in ranges)


REMOVED: Final = " (deleted)"
"""What the kernel adds to the path of a file that was removed."""


def mapped_ranges(folder: Path) -> list[PageRange]:
    """Where this process has mapped files of a folder."""
    return [each.pages for each in all_mapped(folder)]


def all_mapped(folder: Path) -> list[MappedFile]:
    """What this process has mapped of files of a folder, file by file."""
    return [each for mapped in mapped_files(folder).values() for each in mapped]


def mapped_files(folder: Path) -> dict[str, list[MappedFile]]:
    """What this process has mapped of files of a folder, by their paths and its addresses."""
    prefix = f"{folder}/"
    found: dict[str, list[MappedFile]] = {}
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(prefix):
                start, _, end = fields[0].partition("-")
                pages = PageRange(int(start, 16), int(end, 16))
                mapped = MappedFile(fields[5], pages, int(fields[2], 16))
                found.setdefault(fields[5], []).append(mapped)
    return found


def newly_mapped(before: Iterable[MappedFile], after: Iterable[MappedFile]) -> list[MappedFile]:
    """What of `after` is not in `before`."""
    old = [each.pages for each in before]
    return [
        MappedFile(each.path, new, each.offset + new.start - each.pages.start)
        for each in after
        for new in added(old, [each.pages])
    ]


def files_of(paths: Iterable[Path]) -> list[MappedFile]:
    """What this process has mapped of files, also of such as were removed since."""
    wanted = set(map(str, paths))
    folders = {each.parent for each in map(Path, wanted)}
    found = [each for folder in folders for each in mapped_files(folder).items()]
    return [
        each for path, mapped in found if path.removesuffix(REMOVED) in wanted for each in mapped
    ]


def added(before: Iterable[PageRange], after: Iterable[PageRange]) -> tuple[PageRange, ...]:
    """What of `after` is not in `before`: the kernel merges mappings that adjoin."""
    old = sorted(before)
    new: list[PageRange] = []
    for each in sorted(after):
        start = each.start
        for known in old:
            if known.end <= start or each.end <= known.start:
                continue
            if start < known.start:
                new.append(PageRange(start, known.start))
            start = max(start, known.end)
        if start < each.end:
            new.append(PageRange(start, each.end))
    return tuple(new)


def common(some: Iterable[PageRange], others: Iterable[PageRange]) -> list[PageRange]:
    """What is in both, of ranges that do not overlap."""
    left, right = sorted(some, reverse=True), sorted(others, reverse=True)
    both = []
    while left and right:
        start, end = max(left[-1].start, right[-1].start), min(left[-1].end, right[-1].end)
        if start < end:
            both.append(PageRange(start, end))
        (left if left[-1].end == end else right).pop()
    return both


def beyond(ranges: Sequence[PageRange], size: int) -> tuple[PageRange, ...]:
    """The ranges without their first `size` bytes; rather more than less, so that no page and no
    huge page is cut."""
    rest: list[PageRange] = []
    for each in ranges:
        start = _page_start(each, each.start + min(size, each.size))
        size = max(0, size - each.size)
        if start < each.end:
            rest.append(PageRange(start, each.end))
    return tuple(rest)


def _page_start(pages: PageRange, address: int) -> int:
    """Where the page begins that an address may be in the middle of, huge if it may be that."""
    huge = address // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if pages.start <= huge and huge + HUGE_PAGE_BYTES <= pages.end:
        return huge
    return address // mmap.PAGESIZE * mmap.PAGESIZE


def drop(ranges: Iterable[PageRange]) -> None:
    """Let go of the pages; they come back when they are read."""
    for each in ranges:
        _madvise(each, _MADV_DONTNEED)


def page_out(ranges: Iterable[PageRange]) -> None:
    """Have the pages leave memory and the page cache in one step: what is dropped first comes back
    from there while it is in use. Kernels before 5.4 do nothing, and no kernel does where another
    process has them mapped, or another user owns the file."""
    for each in ranges:
        _madvise(each, _MADV_PAGEOUT)


def populate(ranges: Iterable[PageRange]) -> None:
    """Bring the pages into memory. Kernels before 5.14 do not: they come when they are read."""
    for each in ranges:
        _madvise(each, _MADV_POPULATE_READ)


def populate_in_pieces(ranges: Iterable[PageRange]) -> None:
    """The same, where the kernel reads nothing ahead: no more than a piece is on its way."""
    for each in ranges:
        for piece in _pieces(each, _PIECE_BYTES):
            for request in _pieces(piece, _REQUEST_BYTES):
                _madvise(request, _MADV_WILLNEED)
            _madvise(piece, _MADV_POPULATE_READ)


def bring_in(ranges: Sequence[PageRange]) -> None:
    """Bring the pages into memory, and nothing around them."""
    read_nothing_ahead(ranges)
    populate_in_pieces(ranges)


def read_nothing_ahead(ranges: Iterable[PageRange]) -> None:
    """Have the kernel read a page that is missing, and no others around it: what is on its way
    from the disk cannot be taken back, and a disk may be set up to read 8 MiB and more at once. A
    kernel that finds no room for it then ends the process."""
    for each in ranges:
        _madvise(each, _MADV_RANDOM)


@contextmanager
def nothing_read_ahead(ranges: Sequence[PageRange]) -> Iterator[None]:
    """For a while (see `read_nothing_ahead`); then as usual."""
    read_nothing_ahead(ranges)
    try:
        yield
    finally:
        read_ahead(ranges, huge_pages=False)


def read_ahead(ranges: Iterable[PageRange], *, huge_pages: bool) -> None:
    """Have the kernel read what lies around a page that is missing. What comes from the disk then
    is cached in `huge_pages`, where the file system can."""
    for each in ranges:
        _madvise(each, _MADV_NORMAL)
        if huge_pages:
            _madvise(each, _MADV_HUGEPAGE)


def read_by_huge_pages(ranges: Iterable[PageRange]) -> None:
    """Have the kernel read the huge page of the file that a missing page lies in, and no more where
    it is to read nothing ahead (Linux 5.18; before, that page)."""
    for each in ranges:
        _madvise(each, _MADV_HUGEPAGE)


def read_in_no_huge_pages(ranges: Iterable[PageRange]) -> None:
    """Undo that the kernel reads a whole huge page where one page of it is missing: it does so
    also where it reads nothing ahead. No such page is mapped as one piece any more."""
    for each in ranges:
        _madvise(each, _MADV_NOHUGEPAGE)


def huge_part(pages: PageRange, size_bytes: int, most_bytes: int) -> PageRange:
    """What of a range may come in huge pages where its first `size_bytes` are touched: with these
    pages, no more than `most_bytes` of it are in memory. It ends where a huge page does, also
    beyond `size_bytes`."""
    first = -(-pages.start // HUGE_PAGE_BYTES)
    touched = -(-(pages.start + size_bytes) // HUGE_PAGE_BYTES)
    last = min(touched, min(pages.end, pages.start + most_bytes) // HUGE_PAGE_BYTES)
    if last <= first:
        return PageRange(pages.start, pages.start)
    return PageRange(first * HUGE_PAGE_BYTES, last * HUGE_PAGE_BYTES)


def touch_in_huge_pages(pages: PageRange) -> None:
    """Have memory that nobody has touched come in huge pages, when it is."""
    _madvise(pages, _MADV_HUGEPAGE)


def touch_in_small_pages(pages: PageRange) -> None:
    """Have it come page by page, as most memory does."""
    _madvise(pages, _MADV_NOHUGEPAGE)


def read_in_huge_pages(path: Path) -> None:
    """Bring a file into the page cache in huge pages, where the file system can: what was read or
    written otherwise is there in smaller pieces, which take longer to map. Raises `OSError`."""
    size = path.stat().st_size
    if size < HUGE_PAGE_BYTES:
        return
    with path.open("rb") as file:
        uncache(file.fileno())
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            mapped.madvise(_MADV_HUGEPAGE)
            for start in range(0, size, HUGE_PAGE_BYTES):
                mapped[start]  # one huge page, and the kernel reads on ahead
                mapped.madvise(_MADV_DONTNEED, start, min(HUGE_PAGE_BYTES, size - start))


def are_cold(ranges: Sequence[PageRange]) -> bool:
    """Whether reading them would wait for the disk, judged by some of their pages."""
    present = ctypes.c_ubyte(1)
    step = max(_REQUEST_BYTES, size_of(ranges) // _SAMPLES // mmap.PAGESIZE * mmap.PAGESIZE)
    for each in ranges:
        for start in range(each.start, each.end, step):
            _LIBC.mincore(ctypes.c_void_p(start), ctypes.c_size_t(1), ctypes.byref(present))
            if not present.value:
                return True
    return False


def cached_bytes(ranges: Iterable[PageRange]) -> int:
    """What of mapped files is in the page cache."""
    pages = 0
    for each in ranges:
        states = ctypes.create_string_buffer(each.size // mmap.PAGESIZE)
        _LIBC.mincore(ctypes.c_void_p(each.start), ctypes.c_size_t(each.size), states)
        pages += states.raw.count(b"\x01")
    return pages * mmap.PAGESIZE


def are_resident(pagemap: int, pages: PageRange) -> bytes:
    """For each page 1 if it is in this process's memory and of a file; `pagemap` is the open file
    of /proc. Raises `OSError`."""
    count, first = pages.size // mmap.PAGESIZE, pages.start // mmap.PAGESIZE
    entries = os.pread(pagemap, count * _ENTRY_BYTES, first * _ENTRY_BYTES)
    return entries[_TOP_BYTE::_ENTRY_BYTES].translate(_IS_RESIDENT)


def resident_bytes(ranges: Iterable[PageRange]) -> int:
    """What of mapped files is in this process's memory. Raises as `unused_parts`."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pages = sum(are_resident(pagemap.fileno(), each).count(1) for each in ranges)
    return pages * mmap.PAGESIZE


def unused_parts(ranges: Iterable[PageRange]) -> list[PageRange]:
    """What of mapped files is not in this process's memory for the most, in parts of 1 MiB. Raises
    `OSError` where the kernel does not say."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        return [
            part
            for each in ranges
            for part in _pieces(each, _PIECE_BYTES)
            if 2 * mmap.PAGESIZE * are_resident(pagemap.fileno(), part).count(1) < part.size
        ]


def whole_pages(start: int, size: int) -> PageRange:
    """Those that lie in `size` bytes from an address on."""
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    return PageRange(first, max(first, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE))


def pages_around(start: int, size: int) -> PageRange:
    """Those that `size` bytes from an address on lie in, the first and the last in part perhaps."""
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    return PageRange(first, -(-(start + size) // mmap.PAGESIZE) * mmap.PAGESIZE)


def touched_bytes(pages: PageRange) -> int:
    """How far from their start anonymous pages are in memory; 0: none is."""
    states = ctypes.create_string_buffer(pages.size // mmap.PAGESIZE)
    _LIBC.mincore(ctypes.c_void_p(pages.start), ctypes.c_size_t(pages.size), states)
    return (states.raw.rfind(b"\x01") + 1) * mmap.PAGESIZE


def _pieces(pages: PageRange, size: int) -> Iterator[PageRange]:
    for start in range(pages.start, pages.end, size):
        yield PageRange(start, min(pages.end, start + size))


def _madvise(pages: PageRange, advice: int) -> None:
    _LIBC.madvise(pages.start, pages.end - pages.start, advice)


_LIBC: Final = ctypes.CDLL(None)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
