"""The arena of activations, emptied between two blocks."""

import ctypes
import mmap
import resource
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from agent.fragment_making import InBlocks, MadeFragment, dense_model, write_fragment
from agent.own_process import in_own_process
from agent.test_blocks import StopsBefore
from agent.test_swapping import block
from shoal_agent.memory.swapping import HUGE_PAGE_BYTES
from shoal_agent.runtime import huge_pages
from shoal_agent.runtime.arena import ARENA, WorkingRegion
from shoal_agent.runtime.block_parts import Parts
from shoal_agent.runtime.failures import Stopper, Terminated
from shoal_agent.runtime.mapped_pages import PageRange, huge_part
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.prepared import NOTHING_PREPARED
from shoal_agent.runtime.process_memory import LIBRARY_RESERVE_BYTES, MemoryMeter
from shoal_protocol.blocks import least_bytes

MIB = 1 << 20


def made_in(
    folder: Path, emptied: tuple[int, ...], first: int = MIB, second: int = 0
) -> MadeFragment:
    """First 19 MiB of activations and 8 of weights, then 3 and 17: 36.3 or 38.7 in all, measured in
    the second of two items, since some weights stay for the next one. It is said to work in `first`
    bytes, and then in `second`.
    """
    model = dense_model([64, 16384, 64, 2048, 2048])
    model.graph.output.append(helper.make_tensor_value_info("r1", TensorProto.FLOAT, ["batch", 64]))
    return write_fragment(
        folder,
        model,
        64 * MIB,
        InBlocks(4, emptied=emptied, working_bytes=first, last_working_bytes=second),
        largest={"x": (150, 64)},
    )


def item() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal((150, 64), dtype=np.float32)}


@pytest.mark.parametrize(("emptied", "beyond_least"), [((), 0), ((0, 2), 0), ((0, 2), 2 * MIB)])
def test_where_the_arena_is_emptied_weights_have_the_place_of_activations(
    tmp_path: Path, emptied: tuple[int, ...], beyond_least: int
) -> None:
    meter = MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=64 * MIB)
    made, x = made_in(tmp_path, emptied), item()
    runtime.open("whole", made.folder)
    whole = runtime.run("whole", x, Stopper()).outputs["y"]
    runtime.close("whole")
    meter.settle(LIBRARY_RESERVE_BYTES)
    # Of the arena 16 MiB are held back in the trial: they must not keep it from being emptied.
    limit, granted = 48 * MIB, made.least_bytes + beyond_least
    _, tried = runtime.open_and_try("f", made.folder, granted, NOTHING_PREPARED, limit)
    assert tried.taken_bytes is not None
    assert not tried.stopped
    # Within a larger grant there is said to be room for an arena that is kept.
    assert (tried.taken_bytes < 38 * MIB) == (bool(emptied) and not beyond_least)
    for _ in range(2):
        assert np.array_equal(runtime.run("f", x, Stopper()).outputs["y"], whole)


def test_an_output_of_the_first_part_outlives_the_run(tmp_path: Path) -> None:
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=64 * MIB)
    made, x = made_in(tmp_path, (0, 2)), item()
    runtime.open("whole", made.folder)
    whole = runtime.run("whole", x, Stopper()).outputs
    runtime.close("whole")
    runtime.open("f", made.folder, made.least_bytes)
    for _ in range(3):
        outputs = runtime.run("f", x, Stopper()).outputs
        assert all(np.array_equal(outputs[name], whole[name]) for name in ("y", "r1"))
    _, early = runtime._open["f"].run(x, Stopper())
    assert early.flags.owndata, "it was moved out of the arena, and is a result as it is"


def test_parts_work_in_what_they_worked_in_for_the_item_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel need not clear it again. After an item of other shapes, a run that was stopped and
    another grant it is not known, and all is given back."""
    made, kept = made_in(tmp_path, (0, 2), 24 * MIB, 8 * MIB), list[int]()
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=64 * MIB)
    keep = runtime._arena.region.keep

    def noted(size_bytes: int, most_bytes: int) -> bool:
        kept.append(size_bytes)
        assert most_bytes <= (26 * MIB if size_bytes else 0), "what is not known is not huge"
        return keep(size_bytes, most_bytes)

    monkeypatch.setattr(runtime._arena.region, "keep", noted)
    runtime.open("f", made.folder, made.least_bytes)

    def kept_by(x: dict[str, np.ndarray]) -> list[int]:
        kept.clear()
        runtime.run("f", x, Stopper())
        return kept.copy()

    x, short = item(), {"x": item()["x"][:80]}
    assert kept_by(x) == [0, 0]
    _, _, (first, second) = kept_by(x), kept_by(x), kept_by(x)
    assert 18 * MIB < first < 24 * MIB
    assert 2 * MIB < second < 6 * MIB
    assert kept_by(x) == [first, second]
    assert kept_by(short) == [0, 0]
    assert max(*kept_by(short), *kept_by(short)) < first
    assert kept_by(x) == [0, 0]
    assert [kept_by(x), kept_by(x)][1] == [first, second]
    with pytest.raises(Terminated, match="between two of its blocks"):
        runtime.run("f", x, StopsBefore(2))
    assert kept_by(x) == [0, 0]
    runtime.grant("f", made.least_bytes)
    assert kept_by(x) == [0, 0]


def test_a_part_keeps_something_only_where_all_of_its_blocks_have_room_for_it() -> None:
    blocks = [
        block(5, working=2, empties=True),
        block(1, working=6),
        block(6, working=1, empties=True),
    ]
    least = least_bytes(blocks)
    assert least == 7
    region = WorkingRegion(64 * MIB, lambda: None, lambda: False)
    assert Parts(blocks, least, region).blocks == tuple(blocks)
    planned = Parts(blocks, 11, region).blocks
    assert [each.working_bytes for each in planned] == [6, 6, 1]
    assert least_bytes(planned) == 11


def test_the_first_block_works_in_what_the_last_one_has_left_where_nothing_is_kept() -> None:
    """Where a run was stopped another block may have left more: then the arena is emptied."""
    blocks = [
        block(5 * MIB, working=2 * MIB, empties=True),
        block(MIB, working=100 * MIB),
        block(100 * MIB, working=MIB, empties=True),
    ]
    times = list[None]()
    region = WorkingRegion(64 * MIB, lambda: times.append(None), lambda: False)
    parts = Parts(blocks, least_bytes(blocks), region)

    def emptied(*, stopped: bool = False) -> int:
        times.clear()
        parts.begin({})
        for index in range(3):
            if parts.begins_at(index):
                parts.make_room(index)
        if stopped:
            parts.forget()
        else:
            parts.end()
        return len(times)

    assert [emptied() for _ in range(3)] == [2, 1, 1]
    assert emptied(stopped=True) == 1
    assert [emptied() for _ in range(2)] == [2, 1]


def new_region() -> WorkingRegion:
    """Of a process of its own."""
    return Runtime(MemoryMeter(), threads=1, limit_bytes=64 * MIB)._arena.region


@pytest.fixture
def region() -> Iterator[WorkingRegion]:
    """One that nobody works in."""
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=64 * MIB)
    yield runtime._arena.region
    runtime.shrink()


def work(size: int) -> None:
    """As a block does, in the lowest `size` bytes of the region."""
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type([size], np.uint8, memory_info=ARENA)
    ctypes.memset(value.data_ptr(), 1, size)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_region_is_known_also_where_the_part_before_did_not_work_in_it(
    region: WorkingRegion,
) -> None:
    work(9 * MIB)
    assert region.keep(0)
    assert region.keep(0)
    region.empty()
    assert not region.keep(0), "it is gone"


def readings_of_a_part_kept() -> tuple[int, int, int, int]:
    """By how much the process has less when 4 MiB are kept of 9, and more when those are used
    again; what is said to be touched then, and when all 9 are."""
    region = new_region()
    work(9 * MIB)
    before = resident_bytes()
    assert region.keep(4 * MIB)
    kept, between = region.touched_bytes(), resident_bytes()
    work(4 * MIB)
    again = resident_bytes()
    work(9 * MIB)
    return before - between, again - between, kept, region.touched_bytes()


def test_what_lies_beyond_leaves_memory_and_the_rest_stays() -> None:
    left, came, kept, all_of_it = in_own_process(readings_of_a_part_kept)
    assert kept == 4 * MIB
    assert abs(left - 5 * MIB) < MIB // 2
    assert came < MIB // 2
    assert abs(all_of_it - 9 * MIB) <= mmap.PAGESIZE


H = HUGE_PAGE_BYTES


@given(
    start=st.integers(1, 3 * H // mmap.PAGESIZE),
    pages=st.integers(1, 8 * H // mmap.PAGESIZE),
    size=st.integers(0, 16 * H),
    most=st.integers(-H, 16 * H),
)
def test_of_a_region_comes_in_huge_pages_what_is_touched_and_reckoned_with(
    start: int, pages: int, size: int, most: int
) -> None:
    region = PageRange(start * mmap.PAGESIZE, (start + pages) * mmap.PAGESIZE)
    huge = huge_part(region, size, most)
    wholes = [
        page
        for page in range(0, region.end, H)
        if region.start <= page < region.start + size  # some of it is touched
        and page + H <= min(region.end, region.start + most)
    ]
    assert huge.size == H * len(wholes)
    assert huge.start == (wholes[0] if wholes else region.start)


@pytest.mark.parametrize(
    ("works_in", "outside", "kept"), [(6, 0, 6), (6, 4, 6), (6, 5, 0), (11, 0, 0)]
)
def test_a_part_keeps_what_its_first_block_is_reckoned_with_where_there_is_no_more_room(
    region: WorkingRegion,
    monkeypatch: pytest.MonkeyPatch,
    works_in: int,
    outside: int,
    kept: int,
) -> None:
    blocks = [
        block(13 * MIB, working=10 * MIB, empties=True),
        block(1 * MIB, working=12 * MIB),
        block(3 * MIB, working=2 * MIB, empties=True),
    ]
    parts = Parts(blocks, least_bytes(blocks), region)
    assert parts.blocks == tuple(blocks), "no more room"
    asked, keep = list[tuple[int, int]](), region.keep

    def noted(size_bytes: int, most_bytes: int) -> bool:
        asked.append((size_bytes, most_bytes))
        return keep(size_bytes, most_bytes)

    monkeypatch.setattr(region, "keep", noted)
    for item in range(4):
        parts.begin({})
        parts.make_room(0, outside * MIB)
        most = (10 - outside) * MIB if kept else 0
        assert asked.pop() == ((kept * MIB, most) if item > 1 else (0, 0))
        work(works_in * MIB)
        parts.make_room(2)
        parts.end()


needs_huge_pages = pytest.mark.skipif(
    not huge_pages.may_ask(), reason="this kernel has no huge pages for memory of no file"
)


def faults_of(function: Callable[[], None]) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    function()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@needs_huge_pages
@pytest.mark.parametrize("size", [7 * MIB, 3 * MIB, 11 * MIB])
def test_what_a_part_works_in_comes_in_huge_pages_within_what_it_reckons_with(
    region: WorkingRegion, size: int
) -> None:
    work(15 * MIB)
    for _ in range(3):
        assert region.keep(2 * MIB)
        between = resident_bytes()
        for kept in (12 * MIB, size):
            assert region.keep(kept, kept + 2 * H)
            faults = faults_of(partial(work, kept))
            assert faults < 2 * H // mmap.PAGESIZE, "its ends, at most, come page by page"
            assert resident_bytes() - between < kept + 2 * H
        region.leave()


def came_for_who_works_after_that() -> int:
    """Bytes for 5 MiB and a page, where 12 MiB were kept, worked in, and left."""
    region = new_region()
    work(15 * MIB)
    assert region.keep(12 * MIB, 15 * MIB)
    work(12 * MIB)
    region.leave()
    assert region.keep(0)
    before = resident_bytes()
    work(5 * MIB + mmap.PAGESIZE)
    return resident_bytes() - before


@needs_huge_pages
def test_who_works_after_that_gets_what_is_touched_and_no_more() -> None:
    assert in_own_process(came_for_who_works_after_that) < 5 * MIB + H // 4


def left_by_a_shared_region() -> int:
    """Bytes that are given back of 9 MiB, where 4 were to be kept of what is in use."""
    region = new_region()
    assert not region.keep(MIB), "nobody has worked in it"
    work(9 * MIB)
    region._is_shared = lambda: True
    before = resident_bytes()
    assert not region.keep(4 * MIB)
    return before - resident_bytes()


def test_a_region_of_which_some_is_in_use_or_held_back_is_given_back() -> None:
    assert in_own_process(left_by_a_shared_region) > 8 * MIB
