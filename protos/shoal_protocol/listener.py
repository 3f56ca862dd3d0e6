"""A gRPC server on one address, whose certificate can be renewed while it runs.

gRPC's own way to renew a server's certificate, a callback at every handshake, is not safe: a
handshake in one thread uses the factory that another one replaces and frees, and the process aborts
(grpc/grpc#36693). So credentials here are static. When the identity has changed, a second server
opens on the same port (SO_REUSEPORT). The first stops accepting, and lets its calls end in their
own time: sessions continue, and later connections get the new certificate. A handshake in progress
at that moment fails, and the client tries again (docs/decisions/0021).

With SO_REUSEPORT the kernel would let another process of the same user share the port, so a port in
use is detected before the first bind. A Unix socket in use is detected by connecting to it, since
gRPC replaces the file of a socket in silence.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import grpc

from shoal_protocol.channels import (
    MAXIMUM_CALLS,
    AddressRefused,
    Credentials,
    needs_tls,
    server_options,
)

logger = logging.getLogger(__name__)

RENEWAL_CHECK_SECONDS: Final = 5.0
"""How long a renewed certificate may go unseen: it is renewed days or hours before the old ends."""
DRAIN_SECONDS: Final = 86_400.0
"""How long calls may continue over connections that were made with the identity before."""

Register = Callable[[grpc.aio.Server], None]
"""Adds the services to a server; called for every server that is opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerIdentity:
    """A server's certificate chain and key, PEM. `client_ca`: the authority that the certificates
    of clients must come from; None: clients need no certificate.
    """

    certificate: bytes
    key: bytes
    client_ca: bytes | None

    def credentials(self) -> grpc.ServerCredentials:
        """As gRPC takes it; what does not fit together raises when a port is opened."""
        pair = [(self.key, self.certificate)]
        return grpc.ssl_server_credentials(pair, self.client_ca, self.client_ca is not None)


IdentitySource = Callable[[], Awaitable[ServerIdentity]]
"""The identity that counts now. Raises `OSError` where it cannot be read."""


class Listener:
    """Serves what `register` adds, on one address, until it is stopped."""

    def __init__(
        self,
        register: Register,
        *,
        connections: int,
        check_seconds: float = RENEWAL_CHECK_SECONDS,
    ) -> None:
        """`connections` at one time; `check_seconds` between two checks for a renewed identity."""
        self._register = register
        self._connections = connections
        self._check_seconds = check_seconds
        self._servers: list[grpc.aio.Server] = []
        self._draining: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None

    async def open(
        self, address: str, credentials: Credentials | None = None, *, insecure: bool = False
    ) -> int:
        """Listen and serve; the port bound (port 0 asks for any; 1 for a Unix socket).

        Credentials that are renewed in their files are used for the connections that come after.
        Raises `AddressRefused`, or `OSError` where the address is in use or a PEM file cannot be
        read.
        """
        if needs_tls(address, credentials, insecure=insecure):
            assert credentials is not None
            return await self.open_secured(
                address, partial(asyncio.to_thread, _read_consistently, credentials)
            )
        refuse_if_in_use(address)
        return await self._open(address, None)

    async def open_secured(self, address: str, source: IdentitySource) -> int:
        """Like `open`, at HOST:PORT, with the identity that `source` has, asked regularly."""
        refuse_if_in_use(address)
        identity = await source()
        port = await self._open(address, identity)
        bound = f"{address.rpartition(':')[0]}:{port}"
        self._following = asyncio.create_task(self._follow(bound, source, identity))
        return port

    async def stop(self, grace: float | None) -> None:
        """Stop accepting at once; end calls that still run after `grace` seconds (None: now)."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await asyncio.gather(*(server.stop(grace) for server in self._servers))
        await asyncio.gather(*self._draining)

    async def _open(self, address: str, identity: ServerIdentity | None) -> int:
        options = server_options(self._connections, share_port=identity is not None)
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAXIMUM_CALLS)
        self._register(server)
        try:
            if identity is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, identity.credentials())
        except RuntimeError as error:
            # gRPC writes the system's reason to standard error, and leaves it out here.
            raise OSError(
                f"cannot listen on {address}: it is in use, not of this machine, not writable, "
                "or the certificate does not fit its key"
            ) from error
        await server.start()
        self._servers.append(server)
        return port

    async def _follow(self, address: str, source: IdentitySource, identity: ServerIdentity) -> None:
        """Open anew with each identity that replaces the one before."""
        problem = ""
        while True:
            await asyncio.sleep(self._check_seconds)
            try:
                found = await source()
                if found == identity:
                    continue
                await self._open(address, found)
            except Exception as error:  # whatever it is, the next check may find it gone
                if problem != (problem := f"{type(error).__name__}: {error}"):
                    logger.error("%s: cannot renew the certificate: %s", address, problem)
                continue
            identity, problem = found, ""
            logger.info("%s: serving with a renewed certificate", address)
            task = asyncio.create_task(self._drain(self._servers[-2]))
            self._draining.add(task)
            task.add_done_callback(self._draining.discard)

    async def _drain(self, server: grpc.aio.Server) -> None:
        await server.stop(DRAIN_SECONDS)
        self._servers.remove(server)


def _read_consistently(credentials: Credentials) -> ServerIdentity:
    """The identity in the files of credentials.

    Whoever renews a certificate replaces key, certificate and authority in one step, by moving a
    link to a folder (Kubernetes does so with a Secret's). What was read across that step does not
    fit together, so it is read again.
    """
    before, found = _read(credentials), _read(credentials)
    while found != before:
        before, found = found, _read(credentials)
    return found


def _read(credentials: Credentials) -> ServerIdentity:
    return ServerIdentity(
        certificate=credentials.certificate.read_bytes(),
        key=credentials.key.read_bytes(),
        client_ca=credentials.ca.read_bytes(),
    )


def refuse_if_in_use(address: str) -> None:
    """Raises `OSError` where somebody accepts connections at an address already."""
    if address.startswith("unix:"):
        in_use = _is_socket_in_use(Path(address.removeprefix("unix:")))
    else:
        host, _, port = address.rpartition(":")
        in_use = port != "0" and _is_port_in_use(host.strip("[]"), int(port))
    if in_use:
        raise OSError(
            f"cannot listen on {address}: it is in use by another process; "
            "stop that one, or choose another address"
        )


def _is_socket_in_use(path: Path) -> bool:
    """Whether somebody listens there; the file of a process that has ended counts as free."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # where the queue of connections is full, it is in use
        return probe.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def _is_port_in_use(host: str, port: int) -> bool:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        if error.errno == socket.EAI_AGAIN:  # a network may be late
            reason = f"the host has no address yet: {error.strerror}"
            raise OSError(f"{host}:{port}: {reason}") from error
        raise AddressRefused(f"{host}:{port}", f"the host has no address: {error}") from error
    for family, kind, protocol, _, target in found:
        try:  # a machine may be without IPv6, and have a name for its loopback there
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
    return False
