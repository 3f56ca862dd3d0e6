"""How the weights of a block come from the disk where the kernel is to read nothing ahead.

What is on its way from the disk cannot be taken back, so it has to be part of what the block was
granted. Within that, large requests are several times as fast as small ones, and large pages cost
next to nothing to map and to give back: 125 MiB in a group with room for 10 came at 580 MB/s in
requests of 128 KiB, with 140 ms of processor time, and at 2,900 MB/s in huge pages, with 4 ms.

For a page that is missing in a mapping with the advice to use huge pages, the kernel reads the
whole 2 MiB of the file that the page lies in, and nothing ahead of them. What is mapped of these
2 MiB, and where, does not matter to it: weights of 1 MiB, each mapped by itself, come in huge pages
as well. So it is given only where a block has these 2 MiB, but for a small part.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from mmap import PAGESIZE
from operator import attrgetter
from typing import Final

from shoal_agent.memory.swapping import HUGE_PAGE_BYTES
from shoal_agent.runtime.mapped_pages import (
    MappedFile,
    PageRange,
    are_cold,
    populate,
    populate_in_pieces,
    read_by_huge_pages,
    whole_pages,
)
from shoal_protocol.page_cache import uncache

_GAP_BYTES: Final = HUGE_PAGE_BYTES // 8
"""So much of a huge page may be no weight of the block: small ones are copied when they are loaded,
and what aligns others lies between them."""

Range = tuple[int, int]
"""From where on in a file, and up to where, in bytes."""


@dataclass(frozen=True, slots=True)
class HugePage:
    """2 MiB of a file, and the parts of them that are mapped, in the order of the file."""

    parts: tuple[PageRange, ...]

    @property
    def first(self) -> PageRange:
        """The first page: the others come with it."""
        return PageRange(self.parts[0].start, self.parts[0].start + PAGESIZE)

    @property
    def last(self) -> PageRange:
        return PageRange(self.parts[-1].end - PAGESIZE, self.parts[-1].end)


@dataclass(frozen=True, slots=True)
class Place:
    """From where on in a file, and up to where, in bytes."""

    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ColdWeights:
    """The weights of a block by how they are read: in huge pages, and the `rest`; and all places in
    files that come with them."""

    huge: tuple[HugePage, ...]
    rest: tuple[PageRange, ...]
    places: tuple[Place, ...]

    @property
    def pages(self) -> list[PageRange]:
        return [*self.rest, *(part for each in self.huge for part in each.parts)]

    def advise(self) -> None:
        """Have the kernel read these huge pages where one page is missing, where it is to read
        nothing ahead."""
        read_by_huge_pages(part for each in self.huge for part in each.parts)

    def bring(self) -> None:
        """Bring them into memory. No more than a huge page is on its way at any time."""
        populate_in_pieces(self.rest)
        for each in self.huge:
            populate([each.first])
            if are_cold([each.last]):  # it was there in part, or the kernel is older than 5.18
                populate_in_pieces(each.parts)
            else:
                populate(each.parts)

    def uncache(self) -> None:
        """Have them leave the page cache, but for those that are in memory."""
        for path, parts in groupby(self.places, attrgetter("path")):
            with suppress(OSError), open(path, "rb", buffering=0) as file:  # it may be removed
                for each in parts:
                    uncache(file.fileno(), each.start, each.end - each.start)


def cold_weights(mapped: Iterable[MappedFile], tables: Sequence[Range] = ()) -> ColdWeights:
    """Of a block, by where its weights lie in files, and where in their file it has `tables` of
    which it reads some rows: these come as they are read."""
    huge, rest, places = list[HugePage](), list[PageRange](), list[Place]()
    pieces = sorted(
        (
            piece
            for each in mapped
            for part in beside_tables(each, tables)
            for piece in _pieces(part)
        ),
        key=lambda each: (each.path, each.offset, each.pages),
    )
    for (path, page), group in groupby(
        pieces, lambda each: (each.path, each.offset // HUGE_PAGE_BYTES)
    ):
        parts = list(group)
        if _covered_bytes(parts) >= HUGE_PAGE_BYTES - _GAP_BYTES:
            huge.append(HugePage(tuple(each.pages for each in parts)))
            places.append(Place(path, page * HUGE_PAGE_BYTES, (page + 1) * HUGE_PAGE_BYTES))
        else:
            rest += [each.pages for each in parts]
            places += [Place(path, each.offset, each.offset + each.pages.size) for each in parts]
    return ColdWeights(tuple(huge), tuple(rest), tuple(_joined(places)))


def beside_tables(mapped: MappedFile, tables: Sequence[Range]) -> Iterator[MappedFile]:
    """The parts of it that are more than pages of tables."""
    start, end = mapped.offset, mapped.offset + mapped.pages.size
    move = mapped.pages.start - mapped.offset
    for table in sorted(tables):
        whole = whole_pages(table[0], table[1] - table[0])
        if start < min(whole.start, end):
            pages = PageRange(start + move, min(whole.start, end) + move)
            yield MappedFile(mapped.path, pages, start)
        start = max(start, whole.end)
    if start < end:
        yield MappedFile(mapped.path, PageRange(start + move, end + move), start)


def _joined(places: Iterable[Place]) -> list[Place]:
    """Those that adjoin or overlap as one, of places in the order of files."""
    found: list[Place] = []
    for each in places:
        if found and found[-1].path == each.path and each.start <= found[-1].end:
            before = found.pop()
            found.append(Place(each.path, before.start, max(before.end, each.end)))
        else:
            found.append(each)
    return found


def _pieces(mapped: MappedFile) -> Iterator[MappedFile]:
    """Parts of it that lie in one huge page of the file each."""
    start, offset = mapped.pages.start, mapped.offset
    while start < mapped.pages.end:
        size = HUGE_PAGE_BYTES - offset % HUGE_PAGE_BYTES
        end = min(mapped.pages.end, start + size)
        yield MappedFile(mapped.path, PageRange(start, end), offset)
        start, offset = end, offset + size


def _covered_bytes(parts: Sequence[MappedFile]) -> int:
    """Of the file, by parts in its order: some may be mapped more than once."""
    covered, end = 0, 0
    for each in parts:
        last = each.offset + each.pages.size
        covered += max(0, last - max(end, each.offset))
        end = max(end, last)
    return covered
