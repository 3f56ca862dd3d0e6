"""What a transfer that its sender gives up still takes: the memory of its tensors, until its last
frame has left or its stream has ended."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from agent.in_process import Thread, make_fragments
from agent.test_running import edge
from shoal_agent.execution.values import Made
from shoal_agent.telemetry.counters import Counters
from shoal_agent.transport.activations import ActivationStore
from shoal_agent.transport.links import PeerLinks
from shoal_agent.transport.shaping import Uplink
from shoal_protocol.bulk.link import OutboundActivation
from shoal_protocol.bulk.local import LocalTransport, listen

MIB = 1 << 20
KEY = Made("j", 1, 0, 0)


class Stopped:
    """A peer that takes a frame, and the next ones when it is let go."""

    def __init__(self) -> None:
        self.came, self.go = asyncio.Event(), asyncio.Event()

    async def receive(self, _: str, transport: LocalTransport) -> str:
        async for frames in transport.received():
            for frame in frames:
                await frame.payload.read()
                self.came.set()
                await self.go.wait()
        return ""


@asynccontextmanager
async def links_to(peer: Stopped, address: str) -> AsyncIterator[PeerLinks]:
    listener = listen(address, peer.receive, connections=10)
    assert listener is not None
    links = PeerLinks(None, Uplink(), Counters(), insecure=False)
    try:
        yield links
    finally:
        peer.go.set()
        await links.close()
        await listener.stop()


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_transfer_that_is_given_up_counts_until_it_has_left(
    folder: Path, goes_on: bool
) -> None:
    fragments = make_fragments(folder, Thread(1), 48 * MIB)
    store = ActivationStore(folder, 1 << 30, fragments, fragments.buffers)
    array = np.ones(32 * MIB, np.uint8)
    alive = weakref.ref(array)
    await store.put(KEY, {"x": array})
    del array
    peer, address = Stopped(), f"unix:{folder}/peer.sock"

    async def hand_on(links: PeerLinks) -> None:
        with store.lend(KEY) as held:
            outbound = OutboundActivation(key=edge(0, 1), device="b", tensors=held or {})
            await links.link("b", address).send(outbound)

    async with links_to(peer, address) as links:
        sending = asyncio.create_task(hand_on(links))
        await peer.came.wait()
        sending.cancel()
        store.clear()
        await asyncio.sleep(0)
        assert not sending.done()
        assert fragments.ledger.moving >= 32 * MIB, "most of it has not left"
        if goes_on:
            peer.go.set()
        else:  # as a session does that has ended
            links.interrupt("its session has ended")
        await asyncio.wait((sending,))
        assert sending.cancelled()
        del sending
        gc.collect()
        assert alive() is None
        assert fragments.ledger.moving == 0
