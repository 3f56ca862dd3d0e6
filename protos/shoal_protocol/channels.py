"""Channels and ports: the gRPC settings that both sides must agree on, and who may talk to whom.

A target is `unix:/path` or `HOST:PORT`. Behind a Unix socket the file system is the identity (the
folder has mode 0700). A `HOST:PORT` needs mutual TLS: the server checks that the client's
certificate is of the same authority, the client checks the server's as well, and *which* device it
is. A certificate's common name is the device's name, which is not the host in the target, so a
client that dials a device says the name that it expects (`server_name`). Without credentials only
loopback may be used, and only when told.
"""

import contextlib
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import grpc

MAXIMUM_MESSAGE_BYTES: Final = 4 << 20
MAXIMUM_CONCURRENT_STREAMS: Final = 256
_UNIX_PATH_BYTES: Final = 107
"""What the kernel allows in `sockaddr_un`, without the terminating zero."""

Option = tuple[str, int | str]
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class AddressRefused(ValueError):
    """An address that must not be served or dialled in this way; says what would be needed."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"{address}: {reason}")
        self.address = address
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Paths of PEM files: the authority that both sides trust, this side's certificate and key."""

    ca: Path
    certificate: Path
    key: Path


def client_options() -> list[Option]:
    """Keepalive every 20 s with or without calls, so that a silent link is noticed within 30 s."""
    return [
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        # A proxy of the environment is meant for the web, not for devices on the same network.
        ("grpc.enable_http_proxy", 0),
        *_shared_options(),
    ]


def server_options() -> list[Option]:
    """Accepts the clients' keepalive (one faster than every 10 s is cut off), and sends its own."""
    return [
        ("grpc.keepalive_time_ms", 30_000),
        # Between two pings received; unknown names are ignored in silence, so a test idles.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.max_concurrent_streams", MAXIMUM_CONCURRENT_STREAMS),
        # Two servers on one port would share its connections silently.
        ("grpc.so_reuseport", 0),
        *_shared_options(),
    ]


def _shared_options() -> list[Option]:
    return [
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Pings are bounded in time already; by default gRPC stops after two without data.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", MAXIMUM_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAXIMUM_MESSAGE_BYTES),
    ]


def open_channel(
    target: str,
    credentials: Credentials | None = None,
    *,
    insecure: bool = False,
    server_name: str | None = None,
) -> grpc.aio.Channel:
    """A channel to a target; raises `AddressRefused`, or `OSError` where a PEM file cannot be read.

    `server_name` is the name that the server's certificate must carry (a device's name); without
    it, the certificate must be for the target's host.
    """
    if not _needs_tls(target, credentials, insecure=insecure):
        return grpc.aio.insecure_channel(target, options=client_options())
    assert credentials is not None
    options = client_options()
    if server_name is not None:
        # The override replaces the name that the handshake checks; the check itself stays.
        options.append(("grpc.ssl_target_name_override", server_name))
    channel_credentials = grpc.ssl_channel_credentials(
        root_certificates=credentials.ca.read_bytes(),
        private_key=credentials.key.read_bytes(),
        certificate_chain=credentials.certificate.read_bytes(),
    )
    return grpc.aio.secure_channel(target, channel_credentials, options=options)


def add_port(
    server: grpc.aio.Server,
    address: str,
    credentials: Credentials | None = None,
    *,
    insecure: bool = False,
) -> int:
    """Let a server listen; the port bound (port 0 asks for any; 1 for a Unix socket). Credentials
    that are renewed in their files are taken for the connections that come after.

    Raises `AddressRefused`, or `OSError` where the address is taken or a PEM file cannot be read.
    """
    try:
        if not _needs_tls(address, credentials, insecure=insecure):
            return server.add_insecure_port(address)
        assert credentials is not None
        renewed = _Renewed(credentials)
        server_credentials = grpc.dynamic_ssl_server_credentials(
            renewed.load(), renewed.current, require_client_authentication=True
        )
        return server.add_secure_port(address, server_credentials)
    except RuntimeError as error:
        # gRPC writes the system's reason to standard error, and leaves it out here.
        raise OSError(
            f"cannot listen on {address}: it is in use, not of this machine, or not writable"
        ) from error


class _Renewed:
    """The files of a server's credentials, looked at again at every handshake.

    Whoever renews a certificate puts key, certificate and authority there in one step, by moving a
    link to a folder (Kubernetes does so with a Secret's). What cannot be read, or does not fit
    together because it was read across that step, is left for the next handshake.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._seen: tuple[bytes, bytes, bytes] | None = None
        self._configuration: grpc.ServerCertificateConfiguration | None = None

    def load(self) -> grpc.ServerCertificateConfiguration:
        """What the files hold now. Raises `OSError`."""
        return self._take(self._read())

    def current(self) -> grpc.ServerCertificateConfiguration:
        """What the files hold, or what they held last where they cannot be read."""
        assert self._configuration is not None, "it was loaded when the port was opened"
        with contextlib.suppress(OSError):
            found = self._read()
            if found != self._seen and found == self._read():
                return self._take(found)
        return self._configuration

    def _take(self, found: tuple[bytes, bytes, bytes]) -> grpc.ServerCertificateConfiguration:
        key, certificate, ca = self._seen = found
        self._configuration = grpc.ssl_server_certificate_configuration([(key, certificate)], ca)
        return self._configuration

    def _read(self) -> tuple[bytes, bytes, bytes]:
        paths = (self._credentials.key, self._credentials.certificate, self._credentials.ca)
        key, certificate, ca = (path.read_bytes() for path in paths)
        return key, certificate, ca


def peer_name(context: grpc.aio.ServicerContext[_Request, _Response]) -> str | None:
    """The common name of the caller's certificate; None without TLS."""
    identity = context.auth_context()
    if b"ssl" not in identity.get("transport_security_type", ()):
        return None
    match list(identity.get("x509_common_name", ())):
        case [name]:
            return name.decode(errors="replace")
        case _:
            return None


def _needs_tls(address: str, credentials: Credentials | None, *, insecure: bool) -> bool:
    """Whether an address is to be secured; `AddressRefused` if it cannot be used like this."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if not path.startswith("/"):
            raise AddressRefused(address, "a Unix socket is named by an absolute path")
        if len(path.encode()) > _UNIX_PATH_BYTES:
            raise AddressRefused(
                address, f"the path is longer than the {_UNIX_PATH_BYTES} bytes of a Unix socket"
            )
        return False
    host = _host(address)
    if credentials is not None:
        if insecure:
            raise AddressRefused(address, "TLS credentials and --insecure exclude each other")
        return True
    if not insecure:
        raise AddressRefused(
            address, "needs --tls-ca, --tls-certificate and --tls-key (or --insecure on loopback)"
        )
    if not is_loopback(host):
        raise AddressRefused(address, "--insecure is for loopback only; this host is not")
    return False


def _host(address: str) -> str:
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    if not (colon and name and port.isascii() and port.isdigit() and int(port) < 65536):
        raise AddressRefused(address, "is neither unix:/path nor HOST:PORT")
    if ("/" in name) or (":" in name and not bracketed):
        raise AddressRefused(
            address, "is neither unix:/path nor HOST:PORT ([ADDRESS]:PORT for IPv6)"
        )
    return name


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
