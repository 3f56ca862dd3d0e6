"""Files on a coordinator's volume, over `Files` (`v1/files.proto`): a job's folders, fragments."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal_cli.transfer.places import (
    PIECE_BYTES,
    Entry,
    NoRoomThere,
    OnBytes,
    Read,
    Source,
    Target,
    TransferBroken,
    TransferRefused,
)
from shoal_protocol.coordinator_client import CallFailed, CoordinatorClient
from shoal_protocol.digests import Digest, from_hexadecimal, hexadecimal
from shoal_protocol.fragment_store import FragmentStore
from shoal_protocol.manifest import MANIFEST, FileEntry
from shoal_protocol.v1.files_pb2 import PutHeader


@contextlib.contextmanager
def _translated(address: str) -> Iterator[None]:
    """A call that failed, as an error of a place."""
    try:
        yield
    except CallFailed as error:
        kind = TransferRefused if error.final else TransferBroken
        raise kind(f"{address}: {error}") from error


async def _put(
    client: CoordinatorClient, address: str, path: str, entry: Entry, read: Read, on_bytes: OnBytes
) -> bool:
    header = PutHeader(
        path=path,
        bytes=entry.size_bytes,
        sha256="" if entry.digest is None else hexadecimal(entry.digest),
        version=entry.version,
    )
    with _translated(address):
        try:
            return await client.put_file(header, read, on_bytes)
        except CallFailed as error:
            if error.full:
                raise NoRoomThere(f"{address}: {error}") from error
            raise


@dataclass(slots=True)
class JobFolder(Source, Target):
    """`jobs/JOB/in` or `jobs/JOB/out` of a coordinator; a source and a target."""

    address: str
    client: CoordinatorClient
    folder: str

    async def entries(self) -> Sequence[Entry]:
        with _translated(self.address):
            found = await self.client.list_files(self.folder)
        return [Entry(name=each.name, size_bytes=each.bytes) for each in found]

    async def read(self, entry: Entry, offset: int) -> AsyncIterator[bytes]:
        with _translated(self.address):
            async for piece in self.client.fetch_file(f"{self.folder}/{entry.name}", offset):
                yield piece

    async def existing(self) -> Mapping[str, int]:
        return {entry.name: entry.size_bytes for entry in await self.entries()}

    async def digest(self, entry: Entry) -> Digest:
        return await self.existing_digest(entry.name)

    async def existing_digest(self, name: str) -> Digest:
        with _translated(self.address):
            found = await self.client.describe_file(f"{self.folder}/{name}")
        try:
            return from_hexadecimal(found.sha256)
        except ValueError as error:
            raise TransferBroken(f"{self.address}: {name}: {error}") from error

    async def put(self, entry: Entry, read: Read, on_bytes: OnBytes) -> None:
        path = f"{self.folder}/{entry.name}"
        await _put(self.client, self.address, path, entry, read, on_bytes)

    async def close(self) -> None:
        await self.client.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """What an upload of fragments came to."""

    fragments: int
    sent_fragments: int
    sent_bytes: int


async def upload_fragments(
    root: Path,
    digests: Sequence[Digest],
    client: CoordinatorClient,
    address: str,
    on_bytes: OnBytes,
) -> Uploaded:
    """Upload the fragments of the store at `root` that a coordinator lacks. Raises
    `TransferRefused`, `TransferBroken`."""
    store, sent, sent_bytes = FragmentStore(root), set[Digest](), 0
    manifests = {
        digest: await asyncio.to_thread(store.manifest, digest) for digest in dict.fromkeys(digests)
    }
    # The manifests first: they say what the others must be, and those fragments that are there do
    # not give way to the others.
    files = [
        (digest, MANIFEST, FileEntry(digest=digest, size_bytes=manifest.manifest_bytes))
        for digest, manifest in manifests.items()
    ]
    files += [(digest, *file) for digest, each in manifests.items() for file in each.files.items()]
    for digest, name, file in files:
        entry = Entry(name=name, size_bytes=file.size_bytes, digest=file.digest)
        path = f"fragments/{hexadecimal(digest)}/{name}"
        read = _reader(store.folder(digest) / name)
        if await _put(client, address, path, entry, read, on_bytes):
            sent.add(digest)
            sent_bytes += entry.size_bytes
    return Uploaded(fragments=len(set(digests)), sent_fragments=len(sent), sent_bytes=sent_bytes)


def _reader(file: Path) -> Read:
    async def read(offset: int) -> AsyncIterator[bytes]:
        with file.open("rb", buffering=0) as opened:
            opened.seek(offset)
            while piece := await asyncio.to_thread(opened.read, PIECE_BYTES):
                yield piece

    return read
