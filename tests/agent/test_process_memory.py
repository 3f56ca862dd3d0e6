"""What a process takes is counted without the library pages that have returned to it."""

import ctypes
import gc
import mmap
import re
from collections.abc import Callable
from pathlib import Path

import onnxruntime  # noqa: F401 - a large library
import pytest

from agent.fragment_making import dense_model, write_fragment
from agent.own_process import in_own_process
from shoal_agent.runtime.library_pages import LibraryPages
from shoal_agent.runtime.mapped_pages import PageRange, populate
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.process_memory import (
    LIBRARY_RESERVE_BYTES,
    MemoryMeter,
    drop_library_pages,
)
from shoal_protocol.heap_reserve import HEAP_RESERVE_BYTES

MIB = 1 << 20
TAKEN_BYTES = 32 * MIB
RETURNED_BYTES = 8 * MIB
PAGES_BYTES = MIB // 4
NOISE_BYTES = 2 * MIB
"""What earlier tests of this process left may go meanwhile: 0.9 MiB was seen."""


def return_library_pages(offset: int = 0, size: int = RETURNED_BYTES) -> None:
    """ONNX Runtime's code is larger than twice that."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            if "r-xp" in line and "onnxruntime" in line:
                start = int(line.partition("-")[0], 16) + offset
                populate([PageRange(start, start + size)])
                return
    raise AssertionError("ONNX Runtime is not loaded")


def take(size: int) -> mmap.mmap:
    taken = mmap.mmap(-1, size)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(taken)), 1, size)
    return taken


@pytest.fixture
def meter() -> MemoryMeter:
    """It has counted library pages while much more was taken than is now."""
    meter = MemoryMeter()
    meter.settle(LIBRARY_RESERVE_BYTES)
    taken = take(TAKEN_BYTES)
    assert meter.used_bytes() > TAKEN_BYTES - NOISE_BYTES
    taken.close()
    return meter


def test_library_pages_that_return_after_memory_was_given_back_are_no_use(
    meter: MemoryMeter,
) -> None:
    before = meter.used_bytes()
    return_library_pages()
    assert meter.used_at_most_bytes() >= meter.used_bytes()
    assert meter.used_bytes() - before < NOISE_BYTES


def test_library_pages_that_return_in_a_run_are_not_in_its_peak(meter: MemoryMeter) -> None:
    before = meter.used_bytes()
    taken = take(TAKEN_BYTES)
    assert meter.used_bytes() - before > TAKEN_BYTES - NOISE_BYTES
    taken.close()
    meter.begin_peak()
    return_library_pages()
    with take(RETURNED_BYTES):
        assert meter.peak_since_begin_bytes() - before > RETURNED_BYTES - NOISE_BYTES
    assert meter.peak_since_begin_bytes() - before < RETURNED_BYTES + NOISE_BYTES


def counts_of_pages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each count of library pages gives from now on."""
    count = LibraryPages.resident_bytes
    counts: list[int] = []

    def counted(pages: LibraryPages) -> int:
        counts.append(count(pages))
        return counts[-1]

    monkeypatch.setattr(LibraryPages, "resident_bytes", counted)
    return counts


def test_library_pages_are_not_counted_for_a_run_that_takes_no_more_than_others(
    meter: MemoryMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with take(TAKEN_BYTES):
        meter.begin_peak()
        most = meter.peak_since_begin_bytes()
    counts = counts_of_pages(monkeypatch)
    meter.begin_peak(recount=False)
    with take(TAKEN_BYTES // 2):
        assert TAKEN_BYTES // 2 <= meter.peak_since_begin_bytes() <= most
    assert not counts


def test_library_pages_are_no_part_of_a_run_that_takes_more_than_others(
    meter: MemoryMeter,
) -> None:
    meter.begin_peak(recount=False)
    before = meter.used_bytes()
    return_library_pages()
    with take(2 * TAKEN_BYTES):
        taken = meter.peak_since_begin_bytes() - before
    assert 2 * TAKEN_BYTES <= taken < 2 * TAKEN_BYTES + NOISE_BYTES


def test_library_pages_are_counted_once_for_a_run_that_takes_more_than_others(
    meter: MemoryMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter.begin_peak()
    counts = counts_of_pages(monkeypatch)
    with take(2 * TAKEN_BYTES):
        assert meter.peak_since_begin_bytes() >= 2 * TAKEN_BYTES
    assert len(counts) == 1


def test_a_reading_counts_library_pages_only_where_memory_has_changed(
    meter: MemoryMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter.reading()  # what a first one brings into memory is counted, too
    counts = counts_of_pages(monkeypatch)
    with take(TAKEN_BYTES):
        return_library_pages()
        peak, used = meter.reading()
        assert TAKEN_BYTES - NOISE_BYTES < used <= peak < TAKEN_BYTES + NOISE_BYTES
        assert len(counts) == 1
        for _ in range(100):  # of which a few may find that something has grown meanwhile
            assert abs(meter.reading()[1] - used) < NOISE_BYTES
    assert len(counts) < 20


def test_library_pages_that_the_kernel_takes_after_a_peak_are_not_in_it(meter: MemoryMeter) -> None:
    """As it does in a group that is at its limit: the mark is of a moment when they were there."""
    return_library_pages()
    before = meter.used_bytes()
    meter.begin_peak()
    take(TAKEN_BYTES).close()
    drop_library_pages()
    assert abs(meter.peak_since_begin_bytes() - before - TAKEN_BYTES) < NOISE_BYTES
    meter.begin_peak()
    with take(TAKEN_BYTES):
        peak = meter.peak_since_begin_bytes() - before
    assert peak > TAKEN_BYTES - NOISE_BYTES, "pages that stay away lend their reserve to nobody"


def test_library_pages_are_dropped_between_runs_before_they_outgrow_their_reserve() -> None:
    """An agent that always has work brings back more and more of them, and never rests."""
    meter = MemoryMeter()
    meter.settle(RETURNED_BYTES + 2 * NOISE_BYTES)
    before = meter.used_bytes()
    for _ in range(2):
        return_library_pages()
        return_library_pages(RETURNED_BYTES)
        with take(TAKEN_BYTES):
            meter.peak_since_begin_bytes()
        meter.begin_peak(recount=False)
        return_library_pages(RETURNED_BYTES)
        with take(TAKEN_BYTES):
            peak = meter.peak_since_begin_bytes() - before
        assert peak < TAKEN_BYTES + NOISE_BYTES


def test_library_pages_that_return_while_the_floor_is_taken_are_no_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = LibraryPages.resident_bytes
    counts: list[int] = []

    def counted_late(pages: LibraryPages) -> int:
        """As if another thread had used a library just before the first count."""
        if not counts:
            return_library_pages()
        counts.append(count(pages))
        return counts[-1]

    monkeypatch.setattr(LibraryPages, "resident_bytes", counted_late)
    meter = MemoryMeter()
    meter.settle(LIBRARY_RESERVE_BYTES)
    assert counts[0] >= RETURNED_BYTES
    assert meter.used_bytes() < NOISE_BYTES


@pytest.mark.parametrize(
    "reading",
    [MemoryMeter.used_bytes, MemoryMeter.peak_since_begin_bytes, MemoryMeter.peak_bytes],
)
def test_library_pages_that_return_while_they_are_counted_hide_no_use(
    meter: MemoryMeter,
    monkeypatch: pytest.MonkeyPatch,
    reading: Callable[[MemoryMeter], int],
) -> None:
    meter.begin_peak()
    before = meter.used_bytes()
    count = LibraryPages.resident_bytes
    counts: list[int] = []

    def counted_late(pages: LibraryPages) -> int:
        """As if another thread had used a library just before the first count."""
        if not counts:
            return_library_pages()
        counts.append(count(pages))
        return counts[-1]

    with take(2 * TAKEN_BYTES):
        monkeypatch.setattr(LibraryPages, "resident_bytes", counted_late)
        taken = reading(meter) - before
    assert counts
    assert abs(taken - 2 * TAKEN_BYTES) < NOISE_BYTES


@pytest.mark.parametrize("reading", [MemoryMeter.peak_since_begin_bytes, MemoryMeter.peak_bytes])
def test_library_pages_that_return_one_after_the_other_are_in_no_peak(
    meter: MemoryMeter,
    monkeypatch: pytest.MonkeyPatch,
    reading: Callable[[MemoryMeter], int],
) -> None:
    """Where many processes compete, a look at all of them takes so long that others return."""
    meter.begin_peak()
    before = meter.used_bytes()
    count, part, counts = LibraryPages.resident_bytes, RETURNED_BYTES // 8, list[int]()

    def counted_early(pages: LibraryPages) -> int:
        counts.append(count(pages))
        if len(counts) <= 8:
            return_library_pages(part * (len(counts) - 1), part)
        return counts[-1]

    with take(2 * TAKEN_BYTES):
        monkeypatch.setattr(LibraryPages, "resident_bytes", counted_early)
        taken = reading(meter) - before
    assert max(counts) - min(counts) >= RETURNED_BYTES // 2
    assert abs(taken - 2 * TAKEN_BYTES) < NOISE_BYTES


def grown() -> tuple[MemoryMeter, mmap.mmap]:
    """In a process of its own: it has grown by half of what may be the agent's own."""
    meter = MemoryMeter()
    meter.settle(LIBRARY_RESERVE_BYTES, HEAP_RESERVE_BYTES)
    return meter, take(HEAP_RESERVE_BYTES // 2)


def readings_of_growth() -> tuple[int, int, int, int]:
    """What is used before it is noted and after; the peaks then, and once more is taken."""
    meter, growth = grown()
    with growth:
        before = meter.used_bytes()
        meter.note_growth(0)
        after, peak = meter.used_bytes(), meter.peak_bytes()
        with take(TAKEN_BYTES):
            return before, after, peak, meter.peak_since_begin_bytes()


def test_what_the_heap_has_grown_by_is_no_use() -> None:
    before, after, peak, later = in_own_process(readings_of_growth)
    assert after < PAGES_BYTES < before
    assert peak >= before, "it was use until now"
    assert abs(later - TAKEN_BYTES) < PAGES_BYTES


def used_once_noted(held_bytes: int) -> int:
    meter, growth = grown()
    with growth:
        meter.note_growth(held_bytes)
        return meter.used_bytes()


def test_what_is_held_for_work_is_no_growth() -> None:
    held = HEAP_RESERVE_BYTES // 4
    assert abs(in_own_process(used_once_noted, held) - held) < PAGES_BYTES


def readings_beyond_the_reserve() -> tuple[int, int, int, int]:
    """What is used before more is taken than may be growth, then, and when as much is again that
    was noted as gone; what was said to be beyond the reserve."""
    meter, growth = grown()
    with growth:
        before = meter.used_bytes()
        with take(TAKEN_BYTES):
            meter.note_growth(0)
            beyond, said = meter.used_bytes(), meter.beyond_reserve_bytes
        meter.note_growth(0)
        assert meter.beyond_reserve_bytes == 0
        with take(TAKEN_BYTES):
            return before, beyond, meter.used_bytes(), said


def test_growth_beyond_its_reserve_is_use() -> None:
    before, beyond, again, said = in_own_process(readings_beyond_the_reserve)
    assert abs(said - beyond) < PAGES_BYTES
    assert abs(beyond - (before + TAKEN_BYTES - HEAP_RESERVE_BYTES)) < PAGES_BYTES
    assert abs(again - TAKEN_BYTES) < PAGES_BYTES, "it lends nothing to others"


def test_what_is_there_when_the_floor_is_taken_is_not_looked_through_again() -> None:
    """Else each fragment that is given up costs 20 ms."""
    there: list[int] = []
    MemoryMeter().settle()
    came_later: list[int] = []
    tracked = {id(each) for each in gc.get_objects()}
    assert id(there) not in tracked
    assert id(came_later) in tracked


def test_library_pages_go_when_a_fragment_is_opened_for_the_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write_fragment(tmp_path, dense_model([8, 8]), MIB)
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=64 * MIB)
    kept: list[bool] = []
    monkeypatch.setattr(
        MemoryMeter, "give_back", lambda _, *, still_in_use=False: kept.append(still_in_use)
    )
    for _ in range(2):  # as fragments that take turns in memory
        runtime.open("fragment", made.folder)
        runtime.close("fragment")
    assert kept == [False, False, True, False]


def test_of_tables_that_nobody_uses_only_what_was_not_written_to_goes(tmp_path: Path) -> None:
    pages = 16
    path = tmp_path / "libopenblas-0.so"
    path.write_bytes(b"t" * pages * mmap.PAGESIZE)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as tables:
        written = 5 * mmap.PAGESIZE
        tables[written] = ord("w")
        assert set(tables[:: mmap.PAGESIZE]) == set(b"tw")
        assert resident_pages(path) == pages
        drop_library_pages()
        assert resident_pages(path) == 1
        assert tables[written] == ord("w")
        assert tables[:written] == b"t" * written


def resident_pages(path: Path) -> int:
    """Of a mapped file."""
    text = Path("/proc/self/smaps").read_text()
    described = text.partition(f"{path}\n")[2]
    found = re.search(r"^Rss: +(\d+) kB", described, re.MULTILINE)
    assert found is not None
    return (int(found[1]) << 10) // mmap.PAGESIZE
