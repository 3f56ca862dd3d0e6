"""The call that a model's items go over: a local stream to a coordinator of this host, else gRPC.

On the local stream the messages are those of `Infer`, each of them a frame, and the frames of items
are themselves. A message over gRPC costs as much as all else that is done for a small item, on
either side.

A local stream has no codes. Where it ends for another reason than that one side has gone, the next
call is one over gRPC: that takes larger messages, and says whether trying again may help.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final, Protocol

import grpc

from shoal_protocol.bulk.local import INFER, LocalTransport, connect
from shoal_protocol.bulk.transport import TransportBroken
from shoal_protocol.called_items import ItemFrame, LocalCall, item_frame
from shoal_protocol.channels import STATUS_LOST
from shoal_protocol.control import (
    LOCAL_MESSAGE_BYTES,
    MessageTooLarge,
    StreamClosed,
)
from shoal_protocol.frames import Frame, MalformedFrame
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorStub

if TYPE_CHECKING:  # known to type checkers only
    from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorAsyncStub

    _Infer = grpc.aio.StreamStreamCall[pb.InferRequest, pb.InferAnswer]

_PASSING: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})


class CallEnded(Exception):
    """A call is over. `refused`: another one would end as this one did."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


class Call(Protocol):
    """A call of `Infer`. One task reads, one task writes."""

    async def write(self, request: pb.InferRequest | Frame) -> None:
        """Raises `CallEnded`."""
        ...

    def answers(self) -> AsyncIterator[pb.InferAnswer | ItemFrame]:
        """What the coordinator sends until it ends the call. Raises `CallEnded`."""
        ...

    async def close(self) -> None: ...


class Calls:
    """Calls to the coordinator at a gRPC target, one after the other."""

    def __init__(self, channel: grpc.aio.Channel, target: str) -> None:
        self._stub: CoordinatorAsyncStub = CoordinatorStub(channel)
        self._target = target
        self._local: _LocalCall | None = None

    def use(self, channel: grpc.aio.Channel) -> None:
        """Have the calls that begin from now on go over another channel."""
        self._stub = CoordinatorStub(channel)

    def open(self, start: pb.SubmitJobRequest) -> Call:
        """A call that is to begin with `start`."""
        fits = start.ByteSize() <= LOCAL_MESSAGE_BYTES
        is_refused = self._local is not None and self._local.is_refused
        self._local = None
        if (
            fits
            and not is_refused
            and (transport := connect(self._target, suffix=INFER)) is not None
        ):
            self._local = _LocalCall(transport)
            return self._local
        return _GrpcCall(self._stub.Infer(wait_for_ready=False))


class _LocalCall:
    def __init__(self, transport: LocalTransport) -> None:
        self._stream: LocalCall[pb.InferRequest, pb.InferAnswer] = LocalCall(
            transport, pb.InferAnswer.FromString
        )
        self.is_refused = False
        """Whether another one would end as this one did."""

    async def write(self, request: pb.InferRequest | Frame) -> None:
        try:
            await self._stream.write(request)
        except MessageTooLarge as error:
            self.is_refused = True
            await self._stream.close()  # whoever waits for answers learns it
            raise CallEnded(str(error)) from error
        except TransportBroken as error:
            raise CallEnded(str(error)) from error

    async def answers(self) -> AsyncIterator[pb.InferAnswer | ItemFrame]:
        try:
            async for message in self._stream.received():
                yield message
        except (TransportBroken, MalformedFrame) as error:
            self.is_refused |= isinstance(error, StreamClosed | MalformedFrame)
            raise CallEnded(str(error)) from error

    async def close(self) -> None:
        await self._stream.close()


class _GrpcCall:
    def __init__(self, call: "_Infer") -> None:
        self._call = call

    async def write(self, request: pb.InferRequest | Frame) -> None:
        if isinstance(request, Frame):
            request = pb.InferRequest(frame=bytes(request))
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            raise _ended(error) from error
        except asyncio.InvalidStateError as error:
            raise CallEnded(str(error)) from error

    async def answers(self) -> AsyncIterator[pb.InferAnswer | ItemFrame]:
        try:
            async for message in self._call:
                yield item_frame(message)
        except grpc.aio.AioRpcError as error:
            raise _ended(error) from error

    async def close(self) -> None:
        self._call.cancel()


def _ended(error: grpc.aio.AioRpcError) -> CallEnded:
    reason = error.details() or error.code().name
    return CallEnded(reason, refused=error.code() not in _PASSING and reason != STATUS_LOST)
