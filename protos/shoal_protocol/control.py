"""Streams of messages: over gRPC, or over a local stream between processes of one host. The control
stream of a session is one, the call of a program that sends items another.

Over gRPC a message costs about as much as all else that a small task takes, whatever it holds. So
several leave as one batch, and a writer lets a moment pass for more to come (`pacing`). On a local
stream each is a frame, those that wait leave with one system call, and nobody waits.
"""

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage

from shoal_protocol.bulk.local import LocalTransport
from shoal_protocol.bulk.transport import (
    STREAM_ERRORS,
    Received,
    TransportBroken,
    describe,
    describe_status,
)
from shoal_protocol.frames import MAXIMUM_HEADER_BYTES, MalformedFrame, control_message
from shoal_protocol.pacing import BATCHED_MESSAGES
from shoal_protocol.services import Connection
from shoal_protocol.v1.session_pb2 import (
    AgentBatch,
    AgentMessage,
    CoordinatorBatch,
    CoordinatorMessage,
)

LOCAL_MESSAGE_BYTES: Final = MAXIMUM_HEADER_BYTES - 64
"""What a message has at most that fits a frame."""

Ours = TypeVar("Ours", bound=ProtobufMessage)
Theirs = TypeVar("Theirs", bound=ProtobufMessage)
_Ours_contra = TypeVar("_Ours_contra", contravariant=True)
_Theirs_co = TypeVar("_Theirs_co", covariant=True)


class MessageTooLarge(TransportBroken):
    """A message does not fit a frame. Nothing was written of it, or after it."""


class StreamClosed(TransportBroken):
    """The other side has ended a local stream, and said why."""


class ControlStream(Protocol[_Ours_contra, _Theirs_co]):
    """Either end. One task reads, one task writes; cancelling it meanwhile ends the stream."""

    @property
    def local(self) -> bool:
        """Whether a write costs so little that there is nothing to gain by waiting for more."""
        ...

    def received(self) -> AsyncIterator[Sequence[_Theirs_co]]:
        """The other side's messages, in order, one or more at a time, until it ends the stream.
        Raises `TransportBroken`, `MalformedFrame`."""
        ...

    async def write(self, messages: Sequence[_Ours_contra]) -> None:
        """Returns when there is room for more; at most `BATCHED_MESSAGES` at once. Raises
        `TransportBroken`."""
        ...

    async def close(self) -> None: ...


class GrpcControl(Generic[Ours, Theirs]):
    """Either end of `Session.Connect`. `join` makes a batch of messages, `split` gives those of
    one (none: it is no batch)."""

    local = False

    def __init__(
        self,
        incoming: AsyncIterable[Theirs],
        write: Callable[[Ours], Awaitable[object]],
        join: Callable[[Sequence[Ours]], Ours],
        split: Callable[[Theirs], Sequence[Theirs]],
        call: Connection | None = None,
    ) -> None:
        """`call` is the client's, which can end the stream."""
        self._incoming = incoming
        self._write = write
        self._join = join
        self._split = split
        self._call = call

    async def received(self) -> AsyncIterator[Sequence[Theirs]]:
        try:
            async for message in self._incoming:
                yield self._split(message) or (message,)
            if self._call is not None and await self._call.code() != grpc.StatusCode.OK:
                code, details = await self._call.code(), await self._call.details()
                raise TransportBroken(describe_status(code, details))
        except STREAM_ERRORS as error:
            raise TransportBroken(describe(error)) from error

    async def write(self, messages: Sequence[Ours]) -> None:
        try:
            await self._write(messages[0] if len(messages) == 1 else self._join(messages))
        except STREAM_ERRORS as error:
            raise TransportBroken(describe(error)) from error

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()


class LocalControl(Generic[Ours, Theirs]):
    """Either end of a local control stream. `parse` reads the other side's messages."""

    local = True

    def __init__(self, transport: LocalTransport, parse: Callable[[bytes], Theirs]) -> None:
        self._transport = transport
        self._parse = parse

    async def received(self) -> AsyncIterator[Sequence[Theirs]]:
        """See `ControlStream.received`. Raises `StreamClosed` too, where the other side says why it
        ends."""
        async for frames in self._transport.received():
            messages: list[Theirs] = []
            for frame in frames:
                if frame.header.WhichOneof("kind") == "closing":
                    yield messages
                    raise StreamClosed(frame.header.closing.reason)
                messages.append(self.message(frame))
            if messages:  # else a part of one has come
                yield messages

    async def write(self, messages: Sequence[Ours]) -> None:
        """As of any stream; raises `MessageTooLarge` as well."""
        serialised = [each.SerializeToString() for each in messages]
        if (largest := max(map(len, serialised), default=0)) > LOCAL_MESSAGE_BYTES:
            raise MessageTooLarge(f"a message of {largest} bytes does not fit a local stream")
        await self._transport.write([control_message(each) for each in serialised])

    async def close(self) -> None:
        await self._transport.close()

    def message(self, frame: Received) -> Theirs:
        """The message that is a frame. Raises `MalformedFrame`."""
        header = frame.header
        kind = header.WhichOneof("kind")
        if kind != "message" or frame.payload.size:
            raise MalformedFrame(f"a frame of kind {kind} where a message belongs")
        try:
            return self._parse(header.message)
        except DecodeError as error:
            raise MalformedFrame(f"a message cannot be parsed: {error}") from error


def agents_stream(call: Connection) -> GrpcControl[AgentMessage, CoordinatorMessage]:
    """The agent's end of a stream of gRPC."""

    def join(messages: Sequence[AgentMessage]) -> AgentMessage:
        return AgentMessage(batch=AgentBatch(messages=messages))

    return GrpcControl(call, call.write, join, lambda message: message.batch.messages, call)


def coordinators_stream(
    requests: AsyncIterable[AgentMessage], write: Callable[[CoordinatorMessage], Awaitable[object]]
) -> GrpcControl[CoordinatorMessage, AgentMessage]:
    """The coordinator's end of a stream of gRPC. `received` raises `MalformedFrame` for a batch of
    more than `BATCHED_MESSAGES`."""

    def join(messages: Sequence[CoordinatorMessage]) -> CoordinatorMessage:
        return CoordinatorMessage(batch=CoordinatorBatch(messages=messages))

    def split(message: AgentMessage) -> Sequence[AgentMessage]:
        messages = message.batch.messages
        if len(messages) > BATCHED_MESSAGES:
            text = f"{len(messages)} messages in a batch, at most {BATCHED_MESSAGES}"
            raise MalformedFrame(text)
        return messages

    return GrpcControl(requests, write, join, split)
