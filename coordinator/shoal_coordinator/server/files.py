"""The service `Files` (`v1/files.proto`): files of the coordinator's volume over gRPC.

What a path means and when a file stands is `volume`'s affair. Here: streams, one writer at a time
for a file, and errors as status codes.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NoReturn

import grpc

from shoal_coordinator.server.roles import Role, Roles
from shoal_coordinator.storage import volume as vol
from shoal_coordinator.storage.volume import Standing, Upload, Volume
from shoal_coordinator.storage.volume_paths import FragmentPath, JobPath, PathRefused, parse_path
from shoal_protocol.v1 import files_pb2 as pb
from shoal_protocol.v1.files_pb2_grpc import FilesServicer

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 256 << 10
UPLOADS: Final = 32
"""At once; more wait their turn."""
_Context = grpc.aio.ServicerContext[Any, Any]
_CODES: Final[tuple[tuple[type[Exception], grpc.StatusCode], ...]] = (
    (PathRefused, grpc.StatusCode.INVALID_ARGUMENT),
    (vol.FileRefused, grpc.StatusCode.INVALID_ARGUMENT),
    (vol.ContentRefused, grpc.StatusCode.ALREADY_EXISTS),
    (vol.FileMissing, grpc.StatusCode.NOT_FOUND),
    (vol.NoRoom, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (vol.WrongBytes, grpc.StatusCode.DATA_LOSS),
    (OSError, grpc.StatusCode.UNAVAILABLE),
)
_KNOWN: Final = tuple(kind for kind, _ in _CODES)


class FilesService(FilesServicer):
    """The four calls; workers' only."""

    def __init__(self, volume: Volume, roles: Roles, runs: Callable[[str], bool]) -> None:
        """`runs` says of a job's name whether it has been submitted and has not ended."""
        self._volume = volume
        self._roles = roles
        self._runs = runs
        self._turns = asyncio.Semaphore(UPLOADS)
        self._locks: dict[str, asyncio.Lock] = {}

    async def Put(
        self, requests: AsyncIterator[pb.PutRequest], context: _Context
    ) -> AsyncIterator[pb.PutAnswer]:
        await self._roles.require(context, Role.WORKER)
        try:
            first = await anext(aiter(requests))
        except StopAsyncIteration:
            await _abort(context, vol.FileRefused("the stream ended without a header"))
        try:
            if first.WhichOneof("message") != "header":
                raise vol.FileRefused("the first message is not a header")
            path = parse_path(first.header.path)
            async with self._writing(path), self._turns:
                async for answer in self._take(path, first.header, requests):
                    yield answer
        except _KNOWN as error:
            await _abort(context, error)

    async def Fetch(
        self, request: pb.FetchFileRequest, context: _Context
    ) -> AsyncIterator[pb.FilePiece]:
        await self._roles.require(context, Role.WORKER)
        try:
            path = parse_path(request.path)
            file, size = await asyncio.to_thread(self._volume.open, path)
        except _KNOWN as error:
            await _abort(context, error)
        with file:
            if request.offset > size:
                reason = f"offset {request.offset} of {size} bytes"
                await context.abort(grpc.StatusCode.OUT_OF_RANGE, reason)
            file.seek(request.offset)
            piece = await asyncio.to_thread(file.read, PIECE_BYTES)
            yield pb.FilePiece(piece=piece, bytes=size)
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                yield pb.FilePiece(piece=piece)

    async def ListFiles(
        self, request: pb.ListFilesRequest, context: _Context
    ) -> AsyncIterator[pb.FileDescription]:
        await self._roles.require(context, Role.WORKER)
        try:
            found = await asyncio.to_thread(lambda: list(self._volume.list(request.folder)))
        except _KNOWN as error:
            await _abort(context, error)
        for standing in found:
            yield _description(standing)

    async def DescribeFile(
        self, request: pb.DescribeFileRequest, context: _Context
    ) -> pb.FileDescription:
        await self._roles.require(context, Role.WORKER)
        try:
            path = parse_path(request.path)
            return _description(await asyncio.to_thread(self._volume.describe, path))
        except _KNOWN as error:
            await _abort(context, error)

    async def _take(
        self,
        path: FragmentPath | JobPath,
        header: pb.PutHeader,
        requests: AsyncIterator[pb.PutRequest],
    ) -> AsyncIterator[pb.PutAnswer]:
        """The answers to one upload."""
        begun = await asyncio.to_thread(
            self._volume.begin, path, header.bytes, header.sha256, header.version
        )
        if isinstance(begun, Standing):
            yield pb.PutAnswer(stands=_description(begun))
            return
        if isinstance(path, JobPath) and self._runs(path.job):
            begun.drop()
            raise vol.ContentRefused(f"job {path.job} runs; its inputs stay as they are")
        try:
            yield pb.PutAnswer(offset=begun.offset)
            standing = await _receive(begun, requests)
        finally:
            begun.close()
        logger.info("%s stands, %d bytes", header.path, standing.size_bytes)
        yield pb.PutAnswer(stands=_description(standing))

    @contextlib.asynccontextmanager
    async def _writing(self, path: FragmentPath | JobPath) -> AsyncIterator[None]:
        """One at a time for a file, and for a fragment, whose files become one folder."""
        key = path.digest if isinstance(path, FragmentPath) else f"{path.job}/{path.name}"
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked() and self._locks.get(key) is lock:
                del self._locks[key]


async def _receive(upload: Upload, requests: AsyncIterator[pb.PutRequest]) -> Standing:
    """The pieces and the end of a file."""
    async for request in requests:
        match request.WhichOneof("message"):
            case "piece":
                await asyncio.to_thread(upload.write, request.piece)
            case "end":
                return await asyncio.to_thread(upload.finish, request.end.sha256)
            case _:
                raise vol.FileRefused("another header before the file has ended")
    raise vol.WrongBytes(f"the stream ended at {upload.offset} of {upload.size_bytes} bytes")


async def _abort(context: _Context, error: Exception) -> NoReturn:
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    if isinstance(error, OSError):
        logger.warning("a file cannot be handled: %s", error)
    await context.abort(code, str(error))
    raise AssertionError("abort always raises")


def _description(standing: Standing) -> pb.FileDescription:
    return pb.FileDescription(name=standing.name, bytes=standing.size_bytes, sha256=standing.sha256)
