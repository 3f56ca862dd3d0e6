"""What is dropped is what a fragment or a library has mapped. Where a file was, other memory may be
later: a page of that which is dropped is nothing but zeros."""

import asyncio
import ctypes
import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.fragment_making import InBlocks, MadeFragment, dense_model, write_fragment
from shoal_agent.cache.disk import FragmentCache
from shoal_agent.runtime.block_fragment import BlockFragment
from shoal_agent.runtime.mapped_pages import PageRange, added, drop, mapped_ranges, size_of
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.preparation import Preparation
from shoal_agent.runtime.prepared import Prepared
from shoal_agent.runtime.process_memory import LIBRARY_RESERVE_BYTES, MemoryMeter
from shoal_agent.runtime.whole_fragment import WholeFragment

MIB = 1 << 20
GRANTED = 10 * MIB
CONTENT = 0x5A
_FIXED_NOREPLACE = 0x100000
_FAILED = ctypes.c_void_p(-1).value


@contextmanager
def used_again(ranges: Iterable[PageRange]) -> Iterator[list[PageRange]]:
    """Addresses that are free, with memory that has a content; but for those that are in use again
    by now."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED_NOREPLACE
    used = []
    for each in ranges:
        start = libc.mmap(each.start, each.size, rights, kind, -1, 0)
        if start == each.start:
            ctypes.memset(start, CONTENT, each.size)
            used.append(each)
        elif start != _FAILED:  # an old kernel
            libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(each.size))
    try:
        yield used
    finally:
        for each in used:
            libc.munmap(ctypes.c_void_p(each.start), ctypes.c_size_t(each.size))


def lost(ranges: Iterable[PageRange]) -> int:
    """Bytes that have no content any more."""
    return sum(
        each.size - ctypes.string_at(each.start, each.size).count(CONTENT) for each in ranges
    )


@pytest.fixture
def made(tmp_path: Path) -> MadeFragment:
    return write_fragment(tmp_path, dense_model([512] * 9), 16 * MIB, InBlocks(8))


@pytest.fixture
def prepared(tmp_path: Path, made: MadeFragment) -> Prepared:
    cache = FragmentCache(tmp_path, 1 << 30)
    preparation = Preparation(cache, lambda _: True, lambda _: None, worth_bytes=0)
    return asyncio.run(preparation.prepare(made.digest, made.folder, GRANTED))


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=64 * MIB)
    yield runtime
    for digest in ("old", "new"):
        runtime.close(digest)


def content_lost(runtime: Runtime, made: MadeFragment) -> int:
    """Of memory that has the place of the old fragment's weights when those of the new one are
    dropped, which were looked up before."""
    folder = made.folder.resolve()
    weights = runtime._open["new"].weight_pages()
    assert size_of(weights) >= 8 * MIB
    both = mapped_ranges(folder)
    runtime.close("old")
    with used_again(added(mapped_ranges(folder), both)) as used:
        assert size_of(used) > MIB
        drop(weights)
        return lost(used)


@pytest.mark.parametrize("granted", [16 * MIB, GRANTED], ids=["whole", "blocks"])
def test_a_fragment_drops_nothing_that_another_session_of_its_model_had_mapped(
    granted: int, runtime: Runtime, made: MadeFragment
) -> None:
    for digest in ("old", "new"):
        runtime.open(digest, made.folder, granted)
    assert isinstance(runtime._open["new"], WholeFragment) == (granted > GRANTED)
    assert content_lost(runtime, made) == 0


def test_prepared_blocks_drop_nothing_that_other_blocks_of_their_model_had_mapped(
    runtime: Runtime, made: MadeFragment, prepared: Prepared
) -> None:
    for digest in ("old", "new"):
        runtime.open(digest, made.folder, GRANTED, prepared)
        fragment = runtime._open[digest]
        assert isinstance(fragment, BlockFragment)
        assert fragment.is_prepared
    assert content_lost(runtime, made) == 0


def test_blocks_that_are_packed_drop_nothing_that_others_had_mapped(
    runtime: Runtime, made: MadeFragment, prepared: Prepared
) -> None:
    runtime.open("old", made.folder, GRANTED, prepared)
    runtime.open("new", made.folder, GRANTED, prepared, soon=True)
    fragment = runtime._open["new"]
    assert isinstance(fragment, BlockFragment)
    assert fragment.may_pack
    while fragment.may_pack:
        fragment.pack_one()
    assert content_lost(runtime, made) == 0


def test_what_was_mapped_when_the_floor_was_taken_may_go(tmp_path: Path) -> None:
    """Only libraries stay until the process ends."""
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    before = mapped_ranges(tmp_path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        meter = MemoryMeter()
        meter.settle(LIBRARY_RESERVE_BYTES)
        ranges = added(before, mapped_ranges(tmp_path))
    with used_again(ranges) as used:
        assert size_of(used) == MIB
        meter.give_back()
        assert lost(used) == 0
