"""How a session begins: the control stream that it has, Hello, Welcome; or why it does not."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final, TypeAlias

import grpc

from shoal_protocol.bulk.local import CONTROL, connect
from shoal_protocol.bulk.transport import TransportBroken
from shoal_protocol.certificate_times import minute, with_clock
from shoal_protocol.control import (
    LOCAL_MESSAGE_BYTES,
    ControlStream,
    LocalControl,
    agents_stream,
)
from shoal_protocol.frames import MalformedFrame
from shoal_protocol.services import SessionClient
from shoal_protocol.v1 import session_pb2 as pb

_WELCOME_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 2.0
_NO_METHOD: Final = "/shoal.v1.Session/Nothing"

Stream: TypeAlias = ControlStream[pb.AgentMessage, pb.CoordinatorMessage]
Instructions: TypeAlias = AsyncIterator[Sequence[pb.CoordinatorMessage]]


class SessionBroken(Exception):
    """The session is over; says why."""


def open_stream(client: SessionClient, address: str, hello: pb.Hello) -> Stream:
    """A local stream where the coordinator at `address` offers one, else one of gRPC."""
    if hello.ByteSize() < LOCAL_MESSAGE_BYTES:
        transport = connect(address, hello.device, CONTROL)
        if transport is not None:
            return LocalControl(transport, pb.CoordinatorMessage.FromString)
    return agents_stream(client.connect())


async def introduce(
    hello: pb.Hello, stream: Stream, incoming: Instructions
) -> tuple[pb.Welcome, Sequence[pb.CoordinatorMessage]]:
    """Open the session: the Welcome, and what has come with it. Raises `SessionBroken`."""
    try:
        async with asyncio.timeout(_WELCOME_SECONDS):
            await stream.write((pb.AgentMessage(hello=hello),))
            answers = await anext(incoming, None)  # Python 3.11 raises for an empty tuple
    except TimeoutError as error:
        raise SessionBroken(f"no welcome within {_WELCOME_SECONDS:.0f} s") from error
    except TransportBroken as error:
        raise SessionBroken(str(error)) from error
    except MalformedFrame as error:
        raise SessionBroken(f"the coordinator breaks the protocol: {error}") from error
    if not answers:
        raise SessionBroken("the coordinator closed the stream")
    if answers[0].WhichOneof("message") != "welcome":
        raise SessionBroken("the coordinator's first message is no welcome")
    return answers[0].welcome, answers[1:]


async def why_unreachable(channel: grpc.aio.Channel) -> str:
    """What keeps a channel from being connected: any call fails with it."""
    ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_NO_METHOD)
    try:
        await ask(b"", timeout=_ANSWER_SECONDS)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return f"the coordinator cannot be reached: {error.details()}"
    return "the coordinator cannot be reached"


def in_words(problem: str, now: float, expires_at: float | None = None) -> str:
    """What broke a session, with what to look at where a certificate is of another time: a server
    does not say that the one of its caller has expired. Times in seconds since 1970."""
    if expires_at is not None and expires_at <= now:
        return (
            f"{problem} (this device's own certificate ended on {minute(expires_at)}, "
            f"and the clock here says {minute(now)}: renew it, or set the clock)"
        )
    return with_clock(problem, now)
