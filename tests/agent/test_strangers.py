"""An agent's own port over TLS: who may use it, and who holds it up without any right."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from agent.conftest import AgentProcess, StartAgent
from agent.fragment_making import MadeFragment, dense_model, write_fragment
from agent.scripted_coordinator import ConnectedDevice, ScriptedCoordinator
from certificates import Pki
from coordinator.world import refusal
from shoal_protocol.channels import open_channel
from shoal_protocol.exposition import CONNECTIONS
from shoal_protocol.services import FileStream, PeerClient
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest
from strangers import context_of, crowd, descriptors, handshakes, settled

pytestmark = pytest.mark.forked


@dataclass
class Secured:
    """An agent over TLS with a fragment of 4 MB."""

    agent: AgentProcess
    device: ConnectedDevice
    fragment: MadeFragment
    pki: Pki

    @property
    def port(self) -> int:
        return int(self.device.hello.address.rpartition(":")[2])

    @property
    def metrics_port(self) -> int:
        (port,) = re.findall(r"metrics at \S+:(\d+)/metrics", self.agent.errors.read_text())
        return int(port)

    def channel(self, *names: str) -> grpc.aio.Channel:
        own = self.pki.issue(names[0]) if len(names) == 1 else self.pki.issue_for(*names)
        return open_channel(f"localhost:{self.port}", own)

    def fetch(self, channel: grpc.aio.Channel) -> FileStream:
        request = FetchFragmentRequest(digest=self.fragment.digest, file="weights.bin")
        return PeerClient(channel).fetch_fragment(request, timeout=60)


@pytest.fixture
async def secured(folder: Path, start_agent: StartAgent) -> AsyncIterator[Secured]:
    pki = Pki(folder / "pki")
    coordinator = ScriptedCoordinator(folder / "store")
    port = await coordinator.start("127.0.0.1:0", pki.issue("shelf-coordinator"))
    fragment = write_fragment(coordinator.store, dense_model([1024, 1024]))
    own = pki.issue("pi-4")
    agent = await start_agent(
        "pi-4",
        *("--coordinator", f"127.0.0.1:{port}", "--listen", "127.0.0.1:0"),
        *("--tls-ca", str(own.ca), "--tls-certificate", str(own.certificate)),
        *("--tls-key", str(own.key), "--metrics-address", "127.0.0.1:0"),
    )
    device = await coordinator.device()
    reply = await device.load(fragment.digest, fragment.resident_bytes)
    assert reply.HasField("loaded"), reply
    yield Secured(agent, device, fragment, pki)
    await coordinator.stop()


async def read(stream: FileStream) -> int:
    return sum([len(frame) async for frame in stream])


async def test_only_devices_and_coordinators_exchange_data_with_an_agent(secured: Secured) -> None:
    for names in (("shoal",), ("shoal-operator",), ("shoal-worker",), ("jetson", "nano")):
        async with secured.channel(*names) as channel:
            for call in (read(secured.fetch(channel)), PeerClient(channel).push().read()):
                code, text = await refusal(call)
                assert code == grpc.StatusCode.PERMISSION_DENIED, names
                assert text.endswith("is no device here, and may not exchange data with agents")
    for name in ("jetson", "shelf-coordinator"):
        async with secured.channel(name) as channel:
            assert await read(secured.fetch(channel)) > 4 << 20


async def test_a_connection_that_has_outlived_its_certificate_serves_no_peer(
    secured: Secured,
) -> None:
    lifetime = timedelta(seconds=8)
    own = secured.pki.issue("jetson", lifetime)
    async with open_channel(f"localhost:{secured.port}", own) as channel:
        assert await read(secured.fetch(channel)) > 4 << 20
        await asyncio.sleep(lifetime.total_seconds() + 1)
        code, text = await refusal(read(secured.fetch(channel)))
    assert (code, text) == (grpc.StatusCode.UNAUTHENTICATED, "the certificate has expired")


async def test_a_peer_that_reads_nothing_does_not_keep_others_from_fetching(
    secured: Secured,
) -> None:
    async with secured.channel("jetson") as idle, secured.channel("nano") as other:
        unread = [secured.fetch(idle) for _ in range(20)]
        firsts = [asyncio.create_task(stream.read()) for stream in unread]
        codes: list[grpc.StatusCode] = []
        while len(codes) < 4:
            await asyncio.sleep(0.05)
            codes = [
                error.code()
                for first in firsts
                if first.done() and isinstance(error := first.exception(), grpc.aio.AioRpcError)
            ]
        assert codes == 4 * [grpc.StatusCode.RESOURCE_EXHAUSTED]  # 2 are served, 14 wait
        assert await read(secured.fetch(other)) > 4 << 20
        for first in firsts:
            first.cancel()
        await asyncio.gather(*firsts, return_exceptions=True)


@pytest.mark.parametrize("connections", [300, pytest.param(5000, marks=pytest.mark.minutes)])
async def test_strangers_do_not_disturb_an_agents_session(
    secured: Secured, connections: int
) -> None:
    process = secured.agent.process
    context = context_of(secured.pki.issue("jetson"), secured.pki.ca)
    before = descriptors(process.pid)
    assert await handshakes(secured.port, context, each=10) == 320
    opened = 0
    while opened < connections:
        opened += await crowd(secured.port, context, 200)
        assert process.returncode is None
    assert not secured.device.gone.is_set()
    assert await settled(process.pid, before + 2) <= before + 2
    async with secured.channel("nano") as channel:
        assert await read(secured.fetch(channel)) > 4 << 20


async def test_strangers_find_few_places_at_the_port_of_the_metrics_and_probes_one(
    secured: Secured,
) -> None:
    process, port = secured.agent.process, secured.metrics_port
    before = descriptors(process.pid)
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
    assert (await reader.read()).endswith(b"\r\n\r\nok\n")
    assert descriptors(process.pid) <= before + CONNECTIONS
    for _, each in [*silent, (reader, writer)]:
        each.close()
    assert await crowd(port, context_of(None, secured.pki.ca), 200) > 100
    assert await settled(process.pid, before) <= before
    assert not secured.device.gone.is_set()
