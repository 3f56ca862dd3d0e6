"""Where files are read in huge pages: the kernel needs room for what it reads ahead. Without that
room it reads what it is asked for."""

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.fragment_making import InBlocks, dense_model, write_fragment
from agent.test_preparation import Bench
from shoal_agent.memory.residency import Ledger
from shoal_agent.runtime import block_fragment
from shoal_agent.runtime import prepared as prepared_forms
from shoal_agent.runtime.cold_weights import ColdWeights
from shoal_agent.runtime.failures import Stopper
from shoal_agent.runtime.mapped_pages import (
    PageRange,
    are_cold,
    populate_in_pieces,
    read_nothing_ahead,
)
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_agent.runtime.results import RunResult
from shoal_protocol.units import Bytes

MIB = 1 << 20
SIZE = 24 * MIB


def advised(folder: Path, process: int | str = "self") -> set[str]:
    """How weights below a folder are read where they are mapped: in huge pages (`hg`), or without
    anything ahead (`rr`)."""
    text = Path(f"/proc/{process}/smaps").read_text()
    flags = re.findall(rf"{folder}/.*weights\.bin\n(?:[A-Z].*\n)*?VmFlags: (.*)\n", text)
    return {" ".join(sorted({"hg", "rr"} & set(each.split()))) for each in flags}


def test_the_kernel_reads_ahead_for_as_long_as_there_is_room_for_it(tmp_path: Path) -> None:
    made = write_fragment(tmp_path, dense_model([512] * 9), 16 * MIB, InBlocks(8))
    ledger = Ledger(budget=Bytes(0))
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=64 * MIB, free=lambda: ledger.free)
    runtime.open("f", made.folder, made.least_bytes)
    for size, ahead in ((8 * MIB - 1, False), (8 * MIB, True), (8 * MIB - 1, False)):
        ledger.change_budget(Bytes(size))
        runtime.run("f", {"x": np.ones((1, 512), np.float32)}, Stopper())
        assert advised(tmp_path) == ({"hg"} if ahead else {"rr"})


def test_while_a_run_lasts_of_which_nothing_is_known_nothing_is_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_fragment(tmp_path, dense_model([512] * 3), 16 * MIB)
    meter = MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=64 * MIB)
    meter.settle()
    runtime.open("f", made.folder)
    run_guarded, meanwhile = runtime._runs.run_guarded, list[set[str]]()

    def noted(*given: Any, **known: Any) -> RunResult:
        meanwhile.append(advised(tmp_path))
        return run_guarded(*given, **known)

    monkeypatch.setattr(runtime._runs, "run_guarded", noted)
    item = {"x": np.ones((1, 512), np.float32)}
    runtime.run("f", item, Stopper(), 32 * MIB, is_known=False, is_tried=False)
    assert (meanwhile, advised(tmp_path)) == ([{"rr"}], {""})


@dataclass
class Cold:
    """A file on the disk, mapped, of which no page is in memory."""

    mapped: mmap.mmap
    start: int

    def part(self, first: int, size: int) -> PageRange:
        return PageRange(self.start + first, self.start + first + size)


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[Cold]:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(SIZE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        address = ctypes.c_char.from_buffer(mapped)
        found = Cold(mapped, ctypes.addressof(address))
        if cached(found.part(0, SIZE)):
            pytest.skip("this file system does not drop its page cache")
        yield found
        del address


def cached(pages: PageRange) -> int:
    """How many of them are in memory."""
    return sum(
        not are_cold([PageRange(start, start + mmap.PAGESIZE)])
        for start in range(pages.start, pages.end, mmap.PAGESIZE)
    )


def test_what_is_read_in_pieces_brings_nothing_else_into_memory(cold: Cold) -> None:
    """Not even where the disk is set up to read 8 MiB around each page."""
    read_nothing_ahead([cold.part(0, SIZE)])
    wanted = cold.part(3 * MIB, 2 * MIB + mmap.PAGESIZE)
    populate_in_pieces([wanted])
    assert cached(wanted) == wanted.size // mmap.PAGESIZE
    assert cached(cold.part(0, SIZE)) == wanted.size // mmap.PAGESIZE
    cold.mapped[7 * MIB]
    assert cached(cold.part(0, SIZE)) == wanted.size // mmap.PAGESIZE + 1


def test_cold_weights_are_read_for_one_block_at_a_time_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_fragment(tmp_path, dense_model([512] * 9), 16 * MIB, InBlocks(8))
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=made.least_bytes)
    runtime.open("f", made.folder, made.least_bytes)
    brought: list[int] = []
    monkeypatch.setattr(
        ColdWeights,
        "bring",
        lambda weights: brought.append(sum(each.end - each.start for each in weights.places)),
    )
    monkeypatch.setattr(block_fragment, "are_cold", lambda pages: True)
    x = {"x": np.ones((1, 512), np.float32)}
    runtime.run("f", x, Stopper())
    assert brought == [MIB] * 8
    monkeypatch.setattr(block_fragment, "are_cold", lambda pages: False)
    runtime.run("f", x, Stopper())
    assert len(brought) == 8, "what is in the page cache costs nothing"


@pytest.mark.parametrize(("free", "huge"), [(8 * MIB, True), (8 * MIB - 1, False)])
async def test_what_was_prepared_is_read_in_huge_pages_where_there_is_room_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, huge: bool
) -> None:
    dense = write_fragment(tmp_path, dense_model([256, 512, 256]), 8 * MIB)
    assert await Bench(tmp_path).prepare(dense) is not None
    read: list[Path] = []
    monkeypatch.setattr(prepared_forms, "read_in_huge_pages", read.append)
    assert await Bench(tmp_path, Bytes(free)).prepare(dense) is not None
    assert bool(read) == huge
