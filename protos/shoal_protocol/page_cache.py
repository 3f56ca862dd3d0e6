"""What the kernel keeps of files in memory. It charges that to the group of the process that has
read or written them, whether anybody has it mapped or not; and where a group has no room left, it
may take what is mapped and in use first."""

import ctypes
import mmap
import os
import re
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from typing import BinaryIO, Final

PASSING_BYTES: Final = 4 << 20
"""Of a file that passes through a device: what of it may be in memory. Larger than the largest
pages in which the kernel caches files."""
_PIECE_BYTES: Final = 1 << 20
_SMALL_BYTES: Final = 128 << 10
"""The kernel maps 64 KiB around a page of what it has cached in pieces of no more than that."""
_MADV_PAGEOUT: Final = 21
_PROBED: Final = re.compile(r"^\S+ r--s .*?(/.*)\n(?:\w+: .*\n){1,4}?Rss: +(\d+) kB", re.M)
_MAPPED: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r-.p .*?(/.*)$", re.M)


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


def read_in_small_pages(path: str | os.PathLike[str]) -> None:
    """Bring a file into the page cache in the smallest pages: with one that is read, the kernel
    maps as much as it has cached in one piece. Raises `OSError`."""
    with open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())  # what was just installed is not on the disk yet
        uncache(file.fileno())
        cache_in_small_pages(file)
        while file.read(_PIECE_BYTES):
            pass


def cache_libraries_in_small_pages(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Read those again that are cached in large pieces, as far as no other process has them mapped;
    which those are.

    What pip writes at once is cached in one piece, 1 MiB of a library. From Linux 6.18 on, all of a
    piece comes into the memory of a process that runs a line of code in it: 36 MiB for an agent, in
    place of 24 at the most.
    """
    try:
        large = in_large_pieces(paths)
    except OSError:  # a hardened container
        return []
    _page_out(large)
    for path in large:
        with suppress(OSError):
            read_in_small_pages(path)
    return large


def in_large_pieces(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Of files of 1 MiB and more those of which much comes into memory with a page that is read.
    It is seen by reading a page of each MiB: what is in no page cache is read from the disk. Raises
    `OSError` where the kernel does not say what is mapped."""
    touched: dict[str, int] = {}
    with ExitStack() as opened:
        for path in paths:
            with suppress(OSError, ValueError), open(path, "rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size < _PIECE_BYTES:
                    continue
                pages = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
                opened.enter_context(pages)
                places = range(0, len(pages), _PIECE_BYTES)
                sum(pages[place] for place in places)
                touched[os.path.realpath(path)] = len(places)
        with open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape") as smaps:
            found = _PROBED.findall(smaps.read())
    resident: dict[str, int] = {}
    for path, kib in found:  # who holds all of a file in memory has it mapped a second time
        resident[path] = min(int(kib) << 10, resident.get(path, int(kib) << 10))
    return [path for path in touched if resident.get(path, 0) > touched[path] * _SMALL_BYTES]


def _page_out(paths: Collection[str]) -> None:
    """Have this process's own pages of mapped files leave memory and the page cache, where nobody
    has written to them; they come back when they are used."""
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        found = _MAPPED.findall(maps.read())
    for first, last, path in found:
        if path in paths:
            start, end = int(first, 16), int(last, 16)
            size = ctypes.c_size_t(end - start)
            libc.madvise(ctypes.c_void_p(start), size, _MADV_PAGEOUT)
