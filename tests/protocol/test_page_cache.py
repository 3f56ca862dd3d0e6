"""Files that come to a device, or leave it, take no memory of its group."""

import mmap
import os
import subprocess
import sys
from errno import ENOSPC
from pathlib import Path

import pytest

from cached_pages import cached_bytes, need_a_disk
from shoal_agent.transport.serving import _uncached
from shoal_protocol.files import file_frames
from shoal_protocol.page_cache import (
    PASSING_BYTES,
    cache_libraries_in_small_pages,
    in_large_pieces,
)
from shoal_protocol.transfers import PartialFile
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest

MIB = 1 << 20
SIZE = 4 * PASSING_BYTES + MIB


@pytest.mark.parametrize(("cached", "most"), [(False, PASSING_BYTES), (True, SIZE)])
def test_what_has_come_of_a_file_leaves_memory_where_it_is_not_to_be_cached(
    tmp_path: Path, most: int, *, cached: bool
) -> None:
    need_a_disk(tmp_path)
    part = PartialFile(tmp_path / "weights.bin", SIZE, cached=cached)
    part.open()
    for _ in range(SIZE // MIB):
        part.append(bytes(MIB))
    assert most - PASSING_BYTES < cached_bytes(part.path) <= most
    part.check_complete()
    part.close()
    assert part.path.read_bytes() == bytes(SIZE)


def test_a_piece_that_could_not_be_written_back_is_not_there_and_may_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems find out only then that the disk is full."""
    part = PartialFile(tmp_path / "weights.bin", 2 * PASSING_BYTES, cached=False)
    part.open()
    part.append(bytes(PASSING_BYTES - 1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(ENOSPC, "full")))
        with pytest.raises(OSError, match="full"):
            part.append(b"ab")
    assert part.offset == part.path.stat().st_size == PASSING_BYTES - 1
    part.append(b"ab")
    part.append(bytes(PASSING_BYTES - 1))
    part.check_complete()
    part.close()
    content = part.path.read_bytes()
    assert content.index(b"ab") == PASSING_BYTES - 1
    assert content.count(b"ab") == 1


def test_a_file_that_is_sent_to_a_peer_leaves_memory(tmp_path: Path) -> None:
    need_a_disk(tmp_path)
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(SIZE))
    request = FetchFragmentRequest(digest=f"sha256:{'a' * 64}", file="weights.bin")
    with path.open("r+b") as file:
        os.fsync(file.fileno())
    sent = 0
    with path.open("rb") as file:
        for frame in _uncached(file, file_frames(file, request, SIZE)):
            sent += len(frame)
    assert sent > SIZE
    assert cached_bytes(path) < MIB


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A library as pip writes it."""
    need_a_disk(tmp_path)
    path = tmp_path / "library.so"
    with path.open("wb", buffering=0) as file:
        for _ in range(16):
            file.write(os.urandom(MIB))
    if not in_large_pieces([path]):
        pytest.skip("this kernel, or this file system, maps no large pieces: Linux 6.18 does")
    return path


def test_a_library_that_was_just_installed_is_read_again_in_small_pages(installed: Path) -> None:
    content = installed.read_bytes()
    with installed.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as held:
        assert held[:] == content, "all of it is in this process's memory"
    assert cache_libraries_in_small_pages([installed]) == [str(installed)]
    assert in_large_pieces([installed]) == []
    assert cached_bytes(installed) == len(content)
    assert installed.read_bytes() == content
    assert cache_libraries_in_small_pages([installed]) == []


def test_a_library_that_this_process_runs_is_read_again_too(installed: Path) -> None:
    with (
        installed.open("rb") as file,
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as mapped,
    ):
        content = mapped[:]
        cache_libraries_in_small_pages([installed])
        assert in_large_pieces([installed]) == []
        assert mapped[:] == content


def test_a_library_that_another_process_runs_stays_as_it_is(installed: Path) -> None:
    program = (
        "import mmap, sys; file = open(sys.argv[1], 'rb')\n"
        "held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "print(len(held[:]), flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(installed)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline()
        cache_libraries_in_small_pages([installed])
        assert in_large_pieces([installed]) == [str(installed)]
        other.communicate("\n")


def test_what_is_no_library_or_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    small = tmp_path / "small.so"
    small.write_bytes(b"1")
    assert cache_libraries_in_small_pages([small, tmp_path / "none.so", tmp_path]) == []
