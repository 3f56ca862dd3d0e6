"""How activations travel between real agents: relayed, kept at home, over TLS, over a slow link."""

import asyncio
import fcntl
import itertools
import socket
import subprocess
import tempfile
import termios
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.conftest import AgentProcess, Joined
from agent.fragment_making import MadeFragment, cut, dense_model, write_fragment
from agent.scripted_coordinator import PATIENCE_SECONDS, ConnectedDevice, ScriptedCoordinator
from agent.test_running import edge, task
from shoal_agent.transport.shaping import Uplink, unsent_bytes
from shoal_protocol.bulk.link import BulkLink, OutboundActivation, Undelivered
from shoal_protocol.bulk.local import BULK
from shoal_protocol.bulk.transport import Received, TransportBroken
from shoal_protocol.channels import Credentials
from shoal_protocol.frame_sizes import MAXIMUM_PAYLOAD_BYTES
from shoal_protocol.frames import Frame, join_frames
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Acknowledgement

Join = Callable[..., Awaitable[Joined]]
pytestmark = pytest.mark.forked


@pytest.fixture
def halves(coordinator: ScriptedCoordinator) -> list[MadeFragment]:
    return [write_fragment(coordinator.store, m) for m in cut(dense_model([64, 96, 64]), 2)]


def first(fragment: MadeFragment, *routes: pb.Route, **more: Any) -> pb.Execute:
    return pb.Execute(
        task=task(0),
        digest=fragment.digest,
        inputs=[pb.InputSource(producer=-1, tensors=["x"])],
        routes=routes,
        **more,
    )


def second(fragment: MadeFragment) -> pb.Execute:
    return pb.Execute(
        task=task(1),
        digest=fragment.digest,
        inputs=[pb.InputSource(producer=0, tensors=fragment.inputs)],
        results=["y"],
    )


async def start(joined: Joined, *fragments: MadeFragment) -> ConnectedDevice:
    for fragment in fragments:
        reply = await joined.device.load(fragment.digest, fragment.resident_bytes)
        assert reply.HasField("loaded"), reply
    return joined.device


async def test_without_an_address_activations_are_relayed_by_the_coordinator(
    join: Join, halves: list[MadeFragment]
) -> None:
    front = await start(await join("pi-4", "--relayed"), halves[0])
    back = await start(await join("jetson", "--relayed"), halves[1])
    assert front.hello.address == back.hello.address == ""
    await front.give(edge(-1, 0), {"x": np.ones((1, 64), np.float32)})
    waiting = back.begin("execute", second(halves[1]))
    route = pb.Route(consumer=1, device="jetson", tensors=halves[1].inputs)
    reply = await front.ask("execute", first(halves[0], route))
    assert list(reply.executed.delivered) == [1]
    assert (await asyncio.wait_for(waiting, 10)).HasField("executed")
    assert (await back.result()).tensors["y"].shape == (1, 64)


async def test_two_stages_on_one_device_hand_over_without_any_sending(
    join: Join, halves: list[MadeFragment]
) -> None:
    device = await start(await join(), *halves)
    await device.give(edge(-1, 0), {"x": np.ones((1, 64), np.float32)})
    waiting = device.begin("execute", second(halves[1]))
    route = pb.Route(
        consumer=1, device="pi-4", address=device.hello.address, tensors=halves[1].inputs
    )
    reply = await device.ask("execute", first(halves[0], route))
    assert list(reply.executed.delivered) == [1]
    assert (await asyncio.wait_for(waiting, 10)).HasField("executed")
    assert (await device.result()).key == edge(1, -1)


async def test_an_output_can_be_a_result_and_kept_for_a_later_stage(
    join: Join, halves: list[MadeFragment]
) -> None:
    device = await start(await join(), *halves)
    await device.give(edge(-1, 0), {"x": np.ones((1, 64), np.float32)})
    names = halves[1].inputs
    reply = await device.ask("execute", first(halves[0], results=names, kept=names))
    assert reply.HasField("executed"), reply
    assert (await device.result()).key == edge(0, -1)
    reply = await device.ask("execute", second(halves[1]))
    assert reply.HasField("executed"), reply


async def test_a_kept_activation_is_forwarded_later_as_often_as_wanted(
    join: Join, halves: list[MadeFragment]
) -> None:
    front = await start(await join("pi-4"), halves[0])
    back = await start(await join("jetson"), halves[1])
    await front.give(edge(-1, 0), {"x": np.ones((1, 64), np.float32)})
    assert (await front.ask("execute", first(halves[0]))).HasField("executed")
    for _ in range(2):
        route = pb.Route(
            consumer=1, device="jetson", address=back.hello.address, tensors=halves[1].inputs
        )
        reply = await front.ask("forward", pb.Forward(task=task(0), route=route))
        assert reply.forwarded.sent_bytes > 0, reply
        reply = await back.ask("execute", second(halves[1]))
        assert reply.HasField("executed"), reply


async def test_a_busy_coordinator_gets_the_result_again(
    coordinator: ScriptedCoordinator, join: Join, halves: list[MadeFragment]
) -> None:
    device = await start(await join(), halves[0])
    await device.give(edge(-1, 0), {"x": np.ones((1, 64), np.float32)})
    coordinator.outcomes = [Acknowledgement.BUSY, Acknowledgement.BUSY]
    reply = await device.ask("execute", first(halves[0], results=halves[0].outputs))
    assert reply.HasField("executed"), reply
    await device.result()


# ---- TLS -----------------------------------------------------------------------------------------


class Authority:
    """A certificate authority made with openssl; certificates say localhost, and the device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = folder / "ca.pem"
        self._run("req", "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=shelf")

    def issue(self, device: str) -> Credentials:
        names = f"subjectAltName=DNS:{device},DNS:localhost,IP:127.0.0.1\n"
        (self.folder / "names").write_text(names)
        self._run("req", "-keyout", f"{device}.key", "-out", "csr", "-subj", f"/CN={device}")
        command = f"x509 -req -in csr -out {device}.pem -CA ca.pem -CAkey ca.key -CAcreateserial"
        self._run(*command.split(), "-days", "1", "-extfile", "names", new_key=False)
        return Credentials(
            ca=self.ca,
            certificate=self.folder / f"{device}.pem",
            key=self.folder / f"{device}.key",
        )

    def _run(self, *arguments: str, new_key: bool = True) -> None:
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"] if new_key else []
        command = ["openssl", *arguments, *key]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True, timeout=30)


@pytest.fixture
async def shelf(
    folder: Path, start_agent: Callable[..., Awaitable[AgentProcess]]
) -> AsyncIterator[Callable[[str], Awaitable[ConnectedDevice]]]:
    """Agents and a coordinator that speak TLS over TCP."""
    authority = Authority(folder)
    coordinator = ScriptedCoordinator(folder / "store")
    port = await coordinator.start("127.0.0.1:0", authority.issue("coordinator"))

    async def join(name: str) -> ConnectedDevice:
        own = authority.issue(name)
        await start_agent(
            name,
            *("--coordinator", f"127.0.0.1:{port}", "--listen", "127.0.0.1:0"),
            *("--tls-ca", str(own.ca), "--tls-certificate", str(own.certificate)),
            *("--tls-key", str(own.key)),
        )
        return await coordinator.device()

    yield join
    await coordinator.stop()


async def test_over_tls_a_peer_must_be_the_device_that_is_meant(
    folder: Path, shelf: Callable[[str], Awaitable[ConnectedDevice]]
) -> None:
    halves = [write_fragment(folder / "store", m) for m in cut(dense_model([64, 96, 64]), 2)]
    front, back = await shelf("pi-4"), await shelf("jetson")
    await front.load(halves[0].digest, halves[0].resident_bytes)
    await front.give(edge(-1, 0), {"x": np.ones((1, 64), np.float32)})
    right = pb.Route(
        consumer=1, device="jetson", address=back.hello.address, tensors=halves[1].inputs
    )
    reply = await front.ask("execute", first(halves[0], right))
    assert list(reply.executed.delivered) == [1], reply

    wrong = pb.Route(
        consumer=1, device="pi-zero", address=back.hello.address, tensors=halves[1].inputs
    )
    reply = await front.ask("forward", pb.Forward(task=task(0), route=wrong))
    assert reply.failure.code == pb.UNREACHABLE, reply

    peers = [f"pi-zero@{front.hello.address}", f"pi-4@{front.hello.address}"]
    reply = await back.load(halves[0].digest, halves[0].resident_bytes, *peers)
    assert reply.loaded.fetched_bytes > 0, reply


# ---- links and the simulated uplink, without a network -------------------------------------------


class Wire:
    """A transport to nobody: `arrived` has what was written, and when."""

    frame_bytes = MAXIMUM_PAYLOAD_BYTES
    local = False

    def __init__(self, fails_at: int | None = None) -> None:
        self.arrived: list[tuple[float, bytes]] = []
        self.closed = asyncio.Event()
        self.flows = asyncio.Event()
        self.flows.set()
        self._fails_at = fails_at

    async def received(self) -> AsyncIterator[Iterable[Received]]:
        await self.closed.wait()
        yield ()

    def heard(self) -> int | None:
        """Nobody asks."""
        return None

    async def write(self, frames: Sequence[Frame]) -> None:
        message = join_frames([bytes(frame) for frame in frames])
        await self.flows.wait()
        self.arrived.append((time.monotonic(), message))
        await asyncio.sleep(0)
        if len(self.arrived) == self._fails_at:
            raise TransportBroken("gone")

    async def close(self) -> None:
        self.closed.set()


async def test_transfers_do_not_interleave_and_a_broken_one_ends_the_stream() -> None:
    wire = Wire(fails_at=4)
    link = BulkLink(wire)
    running = asyncio.create_task(link.run())
    large = {"x": np.zeros(600_000, np.float32)}  # three frames
    activations = [
        OutboundActivation(key=edge(0, consumer), device="", tensors=large) for consumer in (1, 2)
    ]
    answers = await asyncio.gather(*map(link.send, activations), return_exceptions=True)
    assert all(isinstance(answer, Undelivered) for answer in answers)
    assert await running == "gone"
    assert wire.closed.is_set()
    assert len(wire.arrived) == 4


async def test_a_simulated_uplink_lets_bytes_out_at_its_rate_and_late_but_in_order() -> None:
    uplink = Uplink(rate_bits_per_second=80_000_000, latency_seconds=0.02)  # 10 MB/s
    wire = Wire()
    shaped = uplink.shape(wire)
    begun = time.monotonic()
    for number in range(10):
        await shaped.write([Frame(bytes([number]) * 100_000)])
    left = time.monotonic()
    while len(wire.arrived) < 10:
        await asyncio.sleep(0.001)
    await shaped.close()
    assert [message[-1] for _, message in wire.arrived] == list(range(10))
    # A rate is a lower bound; how much later a busy machine is, is no matter.
    assert left - begun >= 0.099
    for number, (at, _) in enumerate(wire.arrived):
        assert at - begun >= 0.02 + (number + 1) * 0.01 - 0.001
    assert all(later[0] >= earlier[0] for earlier, later in itertools.pairwise(wire.arrived))


async def test_a_simulated_uplink_whose_receiver_does_not_read_takes_a_bounded_number() -> None:
    wire = Wire()
    wire.flows.clear()
    shaped = Uplink(latency_seconds=0.0001).shape(wire)
    written = 0

    async def write() -> None:
        nonlocal written
        while True:
            await shaped.write([Frame(b"x")])
            written += 1

    writing = asyncio.create_task(write())
    while written < 250:
        await asyncio.sleep(0)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert written <= 257
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    await shaped.close()


async def until_it_stands(reader: socket.socket) -> None:
    """Until some bytes have come, and for a while no more."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        before = 0
        while before == 0 or unread_bytes(reader) > before:
            before = unread_bytes(reader)
            await asyncio.sleep(0.1)


def unread_bytes(reader: socket.socket) -> int:
    count = array("i", [0])
    fcntl.ioctl(reader, termios.FIONREAD, count)
    return count[0]


@pytest.mark.parametrize(("budget_mib", "at_most_kib"), [(1, 192), (16, 320), (4096, 2112)])
async def test_the_kernel_holds_little_for_an_agent_of_a_small_budget_whose_peer_does_not_read(
    budget_mib: int, at_most_kib: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as peer:
        peer.bind(f"{folder}/peer{BULK}")
        peer.listen()
        uplink = Uplink(unsent_bytes=unsent_bytes(budget_mib << 20))
        transport = uplink.open(f"unix:{folder}/peer", lambda: pytest.fail("no local stream"))
        frame = Frame(b"", [bytes(MAXIMUM_PAYLOAD_BYTES)], MAXIMUM_PAYLOAD_BYTES)
        writing = asyncio.create_task(transport.write([frame] * 4))
        reader, _ = await asyncio.to_thread(peer.accept)
        await until_it_stands(reader)
        assert not writing.done()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await transport.close()
        with reader:
            held = sum(map(len, iter(lambda: reader.recv(1 << 20), b"")))
    assert 0 < held <= at_most_kib << 10
