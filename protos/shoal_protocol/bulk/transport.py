"""What a bulk link needs of a stream; and the streams of gRPC as that."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Final, Protocol

import grpc

from shoal_protocol.frame_sizes import MAXIMUM_PAYLOAD_BYTES
from shoal_protocol.services import FrameStream

STREAM_ERRORS: Final = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""What reading from or writing to a broken stream of gRPC raises."""

Write = Callable[[bytes], Awaitable[None]]


class TransportBroken(ConnectionError):
    """The stream has ended; the text says why."""


class Transport(Protocol):
    """A stream of messages in each direction. One task reads, one task writes.

    `frame_bytes` is the most payload that one frame should carry here. Cancelling a task while it
    reads or writes ends the stream.
    """

    frame_bytes: int

    def messages(self) -> AsyncIterator[bytes]:
        """The messages of the other side, until it ends the stream. Raises `TransportBroken`."""
        ...

    async def write(self, message: bytes) -> None:
        """Returns when there is room for the next message. Raises `TransportBroken`."""
        ...

    async def close(self) -> None:
        """End the stream, where this end can, and free what serves it."""
        ...


class GrpcTransport:
    """Either end of a stream of gRPC, as a `Transport`."""

    frame_bytes = MAXIMUM_PAYLOAD_BYTES

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

    @classmethod
    def of_call(cls, call: FrameStream) -> "GrpcTransport":
        """The client's end."""
        return cls(call, call.write, call.cancel)

    async def messages(self) -> AsyncIterator[bytes]:
        try:
            async for message in self._incoming:
                yield message
        except STREAM_ERRORS as error:
            raise TransportBroken(describe(error)) from error

    async def write(self, message: bytes) -> None:
        try:
            await self._write(message)
        except STREAM_ERRORS as error:
            raise TransportBroken(describe(error)) from error

    async def close(self) -> None:
        self._cancel()


def describe(error: BaseException) -> str:
    """A gRPC error in one line."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
