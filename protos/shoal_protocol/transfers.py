"""One resumable transfer of a file, for everyone who receives or serves one.

- `PartialFile`: bytes on their way to their place. One writer at a time; what came before a break
  counts; what is published was read back from the disk and has the digest that it should have.
- `stall_watch`: the other side must move a minimum of bytes in the time that one waits for it.
- `receive`: brings the rest of a file into a `PartialFile`, from whatever gives its bytes.

Disk work happens in threads, and a caller that is cancelled waits for it: no thread of a broken
transfer writes into the next one.
"""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import grpc

from shoal_protocol.digests import Digest, digest_of_mapped
from shoal_protocol.durable_files import NO_LOCKS, sync_folder
from shoal_protocol.limits import Stalled, StallWatch
from shoal_protocol.page_cache import PASSING_BYTES, uncache
from shoal_protocol.threads import in_thread

STALL_SECONDS: Final = 30.0
"""The time of waiting in which the other side has to move a minimum of bytes."""
MINIMUM_BYTES_PER_SECOND: Final = 8 << 10

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Piece = TypeVar("Piece", bytes, memoryview)


class WrongBytes(Exception):
    """What came is not what was announced."""


class PartInUse(Exception):
    """Another transfer of the same file is under way."""


class PartialFile:
    """A file on its way. `open`, then `append` until `size_bytes`, `verify`, perhaps `publish`; in
    any case `close`. Methods block."""

    def __init__(
        self, path: Path, size_bytes: int, name: str | None = None, *, cached: bool = True
    ) -> None:
        """`name` is what messages call the file; by default the name in `path`. Where it is not
        to be `cached`, what is written leaves memory soon."""
        self.path = path
        self.size_bytes = size_bytes
        self.name = name or path.name
        self.offset = 0
        self._cached = cached
        self._descriptor: int | None = None

    def open(self) -> int:
        """Open it for this writer alone; how many bytes of it are there. Raises `PartInUse`,
        `OSError`."""
        assert self._descriptor is None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o666)
        try:
            self._lock(descriptor)
            self.offset = os.fstat(descriptor).st_size
            if self.offset > self.size_bytes:
                os.ftruncate(descriptor, 0)
                self.offset = 0
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return self.offset

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = os.path.samestat(os.fstat(descriptor), os.lstat(self.path))
        except BlockingIOError as error:
            raise PartInUse(f"another transfer writes {self.path}") from error
        except FileNotFoundError:
            same = False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            same = True  # the digest alone protects
        if not same:  # it was published, or discarded, after it was opened
            raise PartInUse(f"another transfer has just written {self.path}")

    def append(self, piece: bytes | memoryview) -> None:
        """Add bytes. Raises `WrongBytes` past the announced size (and all is gone), or `OSError`
        (and nothing of the piece is there)."""
        assert self._descriptor is not None
        if self.offset + len(piece) > self.size_bytes:
            self.discard()
            raise self._ends_at(self.offset + len(piece))
        view = memoryview(piece)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
            end = self.offset + len(piece)
            if not self._cached and self.offset // PASSING_BYTES < end // PASSING_BYTES:
                os.fdatasync(self._descriptor)  # what is not written back cannot leave
                uncache(self._descriptor, 0, end)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self.offset)
            raise
        self.offset = end

    def check_complete(self) -> None:
        """Raise `WrongBytes` where bytes are missing."""
        if self.offset != self.size_bytes:
            raise self._ends_at(self.offset)

    def _ends_at(self, offset: int) -> WrongBytes:
        return WrongBytes(f"{self.name} ends at {offset} of the announced {self.size_bytes} bytes")

    def verify(self, *expected: Digest) -> Digest:
        """Read all of it back from the disk, durable from then on; its digest. Raises `WrongBytes`
        (and it is gone) where that is not as expected, `OSError`."""
        assert self._descriptor is not None
        os.fsync(self._descriptor)
        with open(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            found = digest_of_mapped(file)
            size = file.tell()
        if size != self.size_bytes:
            self.discard()
            raise self._ends_at(size)
        for digest in expected:
            if found != digest:
                self.discard()
                raise WrongBytes(
                    f"{self.name} arrived with checksum {found[7:19]}, not {digest[7:19]}"
                )
        return found

    def publish(self, place: Path) -> None:
        """Give the verified file its name, durably; it replaces what has that name. Raises
        `OSError`."""
        assert self._descriptor is not None
        place.parent.mkdir(parents=True, exist_ok=True)
        self.path.rename(place)
        sync_folder(place.parent)

    def discard(self) -> None:
        """Forget what came."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let go of it; what came is there for the next transfer."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


def stall_watch() -> StallWatch:
    """A watch over one transfer of a file, with the minimum rate of this module."""
    return StallWatch(
        seconds=STALL_SECONDS, minimum_bytes=round(STALL_SECONDS * MINIMUM_BYTES_PER_SECOND)
    )


async def write_watched(
    watch: StallWatch,
    context: grpc.aio.ServicerContext[Request, Answer],
    message: Answer,
    count: int,
) -> None:
    """Answer a caller with a message of `count` bytes. A caller that takes too little loses the
    stream: the handler is cancelled, since no status can follow a write that is stuck."""
    try:
        await watch.wait(context.write(message))
    except Stalled as error:
        raise asyncio.CancelledError(str(error)) from error
    watch.progress(count)


async def watched(pieces: AsyncIterable[Piece]) -> AsyncGenerator[Piece]:
    """The pieces of a file. Raises `Stalled` where they come too slowly."""
    watch, iterator = stall_watch(), aiter(pieces)
    try:
        while (piece := await watch.wait(anext(iterator, None))) is not None:
            watch.progress(len(piece))
            yield piece
    finally:
        if isinstance(iterator, AsyncGenerator):
            await iterator.aclose()


async def receive(
    part: PartialFile,
    read: Callable[[int], AsyncIterable[Piece]],
    arrived: Callable[[int], Awaitable[None]] | None = None,
    make_room: Callable[[OSError], Awaitable[None]] | None = None,
) -> None:
    """Bring the rest of a file into an open `part`: `read(offset)` gives its bytes from there on,
    `watched` where they come from another process.

    `arrived` receives the number of bytes of each piece. `make_room` receives the error of each
    write that failed; the write is repeated if it returns. Raises `WrongBytes` where bytes are too
    many or too few, `OSError`, and what `read` raises.
    """
    if part.offset < part.size_bytes:
        pieces = aiter(read(part.offset))
        try:
            async for piece in pieces:
                await _append(part, piece, make_room)
                if arrived is not None:
                    await arrived(len(piece))
        finally:
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()
    part.check_complete()


async def _append(
    part: PartialFile,
    piece: bytes | memoryview,
    make_room: Callable[[OSError], Awaitable[None]] | None,
) -> None:
    while True:
        try:
            await in_thread(part.append, piece)
        except OSError as error:
            if make_room is None:
                raise
            await make_room(error)
        else:
            return
