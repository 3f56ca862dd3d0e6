"""A device gets a certificate for its own name, and nobody else does: over real gRPC and TLS."""

import asyncio
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from certificates import Pki
from pki.operators import Operator
from shoal_agent.enrolment.identity import Identity
from shoal_cluster.ports import lasting_port
from shoal_coordinator.server import CoordinatorSettings, serving
from shoal_protocol.channels import open_channel
from shoal_protocol.pki import enrolment as service
from shoal_protocol.pki.authority import Authority, expiry, is_issued_by
from shoal_protocol.services import SessionClient
from shoal_protocol.v1.enrolment_pb2 import EnrolRequest, EnrolResponse
from shoal_protocol.v1.enrolment_pb2_grpc import EnrolmentStub
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest
from strangers import context_of, crowd, handshakes

if TYPE_CHECKING:
    from shoal_protocol.v1.enrolment_pb2_grpc import EnrolmentAsyncStub

SOON = timedelta(seconds=155)
"""Renewed when two thirds have passed of this, and of the five minutes before: after 3 seconds."""
PATIENCE_SECONDS = 60.0


def csr(name: str, key: ec.EllipticCurvePrivateKey | None = None) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    signed = builder.sign(key or ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.DER)


async def ask(operator: Operator, token: str, request: bytes) -> EnrolResponse:
    credentials = grpc.ssl_channel_credentials(operator.own.certificate)
    async with grpc.aio.secure_channel(operator.target, credentials) as channel:
        response: EnrolResponse = await EnrolmentStub(channel).Enrol(
            EnrolRequest(token=token, certificate_request=request), timeout=60
        )
        return response


async def refusal(
    operator: Operator, token: str, request: bytes
) -> tuple[grpc.StatusCode, str | None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(operator, token, request)
    return caught.value.code(), caught.value.details()


async def test_the_node_of_the_token_is_signed_for_by_its_pool(operator: Operator) -> None:
    response = await ask(operator, "token-of-pi-4", csr("pi-4"))
    pool = operator.pools["default"]
    assert response.authority == pool.certificate
    assert is_issued_by(response.certificate_chain, pool.certificate)
    left = expiry(response.certificate_chain) - datetime.now(UTC)
    assert timedelta(hours=23) < left <= timedelta(days=1)


async def test_who_may_not_have_a_certificate_is_told_why(operator: Operator) -> None:
    operator.grant("token-of-a-web-server", "pi-4", account="web-server")
    denied, invalid = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT
    code, text = await refusal(operator, "expired", csr("pi-4"))
    assert code == grpc.StatusCode.UNAUTHENTICATED
    assert str(text).startswith("the token is not accepted")
    assert await refusal(operator, "token-of-pi-4", csr("jetson")) == (
        denied,
        "pod agent-on-pi-4: asks for the name 'jetson', may have 'pi-4'",
    )
    assert await refusal(operator, "token-of-a-web-server", csr("pi-4")) == (
        denied,
        "service account web-server of namespace default is no pool's agents'",
    )
    assert await refusal(operator, "", csr("pi-4")) == (invalid, "there is no token")
    assert (await refusal(operator, "x" * 20_000, csr("pi-4")))[0] == invalid
    assert (await refusal(operator, "token-of-pi-4", b"nonsense"))[0] == invalid
    operator.away = True
    assert await refusal(operator, "token-of-pi-4", csr("pi-4")) == (
        grpc.StatusCode.UNAVAILABLE,
        "the token cannot be reviewed now: the API server is away",
    )


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ("shoal-operator", "the name shoal-operator is kept for Shoal itself"),
        ("shoal-worker", "the name shoal-worker is kept for Shoal itself"),
        (
            "shelf-coordinator.default.svc",
            "a name that ends in .svc could be a coordinator's",
        ),
        ("n" * 64, "its name has 64 characters, and a device's at most 63"),
    ],
)
async def test_a_node_whose_name_would_make_it_somebody_else_is_refused(
    operator: Operator, node: str, why: str
) -> None:
    operator.grant("its-token", node)
    assert await refusal(operator, "its-token", csr(node)) == (
        grpc.StatusCode.PERMISSION_DENIED,
        f"node {node} cannot be a device: {why}",
    )


async def test_a_token_that_somebody_read_is_of_no_use(operator: Operator) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    await ask(operator, "token-of-pi-4", csr("pi-4", key))
    await ask(operator, "token-of-pi-4", csr("pi-4", key))  # the first answer was lost
    assert await refusal(operator, "token-of-pi-4", csr("pi-4")) == (
        grpc.StatusCode.PERMISSION_DENIED,
        "the token was used already, with another key",
    )
    operator.grant("next-token-of-pi-4", "pi-4")
    await ask(operator, "next-token-of-pi-4", csr("pi-4"))


async def test_the_rate_is_bounded_and_comes_back(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PER_SECOND", 0.001)
    key = ec.generate_private_key(ec.SECP256R1())
    request = csr("pi-4", key)
    for _ in range(service.BURST):
        await ask(operator, "token-of-pi-4", request)
    code, _ = await refusal(operator, "token-of-pi-4", request)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    operator.clock_offset = timedelta(hours=1)
    await ask(operator, "token-of-pi-4", request)


@contextlib.asynccontextmanager
async def seen_as(source: str, port: int) -> AsyncIterator[str]:
    """A target that leads to a port of this machine, which then sees another address."""
    carried: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.write_eof()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, there = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
        with contextlib.closing(there):
            await asyncio.gather(pump(reader, there), pump(back, writer))

    accepted_here = contextlib.ExitStack()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted_here.callback(writer.close)  # also where it is not carried yet
        carried.add(asyncio.create_task(carry(reader, writer)))

    async with await asyncio.start_server(accepted, "127.0.0.1", 0) as server:
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            for each in carried:
                each.cancel()
            await asyncio.gather(*carried, return_exceptions=True)
            accepted_here.close()


async def test_a_flood_from_one_address_refuses_no_device_at_another(operator: Operator) -> None:
    request, codes = csr("pi-4"), Counter[grpc.StatusCode]()

    async def flood(stub: "EnrolmentAsyncStub", number: int) -> None:
        for attempt in count():
            token = f"nobody's-{number}-{attempt}"
            try:
                await stub.Enrol(EnrolRequest(token=token, certificate_request=request), timeout=60)
            except grpc.aio.AioRpcError as error:
                codes[error.code()] += 1

    credentials = grpc.ssl_channel_credentials(operator.own.certificate)
    options = [("grpc.ssl_target_name_override", "localhost")]
    port = int(operator.target.rpartition(":")[2])
    async with (
        seen_as("127.0.0.2", port) as target,
        grpc.aio.secure_channel(target, credentials, options=options) as channel,
    ):
        stub = EnrolmentStub(channel)
        floods = [asyncio.create_task(flood(stub, number)) for number in range(16)]
        while codes[grpc.StatusCode.RESOURCE_EXHAUSTED] < 200:
            await asyncio.sleep(0.05)
        for number in range(30):
            operator.grant(f"token-{number}", f"pi-{number}")
            response = await ask(operator, f"token-{number}", csr(f"pi-{number}"))
            assert is_issued_by(response.certificate_chain, response.authority)
        for task in floods:
            task.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
    assert codes[grpc.StatusCode.UNAUTHENTICATED] >= service.BURST


async def test_strangers_do_not_disturb_enrolment(operator: Operator) -> None:
    (operator.folder / "own.pem").write_bytes(operator.own.certificate)
    context = context_of(None, operator.folder / "own.pem")
    port = int(operator.target.rpartition(":")[2])
    assert await handshakes(port, context, each=10) == 320
    assert await crowd(port, context, 300) > 200
    await ask(operator, "token-of-pi-4", csr("pi-4"))


async def test_requests_without_a_token_cost_an_address_nothing(operator: Operator) -> None:
    for _ in range(service.BURST + 50):
        assert (await refusal(operator, "", b""))[1] == "there is no token"
    assert (await ask(operator, "token-of-pi-4", csr("pi-4"))).certificate_chain


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:4711", "10.0.0.7"),
        ("ipv6:%5B2001:db8::7%5D:4711", "2001:db8::/64"),
        ("ipv6:[2001:db8::1:2:3:4]:4711", "2001:db8::/64"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:4711", "10.0.0.7"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", "fe80::/64"),
        ("unix:", "unix:"),
    ],
)
def test_a_rate_counts_for_an_address_or_a_network_of_ipv6(peer: str, address: str) -> None:
    assert service.address_of(peer) == address


def test_the_addresses_that_a_rate_limiter_knows_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_ADDRESSES", 10)
    limiter, now = service.RateLimiter(), datetime.now(UTC)
    for number in range(100):
        assert limiter.admit(f"10.0.0.{number}", now)
    assert len(limiter._buckets) == 10
    later = now + timedelta(seconds=service.BURST / service.PER_SECOND)
    assert limiter.admit("10.0.1.1", later)
    assert len(limiter._buckets) == 1


# ---- the device's side ---------------------------------------------------------------------------


async def obtained(identity: Identity) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        await identity.obtain()


async def test_a_device_gets_its_identity_and_goes_on_with_it(operator: Operator) -> None:
    device = operator.device("pi-4", "token-of-pi-4")
    await obtained(Identity(device))
    files = device.credentials
    assert files.ca.read_bytes() == operator.pools["default"].certificate
    assert is_issued_by(files.certificate.read_bytes(), files.ca.read_bytes())
    assert files.key.stat().st_mode & 0o077 == 0
    assert device.folder.stat().st_mode & 0o077 == 0
    # The operator may be away when the container starts again.
    operator.tokens.clear()
    await obtained(Identity(device))
    assert "current" in {path.name for path in device.folder.iterdir()}


async def test_an_identity_that_expired_is_not_gone_on_with(operator: Operator) -> None:
    device = operator.device("pi-4", "token-of-pi-4")
    await obtained(Identity(device))
    note = device.folder / "current/identity.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"expires_at": time.time() - 1}))
    before = device.credentials.certificate.read_bytes()
    operator.grant("next-token", "pi-4")
    (operator.folder / "pi-4.token").write_text("next-token")
    await obtained(Identity(device))
    assert device.credentials.certificate.read_bytes() != before


async def test_an_identity_of_another_name_is_not_gone_on_with(operator: Operator) -> None:
    await obtained(Identity(operator.device("pi-4", "token-of-pi-4")))
    operator.grant("token-of-jetson", "jetson")
    device = operator.device("jetson", "token-of-jetson")
    device.folder.symlink_to(operator.folder / "identity-pi-4")
    await obtained(Identity(device))
    parsed = x509.load_pem_x509_certificate(device.credentials.certificate.read_bytes())
    assert parsed.subject.rfc4514_string() == "CN=jetson"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
async def test_a_planted_key_gets_no_certificate(operator: Operator) -> None:
    device = operator.device("pi-4", "token-of-pi-4")
    planted = Identity(device)
    await obtained(planted)  # somebody else's key and certificate for this name
    os.chown(device.folder, 65534, 65534)
    before = device.credentials.certificate.read_bytes()
    identity = Identity(device, shortest_pause_seconds=0.1)
    waiting = asyncio.create_task(identity.obtain())
    while identity.why != (
        f"{device.folder} belongs to user 65534; "
        "name a folder of this user's own with --identity-folder"
    ):
        await asyncio.sleep(0.05)
        assert not waiting.done(), "uses the identity of a folder that belongs to somebody else"
    waiting.cancel()
    assert device.credentials.certificate.read_bytes() == before


@pytest.mark.parametrize("mode", [0o770, 0o707])
async def test_a_folder_that_others_may_write_to_holds_no_identity(
    operator: Operator, mode: int
) -> None:
    device = operator.device("pi-4", "token-of-pi-4")
    device.folder.mkdir()
    device.folder.chmod(mode)
    identity = Identity(device, shortest_pause_seconds=0.1)
    waiting = asyncio.create_task(identity.obtain())
    while not identity.why.endswith(f"may be written by other users; chmod 700 {device.folder}"):
        await asyncio.sleep(0.05)
        assert not waiting.done()
    device.folder.chmod(0o700)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await waiting


async def test_a_device_that_nobody_lets_in_asks_again_with_the_same_token(
    operator: Operator,
) -> None:
    device = operator.device("pi-4", "token-of-pi-4")
    identity = Identity(device, doubt_seconds=(0.1, 0.1))
    await obtained(identity)
    operator.pools["default"] = Authority.make("shelf", datetime.now(UTC))
    key = device.credentials.key.read_bytes()
    identity.refused()
    renewal = asyncio.ensure_future(anext(identity.renewals()))
    await asyncio.sleep(0)
    assert not renewal.done()  # one refusal may be a coordinator that starts again
    while not renewal.done():
        identity.refused()
        await asyncio.sleep(0.01)
    files = device.credentials
    assert files.ca.read_bytes() == operator.pools["default"].certificate
    assert is_issued_by(files.certificate.read_bytes(), files.ca.read_bytes())
    assert files.key.read_bytes() == key  # with another one the token would be taken for stolen


async def test_a_device_waits_for_an_operator_that_is_away(tmp_path: Path) -> None:
    port = lasting_port()
    operator = Operator(tmp_path, target=f"localhost:{port}")
    operator.pools["default"] = Authority.make("shelf", datetime.now(UTC))
    identity = Identity(operator.device("pi-4", "token"), shortest_pause_seconds=0.1)
    waiting = asyncio.create_task(obtained(identity))
    while not identity.why.startswith("UNAVAILABLE"):
        await asyncio.sleep(0.05)
        assert not waiting.done()
    async with operator.serving(port):  # back, but the token is not known yet
        while not identity.why.startswith("UNAUTHENTICATED"):
            await asyncio.sleep(0.05)
            assert not waiting.done()
        operator.grant("token", "pi-4")
        await waiting


async def test_an_operator_of_another_authority_is_not_believed(operator: Operator) -> None:
    device = operator.device("pi-4", "token-of-pi-4")
    other = Authority.make("another", datetime.now(UTC))
    (operator.folder / "enrol-ca.pem").write_bytes(other.certificate)
    identity = Identity(device, shortest_pause_seconds=0.1)
    waiting = asyncio.create_task(identity.obtain())
    while not identity.why.startswith("UNAVAILABLE"):
        await asyncio.sleep(0.05)
    waiting.cancel()
    assert not (device.folder / "current").exists()


@pytest.mark.parametrize("operator", [SOON], indirect=True)
async def test_a_server_shows_a_renewed_identity_to_those_that_come_after(
    operator: Operator, tmp_path: Path
) -> None:
    pool = operator.pools["default"]
    device = operator.device("localhost", "first")
    operator.grant("first", "localhost")
    identity = Identity(device)
    await obtained(identity)
    settings = CoordinatorSettings(
        listen="localhost:0",
        store=tmp_path / "store",
        state=tmp_path / "state",
        credentials=device.credentials,
    )
    client = Pki(tmp_path / "client")
    client.authority = pool
    client.ca.write_bytes(pool.certificate)
    mine = client.issue("pi-4")

    async def serial_shown(port: int) -> bytes:
        """Of the certificate that a server shows; it wants one itself, so a call is made first."""
        async with open_channel(f"localhost:{port}", mine) as channel:
            request = FetchFragmentRequest(digest="sha256:" + "0" * 64, file="model.onnx")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await SessionClient(channel).fetch_fragment(request, timeout=60).read()
            # One that the server before accepts as it stops is cancelled: callers call again.
            assert caught.value.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.CANCELLED)
        return await asyncio.to_thread(_certificate_of, port)

    async with serving(settings) as coordinator:
        first = device.credentials.certificate.read_bytes()
        assert await serial_shown(coordinator.port) == _der(first)
        operator.grant("second", "localhost")
        (operator.folder / "localhost.token").write_text("second")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await anext(identity.renewals())
        second = device.credentials.certificate.read_bytes()
        assert second != first
        async with asyncio.timeout(PATIENCE_SECONDS):  # the files are read every few seconds
            while (shown := await serial_shown(coordinator.port)) == _der(first):
                await asyncio.sleep(0.5)
        assert shown == _der(second)
    assert sum(not path.is_symlink() for path in device.folder.iterdir()) == 1


def _certificate_of(port: int) -> bytes:
    import socket  # noqa: PLC0415 - here alone
    import ssl  # noqa: PLC0415

    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("localhost", port), timeout=60) as plain,
        context.wrap_socket(plain) as secured,
    ):
        return secured.getpeercert(binary_form=True) or b""


def _der(certificate: bytes) -> bytes:
    parsed = x509.load_pem_x509_certificate(certificate)
    return parsed.public_bytes(serialization.Encoding.DER)
