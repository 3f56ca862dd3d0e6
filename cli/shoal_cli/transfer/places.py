"""What every place has in common: a source lists and reads, a target lists and writes."""

import asyncio
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeVar

from shoal_protocol.digests import Digest, from_hexadecimal
from shoal_protocol.limits import Stalled
from shoal_protocol.transfers import watched

PIECE_BYTES: Final = 1 << 20
TRIES: Final = 4
PAUSE_SECONDS: Final = 1.0
"""Before the second try; it doubles."""
_NAME_BYTES: Final = 255
_SHOWN: Final = 80
_QUERY: Final = re.compile(r"(\w+://[^\s?#'\"]+)[?#][^\s'\"]*?(?=[:.,;)]?(?:[\s'\"]|$))")

Result = TypeVar("Result")
OnBytes = Callable[[int], None]
"""Receives the number of bytes that were transferred since the last call."""


def redacted(text: str) -> str:
    """A text whose addresses show no query: that may be a signature, as good as a password."""
    return _QUERY.sub(r"\1?...", text)


class _Failed(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(redacted(text))


class TransferRefused(_Failed):
    """A transfer that would fail again. The text says what to do."""


class ModelMissing(TransferRefused):
    """There is no model where a path of this machine says, or more than one."""


class TransferBroken(_Failed):
    """A network, a server or a disk failed: the next try may succeed."""


class NoRoomThere(TransferBroken):
    """A coordinator's volume has no room for a file until something leaves it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file of a source.

    `version` tells this content from another of the same name and size (an entity tag, a time); it
    may be empty. `digest` is known where the place knows it without reading.
    """

    name: str
    size_bytes: int
    version: str = ""
    digest: Digest | None = None


Read = Callable[[int], AsyncIterator[bytes]]
"""The bytes of a file from an offset on, in pieces."""


class Place(ABC):
    """Where files are; it is closed at the end of its context. Methods raise `TransferRefused` or
    `TransferBroken`."""

    address: str

    async def close(self) -> None:  # noqa: B027 - many hold nothing open
        """Release connections."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class Source(Place):
    """Where files come from."""

    @abstractmethod
    async def entries(self) -> Sequence[Entry]:
        """The files, by name; none where there is nothing. Not every place can have a file of each
        name (`is_name`): who copies them looks at that."""

    @abstractmethod
    def read(self, entry: Entry, offset: int) -> AsyncIterator[bytes]:
        """A file's bytes from an offset on."""

    async def digest(self, entry: Entry) -> Digest | None:
        """A file's digest, where that costs no network."""
        return entry.digest


class Target(Place):
    """Where files go."""

    async def existing(self) -> Mapping[str, int]:
        """The sizes of the files that exist there, by name; none where they cannot be listed."""
        return {}

    async def existing_digest(self, name: str) -> Digest | None:
        """The digest of a file of `existing`; None where it cannot be known."""
        return None

    @abstractmethod
    async def put(self, entry: Entry, read: Read, on_bytes: OnBytes) -> None:
        """Write a file; it appears when it is whole, with `entry.digest` where that is known."""


@dataclass(slots=True)
class Passing:
    """A file's bytes for a library that sends them: as many as announced. `problem` is what went
    wrong with them, since the library reports an error of its own."""

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


def reader(source: Source, entry: Entry) -> Read:
    """How to read a file of a source; `TransferBroken` where its bytes come too slowly."""

    async def read(offset: int) -> AsyncIterator[bytes]:
        try:
            async for piece in watched(source.read(entry, offset)):
                yield piece
        except Stalled as error:
            raise TransferBroken(f"{source.address}: {entry.name}: {error}") from error

    return read


async def with_tries(act: Callable[[], Awaitable[Result]]) -> Result:
    """Do what may break, up to `TRIES` times, with a longer pause before each."""
    pause_seconds = PAUSE_SECONDS
    for _ in range(TRIES - 1):
        try:
            return await act()
        except TransferBroken:
            await asyncio.sleep(pause_seconds)
            pause_seconds *= 2
    return await act()


async def digest_of_stream(pieces: AsyncIterator[bytes]) -> Digest:
    """The digest of bytes that come in pieces."""
    found = hashlib.sha256()
    async for piece in pieces:
        await asyncio.to_thread(found.update, piece)
    return from_hexadecimal(found.hexdigest())


def check_name(name: str, address: str) -> str:
    """A name that a file can have anywhere; `TransferRefused` for any other."""
    if not is_name(name):
        raise TransferRefused(f"{address}: {no_name(name)}")
    return name


def is_name(name: str) -> bool:
    """Whether a file can be called so anywhere."""
    visible = name and not name.startswith(".") and name.isprintable()
    return bool(visible) and "/" not in name and len(name.encode()) <= _NAME_BYTES


def no_name(name: str) -> str:
    """Says that no file can be called so."""
    return f"no file can be called {name[:_SHOWN]!r}"
