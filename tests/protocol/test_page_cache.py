"""Files that come to a device, or leave it, take no memory of its group."""

import os
from errno import ENOSPC
from pathlib import Path

import pytest

from cached_pages import cached_bytes, need_a_disk
from shoal_agent.transport.serving import _uncached
from shoal_protocol.files import file_frames
from shoal_protocol.page_cache import PASSING_BYTES
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
