"""Who opens a control stream and says nothing."""

import socket
import struct

import grpc
import pytest

from coordinator.world import World
from shoal_protocol.bulk.local import CONTROL, LocalTransport, local_path
from shoal_protocol.bulk.transport import TransportBroken
from shoal_protocol.control import LocalControl
from shoal_protocol.frames import opening
from shoal_protocol.services import SessionClient
from shoal_protocol.v1.session_pb2 import CoordinatorMessage

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
        async for _ in LocalControl(transport, CoordinatorMessage.FromString).received():
            pass
    transport.disconnect()
