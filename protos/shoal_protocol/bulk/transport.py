"""What a bulk link needs of a stream; and the streams of gRPC as that (`local` has the other)."""

import asyncio
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from typing import Final, NamedTuple, Protocol

import grpc
import numpy as np
from numpy.typing import NDArray

from shoal_protocol.assembly import copy_into
from shoal_protocol.channels import STATUS_LOST
from shoal_protocol.frame_sizes import MAXIMUM_PAYLOAD_BYTES
from shoal_protocol.frames import Frame, frames_in, join_frames, split_frame
from shoal_protocol.services import FrameStream
from shoal_protocol.v1.tensors_pb2 import FrameHeader

STREAM_ERRORS: Final = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""What reading from or writing to a broken stream of gRPC raises."""

_BESIDE_BYTES: Final = 1 << 10
"""What a message may hold beside a payload that is not copied out of it."""

Write = Callable[[bytes], Awaitable[None]]
Allocate = Callable[[int], NDArray[np.uint8]]
"""Gives so many writable bytes."""


class TransportBroken(ConnectionError):
    """The stream has ended; the text says why."""


def new_memory(size: int) -> NDArray[np.uint8]:
    """So many writable bytes."""
    return np.empty(size, np.uint8)


class Payload(Protocol):
    """The payload of a frame that is being received. What is not read is skipped."""

    @property
    def size(self) -> int: ...

    async def read(self, allocate: Allocate = new_memory) -> memoryview:
        """The bytes, in memory of about their size that may be kept, made by `allocate` where they
        are in none yet. Raises `TransportBroken`, and what `allocate` raises."""
        ...

    async def read_into(self, targets: Sequence[memoryview]) -> None:
        """Put the bytes into memory that has room for just as many. Raises `TransportBroken`."""
        ...

    def pieces(self, most_bytes: int) -> AsyncIterator[memoryview]:
        """The bytes in order, at least one piece of at most so many, each until the next is asked
        for. Raises `TransportBroken`."""
        ...


class Received(NamedTuple):
    """One frame. `size` are its header and its payload, as in `Frame`."""

    header: FrameHeader
    payload: Payload
    size: int


class Transport(Protocol):
    """A stream of frames in each direction. One task reads, one task writes.

    `frame_bytes` is the most payload that one frame should carry here. `local`: the stream stays on
    this host, so that a write costs little, and encoding tensors gains nothing. Cancelling a task
    while it reads or writes ends the stream.
    """

    frame_bytes: int
    local: bool

    def received(self) -> AsyncIterator[Iterable[Received]]:
        """The frames of the other side, as they come, until it ends the stream. Each is to be taken
        before the next one is asked for. Raises `TransportBroken`, `MalformedFrame`."""
        ...

    def heard(self) -> int | None:
        """How many bytes have come so far, while a read waits for more; None: none does."""
        ...

    async def write(self, frames: Sequence[Frame]) -> None:
        """Returns when there is room for the next frames. Raises `TransportBroken`."""
        ...

    async def close(self) -> None:
        """End the stream, where this end can, and free what serves it."""
        ...


class Held:
    """A payload that is here already, with its message."""

    __slots__ = ("_view", "size")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.size = len(view)

    async def read(self, allocate: Allocate = new_memory) -> memoryview:
        # Whoever keeps it counts its size: a stranger's header must not stay with it.
        little = memoryview(self._view.obj).nbytes - self.size <= _BESIDE_BYTES
        return self._view if little else memoryview(bytes(self._view))

    async def read_into(self, targets: Sequence[memoryview]) -> None:
        copy_into(targets, self._view)

    async def pieces(self, most_bytes: int) -> AsyncIterator[memoryview]:
        for start in range(0, max(1, self.size), most_bytes):
            yield self._view[start : start + most_bytes]


class GrpcTransport:
    """Either end of a stream of gRPC, as a `Transport`."""

    frame_bytes = MAXIMUM_PAYLOAD_BYTES
    local = False

    def __init__(
        self,
        incoming: AsyncIterable[bytes],
        write: Write,
        cancel: Callable[[], object] = lambda: None,
    ) -> None:
        """`cancel` ends the stream; a server's ends with the call of its method."""
        self._incoming = incoming
        self._write = write
        self._cancel = cancel
        self._heard_bytes = 0
        self._waits = False

    @classmethod
    def of_call(cls, call: FrameStream) -> "GrpcTransport":
        """The client's end."""
        return cls(call, call.write, call.cancel)

    async def received(self) -> AsyncIterator[Iterable[Received]]:
        """See `Transport.received`: the frames of one message at a time."""
        try:
            self._waits = True
            async for message in self._incoming:
                self._waits = False
                self._heard_bytes += len(message)
                yield read_message(message)
                self._waits = True
        except STREAM_ERRORS as error:
            raise TransportBroken(describe(error)) from error

    def heard(self) -> int | None:
        """See `Transport.heard`."""
        return self._heard_bytes if self._waits else None

    async def write(self, frames: Sequence[Frame]) -> None:
        """See `Transport.write`: all frames in one message of gRPC."""
        try:
            await self._write(join_frames(frames))
        except STREAM_ERRORS as error:
            raise TransportBroken(describe(error)) from error

    async def close(self) -> None:
        self._cancel()


def read_message(message: bytes) -> Iterator[Received]:
    """The frames of one message of gRPC. Raises `MalformedFrame`."""
    return map(_read_frame, frames_in(message))


def _read_frame(frame: bytes) -> Received:
    header, payload = split_frame(frame)
    return Received(header, Held(payload), header.ByteSize() + len(payload))


def describe_status(code: grpc.StatusCode, details: str | None) -> str:
    """How a call has ended, in one line."""
    return "the stream ended" if details == STATUS_LOST else f"{code.name}: {details}"


def describe(error: BaseException) -> str:
    """A gRPC error in one line."""
    if isinstance(error, grpc.aio.AioRpcError):
        return describe_status(error.code(), error.details())
    return str(error) or type(error).__name__
