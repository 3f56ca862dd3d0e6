"""Streams to peers: how many there are, and what becomes of what is on its way when they close."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from agent.test_running import edge
from protocol.test_bulk import Buffer
from shoal_agent.telemetry.counters import Counters
from shoal_agent.transport import links
from shoal_agent.transport.links import PeerLink, PeerLinks
from shoal_agent.transport.shaping import Uplink
from shoal_protocol.assembly import ReceivedActivation
from shoal_protocol.bulk.link import BulkLink, OutboundActivation, Undelivered
from shoal_protocol.bulk.local import LocalTransport, listen
from shoal_protocol.bulk.receiving import Intake, ReceiveBuffer
from shoal_protocol.frames import TransferError
from shoal_protocol.v1.tensors_pb2 import Activation


class Slow:
    """Takes what comes when the test lets it (a `Receiver`)."""

    def __init__(self) -> None:
        self.came, self.go = asyncio.Event(), asyncio.Event()

    def admit(self, activation: Activation, memory_bytes: int) -> ReceiveBuffer:
        return Buffer()

    async def take(self, received: ReceivedActivation, buffer: ReceiveBuffer) -> None:
        self.came.set()
        await self.go.wait()

    def refused(self, error: TransferError) -> None:
        """The acknowledgement says it."""


@dataclass(frozen=True)
class UnderWay:
    """A tensor that a peer has from us and lets us wait for."""

    taker: Slow
    address: str
    peers: PeerLinks
    link: PeerLink
    sending: asyncio.Task[int]


@asynccontextmanager
async def under_way(folder: Path) -> AsyncIterator[UnderWay]:
    taker, address = Slow(), f"unix:{folder}/peer.sock"

    async def serve(_: str, transport: LocalTransport) -> str:
        return await BulkLink(transport, Intake(taker)).run()

    listener = listen(address, serve, connections=10)
    assert listener is not None
    peers = PeerLinks(None, Uplink(), Counters(), insecure=False)
    tensors = {"x": np.ones(4, np.float32)}
    outbound = OutboundActivation(key=edge(0, 1), device="a", tensors=tensors)
    link = peers.link("a", address)
    sending = asyncio.create_task(link.send(outbound))
    await asyncio.wait_for(taker.came.wait(), 10)
    yield UnderWay(taker, address, peers, link, sending)
    await asyncio.wait_for(peers.close(), 10)
    await listener.stop()


async def test_what_is_on_its_way_when_the_certificate_is_renewed_arrives(folder: Path) -> None:
    async with under_way(folder) as tensor:
        tensor.peers.renew()
        other = tensor.peers.link("a", tensor.address)
        assert other is not tensor.link, "which shows the new one"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(tensor.sending), 0.2)
        tensor.taker.go.set()
        assert await asyncio.wait_for(tensor.sending, 10) > 0


@pytest.mark.parametrize("ends", ["close", "lost"])
async def test_a_stream_that_is_left_ends_with_the_others(folder: Path, ends: str) -> None:
    async with under_way(folder) as tensor:
        tensor.peers.renew()
        if ends == "lost":
            tensor.peers.lose("a")
        else:
            await asyncio.wait_for(tensor.peers.close(), 10)
        with pytest.raises(Undelivered):
            await asyncio.wait_for(tensor.sending, 10)


async def test_streams_to_peers_are_bounded_and_the_idle_ones_give_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MAXIMUM_LINKS", 2)
    counters = Counters()
    peers = PeerLinks(None, Uplink(), counters, insecure=False)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{folder}/silent.sock")
        silent.listen()
        tensors = {"x": np.ones((1, 64), np.float32)}
        busy = [peers.link(name, f"unix:{folder}/silent.sock") for name in ("a", "b")]
        outbound = OutboundActivation(key=edge(0, 1), device="a", tensors=tensors)
        sending = [asyncio.create_task(link.send(outbound)) for link in busy]
        await asyncio.sleep(0)
        with pytest.raises(Undelivered, match="streams to 2 peers are busy already"):
            peers.link("c", f"unix:{folder}/silent.sock")
        peers.lose("a")
        with pytest.raises(Undelivered, match="the coordinator has lost a"):
            await sending[0]
        peers.link("c", f"unix:{folder}/silent.sock")
        assert len(peers) == 2
        assert peers.link("b", f"unix:{folder}/silent.sock") is busy[1], "it is not idle"
        assert counters.full_queues["peers"] == 2
        await peers.close()
        with pytest.raises(Undelivered, match="closed"):
            await sending[1]
