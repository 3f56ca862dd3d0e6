"""Who may talk to whom: refusals, Unix sockets, and mutual TLS with real certificates."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from shoal_protocol.channels import (
    AddressRefused,
    Credentials,
    Option,
    client_options,
    open_channel,
    peer_name,
    server_options,
)
from shoal_protocol.listener import Listener
from shoal_protocol.services import FileContext, FrameContext, PeerClient, add_peer_service
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest


class Authority:
    """A certificate authority with a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.ca = folder / "ca.pem"
        self._key = folder / "ca.key"
        name = ["-subj", f"/CN={folder.name}"]
        _openssl("req", "-x509", "-keyout", self._key, "-out", self.ca, *_NEW_KEY, *name)

    def issue(
        self, device: str, *, alternative_name: str | None = None, subject: str | None = None
    ) -> Credentials:
        """Key and certificate of a device, with its name as the common name, or of a subject."""
        key, request = self.folder / f"{device}.key", self.folder / f"{device}.csr"
        certificate = self.folder / f"{device}.pem"
        _openssl(
            "req", "-keyout", key, "-out", request, *_NEW_KEY, "-subj", subject or f"/CN={device}"
        )
        extensions = self.folder / f"{device}.cnf"
        extensions.write_text(f"subjectAltName={alternative_name}\n" if alternative_name else "")
        _openssl(
            *("x509", "-req", "-in", request, "-out", certificate, "-days", "1"),
            *("-CA", self.ca, "-CAkey", self._key, "-CAcreateserial", "-extfile", extensions),
        )
        return Credentials(ca=self.ca, certificate=certificate, key=key)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki") / "shelf")


@dataclass
class Greeter:
    """Notes who calls, and answers."""

    callers: list[str | None] = field(default_factory=list)

    async def push(self, requests: AsyncIterator[bytes], context: FrameContext) -> None:
        async for message in requests:
            await context.write(message)

    async def fetch_fragment(self, request: FetchFragmentRequest, context: FileContext) -> None:
        self.callers.append(peer_name(context))
        await context.write(b"hello")


@asynccontextmanager
async def serving(
    address: str, credentials: Credentials | None = None, *, insecure: bool = False
) -> AsyncIterator[tuple[Greeter, int]]:
    greeter = Greeter()
    listener = Listener(lambda server: add_peer_service(server, greeter), connections=100)
    port = await listener.open(address, credentials, insecure=insecure)
    try:
        yield greeter, port
    finally:
        await listener.stop(None)


async def greet(channel: grpc.aio.Channel) -> bytes:
    async with channel:
        call = PeerClient(channel).fetch_fragment(FetchFragmentRequest(), timeout=60)
        return b"".join([message async for message in call])


async def test_behind_a_unix_socket_neither_side_needs_a_certificate(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/agent.sock"
    async with serving(address) as (greeter, _):
        assert await greet(open_channel(address)) == b"hello"
        assert greeter.callers == [None]


async def test_loopback_may_be_insecure_when_told(tmp_path: Path) -> None:
    async with serving("127.0.0.1:0", insecure=True) as (greeter, port):
        assert await greet(open_channel(f"localhost:{port}", insecure=True)) == b"hello"
        assert greeter.callers == [None]


async def test_a_device_is_known_by_its_certificate_on_both_sides(authority: Authority) -> None:
    server, client = authority.issue("pi-4"), authority.issue("jetson")
    async with serving("127.0.0.1:0", server) as (greeter, port):
        channel = open_channel(f"127.0.0.1:{port}", client, server_name="pi-4")
        assert await greet(channel) == b"hello"
        assert greeter.callers == ["jetson"]


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ("/O=fish, CN=shoal-operator/CN=jetson", "jetson"),
        ("/CN=jetson\\\\,CN=nano", "jetson\\,CN=nano"),
        ("/CN=jetson/CN=shoal-operator", None),
        ("/CN=jetson+CN=shoal-operator", None),
        ("/CN=jetson\\\\/CN=shoal-operator", None),
        ("/O=fish", None),
    ],
)
async def test_a_caller_has_a_name_only_if_its_certificate_has_exactly_one(
    authority: Authority, subject: str, name: str | None
) -> None:
    client = authority.issue("subject", subject=subject)
    async with serving("127.0.0.1:0", authority.issue("pi-4")) as (greeter, port):
        channel = open_channel(f"127.0.0.1:{port}", client, server_name="pi-4")
        assert await greet(channel) == b"hello"
        assert greeter.callers == [name]


async def test_a_certificate_for_the_host_needs_no_server_name(authority: Authority) -> None:
    server = authority.issue("coordinator", alternative_name="IP:127.0.0.1,DNS:localhost")
    async with serving("127.0.0.1:0", server) as (_, port):
        for host in ("127.0.0.1", "localhost"):
            assert await greet(open_channel(f"{host}:{port}", server)) == b"hello"


@pytest.mark.parametrize("expected", ["pi-zero", None])
async def test_a_client_refuses_a_server_of_another_name(
    authority: Authority, expected: str | None
) -> None:
    server, client = authority.issue("pi-4"), authority.issue("jetson")
    async with serving("127.0.0.1:0", server) as (greeter, port):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await greet(open_channel(f"127.0.0.1:{port}", client, server_name=expected))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert greeter.callers == []


async def test_strangers_are_refused_on_both_sides(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "elsewhere")
    ours, theirs = authority.issue("pi-4"), stranger.issue("pi-4")
    async with serving("127.0.0.1:0", ours) as (greeter, port):
        target = f"127.0.0.1:{port}"
        # A client of another authority that trusts ours, one that trusts its own, one without TLS.
        half = Credentials(ca=ours.ca, certificate=theirs.certificate, key=theirs.key)
        for channel in (
            open_channel(target, half, server_name="pi-4"),
            open_channel(target, theirs, server_name="pi-4"),
            open_channel(target, insecure=True),
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await greet(channel)
        assert greeter.callers == []


@pytest.mark.parametrize(
    ("address", "insecure", "reason"),
    [
        ("192.168.1.7:50051", True, "loopback only"),
        ("0.0.0.0:50051", True, "loopback only"),
        ("pi-4.local:50051", True, "loopback only"),
        ("[2001:db8::7]:50051", True, "loopback only"),
        ("127.0.0.1:50051", False, "needs --tls-ca"),
        ("pi-4:50051", False, "needs --tls-ca"),
        ("pi-4", True, "neither unix:/path nor HOST:PORT"),
        ("pi-4:", True, "neither unix:/path nor HOST:PORT"),
        (":50051", True, "neither unix:/path nor HOST:PORT"),
        ("pi-4:65536", True, "neither unix:/path nor HOST:PORT"),
        ("dns:///127.0.0.1:50051", True, "neither unix:/path nor HOST:PORT"),
        ("::1:50051", True, "[ADDRESS]:PORT"),
        ("unix:agent.sock", True, "absolute path"),
        ("unix:/" + "a" * 107, False, "longer than the 107 bytes"),
    ],
)
async def test_an_address_that_is_not_safe_is_refused_with_the_reason(
    address: str, insecure: bool, reason: str
) -> None:
    with pytest.raises(AddressRefused) as caught:
        open_channel(address, insecure=insecure)
    assert reason in str(caught.value)
    assert caught.value.address == address
    with pytest.raises(AddressRefused):
        await Listener(lambda _: None, connections=1).open(address, insecure=insecure)


async def test_credentials_and_insecure_exclude_each_other(authority: Authority) -> None:
    with pytest.raises(AddressRefused, match="exclude each other"):
        open_channel("127.0.0.1:1", authority.issue("pi-4"), insecure=True)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "localhost:1"])
async def test_every_way_to_write_loopback_is_loopback(address: str) -> None:
    async with open_channel(address, insecure=True) as channel:
        assert channel.get_state() is grpc.ChannelConnectivity.IDLE


async def test_a_port_that_is_taken_is_an_error_of_the_system() -> None:
    async with serving("127.0.0.1:0", insecure=True) as (_, port):
        other = Listener(lambda _: None, connections=1)
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            await other.open(f"127.0.0.1:{port}", insecure=True)


async def test_a_message_above_the_limit_ends_the_stream(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/agent.sock"
    async with serving(address):
        unbounded = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(address, options=unbounded) as channel:
            call = PeerClient(channel).push()
            await call.write(bytes(5 << 20))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(call.read(), timeout=60)
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


ANSWERED_IN = "grpc.keepalive_timeout_ms"


def hastened(options: list[Option]) -> list[Option]:
    """The same options with a hundredth of their times; but a ping has as long as ever to be
    answered, or a machine that is busy for a tenth of a second ends the connection."""
    return [
        (name, int(value) // 100 if name.endswith("_ms") and name != ANSWERED_IN else value)
        for name, value in options
    ]


async def test_an_idle_connection_outlives_its_keepalive(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/agent.sock"
    server = grpc.aio.server(options=hastened(server_options()))
    add_peer_service(server, Greeter())
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address, options=hastened(client_options())) as channel:
        call = PeerClient(channel).push()
        ended = asyncio.Event()
        call.add_done_callback(lambda _: ended.set())
        await call.write(b"before")
        assert await call.read() == b"before"
        # gRPC pings at most once a second; the third ping that the server finds too early ends
        # the connection, as it does here after four seconds where the two do not agree.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ended.wait(), timeout=6)
        await call.write(b"after")
        assert await call.read() == b"after"
    await server.stop(None)
