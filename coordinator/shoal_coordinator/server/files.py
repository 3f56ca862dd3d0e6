"""The service `Files` (`v1/files.proto`): files of the coordinator's volume over gRPC.

`storage.volume` decides what a path means and when a file is published. Here: streams, one writer
at a time for a file, a minimum rate for every caller, and errors as status codes.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn

import grpc

from shoal_coordinator.server.refusals import abort
from shoal_coordinator.server.roles import Role, Roles
from shoal_coordinator.storage import volume_values as vol
from shoal_coordinator.storage.volume import Upload, Volume, checked_digest
from shoal_coordinator.storage.volume_paths import JobPath, PathRefused, parse_path
from shoal_coordinator.storage.volume_values import StoredFile
from shoal_protocol.digests import hexadecimal
from shoal_protocol.limits import CallLimiter, Stalled
from shoal_protocol.threads import in_executor, in_thread, open_in_thread
from shoal_protocol.transfers import (
    PartInUse,
    WrongBytes,
    receive,
    stall_watch,
    watched,
    write_watched,
)
from shoal_protocol.v1 import files_pb2 as pb
from shoal_protocol.v1.files_pb2_grpc import FilesServicer

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 256 << 10
UPLOADS: Final = 32
"""At once; more wait their turn."""
DOWNLOADS: Final = 64
READERS: Final = 4
"""Whole files that are read for their digests at once. That takes long, so it has threads of its
own: the others are for what is short."""
_Context = grpc.aio.ServicerContext[Any, Any]
_CODES: Final[Mapping[type[Exception], grpc.StatusCode]] = {
    PathRefused: grpc.StatusCode.INVALID_ARGUMENT,
    vol.FileRefused: grpc.StatusCode.INVALID_ARGUMENT,
    vol.ContentRefused: grpc.StatusCode.ALREADY_EXISTS,
    vol.FileMissing: grpc.StatusCode.NOT_FOUND,
    vol.NoRoom: grpc.StatusCode.RESOURCE_EXHAUSTED,
    WrongBytes: grpc.StatusCode.DATA_LOSS,
    Stalled: grpc.StatusCode.DEADLINE_EXCEEDED,
    PartInUse: grpc.StatusCode.UNAVAILABLE,
    OSError: grpc.StatusCode.UNAVAILABLE,
}


class FilesService(FilesServicer):
    """The four calls; for workers and users."""

    def __init__(
        self,
        volume: Volume,
        roles: Roles,
        refuses: Callable[[str], bool],
        readers: Executor | None = None,
    ) -> None:
        """`refuses` says of a job's name whether it runs, and its inputs stay as they are."""
        self._readers = readers or ThreadPoolExecutor(READERS, "files read back")
        self._volume = volume
        self._roles = roles
        self._refuses = refuses
        self._uploads = CallLimiter(total=UPLOADS, each=1)
        self._downloads = asyncio.Semaphore(DOWNLOADS)

    # The stubs know generators only. These are coroutines, since a write can be watched, and what a
    # generator yields cannot.
    async def Put(  # type: ignore[override]
        self, requests: AsyncIterator[pb.PutRequest], context: _Context
    ) -> None:
        await self._roles.require(context, Role.WORKER)
        async with _statuses(context):
            first = await stall_watch().wait(anext(aiter(requests), None))
            if first is None or first.WhichOneof("message") != "header":
                raise vol.FileRefused("the first message is not a header")
            path = parse_path(first.header.path)
            async with self._uploads.turn(path.owner):
                header = first.header
                found = await in_executor(
                    self._readers,
                    partial(self._volume.begin, path, header.bytes, header.sha256, header.version),
                )
                if isinstance(found, Upload):
                    if isinstance(path, JobPath) and self._refuses(path.job):
                        raise vol.ContentRefused(
                            f"job {path.job} runs; its inputs stay as they are"
                        )
                    found = await _take(found, _Sent(requests), context, self._readers)
                    logger.info("%s was uploaded, %d bytes", header.path, found.size_bytes)
            await context.write(pb.PutAnswer(stored=_description(found)))

    async def Fetch(  # type: ignore[override]
        self, request: pb.FetchFileRequest, context: _Context
    ) -> None:
        await self._roles.require(context, Role.WORKER)
        async with _statuses(context):
            path = parse_path(request.path)
            opened = partial(self._volume.open, path)
            async with self._downloads, open_in_thread(opened) as (file, size):
                if request.offset > size:
                    reason = f"offset {request.offset} of {size} bytes"
                    await context.abort(grpc.StatusCode.OUT_OF_RANGE, reason)
                file.seek(request.offset)
                watch, message = stall_watch(), pb.FilePiece(bytes=size)
                while (piece := await in_thread(file.read, PIECE_BYTES)) or message.bytes:
                    message.piece = piece
                    await write_watched(watch, context, message, len(piece))
                    message = pb.FilePiece()

    async def ListFiles(
        self, request: pb.ListFilesRequest, context: _Context
    ) -> AsyncIterator[pb.FileDescription]:
        await self._roles.require(context, Role.WORKER)
        async with _statuses(context):
            found = await in_thread(lambda: list(self._volume.list(request.folder)))
        for stored in found:
            yield _description(stored)

    async def DescribeFile(
        self, request: pb.DescribeFileRequest, context: _Context
    ) -> pb.FileDescription:
        await self._roles.require(context, Role.WORKER)
        async with _statuses(context):
            path = parse_path(request.path)
            found = await in_executor(self._readers, partial(self._volume.describe, path))
            return _description(found)


@dataclass(slots=True)
class _Sent:
    requests: AsyncIterator[pb.PutRequest]
    end: pb.PutEnd | None = None

    async def pieces(self) -> AsyncIterator[bytes]:
        """The pieces; the end, when they have ended with one."""
        async for request in self.requests:
            match request.WhichOneof("message"):
                case "piece":
                    yield request.piece
                case "end":
                    self.end = request.end
                    return
                case _:
                    raise vol.FileRefused("another header before the file has ended")


async def _take(upload: Upload, sent: _Sent, context: _Context, readers: Executor) -> StoredFile:
    """Receive an upload from where it broke off, and publish it."""

    async def failed(error: OSError) -> NoReturn:
        raise await in_thread(upload.failed, error) from error

    try:
        await in_thread(upload.open)
        await context.write(pb.PutAnswer(offset=upload.part.offset))
        await receive(upload.part, lambda offset: watched(sent.pieces()), make_room=failed)
        if sent.end is None:  # all of the file was here already, or its stream has no end
            async for _ in watched(sent.pieces()):
                raise WrongBytes(f"{upload.path.name} has more than the announced bytes")
        if sent.end is None:
            raise WrongBytes(f"the stream of {upload.path.name} ends without an end message")
        finish = partial(upload.finish, checked_digest(sent.end.sha256))
        return await in_executor(readers, finish)
    finally:
        await in_thread(upload.close)


@contextlib.asynccontextmanager
async def _statuses(context: _Context) -> AsyncIterator[None]:
    try:
        yield
    except tuple(_CODES) as error:
        if isinstance(error, OSError):
            logger.warning("a file cannot be handled: %s", error)
        code = next(code for kind, code in _CODES.items() if isinstance(error, kind))
        await abort(context, code, str(error))


def _description(stored: StoredFile) -> pb.FileDescription:
    sha256 = "" if stored.digest is None else hexadecimal(stored.digest)
    return pb.FileDescription(name=stored.name, bytes=stored.size_bytes, sha256=sha256)
