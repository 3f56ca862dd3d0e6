"""Who opens a control stream and says nothing."""

import asyncio
import socket
import struct

import grpc
import pytest

from coordinator.world import World
from shoal_protocol import PROTOCOL
from shoal_protocol.bulk.local import CONTROL, LocalTransport, connect, local_path
from shoal_protocol.bulk.transport import TransportBroken
from shoal_protocol.control import LocalControl
from shoal_protocol.frames import opening
from shoal_protocol.services import SessionClient
from shoal_protocol.v1 import session_pb2 as pb

REASON = "the stream ended without a Hello"


async def test_a_stream_that_ends_without_a_hello_is_refused_with_the_reason(world: World) -> None:
    call = SessionClient(world.channel).connect()
    await call.done_writing()
    assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert await call.details() == REASON


async def test_so_is_one_of_the_same_host(world: World) -> None:
    ours, header = socket.socket(socket.AF_UNIX), opening("pi-4").header
    ours.connect(str(local_path(world.target, CONTROL)))
    ours.sendall(struct.pack("<II", len(header), 0) + header)
    ours.shutdown(socket.SHUT_WR)
    ours.setblocking(False)
    transport = LocalTransport(ours)
    with pytest.raises(TransportBroken, match=REASON):
        async for _ in LocalControl(transport, pb.CoordinatorMessage.FromString).received():
            pass
    transport.disconnect()


async def test_a_hello_that_comes_in_parts_opens_a_session(world: World) -> None:
    """Of a device that has cached so many fragments that its socket does not hold it at once."""
    transport = connect(world.target, "pi-4", CONTROL)
    assert transport is not None
    cached = [pb.CachedFragment(digest=f"sha256:{number:064x}", bytes=1) for number in range(3000)]
    hello = pb.Hello(protocol=PROTOCOL, device="pi-4", budget_bytes=1 << 20, cached=cached)
    parse = pb.CoordinatorMessage.FromString
    stream: LocalControl[pb.AgentMessage, pb.CoordinatorMessage] = LocalControl(transport, parse)
    await stream.write([pb.AgentMessage(hello=hello)])
    async with asyncio.timeout(60):
        answers = await anext(stream.received())
    assert answers[0].HasField("welcome")
    await stream.close()
