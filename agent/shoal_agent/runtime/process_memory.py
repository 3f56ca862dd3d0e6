"""This process's own memory: what it takes now, what it took at most, and giving it back.

*Resident* is the kernel's VmRSS: anonymous pages, and pages of mapped files that are in this
process's page tables (libraries, weights). Mapped weights count, though the kernel could take clean
ones back at any time: the budget promises what the device has to find, not what it might get away
with. Under a limit that is near, the kernel does take them back, and resident memory, its highest
mark too, is then what the process was left with, at the price of reading pages again.

The *floor* is what the agent takes for itself: the resident memory of the idle process (ONNX
Runtime loaded, its arena made, one of everything rehearsed that jobs ask for, the coordinator
connected; freed heap given back, library pages dropped), a reserve for library pages that return
when they are used, and one for what its heap grows by. All use is above it. The *peak* is the
highest mark since the floor was taken, less what was resident then, and less the library pages that
have returned and what the heap has grown by, up to their reserves: these are no use of a fragment,
but neither may they exceed what is reserved for them. The mark is the kernel's own (VmHWM), which
misses nothing between samples. It is not exact: each processor adds what it has counted when that
is 32 pages of a kind, so the mark may be 128 KiB too high, or too low, for each processor (from
Linux 6.2 on; 172 KiB were seen on two).

So resident memory never exceeds floor + budget while use is within the budget, and pages that stay
away lend their reserve to nobody.
"""

import contextlib
import ctypes
import gc
import os
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal_agent.runtime.library_files import library_files
from shoal_agent.runtime.library_pages import LibraryPages, drop_unused_tables
from shoal_agent.runtime.mapped_pages import REMOVED, PageRange, drop
from shoal_protocol.heap_reserve import HEAP_RESERVE_BYTES
from shoal_protocol.page_cache import cache_libraries_in_small_pages

_STATUS_BYTES: Final = 8192
_FIELDS: Final = re.compile(rb"^Vm(HWM|RSS):\s+(\d+) kB", re.MULTILINE)
_RESET_PEAK: Final = b"5"
_MARK: Final = 0
_RESIDENT: Final = 1
_ATTEMPTS: Final = 10
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_MALLOC_TRIM: Final = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""Looked up once: to open a library takes longer than to call it."""
_MAPPING: Final = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+) *(.*)|^(Anonymous): +(\d+) kB"
)
LIBRARY_RESERVE_BYTES: Final = 24 << 20
"""For library pages that return to an agent at work: 11 MiB with a model of matrix products alone,
18 with one of convolutions whose tensors are compressed, 24 with all that the rehearsal does. With
20, a device of a cluster was measured at 106 % of its budget."""
RESERVES_BYTES: Final = (LIBRARY_RESERVE_BYTES, HEAP_RESERVE_BYTES)
LOADING_BYTES: Final = 256 << 10
"""What loading a fragment takes of the heap, and gives back: 0.1 MiB was seen."""
MAPPED_FROM_BYTES: Final = 128 << 10
_MAPPED_ALWAYS_BYTES: Final = 2 << 20
_HEAP_PART: Final = 64
_HEAP_FREE: Final = 8
"""Blocks from here on come from mappings of their own, and go back to the kernel when freed: the
first where a budget is small, the second where it is large, a part of the budget in between. So
many of them may be free at the heap's end: the frames of one transfer. `Buffers` counts them."""


class MemoryMeter:
    """Resident bytes above the floor, from the kernel's counters of this process. Thread-safe."""

    def __init__(self) -> None:
        self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        self._clear: int | None
        try:
            self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:  # a hardened container
            self._clear = None
        self._lock = threading.Lock()
        self._idle_bytes = 0
        self._highest_bytes = 0
        self._mark_at_floor = 0
        self._libraries: LibraryPages | None = None
        self._reserve_bytes = 0
        self._heap_reserve_bytes = 0
        self._grown_bytes = 0
        self.beyond_reserve_bytes = 0
        """What the heap has grown by beyond its reserve, as `note_growth` has found last."""
        self._returned_bytes = 0
        self._returned_at_most_bytes = 0
        self._apart_bytes = 0
        self._counted_at_bytes = 0
        self._seen = (0, 0)

    @property
    def floor_bytes(self) -> int:
        """What the agent takes for itself; 0 before `settle`."""
        return self._idle_bytes + self._reserve_bytes + self._heap_reserve_bytes

    def settle(self, library_reserve_bytes: int = 0, heap_reserve_bytes: int = 0) -> int:
        """Take the floor from what is resident now, trimmed; peaks count from here.

        With a reserve for library pages, they are dropped first, and at each `give_back` from now
        on; where the kernel does not let this process see which pages return, they stay. What the
        heap has grown by, of which `note_growth` knows, is no use up to its reserve.
        """
        gc.collect()
        gc.freeze()  # what is there now stays: `Runtime.close` need not look through it
        trim()
        with self._lock:
            mappings = _library_mappings() if library_reserve_bytes else []
            if mappings and self._libraries is None and self._clear is not None:
                with contextlib.suppress(OSError):
                    self._libraries = LibraryPages(mappings)
            if self._libraries is not None:
                self._reserve_bytes = library_reserve_bytes
                self._drop_libraries()
            self._reset_mark()
            self._read_floor()
            self._heap_reserve_bytes, self._grown_bytes = heap_reserve_bytes, 0
            self._highest_bytes = 0
            self._counted_at_bytes = 0
        return self.floor_bytes

    def give_back(self, *, still_in_use: bool = False) -> None:
        """Give back what nobody may need now: freed heap, and library pages, of which those that
        are needed return when they are used: some milliseconds of work. Where many are in use
        still, they are dropped only when they have taken up most of their reserve."""
        trim()
        with self._lock:
            if self._libraries is None:
                return
            self._counted_at_bytes = 0
            self._record_mark()
            if not still_in_use or self._nearly_all_returned():
                self._drop_libraries()
                self._reset_mark()

    def note_growth(self, held_bytes: int) -> None:
        """No fragment is open: what is in use, but for so much that is held for work, is what the
        agent's own heap has grown by, and no use of what comes."""
        with self._lock:
            self._counted_at_bytes = 0
            self._record_mark()
            self._grown_bytes = 0
            grown = self._above(self._counted(_RESIDENT)) - held_bytes
            self._grown_bytes = min(max(0, grown), self._heap_reserve_bytes)
            self.beyond_reserve_bytes = max(0, grown - self._heap_reserve_bytes)
            self._reset_mark()

    def set_apart(self, size_bytes: int) -> None:
        """So much is the agent's own from now on, as library pages are that have returned, if the
        reserve of those has room for it."""
        with self._lock:
            self._counted_at_bytes = 0
            before, self._apart_bytes = self._apart_bytes, max(self._apart_bytes, size_bytes)
            self._record_mark()  # what is in memory now, or was until now, is no use
            self._apart_bytes = size_bytes
            if size_bytes < before:
                self._reset_mark()

    def used_bytes(self) -> int:
        """Resident bytes above the floor now; never below zero."""
        with self._lock:
            self._counted_at_bytes = 0
            return self._above(self._counted(_RESIDENT))

    def used_at_most_bytes(self) -> int:
        """No less than `used_bytes`, in a fraction of its time: library pages that have returned
        since they were counted are in it."""
        with self._lock:
            return self._above(self._counted(_RESIDENT, counts=1))

    def begin_peak(self, *, recount: bool = True) -> None:
        """Start a new highest mark, for `peak_since_begin_bytes`. To count library pages takes
        longer than a light run. Without `recount` they are counted where memory has grown, or
        seems to be more than ever: the peak may be taken for more then, but not for that much.
        Where they have taken up most of their reserve, they are dropped: an agent that always has
        work never rests."""
        if self._clear is not None:
            with self._lock:  # between reading the mark and the reset nobody else may read it
                self._record_mark()
                if self._nearly_all_returned():
                    self._drop_libraries()
                self._reset_mark()
                if recount:
                    self._counted_at_bytes = 0

    def peak_since_begin_bytes(self) -> int:
        """The most above the floor since `begin_peak`; where marks cannot be reset, the present."""
        if self._clear is None:
            return self.used_bytes()
        with self._lock:
            return self._record_mark()

    def peak_bytes(self) -> int:
        """The most above the floor since `settle`.

        Where marks cannot be reset, the mark is the start's until use passes that, and until then
        only what is seen at calls counts.
        """
        with self._lock:
            seen = self._read()
            is_of_start = self._clear is None and seen[_MARK] == self._mark_at_floor
            if seen != self._seen:
                self._counted_at_bytes = 0  # the kernel may have taken pages meanwhile
                self._seen = seen
            most = self._counted(_RESIDENT if is_of_start else _MARK)
            self._highest_bytes = max(self._highest_bytes, self._mark_above(most))
            return self._highest_bytes

    def reading(self) -> tuple[int, int]:
        """`peak_bytes`, and what is used now. Library pages are counted where memory has changed
        since the last reading, and only once: an idle agent does little but report both."""
        return self.peak_bytes(), self.used_at_most_bytes()

    def _read_floor(self) -> None:
        """Library pages are no part of it: those that return have their reserve. Other threads
        bring some back at any moment. What returned between reading resident memory and counting
        these pages would be use for ever, so both are read until nothing did."""
        libraries = self._library_bytes()
        for _ in range(_ATTEMPTS):
            self._mark_at_floor, resident = self._read()
            before, libraries = libraries, self._library_bytes()
            self._idle_bytes = resident - libraries
            if libraries == before:
                return

    def _library_bytes(self) -> int:
        return 0 if self._libraries is None else self._libraries.resident_bytes()

    def _counted(self, which: int, counts: int = _ATTEMPTS) -> int:
        """The mark or resident memory, for which library pages are counted. Other threads bring
        some back at any moment. What returned between reading memory and counting these pages would
        hide as much use, so memory is read again. What comes after the last count seems to be use:
        where this process waits for a processor that may be all of them. So they are counted again
        for as long as memory grows and they return."""
        size, returned = self._read()[which], -1
        for _ in range(counts):
            if not self._count_returned(size) or self._returned_bytes == returned:
                break
            returned = self._returned_bytes
            size = max(size, self._read()[which])
        return size

    def _above(self, resident_bytes: int) -> int:
        """So much resident memory now is how much above the floor?"""
        return self._use(resident_bytes, self._returned_bytes)

    def _mark_above(self, mark_bytes: int) -> int:
        """So much at the mark was how much above the floor? Library pages that were in memory then
        may have gone since: where a group is at its limit, the kernel takes them."""
        return self._use(mark_bytes, self._returned_at_most_bytes)

    def _use(self, resident_bytes: int, returned_bytes: int) -> int:
        own_bytes = min(returned_bytes + self._apart_bytes, self._reserve_bytes)
        return max(0, resident_bytes - self._idle_bytes - own_bytes - self._grown_bytes)

    def _count_returned(self, resident_bytes: int) -> bool:
        """Library pages return while memory grows: they are counted when there is more than when
        they were counted last. They may also return where other memory was given back: whoever has
        to know resets that. Whether they were counted."""
        if self._libraries is None or resident_bytes <= self._counted_at_bytes:
            return False
        self._returned_bytes = min(self._libraries.resident_bytes(), self._reserve_bytes)
        self._returned_at_most_bytes = max(self._returned_at_most_bytes, self._returned_bytes)
        self._counted_at_bytes = resident_bytes
        return True

    def _nearly_all_returned(self) -> bool:
        """Whether library pages have taken up most of their reserve: what comes beyond is use."""
        return 4 * self._returned_bytes > 3 * self._reserve_bytes

    def _drop_libraries(self) -> None:
        assert self._libraries is not None
        self._libraries.drop()
        self._returned_bytes = self._counted_at_bytes = 0

    def _record_mark(self) -> int:
        """The highest mark, above the floor."""
        counted_at_bytes = self._counted_at_bytes
        if (above := self._mark_above(self._counted(_MARK))) > self._highest_bytes:
            if counted_at_bytes == self._counted_at_bytes:  # they were not counted just now
                self._counted_at_bytes = 0  # library pages that have returned are none of it
                above = self._mark_above(self._counted(_MARK))
            self._highest_bytes = max(self._highest_bytes, above)
        return above

    def _reset_mark(self) -> None:
        self._returned_at_most_bytes = self._returned_bytes
        if self._clear is not None:
            os.write(self._clear, _RESET_PEAK)

    def _read(self) -> tuple[int, int]:
        found = dict(_FIELDS.findall(os.pread(self._status, _STATUS_BYTES, 0)))
        return int(found[b"HWM"]) << 10, int(found[b"RSS"]) << 10


def tune_allocator(budget_bytes: int = 0) -> None:
    """Keep glibc from hoarding what was freed; without glibc this does nothing.

    By default its threshold for mapped blocks grows with use, and freed activations stay in the
    heap: the peak of a fragment of 5 MB of weights fell from 20 to 8 MiB, and no longer varies.
    A large budget has room for frames of messages there, which are made and freed all the time.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        mapped = max(MAPPED_FROM_BYTES, min(budget_bytes // _HEAP_PART, _MAPPED_ALWAYS_BYTES))
        is_large = mapped > MAPPED_FROM_BYTES
        libc.mallopt(_M_MMAP_THRESHOLD, mapped)
        libc.mallopt(_M_TRIM_THRESHOLD, _HEAP_FREE * mapped if is_large else mapped)
        libc.mallopt(_M_ARENA_MAX, 1)


def trim() -> None:
    if _MALLOC_TRIM is not None:
        _MALLOC_TRIM(0)


def drop_library_pages(*, recached: bool = False) -> None:
    """Let go of the library pages that are in memory: those still needed come back when used.

    What is dropped is on disk, unchanged, and mostly in the page cache still; `recached`: in small
    pages, also where it was just installed.
    """
    drop(_library_mappings())
    drop_unused_tables()
    if recached:
        cache_libraries_in_small_pages(library_files())


def clean_pages(paths: Iterable[Path]) -> list[PageRange]:
    """Where files are mapped whose pages can be dropped: they come back when they are read. A file
    that was removed is there still for who has it mapped.

    Not a mapping that was written to: what was written would be lost.
    """
    wanted = set(map(str, paths))
    return [each.pages for each in _clean_mappings() if each.path.removesuffix(REMOVED) in wanted]


@dataclass(frozen=True, slots=True)
class _Mapping:
    """Addresses at which a file is mapped."""

    pages: PageRange
    writable: bool
    executable: bool
    path: str


def _library_mappings() -> list[PageRange]:
    """Clean mappings that this process cannot write to, of files that have code: these stay where
    they are until the process ends. Weights and whatever else is mapped may go at any time, and
    then other memory be there."""
    mappings = list(_clean_mappings())
    libraries = {each.path for each in mappings if each.executable}
    return [each.pages for each in mappings if not each.writable and each.path in libraries]


def _clean_mappings() -> Iterator[_Mapping]:
    """Mappings of files of which no page in memory is this process's own."""
    try:
        smaps = open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
    except OSError:  # a hardened container
        return
    mapping: _Mapping | None = None
    with smaps:
        for line in smaps:
            if (found := _MAPPING.match(line)) is None:
                continue
            match found.groups():
                case (str(start), str(end), str(rights), str(inode), str(path), _, _):
                    pages = PageRange(int(start, 16), int(end, 16))
                    mapping = _Mapping(pages, "w" in rights, "x" in rights, path)
                    if inode == "0":
                        mapping = None
                case (*_, "Anonymous", "0") if mapping is not None:
                    yield mapping
                case _:
                    pass
