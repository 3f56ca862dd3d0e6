"""One writer for a partial file, verified from the disk; the slow are left, and nobody starves."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_protocol import transfers
from shoal_protocol.digests import digest_of
from shoal_protocol.limits import Stalled
from shoal_protocol.threads import in_thread
from shoal_protocol.transfers import PartialFile, PartInUse, WrongBytes, receive, watched

CONTENT = b"0123456789"


def source(pieces: list[bytes]) -> AsyncIterator[bytes]:
    async def read() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return read()


@settings(deadline=None)  # it writes files
@given(st.lists(st.integers(0, len(CONTENT)), max_size=5))
def test_a_transfer_that_breaks_anywhere_is_resumed(
    tmp_path_factory: pytest.TempPathFactory, breaks: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("part")

    async def transfer() -> None:
        for end in breaks:
            part = PartialFile(folder / "a.part", len(CONTENT))
            offset = part.open()
            if offset < end < len(CONTENT):
                with pytest.raises(WrongBytes, match=f"ends at {end} of the announced 10 bytes"):
                    await receive(part, lambda at, end=end: source([CONTENT[at:end]]))  # type: ignore[misc]
            part.close()
        part = PartialFile(folder / "a.part", len(CONTENT))
        part.open()
        await receive(part, lambda at: source([CONTENT[at:]]))
        assert part.verify(digest_of(CONTENT)) == digest_of(CONTENT)
        part.publish(folder / "a")
        part.close()

    asyncio.run(transfer())
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert (folder / "a").read_bytes() == CONTENT


def test_a_partial_file_has_one_writer(tmp_path: Path) -> None:
    first, second = (PartialFile(tmp_path / "a.part", 10) for _ in range(2))
    assert first.open() == 0
    with pytest.raises(PartInUse):
        second.open()
    first.append(CONTENT[:4])
    first.close()
    assert second.open() == 4
    second.close()


def test_what_is_published_is_what_is_on_the_disk(tmp_path: Path) -> None:
    """Not what was sent: another process may have written, or the disk have lost, some of it."""
    for written in (b"0123456780", b"012345678", b"0123456789+"):
        part = PartialFile(tmp_path / "a.part", 10)
        part.open()
        part.append(CONTENT)
        (tmp_path / "a.part").write_bytes(written)
        with pytest.raises(WrongBytes):
            part.verify(digest_of(CONTENT))
        assert not list(tmp_path.iterdir())


def test_more_than_was_announced_is_thrown_away(tmp_path: Path) -> None:
    part = PartialFile(tmp_path / "a.part", 5)
    part.open()
    with pytest.raises(WrongBytes, match="ends at 10 of the announced 5 bytes"):
        part.append(CONTENT)
    assert not list(tmp_path.iterdir())


async def test_a_cancelled_caller_waits_for_its_thread() -> None:
    entered, released, left = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        released.wait()
        left.set()

    task = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(entered.wait)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left.is_set()


async def test_only_the_time_of_the_other_side_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "STALL_SECONDS", 0.2)
    assert [piece async for piece in watched(source([b"a", b"b"]))] == [b"a", b"b"]
    async for _ in watched(source([b"a"] * 5)):
        await asyncio.sleep(0.1)  # a slow disk of ours

    async def slow() -> AsyncIterator[bytes]:
        for _ in range(100):
            await asyncio.sleep(0.1)
            yield b"a"

    with pytest.raises(Stalled, match="stalled"):
        async for _ in watched(slow()):
            pass
