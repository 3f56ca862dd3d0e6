"""A folder of this machine, as a source and as a target; a single file, as a source.

Files that begin with a dot are not seen, sub-folders neither: results are beside `.shoal/`. What is
on its way is `.NAME.KEY.part`, KEY being made of what tells this content from another.
"""

import asyncio
import errno
import hashlib
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from shoal_cli.transfer.places import (
    PIECE_BYTES,
    Entry,
    OnBytes,
    Read,
    TransferBroken,
    TransferRefused,
    check_name,
)
from shoal_protocol.durable_files import sync_folder
from shoal_protocol.units import format_bytes


@dataclass(slots=True)
class FolderSource:
    """Files of a folder, or one file. `root`: nothing outside of it is read, whatever links say."""

    address: str
    path: Path
    root: Path | None = None

    async def entries(self) -> Sequence[Entry]:
        return await asyncio.to_thread(self._entries)

    def _entries(self) -> list[Entry]:
        try:
            if self.path.is_file():
                return [self._entry(self.path)]
            if not self.path.is_dir():
                raise TransferRefused(f"{self.address}: there is no {self.path}")
            names = sorted(name for name in os.listdir(self.path) if not name.startswith("."))
            return [self._entry(self.path / name) for name in names if self._is_file(name)]
        except OSError as error:
            raise broken(self.address, error) from error

    def _is_file(self, name: str) -> bool:
        return (self.path / name).is_file()

    def _entry(self, file: Path) -> Entry:
        status = file.stat()
        return Entry(
            name=check_name(file.name, self.address),
            size_bytes=status.st_size,
            version=f"{status.st_mtime_ns}-{status.st_ino}",
        )

    def _open(self, entry: Entry) -> BinaryIO:
        file = self.path if self.path.is_file() else self.path / entry.name
        if self.root is not None and not file.resolve().is_relative_to(self.root.resolve()):
            raise TransferRefused(f"{self.address}: a link of {entry.name} leads out of the claim")
        return file.open("rb", buffering=0)

    async def read(self, entry: Entry, offset: int) -> AsyncIterator[bytes]:
        try:
            with self._open(entry) as file:
                file.seek(offset)
                while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                    yield piece
        except OSError as error:
            raise broken(self.address, error) from error

    async def sha256(self, entry: Entry) -> str:
        def digest() -> str:
            with self._open(entry) as file:
                return _sha256(file)

        try:
            return await asyncio.to_thread(digest)
        except OSError as error:
            raise broken(self.address, error) from error

    async def close(self) -> None:
        pass


@dataclass(slots=True)
class FolderTarget:
    """A folder that files are written to; it is made when the first one comes."""

    address: str
    path: Path

    async def standing(self) -> Mapping[str, int]:
        def sizes() -> dict[str, int]:
            if not self.path.is_dir():
                return {}
            files = (path for path in self.path.iterdir() if path.is_file())
            return {path.name: path.stat().st_size for path in files}

        try:
            return await asyncio.to_thread(sizes)
        except OSError as error:
            raise broken(self.address, error) from error

    async def sha256(self, name: str) -> str:
        def digest() -> str:
            with (self.path / name).open("rb", buffering=0) as file:
                return _sha256(file)

        try:
            return await asyncio.to_thread(digest)
        except OSError as error:
            raise broken(self.address, error) from error

    async def put(self, entry: Entry, read: Read, on_bytes: OnBytes) -> None:
        try:
            part = await asyncio.to_thread(self._begin, entry)
            await receive(part, entry, read, on_bytes)
            await asyncio.to_thread(self._settle, part, entry.name)
        except OSError as error:
            raise broken(self.address, error) from error

    def _begin(self, entry: Entry) -> Path:
        check_name(entry.name, self.address)
        self.path.mkdir(parents=True, exist_ok=True)
        same = f"{entry.name}\0{entry.size_bytes}\0{entry.version}\0{entry.sha256}"
        key = hashlib.sha256(same.encode()).hexdigest()
        part = self.path / f".{key[:32]}.part"
        if not entry.version and not entry.sha256:
            part.unlink(missing_ok=True)
        have = part.stat().st_size if part.exists() else 0
        free = shutil.disk_usage(self.path).free
        if entry.size_bytes - have > free:
            raise TransferBroken(
                f"{self.address}: {entry.name} would need {format_bytes(entry.size_bytes - have)}, "
                f"{format_bytes(free)} are free there"
            )
        return part

    def _settle(self, part: Path, name: str) -> None:
        part.rename(self.path / name)
        sync_folder(self.path)

    async def close(self) -> None:
        pass


async def receive(part: Path, entry: Entry, read: Read, on_bytes: OnBytes) -> str:
    """Have all of a file in `part`, which may hold its beginning; synced, and its checksum.

    Raises `TransferBroken` where the bytes are not those announced, `OSError`.
    """
    with part.open("ab", buffering=0) as file:
        if file.tell() > entry.size_bytes:
            file.truncate(0)
        offset = file.seek(0, os.SEEK_END)
        with part.open("rb", buffering=0) as before:
            found = await asyncio.to_thread(_hash, before)
        on_bytes(offset)

        def take(piece: bytes) -> None:
            found.update(piece)
            view = memoryview(piece)
            while view:
                view = view[file.write(view) :]

        async for piece in _exactly(entry, offset, read):
            await asyncio.to_thread(take, piece)
            on_bytes(len(piece))
        await asyncio.to_thread(os.fsync, file.fileno())
    digest = found.hexdigest()
    if entry.sha256 and digest != entry.sha256:
        part.unlink()
        raise TransferBroken(
            f"{entry.name} arrived with checksum {digest[:12]}, not {entry.sha256[:12]}"
        )
    return digest


async def _exactly(entry: Entry, offset: int, read: Read) -> AsyncIterator[bytes]:
    """The rest of a file, which must be as long as it was announced."""
    if offset < entry.size_bytes:
        async for piece in read(offset):
            offset += len(piece)
            if offset > entry.size_bytes:
                break
            yield piece
    if offset != entry.size_bytes:
        raise TransferBroken(
            f"{entry.name} ends at {offset} of the announced {entry.size_bytes} bytes"
        )


def broken(address: str, error: OSError) -> TransferRefused | TransferBroken:
    """An error of the file system, sorted: is there any sense in trying again?"""
    text = f"{address}: {error.strerror or error}"
    if error.filename:
        text += f" ({error.filename})"
    hopeless = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS)
    return TransferRefused(text) if error.errno in hopeless else TransferBroken(text)


def _sha256(file: BinaryIO) -> str:
    return _hash(file).hexdigest()


def _hash(file: BinaryIO | FileIO) -> "hashlib._Hash":
    found = hashlib.sha256()
    while piece := file.read(PIECE_BYTES):
        found.update(piece)
    return found
