"""What tests of carrying share: files, a source that breaks off, a copy from here to there."""

import base64
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

from shoal_cli.transfer.addresses import Access
from shoal_cli.transfer.copying import Copied, copy
from shoal_cli.transfer.folders import Folder
from shoal_cli.transfer.places import Entry, TransferBroken

LARGE = 20 << 20


class Shaky(Folder):
    """A folder whose reader breaks off after so many bytes, so many times."""

    breaks = 2
    limit_bytes = 3 << 20
    offsets: tuple[int, ...] = ()

    async def read(self, entry: Entry, offset: int) -> AsyncIterator[bytes]:
        self.offsets = (*self.offsets, offset)
        passed = 0
        async for piece in Folder.read(self, entry, offset):
            if self.breaks and passed + len(piece) > self.limit_bytes:
                self.breaks -= 1
                raise TransferBroken("the line went dead")
            passed += len(piece)
            yield piece


def fill(folder: Path, *sizes: int) -> dict[str, bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"{number:03}.npz": os.urandom(size) for number, size in enumerate(sizes)}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files


def content_digest(content: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(content).digest()).decode()}:"


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def carry(source: str, target: str, access: Access) -> Copied:
    opened = access.source(source)
    try:
        into = access.target(target)
        try:
            return await copy(opened, into)
        finally:
            await into.close()
    finally:
        await opened.close()
