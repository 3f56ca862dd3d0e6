"""The services as typed Python: what implements them, what registers them, what calls them.

gRPC's generated stubs parse every message. Bulk streams must not, and so the services of
`session.proto` have none: where it says Frame, raw bytes go in and out here (no serialiser at all),
and `frames` and `tensors` make and read them.

All methods of an implementation are coroutines that read `requests` with `async for` and answer
with `context.write`; they end the call by returning.

Cancelling a task while it waits in a call's `read` or `write` (a timeout around it, too) cancels
the whole call: that is how gRPC's asyncio interface works. So a stream has one task that reads it,
and a write that is given up gives up the stream.
"""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc

from shoal_protocol.v1.session_pb2 import AgentMessage, CoordinatorMessage
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest

if TYPE_CHECKING:  # generic for the type checker only
    _Handler = grpc.RpcMethodHandler[Any, Any]

DEVICE_METADATA: Final = "shoal-device"

_SESSION: Final = "shoal.v1.Session"
_PEER: Final = "shoal.v1.Peer"

Connection = grpc.aio.StreamStreamCall[AgentMessage, CoordinatorMessage]
FrameStream = grpc.aio.StreamStreamCall[bytes, bytes]
FileStream = grpc.aio.UnaryStreamCall[FetchFragmentRequest, bytes]
ConnectContext = grpc.aio.ServicerContext[AgentMessage, CoordinatorMessage]
FrameContext = grpc.aio.ServicerContext[bytes, bytes]
FileContext = grpc.aio.ServicerContext[FetchFragmentRequest, bytes]
_Connect = grpc.aio.StreamStreamMultiCallable[AgentMessage, CoordinatorMessage]
_Fetch = grpc.aio.UnaryStreamMultiCallable[FetchFragmentRequest, bytes]
_Frames = grpc.aio.StreamStreamMultiCallable[bytes, bytes]


class FragmentSource(Protocol):
    """Whoever has fragments to give."""

    async def fetch_fragment(self, request: FetchFragmentRequest, context: FileContext) -> None: ...


class SessionService(FragmentSource, Protocol):
    """What a coordinator offers to its agents (`v1/session.proto`)."""

    async def connect(
        self, requests: AsyncIterator[AgentMessage], context: ConnectContext
    ) -> None: ...

    async def exchange(self, requests: AsyncIterator[bytes], context: FrameContext) -> None: ...


class PeerService(FragmentSource, Protocol):
    """What an agent offers to other agents (`v1/session.proto`)."""

    async def push(self, requests: AsyncIterator[bytes], context: FrameContext) -> None: ...


def add_session_service(server: grpc.aio.Server, implementation: SessionService) -> None:
    """Register a coordinator's side of `Session`."""
    handlers: dict[str, _Handler] = {
        "Connect": grpc.stream_stream_rpc_method_handler(
            _erase(implementation.connect),
            request_deserializer=AgentMessage.FromString,
            response_serializer=CoordinatorMessage.SerializeToString,
        ),
        "Exchange": grpc.stream_stream_rpc_method_handler(_erase(implementation.exchange)),
    }
    _register(server, _SESSION, implementation, handlers)


def add_peer_service(server: grpc.aio.Server, implementation: PeerService) -> None:
    """Register an agent's side of `Peer`."""
    handlers: dict[str, _Handler] = {
        "Push": grpc.stream_stream_rpc_method_handler(_erase(implementation.push))
    }
    _register(server, _PEER, implementation, handlers)


class _FragmentClient:
    def __init__(self, channel: grpc.aio.Channel, service: str) -> None:
        self._fetch_fragment: _Fetch = channel.unary_stream(
            f"/{service}/FetchFragment", request_serializer=FetchFragmentRequest.SerializeToString
        )

    def fetch_fragment(self, request: FetchFragmentRequest, timeout: float) -> FileStream:
        """A file of a fragment that the other side stores; `timeout` in seconds."""
        return self._fetch_fragment(request, timeout=timeout)


class SessionClient(_FragmentClient):
    """An agent's calls to its coordinator. Every call returns at once; reading it waits."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__(channel, _SESSION)
        self._connect: _Connect = channel.stream_stream(
            f"/{_SESSION}/Connect",
            request_serializer=AgentMessage.SerializeToString,
            response_deserializer=CoordinatorMessage.FromString,
        )
        self._exchange: _Frames = channel.stream_stream(f"/{_SESSION}/Exchange")

    def connect(self) -> Connection:
        """The control stream; it lives as long as the session."""
        return self._connect()

    def exchange(self, device: str) -> FrameStream:
        """The bulk stream of a device; it lives as long as the session."""
        return self._exchange(metadata=grpc.aio.Metadata((DEVICE_METADATA, device)))


class PeerClient(_FragmentClient):
    """An agent's calls to another agent."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__(channel, _PEER)
        self._push: _Frames = channel.stream_stream(f"/{_PEER}/Push")

    def push(self) -> FrameStream:
        """The stream of activations to the peer; acknowledgements come back on it."""
        return self._push()


def device_metadata(context: FrameContext) -> str | None:
    """The device that an Exchange stream says it belongs to."""
    for key, value in context.invocation_metadata() or ():
        if key == DEVICE_METADATA:
            return value if isinstance(value, str) else value.decode(errors="replace")
    return None


def _erase(behaviour: Any) -> Any:
    """gRPC's types know handlers of the threaded server only; the asyncio one takes coroutines."""
    return behaviour


def _register(
    server: grpc.aio.Server, service: str, source: FragmentSource, handlers: dict[str, "_Handler"]
) -> None:
    handlers["FetchFragment"] = grpc.unary_stream_rpc_method_handler(
        _erase(source.fetch_fragment), request_deserializer=FetchFragmentRequest.FromString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
