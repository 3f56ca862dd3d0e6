"""How much of a file the kernel keeps in memory."""

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from shoal_protocol.page_cache import uncache

_LIBC = ctypes.CDLL(None)


def cached_bytes(path: Path) -> int:
    """In whole pages."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        states = ctypes.create_string_buffer(-(-len(mapped) // mmap.PAGESIZE))
        view = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(view))
        assert _LIBC.mincore(address, ctypes.c_size_t(len(mapped)), states) == 0
        del view
        return states.raw.count(b"\x01") * mmap.PAGESIZE


def need_a_disk(folder: Path) -> None:
    """Skip the test where files of a folder never leave memory."""
    path = folder / "probe"
    path.write_bytes(bytes(1 << 20))
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        uncache(file.fileno())
    if cached_bytes(path):
        pytest.skip("files of this folder are in memory")
