"""How a session begins: what the agent does about a coordinator that does not welcome it."""

import asyncio
import socket

import pytest

from shoal_agent.session.greeting import SessionBroken, introduce
from shoal_protocol.bulk.local import LocalTransport
from shoal_protocol.control import LocalControl
from shoal_protocol.v1 import session_pb2 as pb


async def test_a_coordinator_that_closes_without_a_welcome_ends_the_session_only() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    ours.setblocking(False)
    stream: LocalControl[pb.AgentMessage, pb.CoordinatorMessage] = LocalControl(
        LocalTransport(ours), pb.CoordinatorMessage.FromString
    )
    theirs.shutdown(socket.SHUT_WR)
    with theirs, pytest.raises(SessionBroken, match="the coordinator closed the stream"):
        async with asyncio.timeout(60):
            await introduce(pb.Hello(device="pi-4"), stream, stream.received())
    await stream.close()
