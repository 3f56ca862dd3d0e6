"""A folder of this machine, or a single file.

Files that begin with a dot are not listed, sub-folders neither: results are beside `.shoal/`. A
partial file is `.KEY.part`, where KEY is made of what tells this content from another.
"""

import asyncio
import contextlib
import errno
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from shoal_cli.transfer.places import (
    PIECE_BYTES,
    Entry,
    OnBytes,
    Read,
    Source,
    Target,
    TransferBroken,
    TransferRefused,
    check_name,
)
from shoal_protocol.digests import Digest, digest_of, digest_of_file, hexadecimal
from shoal_protocol.threads import in_thread
from shoal_protocol.transfers import PartialFile, PartInUse, WrongBytes, receive
from shoal_protocol.units import format_bytes

_FINAL: Final = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(slots=True)
class Folder(Source, Target):
    """Files of a folder, which is made when the first one is written; one file as a source.
    `root`: nothing outside of it is read, whatever links say."""

    address: str
    path: Path
    root: Path | None = None

    async def entries(self) -> Sequence[Entry]:
        with translated(self.address):
            return await asyncio.to_thread(self._entries)

    def _entries(self) -> list[Entry]:
        if self.path.is_file():
            return [self._entry(self.path)]
        if not self.path.is_dir():
            raise TransferRefused(f"{self.address}: there is no {self.path}")
        names = sorted(name for name in os.listdir(self.path) if not name.startswith("."))
        found: list[Entry] = []
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # renamed just now, or a link to nowhere
                if (self.path / name).is_file():
                    found.append(self._entry(self.path / name))
        return found

    def _entry(self, file: Path) -> Entry:
        status = file.stat()
        return Entry(
            name=file.name,
            size_bytes=status.st_size,
            version=f"{status.st_mtime_ns}-{status.st_ino}",
        )

    def _open(self, name: str) -> BinaryIO:
        file = self.path if self.path.is_file() else self.path / name
        if self.root is not None and not file.resolve().is_relative_to(self.root.resolve()):
            raise TransferRefused(f"{self.address}: a link of {name} leads out of the claim")
        return file.open("rb", buffering=0)

    async def read(self, entry: Entry, offset: int) -> AsyncIterator[bytes]:
        with translated(self.address), self._open(entry.name) as file:
            file.seek(offset)
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                yield piece

    async def digest(self, entry: Entry) -> Digest:
        return await self.existing_digest(entry.name)

    async def existing(self) -> Mapping[str, int]:
        def sizes() -> dict[str, int]:
            if not self.path.is_dir():
                return {}
            files = (path for path in self.path.iterdir() if path.is_file())
            return {path.name: path.stat().st_size for path in files}

        with translated(self.address):
            return await in_thread(sizes)

    async def existing_digest(self, name: str) -> Digest:
        with translated(self.address), self._open(name) as file:
            return await in_thread(digest_of_file, file)

    async def put(self, entry: Entry, read: Read, on_bytes: OnBytes) -> None:
        with translated(self.address):
            part = await in_thread(self._part, entry)
            place = self.path / entry.name
            await receive_file(self.address, part, place, entry, read, on_bytes)

    def _part(self, entry: Entry) -> Path:
        check_name(entry.name, self.address)
        self.path.mkdir(parents=True, exist_ok=True)
        same = f"{entry.name}\0{entry.size_bytes}\0{entry.version}\0{entry.digest or ''}"
        part = self.path / f".{hexadecimal(digest_of(same.encode()))[:32]}.part"
        if not entry.version and entry.digest is None:
            part.unlink(missing_ok=True)
        have = part.stat().st_size if part.exists() else 0
        if (missing := entry.size_bytes - have) > (free := shutil.disk_usage(self.path).free):
            raise TransferBroken(
                f"{self.address}: {entry.name} would need {format_bytes(missing)}, "
                f"{format_bytes(free)} are free there"
            )
        return part


async def receive_file(
    address: str, part: Path, place: Path, entry: Entry, read: Read, on_bytes: OnBytes
) -> Digest:
    """Receive a file into `part`, which may hold its beginning, and move it to its place; its
    digest. Raises `TransferBroken` for other bytes than announced, or where the disk fails."""

    async def arrived(count: int) -> None:
        on_bytes(count)

    file = PartialFile(part, entry.size_bytes, entry.name)
    with translated(address):
        try:
            on_bytes(await in_thread(file.open))
            await receive(file, read, arrived)
            found = await in_thread(file.verify, *([entry.digest] if entry.digest else []))
            await in_thread(file.publish, place)
        finally:
            await in_thread(file.close)
    return found


@contextlib.contextmanager
def translated(address: str) -> Iterator[None]:
    """Turn an error of the file system into one of a place, by whether another try may succeed."""
    try:
        yield
    except (WrongBytes, PartInUse) as error:
        raise TransferBroken(f"{address}: {error}") from error
    except OSError as error:
        text = f"{address}: {error.strerror or error}"
        if error.filename:
            text += f" ({error.filename})"
        kind = TransferRefused if error.errno in _FINAL else TransferBroken
        raise kind(text) from error
