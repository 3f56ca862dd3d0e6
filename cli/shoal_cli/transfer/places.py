"""What every place has in common: a source lists and reads, a target says what stands and takes."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

PIECE_BYTES: Final = 1 << 20

OnBytes = Callable[[int], None]
"""ConditionUpdate how many bytes more have been carried."""


class TransferRefused(Exception):
    """What was asked for cannot be: trying again would not help. The text says what to do."""


class TransferBroken(Exception):
    """A network, a server or a disk failed: it may be well the next time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file of a source.

    `version` tells this content from another of the same name and size (an entity tag, a time); it
    may be empty. `sha256`, in hexadecimal, is known where the place knows it without reading.
    """

    name: str
    size_bytes: int
    version: str = ""
    sha256: str = ""


Read = Callable[[int], AsyncIterator[bytes]]
"""The bytes of a file from an offset on, in pieces."""


class Source(Protocol):
    """Where files come from. Methods raise `TransferRefused` or `TransferBroken`."""

    address: str

    async def entries(self) -> Sequence[Entry]:
        """The files, by name; none where there is nothing."""
        ...

    def read(self, entry: Entry, offset: int) -> AsyncIterator[bytes]:
        """A file's bytes from an offset on."""
        ...

    async def sha256(self, entry: Entry) -> str:
        """A file's checksum, where that costs no network; empty otherwise."""
        ...

    async def close(self) -> None: ...


class Target(Protocol):
    """Where files go. Methods raise `TransferRefused` or `TransferBroken`."""

    address: str

    async def standing(self) -> Mapping[str, int]:
        """The sizes of the files that stand, by name."""
        ...

    async def sha256(self, name: str) -> str:
        """The checksum of a file that stands."""
        ...

    async def put(self, entry: Entry, read: Read, on_bytes: OnBytes) -> None:
        """Take a file; it is seen when it is whole. `entry.sha256` is checked where it is known."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class Passing:
    """A file's bytes on their way from its start, which must be as many as were announced.

    `problem` is what went wrong with them: a library that takes them in tells of it otherwise.
    """

    entry: Entry
    read: Read
    on_bytes: OnBytes
    problem: TransferRefused | TransferBroken | None = None

    async def pieces(self) -> AsyncIterator[bytes]:
        sent, announced = 0, self.entry.size_bytes
        try:
            async for piece in self.read(0):
                sent += len(piece)
                if sent > announced:
                    break
                yield piece
                self.on_bytes(len(piece))
            if sent != announced:
                raise TransferBroken(
                    f"{self.entry.name} ends at {sent} of the announced {announced} bytes"
                )
        except (TransferRefused, TransferBroken) as error:
            self.problem = error
            raise


async def checksum(pieces: AsyncIterator[bytes]) -> str:
    """The checksum of what passes by."""
    found = hashlib.sha256()
    async for piece in pieces:
        await asyncio.to_thread(found.update, piece)
    return found.hexdigest()


def check_name(name: str, address: str) -> str:
    """A name that a file can have anywhere; `TransferRefused` for any other."""
    if (
        not name
        or name.startswith(".")
        or "/" in name
        or not name.isprintable()
        or len(name.encode()) > 255
    ):
        raise TransferRefused(f"{address}: no file can be called {name[:80]!r}")
    return name
