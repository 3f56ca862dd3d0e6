"""How weights come from the disk where the kernel is to read nothing ahead, and leave again."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Final

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from agent.fragment_making import InBlocks, dense_model, table_model, write_fragment
from agent.test_huge_pages import advised, cached
from shoal_agent.runtime import block_fragment
from shoal_agent.runtime.block_fragment import BlockFragment
from shoal_agent.runtime.cold_weights import ColdWeights, HugePage, cold_weights
from shoal_agent.runtime.failures import Exceeded, Stopper
from shoal_agent.runtime.guard import READ_BYTES
from shoal_agent.runtime.mapped_pages import (
    MappedFile,
    PageRange,
    are_cold,
    drop,
    read_nothing_ahead,
    size_of,
)
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_agent.runtime.weights_on_disk import WeightsOnDisk

MIB = 1 << 20
HUGE: Final = 2 * MIB
SIZE: Final = 12 * MIB
PAGE: Final = mmap.PAGESIZE

pieces = st.lists(
    st.builds(
        lambda path, first, pages: (path, first * 64 * PAGE, pages * 64 * PAGE),
        st.sampled_from(["a", "b"]),
        st.integers(0, 40),
        st.integers(1, 30),
    ),
    max_size=8,
)
"""Mappings: path, offset and size."""


def mapped(found: list[tuple[str, int, int]]) -> list[MappedFile]:
    """Each at addresses of its own."""
    starts = (1 << 32) * np.arange(1, len(found) + 1)
    return [
        MappedFile(path, PageRange(int(start), int(start) + size), offset)
        for start, (path, offset, size) in zip(starts, found, strict=True)
    ]


@given(pieces)
def test_each_page_is_read_once_and_huge_pages_hold_hardly_anything_else(
    found: list[tuple[str, int, int]],
) -> None:
    files = mapped(found)
    weights = cold_weights(files)
    where = {
        address: (each.path, each.offset + address - each.pages.start)
        for each in files
        for address in range(each.pages.start, each.pages.end, PAGE)
    }
    parts = [*weights.rest, *(part for each in weights.huge for part in each.parts)]
    read = [address for part in parts for address in range(part.start, part.end, PAGE)]
    assert sorted(read) == sorted(where)
    for each in weights.huge:
        places = [
            where[start] for part in each.parts for start in range(part.start, part.end, PAGE)
        ]
        assert len({(path, offset // HUGE) for path, offset in places}) == 1
        assert len(set(places)) * PAGE >= HUGE * 7 // 8
        assert where[each.first.start] == min(places)
    in_huge = {where[start] for each in weights.huge for start in addresses(each)}
    for name in ("a", "b"):
        for unit in range(0, 40 * 64 * PAGE + 30 * 64 * PAGE, HUGE):
            there = {place for place in where.values() if place[0] == name}
            there = {place for place in there if place[1] // HUGE == unit // HUGE}
            if len(there) * PAGE >= HUGE * 7 // 8:
                assert there <= in_huge, "nothing is read in small pieces without need"


def addresses(page: HugePage) -> list[int]:
    return [start for part in page.parts for start in range(part.start, part.end, PAGE)]


@dataclass
class Cold:
    """A file of which no page is in memory, and where its parts of 1 MiB are mapped."""

    parts: list[PageRange]
    files: list[MappedFile]

    @property
    def cached(self) -> list[int]:
        """Which parts are in memory as a whole; none may be in part."""
        counts = [cached(part) for part in self.parts]
        assert set(counts) <= {0, MIB // PAGE}
        return [index for index, count in enumerate(counts) if count]


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[Cold]:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(SIZE))
    with path.open("rb") as file, ExitStack() as stack:
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        parts, held = [], []
        for offset in range(0, SIZE, MIB):
            part = mmap.mmap(file.fileno(), MIB, access=mmap.ACCESS_COPY, offset=offset)
            held.append(ctypes.c_char.from_buffer(stack.enter_context(part)))
            start = ctypes.addressof(held[-1])
            parts.append(PageRange(start, start + MIB))
        offsets = range(0, SIZE, MIB)
        found = Cold(
            parts, [MappedFile(str(path), *each) for each in zip(parts, offsets, strict=True)]
        )
        if found.cached:
            pytest.skip("this file system does not drop its page cache")
        yield found
        held.clear()


def test_weights_that_are_mapped_by_themselves_come_together_and_nothing_else_does(
    cold: Cold,
) -> None:
    """What lies in the same 2 MiB as others' stays where it is."""
    weights = cold_weights(cold.files[3:8])
    assert (len(weights.huge), len(weights.rest)) == (2, 1)
    read_nothing_ahead(cold.parts)
    weights.advise()
    weights.bring()
    assert cold.cached == [3, 4, 5, 6, 7]


def test_of_a_table_nothing_comes_but_what_else_lies_in_its_pages(cold: Cold) -> None:
    """The table ends 100 bytes into a page."""
    read_nothing_ahead(cold.parts)
    table = (2 * MIB, 5 * MIB + 100)
    weights = cold_weights(cold.files[2:8], [table])
    weights.advise()
    weights.bring()
    assert cold.cached == [5, 6, 7]


def test_weights_leave_the_page_cache_when_nobody_has_them_in_memory(cold: Cold) -> None:
    mine, others = cold_weights(cold.files[2:6]), cold_weights(cold.files[6:8])
    read_nothing_ahead(cold.parts)
    for each in (mine, others):
        each.advise()
        each.bring()
    mine.uncache()
    assert cold.cached == [2, 3, 4, 5, 6, 7], "they are in memory"
    drop(cold.parts[2:6])
    mine.uncache()
    assert cold.cached == [6, 7]


def test_weights_whose_file_was_removed_stay_until_it_is_unmapped(cold: Cold) -> None:
    weights = cold_weights(cold.files[2:6])
    read_nothing_ahead(cold.parts)
    weights.advise()
    weights.bring()
    drop(cold.parts[2:6])
    os.unlink(cold.files[0].path)
    weights.uncache()
    assert cold.cached == [2, 3, 4, 5]


def words_and_a_layer() -> onnx.ModelProto:
    """Looks rows up in a table of 8 MiB, and multiplies them with a weight of 4 MiB."""
    chance = np.random.default_rng(0)
    table = chance.standard_normal((1 << 13, 256), dtype=np.float32)
    weight = chance.standard_normal((256, 1 << 12), dtype=np.float32)
    model = table_model()
    del model.graph.initializer[:]
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1 << 12
    return model


def test_what_a_block_has_beside_a_table_is_brought_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page by page it took a thousand faults. A run of which little is known has it in memory as a
    whole, and of the table what it may read."""
    in_one = InBlocks(1, read_bytes=64 << 10)
    made = write_fragment(tmp_path, words_and_a_layer(), 16 * MIB, in_one)
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=made.least_bytes)
    runtime.open("f", made.folder, made.least_bytes)
    brought = list[int]()
    monkeypatch.setattr(
        ColdWeights, "bring", lambda weights: brought.append(size_of(weights.pages))
    )
    monkeypatch.setattr(block_fragment, "are_cold", lambda pages: True)
    runtime.run("f", {"x": np.arange(4, dtype=np.int64)}, Stopper())
    assert brought == [4 * MIB]
    assert runtime._open["f"].weights_at_once() == 4 * MIB + READ_BYTES
    for _ in range(2):  # refused before it begins, it changes nothing for the next one
        with pytest.raises(Exceeded, match="more than 256 KiB"):
            runtime.run(
                "f", {"x": np.arange(8, dtype=np.int64)}, Stopper(), MIB // 4, is_larger=True
            )
        runtime.run("f", {"x": np.arange(4, dtype=np.int64)}, Stopper())
    assert brought == [4 * MIB] * 3


@pytest.fixture
def whole(tmp_path: Path) -> Runtime:
    """Has `words_and_a_layer` open as a whole, within too little for its table."""
    made = write_fragment(tmp_path, words_and_a_layer(), 7 * MIB)
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=16 * MIB, free=lambda: 0)
    runtime.open("f", made.folder, made.resident_bytes)
    return runtime


def test_a_whole_brings_what_it_reads_beside_a_table_where_that_is_on_the_disk(
    whole: Runtime,
) -> None:
    """Page by page it took a thousand faults, each of which waits for the disk."""
    item = {"x": np.arange(0, 8192, 2048, dtype=np.int64)}
    first = whole.run("f", item, Stopper()).outputs["y"].copy()
    fragment = whole._open["f"]
    if not WeightsOnDisk(fragment.weight_pages(), fragment.weight_files()).leave():
        pytest.skip("this file system does not drop its page cache")
    faults = getrusage(RUSAGE_SELF).ru_majflt
    again = whole.run("f", item, Stopper()).outputs["y"]
    assert getrusage(RUSAGE_SELF).ru_majflt - faults < 256
    assert again.tobytes() == first.tobytes()
    table = max(fragment.weight_pages(), key=lambda pages: pages.size)
    assert table.size == 8 * MIB
    assert cached(table) <= 4, "of the table no more than four rows"


def test_rows_come_page_by_page_also_after_a_run_of_which_nothing_was_planned(
    whole: Runtime, tmp_path: Path
) -> None:
    item = {"x": np.arange(4, dtype=np.int64)}
    assert advised(tmp_path) == {"rr"}
    whole.run("f", item, Stopper(), 1024 * MIB, is_tried=False)
    assert advised(tmp_path) == {"rr"}


def test_rows_of_a_table_that_are_on_the_disk_drive_no_weights_from_the_page_cache(
    tmp_path: Path,
) -> None:
    in_one = InBlocks(1, read_bytes=64 << 10)
    made = write_fragment(tmp_path, words_and_a_layer(), 16 * MIB, in_one)
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=made.least_bytes)
    runtime.open("f", made.folder, made.least_bytes)
    item = {"x": np.arange(4, dtype=np.int64)}
    for _ in range(3):
        runtime.run("f", item, Stopper())
        with (made.folder / "weights.bin").open("rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 8 * MIB, os.POSIX_FADV_DONTNEED)
    fragment = runtime._open["f"]
    assert isinstance(fragment, BlockFragment)
    assert sum(map(cached, fragment._cold_weights[0].pages)) == 4 * MIB // PAGE


def test_what_the_page_cache_has_lost_once_leaves_it_after_use(tmp_path: Path) -> None:
    made = write_fragment(tmp_path, dense_model([1024] * 4), 16 * MIB, InBlocks(3))
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=made.least_bytes)
    runtime.open("f", made.folder, made.least_bytes)
    lost = list[bool]()
    with (made.folder / "weights.bin").open("rb") as file:
        for run in range(3):
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if run == 0 and not are_cold(runtime._open["f"].weight_pages()):
                pytest.skip("this file system does not drop its page cache")
            runtime.run("f", {"x": np.ones((1, 1024), np.float32)}, Stopper())
            lost.append(are_cold(runtime._open["f"].weight_pages()))
    assert lost == [False, True, True]
