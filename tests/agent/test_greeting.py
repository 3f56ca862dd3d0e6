"""How a session begins: what the agent does about a coordinator that does not welcome it."""

import asyncio
import socket

import pytest

from shoal_agent.session.greeting import SessionBroken, in_words, introduce
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


@pytest.mark.parametrize(
    "problem", ["certificate has expired", "ALERT_CERTIFICATE_EXPIRED", "is not yet valid"]
)
def test_a_certificate_of_another_time_has_both_clocks_looked_at(problem: str) -> None:
    said = in_words(f"Ssl handshake failed: {problem}: OK", 600.0)
    assert said.startswith("Ssl handshake failed: ")
    assert said.endswith(
        "(the clock here says 1970-01-01 00:10 UTC: is it right, and that of the coordinator?)"
    )


def test_what_else_breaks_a_session_is_said_as_it_is() -> None:
    assert in_words("connection refused", 600.0) == "connection refused"


def test_a_device_whose_own_certificate_has_ended_says_so() -> None:
    said = in_words("Socket closed", 86400.0 * 366, expires_at=86400.0)
    assert said.startswith(
        "Socket closed (this device's own certificate ended on 1970-01-02 00:00 UTC, and"
    )
    assert "says 1971-01-02 00:00 UTC: renew it" in said
    assert in_words("Socket closed", 600.0, expires_at=86400.0) == "Socket closed"
