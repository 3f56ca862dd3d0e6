"""Weights that are to be on the disk while a run reads them."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from cached_pages import cached_bytes, need_a_disk
from shoal_agent.runtime import weights_on_disk
from shoal_agent.runtime.guard import READ_BYTES
from shoal_agent.runtime.mapped_pages import PageRange, drop
from shoal_agent.runtime.weights_on_disk import WeightsOnDisk

SIZE = 16 << 20


def test_weights_leave_the_page_cache_though_they_are_read_again_as_soon_as_they_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in use again is not let go of."""
    need_a_disk(tmp_path)
    path = tmp_path / "weights.bin"
    path.write_bytes(b"x" * SIZE)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        mapped = mmap.mmap(file.fileno(), SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    view = ctypes.c_char.from_buffer(mapped)
    start = ctypes.addressof(view)

    def read_all() -> None:
        assert mapped[:: mmap.PAGESIZE].count(b"x") == SIZE // mmap.PAGESIZE

    def drop_and_read(ranges: Iterable[PageRange]) -> None:
        drop(ranges)
        read_all()

    monkeypatch.setattr(weights_on_disk, "drop", drop_and_read)
    weights = WeightsOnDisk([PageRange(start, start + SIZE)], [str(path)])
    read_all()
    assert cached_bytes(path) == SIZE
    weights.let_go()
    assert cached_bytes(path) <= READ_BYTES
    assert weights.leave()
    del view
    mapped.close()
