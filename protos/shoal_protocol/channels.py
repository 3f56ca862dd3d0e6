"""Channels: the gRPC settings that both sides must agree on, and who may talk to whom.

A target is `unix:/path` or `HOST:PORT`. Behind a Unix socket the file system is the identity (the
folder has mode 0700). A `HOST:PORT` needs mutual TLS: the server checks that the client's
certificate is of the same authority, the client checks the server's as well, and *which* device it
is. A certificate's common name is the device's name, which is not the host in the target, so a
client that dials a device passes the name that it expects (`server_name`). Without credentials only
loopback may be used, and only with `insecure`.

Servers (`listener`) bound what a peer may hold, also one without a certificate:

| bound                          | value       | why                                               |
|--------------------------------|-------------|---------------------------------------------------|
| connections of a server        | 256 to 2048 | a TLS handshake in progress takes 30 KB; more are |
|                                |             | closed at once. At most half of the descriptors   |
| handshake, until HTTP/2 starts | 10 s        | gRPC's own 120 s let silent peers fill the bound  |
| connection without a call      | 10 min      | sessions are calls, so they are not cut           |
| unanswered keepalive ping      | 10 s        | ends peers that are gone, or that never read      |
| streams of a connection        | 256         | an agent uses a handful                           |
| calls of a server              | 50,000      | the rest is refused with RESOURCE_EXHAUSTED       |
| message                        | 4 MiB       | bulk data comes in frames far below it            |

Handshakes in progress are bounded by connections and time together. A maximum age of connections
would cut sessions, which live for days, so there is none.
"""

import ipaddress
import json
import re
import resource
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Final, TypeVar

import grpc

from shoal_protocol.certificate_times import expiration_of
from shoal_protocol.units import parse_whole

MAXIMUM_MESSAGE_BYTES: Final = 4 << 20
MAXIMUM_CONCURRENT_STREAMS: Final = 256
MAXIMUM_CALLS: Final = 50_000
MOST_PORT: Final = 65535
STATUS_LOST: Final = "Internal error from Core"
"""gRPC's own words where a write found its stream ended before the status had come. The status is
lost; another call gets it."""
_UNIX_PATH_BYTES: Final = 107
"""What the kernel allows in `sockaddr_un`, without the terminating zero."""

_REPEATABLE: Final = {
    "Coordinator": (
        "SubmitJob",
        "WatchJob",
        "CancelJob",
        "EndJob",
        "ListItems",
        "ListJobs",
        "PlaceFragments",
        "ListDevices",
        "ListFragments",
        "GetOverview",
        "GetTimeline",
        "ExportTraces",
    ),
    "Enrolment": (),
    "Files": ("Fetch", "ListFiles", "DescribeFile"),
}
"""Services, and which of their calls come to the same when they are made twice."""


def _retry(names: list[dict[str, str]], *codes: str) -> dict[str, object]:
    """Four tries within a second, and longer where the server is slow to answer."""
    policy = {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "1s",
        "backoffMultiplier": 3,
        "retryableStatusCodes": codes,
    }
    return {"name": names, "retryPolicy": policy}


_RETRIES: Final = json.dumps(
    {
        "methodConfig": [
            _retry([{"service": f"shoal.v1.{each}"} for each in _REPEATABLE], "CANCELLED"),
            _retry(
                [
                    {"service": f"shoal.v1.{service}", "method": method}
                    for service, methods in _REPEATABLE.items()
                    for method in methods
                ],
                "CANCELLED",
                "UNAVAILABLE",
            ),
        ]
    }
)
"""A server whose certificate is renewed cancels calls that reach it at that moment, before anyone
has seen them (grpc/grpc#41785), and closes connections whose handshake it has accepted: whether a
call was seen that was sent over one of those, nobody knows. Agents need no retry: their sessions
connect again."""

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

    @classmethod
    def of_folder(cls, folder: Path) -> "Credentials":
        """Those of an identity that is kept in a folder (`pki.request`)."""
        return cls(
            ca=folder / "ca.pem", certificate=folder / "certificate.pem", key=folder / "key.pem"
        )


def client_options() -> list[Option]:
    """Keepalive every 20 s with or without calls, so that a silent link is noticed within 30 s. A
    server that is not there is dialled again after 0.1 s, then after longer and longer."""
    return [
        ("grpc.keepalive_time_ms", 20_000),
        # A server that starts beside its client is there in a fraction of the second by default.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        # A proxy of the environment is meant for the web, not for devices on the same network.
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config", _RETRIES),
        *_shared_options(),
    ]


def server_options(connections: int = 1024, *, share_port: bool = False) -> list[Option]:
    """Accepts the clients' keepalive (one faster than every 10 s is cut off), sends its own, and
    bounds what a peer may hold. `connections` are those at one time, of all peers together;
    `share_port`: another server of this process may open the same port.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        ("grpc.keepalive_time_ms", 30_000),
        # Between two pings received; unknown names are ignored in silence, so a test idles.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.max_concurrent_streams", MAXIMUM_CONCURRENT_STREAMS),
        ("grpc.max_allowed_incoming_connections", min(connections, descriptors // 2)),
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_connection_idle_ms", 600_000),
        # Otherwise two servers on one port would share its connections silently.
        ("grpc.so_reuseport", int(share_port)),
        *_shared_options(),
    ]


def _shared_options() -> list[Option]:
    return [
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Pings are bounded in time already; by default gRPC stops after two without data.
        ("grpc.http2.max_pings_without_data", 0),
        # gRPC takes in more, the faster the link is, and that counts in a device's memory
        # (`transport.activations`). Without `grpc.http2.bdp_probe` it would not; but then streams
        # with frames of 256 KiB stand still for good now and then, on a busy machine.
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
    if not needs_tls(target, credentials, insecure=insecure):
        return grpc.aio.insecure_channel(target, options=client_options())
    assert credentials is not None
    channel_credentials = grpc.ssl_channel_credentials(
        root_certificates=credentials.ca.read_bytes(),
        private_key=credentials.key.read_bytes(),
        certificate_chain=credentials.certificate.read_bytes(),
    )
    return open_secured_channel(target, channel_credentials, server_name=server_name)


def open_secured_channel(
    target: str, credentials: grpc.ChannelCredentials, *, server_name: str | None = None
) -> grpc.aio.Channel:
    """A channel with credentials that are in memory; `server_name` as for `open_channel`."""
    options = client_options()
    if server_name is not None:
        # The override replaces the name that the handshake checks; the check itself stays.
        options.append(("grpc.ssl_target_name_override", server_name))
    return grpc.aio.secure_channel(target, credentials, options=options)


def is_secured(context: grpc.aio.ServicerContext[_Request, _Response]) -> bool:
    """Whether a call came over TLS, so that the caller has a certificate."""
    return b"ssl" in context.auth_context().get("transport_security_type", ())


def peer_name(context: grpc.aio.ServicerContext[_Request, _Response]) -> str | None:
    """The common name of the caller's certificate; None without TLS, and where the certificate has
    no common name or several: gRPC reports the first of them, other software the last.
    """
    identity = context.auth_context()
    subject = b"".join(identity.get("x509_subject", ())).decode(errors="replace")
    # RFC 2253: commas and plus signs inside a value are escaped by a backslash.
    attributes = re.findall(r"(?:[^,+\\]|\\.)+", subject)
    if not is_secured(context) or sum(each.startswith("CN=") for each in attributes) != 1:
        return None
    match list(identity.get("x509_common_name", ())):
        case [name]:
            return name.decode(errors="replace")
        case _:
            return None


def peer_expiration(context: grpc.aio.ServicerContext[_Request, _Response]) -> float | None:
    """When the caller's certificate expires, in seconds since 1970; None: there is none."""
    shown = b"".join(context.auth_context().get("x509_pem_cert", ()))
    return expiration_of(shown.decode(errors="replace"))


def has_expired(context: grpc.aio.ServicerContext[_Request, _Response]) -> bool:
    """Whether the caller's certificate has expired since its connection was made."""
    ends_at = peer_expiration(context)
    return ends_at is not None and ends_at <= time()


def needs_tls(address: str, credentials: Credentials | None, *, insecure: bool) -> bool:
    """Whether an address needs TLS. Raises `AddressRefused` if it cannot be used like this."""
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
    if not (colon and name) or parse_whole(port, MOST_PORT) is None:
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
