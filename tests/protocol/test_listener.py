"""A server's port: renewed certificates, addresses in use, and strangers while it is renewed."""

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from operator import sub
from pathlib import Path
from typing import NoReturn

import grpc
import pytest

from certificates import Pki
from protocol.renewing_server import Echo
from shoal_protocol.channels import Credentials, open_channel
from shoal_protocol.coordinator_client import CoordinatorClient
from shoal_protocol.listener import Listener
from shoal_protocol.services import PeerClient, add_peer_service
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest
from strangers import context_of, crowd, descriptors, handshakes, settled

PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


def serving(connections: int = 100) -> Listener:
    return Listener(
        lambda server: add_peer_service(server, Echo()),
        connections=connections,
        check_seconds=0.05,
    )


async def echo(channel: grpc.aio.Channel) -> bytes:
    call = PeerClient(channel).fetch_fragment(FetchFragmentRequest(digest="hello"), timeout=60)
    return b"".join([message async for message in call])


async def shown(port: int, pki: Pki, client: Credentials) -> str:
    """The certificate that a server shows."""

    def look() -> str:
        context = context_of(client, pki.ca)
        # Wrapped before it connects: a socket that is reset between the two is closed too.
        with context.wrap_socket(socket.socket(), server_hostname="localhost") as secured:
            secured.settimeout(60)
            secured.connect(("127.0.0.1", port))
            return ssl.DER_cert_to_PEM_cert(secured.getpeercert(binary_form=True) or b"")

    while True:
        with contextlib.suppress(OSError):  # closed by a listener that is being replaced
            return await asyncio.to_thread(look)


async def until_shown(certificate: bytes, port: int, pki: Pki, client: Credentials) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await shown(port, pki, client) != certificate.decode():
            await asyncio.sleep(0.05)


# ---- renewal -------------------------------------------------------------------------------------


async def test_a_renewed_certificate_is_shown_and_calls_go_on(pki: Pki) -> None:
    server, client = pki.issue("server"), pki.issue("pi-4")
    listener = serving()
    port = await listener.open("127.0.0.1:0", server)
    async with open_channel(f"localhost:{port}", client) as channel:
        call = PeerClient(channel).push()
        await call.write(b"before")
        assert await call.read() == b"before"
        for _ in range(3):
            server = pki.issue("server")
            await until_shown(server.certificate.read_bytes(), port, pki, client)
        await call.write(b"after")
        assert await call.read() == b"after"
        assert await echo(channel) == b"hello"
    await listener.stop(None)


async def no_devices(request: pb.ListDevicesRequest, context: object) -> pb.ListDevicesResponse:
    return pb.ListDevicesResponse()


def add_coordinator(server: grpc.aio.Server) -> None:
    """A coordinator without devices."""
    handler = grpc.unary_unary_rpc_method_handler(
        no_devices,
        request_deserializer=pb.ListDevicesRequest.FromString,
        response_serializer=pb.ListDevicesResponse.SerializeToString,
    )
    methods = {"ListDevices": handler}
    service = grpc.method_handlers_generic_handler("shoal.v1.Coordinator", methods)
    server.add_generic_rpc_handlers((service,))


async def test_no_call_fails_while_certificates_are_renewed(pki: Pki) -> None:
    server, client = pki.issue("server"), pki.issue("pi-4")
    listener = Listener(add_coordinator, connections=100, check_seconds=0.05)
    port = await listener.open("127.0.0.1:0", server)
    renewed, answers = False, [0] * 8

    async def ask(coordinator: CoordinatorClient, number: int) -> None:
        while not renewed:
            assert await coordinator.devices() == []
            answers[number] += 1

    try:
        async with open_channel(f"localhost:{port}", client) as channel:
            coordinator = CoordinatorClient(channel)
            asking = asyncio.gather(*(ask(coordinator, number) for number in range(8)))
            for _ in range(10):
                server = pki.issue("server")
                await until_shown(server.certificate.read_bytes(), port, pki, client)
                # A certificate lasts for days: no call meets a second renewal before it is tried
                # again. So each caller is answered before the next one.
                before = answers.copy()
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while not asking.done() and min(map(sub, answers, before)) < 2:
                        await asyncio.sleep(0.01)
            renewed = True
            await asking
    finally:  # a server that is left behind holds up the tests after this one
        await listener.stop(None)


async def test_a_certificate_that_does_not_fit_its_key_is_not_used(pki: Pki) -> None:
    server, client = pki.issue("server"), pki.issue("pi-4")
    first = server.certificate.read_bytes()
    listener = serving()
    port = await listener.open("127.0.0.1:0", server)
    server.key.write_bytes(pki.issue("jetson").key.read_bytes())
    await asyncio.sleep(0.3)
    assert await shown(port, pki, client) == first.decode()
    server.certificate.unlink()
    await asyncio.sleep(0.3)
    assert await shown(port, pki, client) == first.decode()
    renewed = pki.issue("server").certificate.read_bytes()
    await until_shown(renewed, port, pki, client)
    await listener.stop(None)


async def test_a_listener_that_stops_ends_the_calls_of_all_its_servers(pki: Pki) -> None:
    server, client = pki.issue("server"), pki.issue("pi-4")
    listener = serving()
    port = await listener.open("127.0.0.1:0", server)
    async with open_channel(f"localhost:{port}", client) as channel:
        call = PeerClient(channel).push()
        await call.write(b"before")
        assert await call.read() == b"before"
        await until_shown(pki.issue("server").certificate.read_bytes(), port, pki, client)
        await asyncio.wait_for(listener.stop(0.1), PATIENCE_SECONDS)
        assert await call.code() != grpc.StatusCode.OK


# ---- addresses in use ----------------------------------------------------------------------------


async def test_a_second_server_on_a_port_is_refused_although_ports_can_be_shared(pki: Pki) -> None:
    first, second = serving(), serving()
    port = await first.open("127.0.0.1:0", pki.issue("server"))
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: it is in use"):
        await second.open(f"127.0.0.1:{port}", pki.issue("server"))
    await first.stop(None)
    assert await second.open(f"127.0.0.1:{port}", pki.issue("server")) == port
    await second.stop(None)


async def test_a_name_that_has_an_address_of_ipv6_is_served_without_ipv6(
    pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian has `::1 localhost` in its hosts; a kernel may be without IPv6 all the same."""
    real, stream = socket.socket, (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")

    def without(family: int = socket.AF_INET, *rest: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return real(family, *rest)

    def of_both(_host: str, port: int, **_: object) -> list[object]:
        found = (socket.AF_INET6, *stream, ("::1", port, 0, 0))
        return [found, (socket.AF_INET, *stream, ("127.0.0.1", port))]

    listener, other = serving(), serving()
    port = await other.open("127.0.0.1:0", pki.issue("server"))
    monkeypatch.setattr(socket, "socket", without)
    monkeypatch.setattr(socket, "getaddrinfo", of_both)
    with pytest.raises(OSError, match="it is in use by another process"):
        await listener.open(f"localhost:{port}", pki.issue("server"))
    await other.stop(None)
    assert await listener.open(f"localhost:{port}", pki.issue("server")) == port
    await listener.stop(None)


async def test_a_name_that_nobody_can_look_up_now_is_not_refused_for_good(
    pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at boot, before there is a network: whoever starts the process is to try again."""

    def late(*_: object, **__: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", late)
    with pytest.raises(OSError, match="7401: the host has no address yet: Temporary"):
        await serving().open("pi-4.lan:7401", pki.issue("server"))


async def test_a_second_server_on_a_unix_socket_is_refused(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    first, second = serving(), serving()
    await first.open(address)
    with pytest.raises(OSError, match="it is in use by another process; stop that one"):
        await second.open(address)
    async with open_channel(address) as channel:
        assert await echo(channel) == b"hello"
    await first.stop(None)


async def test_the_unix_socket_of_a_process_that_has_ended_is_used_again(tmp_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(f"{tmp_path}/s")
    stale.listen()
    stale.close()
    assert (tmp_path / "s").is_socket()
    listener = serving()
    await listener.open(f"unix:{tmp_path}/s")
    async with open_channel(f"unix:{tmp_path}/s") as channel:
        assert await echo(channel) == b"hello"
    await listener.stop(None)


# ---- strangers -----------------------------------------------------------------------------------


async def test_connections_past_the_bound_are_closed_at_once(pki: Pki) -> None:
    listener = serving(connections=5)
    port = await listener.open("127.0.0.1:0", pki.issue("server"))
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
    async with asyncio.timeout(PATIENCE_SECONDS):
        ends = [asyncio.create_task(reader.read(1)) for reader, _ in opened]
        closed, waiting = set[asyncio.Task[bytes]](), set(ends)
        while len(closed) < 3:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            closed |= done
        assert len(waiting) == 5
        for _, writer in opened:
            writer.close()
        await asyncio.gather(*ends, return_exceptions=True)
        client = pki.issue("pi-4")
        while True:  # there is room again, as soon as the server has seen them go
            with contextlib.suppress(grpc.aio.AioRpcError):
                async with open_channel(f"localhost:{port}", client) as channel:
                    assert await echo(channel) == b"hello"
                    break
    await listener.stop(None)


@contextlib.asynccontextmanager
async def renewing_server(pki: Pki) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    script = Path(__file__).with_name("renewing_server.py")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), str(pki.folder)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process, int(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@dataclass
class Renewals:
    """Certificates that are replaced one after the other, each in one step."""

    pki: Pki
    count: int = 0

    async def go_on(self) -> None:
        while True:
            issued = self.pki.issue("next")
            for new, old in ((issued.key, "server.key"), (issued.certificate, "server.pem")):
                os.replace(new, self.pki.folder / old)
            self.count += 1
            await asyncio.sleep(0.1)


@pytest.mark.real
@pytest.mark.parametrize(
    "connections",
    [300, pytest.param(5000, marks=[pytest.mark.minutes, pytest.mark.timeout(600)])],
)
async def test_strangers_do_not_end_a_server_whose_certificate_is_renewed(
    tmp_path: Path, connections: int
) -> None:
    pki = Pki(tmp_path / "pki")
    client = pki.issue("pi-4")
    pki.issue("server")
    context = context_of(client, pki.ca)
    async with renewing_server(pki) as (process, port):
        before = descriptors(process.pid)
        renewals = Renewals(pki)
        renewing = asyncio.create_task(renewals.go_on())
        opened = 0
        while opened < connections:
            opened += await handshakes(port, context, each=3)
            opened += await crowd(port, context, 100)
            assert process.returncode is None
        renewing.cancel()
        assert renewals.count > 5
        await until_shown((pki.folder / "server.pem").read_bytes(), port, pki, client)
        async with open_channel(f"localhost:{port}", client) as channel:
            assert await echo(channel) == b"hello"
        assert await settled(process.pid, before + 2) <= before + 2
