"""This process's own memory: what it takes now, what it took at most, and giving it back.

*Resident* is the kernel's VmRSS: anonymous pages, and pages of mapped files that are in this
process's page tables (libraries, weights). Mapped weights count, though the kernel could take clean
ones back at any time: the budget promises what the device has to find, not what it might get away
with. Under a limit that is near, the kernel does take them back, and resident memory, its highest
mark too, is then what the process was left with, at the price of reading pages again.

The *floor* is the resident memory of the idle agent: ONNX Runtime loaded, its arena made, library
pages that only the start needed let go, one of everything rehearsed that jobs ask for
(`rehearsal`), the coordinator connected; freed heap given back. All use is above it. The *peak* is
the highest mark since the floor was taken, less the floor. The mark is the kernel's own (VmHWM),
which misses nothing between samples.
"""

import ctypes
import gc
import os
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal_agent.runtime.mapped_pages import PageRange, drop

_STATUS_BYTES: Final = 8192
_FIELDS: Final = re.compile(rb"^Vm(HWM|RSS):\s+(\d+) kB", re.MULTILINE)
_RESET_PEAK: Final = b"5"
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_PR_SET_PDEATHSIG: Final = 1
_MAPPING: Final = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+) *(.*)|^(Rss|Anonymous): +(\d+) kB"
)
MAPPED_FROM_BYTES: Final = 128 << 10
"""Blocks from here on come from mappings of their own, and go back to the kernel when freed."""


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
        self.floor_bytes = 0
        self._highest = 0
        self._mark_at_floor = 0

    def settle(self) -> int:
        """Take what is resident now, trimmed, as the floor; peaks count from here."""
        gc.collect()
        trim()
        self.begin_peak()
        with self._lock:
            self._mark_at_floor, self.floor_bytes = self._read()
            self._highest = self.floor_bytes
        return self.floor_bytes

    def used_bytes(self) -> int:
        """Resident bytes above the floor now; never below zero."""
        return max(0, self._read()[1] - self.floor_bytes)

    def begin_peak(self) -> None:
        """Start a new highest mark, for `peak_since_begin_bytes`."""
        if self._clear is not None:
            with self._lock:  # between reading the mark and the reset nobody else may read it
                self._highest = max(self._highest, self._read()[0])
                os.write(self._clear, _RESET_PEAK)

    def peak_since_begin_bytes(self) -> int:
        """The most above the floor since `begin_peak`; where marks cannot be reset, the present."""
        if self._clear is None:
            return self.used_bytes()
        return max(0, self._read()[0] - self.floor_bytes)

    def peak_bytes(self) -> int:
        """The most above the floor since `settle`.

        Where marks cannot be reset, the mark is the start's until use passes that, and until then
        only what is seen at calls counts.
        """
        with self._lock:
            mark, now = self._read()
            if self._clear is None and mark == self._mark_at_floor:
                mark = now
            self._highest = max(self._highest, mark)
            return max(0, self._highest - self.floor_bytes)

    def _read(self) -> tuple[int, int]:
        found = dict(_FIELDS.findall(os.pread(self._status, _STATUS_BYTES, 0)))
        return int(found[b"HWM"]) << 10, int(found[b"RSS"]) << 10


def tune_allocator() -> None:
    """Keep glibc from hoarding what was freed; without glibc this does nothing.

    By default its threshold for mapped blocks grows with use, and freed activations stay in the
    heap: the peak of a fragment of 5 MB of weights fell from 20 to 8 MiB, and no longer varies.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, MAPPED_FROM_BYTES)
        libc.mallopt(_M_ARENA_MAX, 2)


def trim() -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def drop_library_pages() -> None:
    """Let go of the library pages that are in memory: those still needed come back when used.

    Only of mappings that are not writable and hold no page of this process's own (relocated
    tables do): what is dropped is on disk, unchanged, and mostly in the page cache still.
    """
    _drop(each for each in _clean_mappings() if not each.writable)


def drop_mapped_file(path: Path) -> None:
    """Let go of the pages of one mapped file; they come back when they are read.

    Not of a mapping that was written to: what was written would be lost.
    """
    _drop(each for each in _clean_mappings() if each.path == str(path))


@dataclass(frozen=True, slots=True)
class _Mapping:
    """Addresses at which a file is mapped."""

    pages: PageRange
    writable: bool
    path: str


def _drop(mappings: Iterable[_Mapping]) -> None:
    drop([each.pages for each in mappings])


def _clean_mappings() -> Iterator[_Mapping]:
    """Mappings of files that have pages in memory, none of them this process's own."""
    try:
        smaps = open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
    except OSError:  # a hardened container
        return
    mapping: _Mapping | None = None
    resident = 0
    with smaps:
        for line in smaps:
            if (found := _MAPPING.match(line)) is None:
                continue
            match found.groups():
                case (str(start), str(end), str(rights), str(inode), str(path), _, _):
                    pages = PageRange(int(start, 16), int(end, 16))
                    mapping = _Mapping(pages, "w" in rights, path)
                    if inode == "0":
                        mapping = None
                case (*_, "Rss", str(kib)):
                    resident = int(kib)
                case (*_, "Anonymous", "0") if mapping is not None and resident:
                    yield mapping
                case _:
                    pass


def exit_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent ends, however that ends.

    `parent` is its process id, where this process received it; else that is what it is now.
    """
    expected = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != expected or (parent is None and expected == 1):
        raise SystemExit("the parent is gone already")
