"""What an agent leaves in the kernel's page cache, and what it finds there of earlier processes."""

import ctypes
import mmap
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.fragment_making import dense_model, table_model, write_fragment
from shoal_agent.cache.disk import FragmentCache
from shoal_protocol.digests import Digest
from shoal_protocol.fragment_store import read_manifest
from shoal_protocol.manifest import WEIGHTS, FileEntry
from shoal_protocol.shared_files import SharedFiles
from shoal_protocol.transfers import PartialFile

MIB = 1 << 20
MAPPED_AROUND_BYTES = 64 << 10
"""What the kernel maps at the least where it has more than the page that is touched."""
ROWS = 16


def leave_the_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_of_rows(path: Path) -> int:
    """What is in this process's memory once it has touched a page of some MiB of a file."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        for row in range(ROWS):
            mapped[row * MIB + MIB // 2]
        smaps = Path("/proc/self/smaps").read_text()
        (of_file,) = re.findall(rf" {path}\n((?:[A-Z].*\n)*)", smaps)
        return int(re.findall(r"^Rss: +(\d+)", of_file, re.MULTILINE)[0]) << 10


def verified_on_arrival(path: Path, entry: FileEntry) -> None:
    part = PartialFile(path, entry.size_bytes)
    assert part.open() == entry.size_bytes
    part.verify(entry.digest)
    part.close()


def linked_to_another_fragment(path: Path, entry: FileEntry) -> None:
    shared = SharedFiles(path.parent)
    shared.keep(entry.digest, path)
    assert shared.link(entry, path.with_name("shared.0.bin"))


def sent_to_another_device(path: Path, entry: FileEntry) -> None:
    cache = FragmentCache(path.parents[2], 1 << 30)
    file, size = cache.open(f"sha256:{path.parent.name}", path.name)
    with file:
        assert sum(len(piece) for piece in iter(lambda: file.read(128 << 10), b"")) == size


@pytest.mark.parametrize(
    "read", [verified_on_arrival, linked_to_another_fragment, sent_to_another_device]
)
def test_a_row_of_a_table_brings_no_more_into_memory_whoever_has_read_its_file(
    tmp_path: Path, read: Callable[[Path, FileEntry], None]
) -> None:
    made = write_fragment(tmp_path.resolve(), table_model(rows=ROWS * MIB // 1024))
    weights = made.folder / WEIGHTS
    leave_the_page_cache(weights)
    read(weights, read_manifest(made.folder, Digest(made.digest)).files[WEIGHTS])
    assert bytes_of_rows(weights) <= ROWS * MAPPED_AROUND_BYTES


def pages_in_memory(path: Path) -> int:
    """Of a file, in the page cache: whichever process brought them there."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        present = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert (
            ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), present) == 0
        )
        return sum(byte & 1 for byte in present)


def test_pages_that_an_earlier_process_left_in_the_page_cache_are_dropped_at_the_start(
    tmp_path: Path,
) -> None:
    # They would stay charged to that process's control group, and be free for this one's.
    made = write_fragment(tmp_path, dense_model([512, 1024, 512]))
    weights = made.folder / "weights.bin"
    prepared = made.folder / "prepared" / "key" / "weights.bin"
    prepared.parent.mkdir(parents=True)
    shutil.copy(weights, prepared)
    os.sync()
    for path in (weights, prepared):
        path.read_bytes()
        assert pages_in_memory(path) * mmap.PAGESIZE >= path.stat().st_size
    cache = FragmentCache(tmp_path, 1 << 30)
    assert (pages_in_memory(weights), pages_in_memory(prepared)) == (0, 0)
    assert cache.verify(made.digest) == made.folder
