"""Files on a coordinator's volume, over `Files` (`v1/files.proto`): a job's folders, fragments."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc

from shoal_cli.transfer.places import (
    PIECE_BYTES,
    Entry,
    OnBytes,
    Read,
    TransferBroken,
    TransferRefused,
    check_name,
)
from shoal_protocol.fragment_store import FILES, FragmentStore
from shoal_protocol.partition import Digest
from shoal_protocol.v1 import files_pb2 as pb
from shoal_protocol.v1.files_pb2_grpc import FilesStub

_SENT_BYTES: Final = 256 << 10
"""Of one message: a gRPC message is held whole on both sides."""
_REACH_SECONDS: Final = 10.0
"""How long the first call waits for a connection: a network with policies may let a new pod through
only some seconds after it has begun, and a coordinator may just be starting."""
_HOPELESS: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


class FilesClient:
    """Calls to one coordinator. Raise `TransferRefused` or `TransferBroken`."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._channel = channel
        self._stub = FilesStub(channel)
        self._address = address
        self._reached = False

    async def list(self, folder: str) -> list[Entry]:
        """The files of a folder by name."""
        await self._reach()
        try:
            call = self._stub.ListFiles(pb.ListFilesRequest(folder=folder))
            return [Entry(name=each.name, size_bytes=each.bytes) async for each in call]
        except grpc.aio.AioRpcError as error:
            self._sort_out(error)

    async def sha256(self, path: str) -> str:
        """A file's checksum, computed over there."""
        try:
            found = await self._stub.DescribeFile(pb.DescribeFileRequest(path=path))
        except grpc.aio.AioRpcError as error:
            self._sort_out(error)
        return found.sha256

    async def fetch(self, path: str, offset: int) -> AsyncIterator[bytes]:
        """A file's bytes from an offset on."""
        call = self._stub.Fetch(pb.FetchFileRequest(path=path, offset=offset))
        try:
            async for message in call:
                yield message.piece
        except grpc.aio.AioRpcError as error:
            self._sort_out(error)
        finally:
            call.cancel()

    async def put(self, path: str, entry: Entry, read: Read, on_bytes: OnBytes) -> bool:
        """Put a file; whether anything had to be sent."""
        await self._reach()
        call = self._stub.Put()
        header = pb.PutHeader(
            path=path, bytes=entry.size_bytes, sha256=entry.sha256, version=entry.version
        )
        try:
            await call.write(pb.PutRequest(header=header))
            answer = await self._answer(call)
            if answer.WhichOneof("message") == "stands":
                on_bytes(entry.size_bytes)
                return False
            on_bytes(answer.offset)
            sha256 = await self._send(call, read, answer.offset, on_bytes)
            await call.write(pb.PutRequest(end=pb.PutEnd(sha256=sha256)))
            answer = await self._answer(call)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._fail(call)  # a write only knows that it failed, the call knows why
        finally:
            call.cancel()
        if answer.WhichOneof("message") != "stands" or answer.stands.bytes != entry.size_bytes:
            raise TransferBroken(f"{self._address}: {path} does not stand as it was sent")
        return True

    async def _reach(self) -> None:
        """Wait for a connection, for a while and once; why there is none, a call says."""
        if not self._reached:
            self._reached = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REACH_SECONDS):
                    await self._channel.channel_ready()

    async def _send(
        self,
        call: "grpc.aio.StreamStreamCall[pb.PutRequest, pb.PutAnswer]",
        read: Read,
        offset: int,
        on_bytes: OnBytes,
    ) -> str:
        """Send from an offset on; the checksum, where all of the file was seen."""
        found = hashlib.sha256()
        async for piece in read(offset):
            for start in range(0, len(piece), _SENT_BYTES):
                part = piece[start : start + _SENT_BYTES]
                await call.write(pb.PutRequest(piece=part))
                on_bytes(len(part))
            await asyncio.to_thread(found.update, piece)
        return "" if offset else found.hexdigest()

    async def _answer(
        self, call: "grpc.aio.StreamStreamCall[pb.PutRequest, pb.PutAnswer]"
    ) -> pb.PutAnswer:
        answer = await call.read()
        if not isinstance(answer, pb.PutAnswer):
            await self._fail(call)
        return answer

    async def _fail(self, call: "grpc.aio.StreamStreamCall[Any, Any]") -> NoReturn:
        """What ended a call."""
        self._sort_out_code(await call.code(), await call.details())

    def _sort_out(self, error: grpc.aio.AioRpcError) -> NoReturn:
        self._sort_out_code(error.code(), error.details())

    def _sort_out_code(self, code: grpc.StatusCode, details: str | None) -> NoReturn:
        text = f"{self._address}: {details or code.name}"
        if code in _HOPELESS:
            raise TransferRefused(text)
        raise TransferBroken(text)

    async def close(self) -> None:
        await self._channel.close()


@dataclass(slots=True)
class JobFolder:
    """`jobs/JOB/in` or `jobs/JOB/out` of a coordinator; a source and a target."""

    address: str
    client: FilesClient
    folder: str

    async def entries(self) -> Sequence[Entry]:
        found = await self.client.list(self.folder)
        for entry in found:
            check_name(entry.name, self.address)
        return found

    def read(self, entry: Entry, offset: int) -> AsyncIterator[bytes]:
        return self.client.fetch(f"{self.folder}/{entry.name}", offset)

    async def standing(self) -> Mapping[str, int]:
        return {entry.name: entry.size_bytes for entry in await self.client.list(self.folder)}

    async def sha256(self, entry: Entry | str) -> str:
        name = entry.name if isinstance(entry, Entry) else entry
        return await self.client.sha256(f"{self.folder}/{name}")

    async def put(self, entry: Entry, read: Read, on_bytes: OnBytes) -> None:
        await self.client.put(f"{self.folder}/{entry.name}", entry, read, on_bytes)

    async def close(self) -> None:
        await self.client.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """What delivering fragments came to."""

    fragments: int
    sent_fragments: int
    sent_bytes: int


@dataclass(slots=True)
class Delivery:
    """Brings fragments of a store on this disk to a coordinator; those that it has are not sent."""

    store: Path
    client: FilesClient
    sent_bytes: int = 0
    _seen: set[Digest] = field(default_factory=set)

    async def deliver(self, digests: Sequence[Digest], on_bytes: OnBytes) -> Delivered:
        """Raises `TransferRefused`, `TransferBroken`."""
        distinct = list(dict.fromkeys(digests))
        sent = 0
        for digest in distinct:
            sent += await self._fragment(digest, on_bytes)
        return Delivered(fragments=len(distinct), sent_fragments=sent, sent_bytes=self.sent_bytes)

    async def _fragment(self, digest: Digest, on_bytes: OnBytes) -> bool:
        described = FragmentStore(self.store).files(digest)
        hexadecimal = digest.removeprefix("sha256:")
        folder = self.store / "fragments" / hexadecimal
        sent = False
        for name in FILES:  # the manifest first: it says what the others must be
            if name != FILES[0] and name not in described:
                continue
            file = folder / name
            sha256 = described[name].sha256 if name in described else hexadecimal
            entry = Entry(name=name, size_bytes=file.stat().st_size, sha256=sha256)
            path = f"fragments/{hexadecimal}/{name}"
            if await self.client.put(path, entry, _reader(file), on_bytes):
                sent, self.sent_bytes = True, self.sent_bytes + entry.size_bytes
        return sent


def _reader(file: Path) -> Read:
    async def read(offset: int) -> AsyncIterator[bytes]:
        with file.open("rb", buffering=0) as opened:
            opened.seek(offset)
            while piece := await asyncio.to_thread(opened.read, PIECE_BYTES):
                yield piece

    return read
