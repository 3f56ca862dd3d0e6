"""A web server (`https://...`): one file as a source, a folder that files are PUT into as a target.

An address that is read may be signed and good for GET alone, so only GET is used. A redirect is
followed if that is no less safe: from https to https only, to this machine only from this machine,
and never to an address where clouds serve the credentials of their machines. Proxies are those of
the environment. `HTTP_BEARER_TOKEN`, or `HTTP_USERNAME` with `HTTP_PASSWORD`, are sent to the
address itself and never to another host that it redirects to. The registry reads its blobs here
too.

Every request has a deadline for its answer; bytes must come at a minimum rate (`places.reader`).
"""

import asyncio
import base64
import contextlib
import ipaddress
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Final
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import aiohttp
from aiohttp.abc import ResolveResult
from yarl import URL

from shoal_cli.transfer.places import (
    PIECE_BYTES,
    Entry,
    OnBytes,
    Passing,
    Read,
    Source,
    Target,
    TransferBroken,
    TransferRefused,
    check_name,
)
from shoal_protocol.channels import is_loopback
from shoal_protocol.digests import hexadecimal
from shoal_protocol.units import parse_whole

ANSWER_SECONDS: Final = 60.0
"""For an answer to begin, redirects included; and for a server to take a megabyte."""
_TRANSIENT: Final = (408, 425, 429)
"""Statuses of the 400s that another try may not get."""
_ITSELF: Final = "is this machine itself"
_METADATA: Final = frozenset({"fd00:ec2::254", "100.100.100.200", "168.63.129.16"})
"""Addresses of clouds' metadata services that are not link-local."""
_FINAL: Final = (
    aiohttp.InvalidURL,
    aiohttp.TooManyRedirects,
    aiohttp.ClientConnectorCertificateError,
)


def open_session() -> aiohttp.ClientSession:
    """A session whose requests last as long as bytes come, and that checks where it is sent."""
    resolver, redirects = _Resolver(), aiohttp.TraceConfig()
    redirects.on_request_redirect.append(resolver.check_redirect)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(resolver=resolver),
        trace_configs=[redirects],
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60),
        headers={"User-Agent": "shoal", "Accept-Encoding": "identity"},
        auto_decompress=False,
        trust_env=True,
    )


def why_not_redirect(origin: URL, to: URL) -> str | None:
    """Why a redirect is refused; None where it is followed."""
    host = to.host or ""
    if reason := why_not_host(host):
        return reason
    if is_loopback(host) and not is_loopback(origin.host or ""):
        return _ITSELF
    if to.scheme != "https" and not (to.scheme == origin.scheme == "http" and is_loopback(host)):
        return "is not encrypted"
    return None


def check_web(uri: str) -> None:
    """Raise `TransferRefused` for an address that must not be requested."""
    parts = urlsplit(uri)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise TransferRefused(f"{uri}: is not encrypted; write https://")
    if reason := why_not_host(parts.hostname or ""):
        raise TransferRefused(f"{uri}: {reason}")
    if parts.username or parts.password:
        raise TransferRefused(
            f"{parts.scheme}://{parts.hostname}: credentials are no part of an address; "
            f"set HTTP_USERNAME and HTTP_PASSWORD"
        )


def why_not_host(host: str) -> str | None:
    """Why nothing is read from a host that is written as an address; None for any other."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    address = mapped or address
    if address.is_link_local:
        return "is a link-local address; nothing is read from there"
    if str(address) in _METADATA:
        return "is the address of a cloud's metadata service; nothing is read from there"
    return None


class _Resolver(aiohttp.ThreadedResolver):
    """Finds no addresses of metadata services behind names, and of those that somebody else has
    redirected to, none of this machine: whoever owns a name says which address it has."""

    def __init__(self) -> None:
        super().__init__()
        self._redirected: set[str] = set()

    async def check_redirect(
        self,
        session: aiohttp.ClientSession,
        context: SimpleNamespace,
        redirect: aiohttp.TraceRequestRedirectParams,
    ) -> None:
        """Raise `TransferRefused` before a redirect that is less safe is followed: a server must
        not have a worker read what only the worker's network reaches."""
        headers = redirect.response.headers
        try:
            to = redirect.url.join(URL(headers.get("Location") or headers.get("URI") or ""))
        except ValueError:
            return  # no address at all, which the session says itself
        reason = why_not_redirect(redirect.url, to)
        if reason is not None:
            redirect.response.close()
            raise TransferRefused(
                f"{redirect.url.host} redirects to {to.scheme}://{to.host}: {reason}"
            )
        if to.host and to.host != redirect.url.host and not is_loopback(redirect.url.host or ""):
            self._redirected.add(to.host)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await super().resolve(host, port, family)
        reasons = [self._why_not(host, each["host"]) for each in found]
        if found and all(reasons):
            raise TransferRefused(f"{host}: {reasons[0]}")
        return [each for each, reason in zip(found, reasons, strict=True) if reason is None]

    def _why_not(self, host: str, address: str) -> str | None:
        own = host in self._redirected and is_loopback(address)
        return _ITSELF if own else why_not_host(address)


def environment_headers(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the environment says about who asks."""
    if token := environment.get("HTTP_BEARER_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    if user := environment.get("HTTP_USERNAME"):
        return {"Authorization": basic(user, environment.get("HTTP_PASSWORD", ""))}
    return {}


def basic(user: str, password: str) -> str:
    """The value of an Authorization header."""
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


Get = Callable[[URL, Mapping[str, str]], Awaitable[aiohttp.ClientResponse]]
"""An answer to a request with these headers, and others that the server wants."""


@dataclass(slots=True)
class WebPlace(Source, Target):
    """As a source one file, as a target a folder whose files are written with PUT, each at the
    address with its name added. It cannot be listed, so every file is sent; sending one again
    replaces it. `headers` go with every request. `get` is how files are asked for where it takes
    more than that."""

    address: str
    session: aiohttp.ClientSession
    headers: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    get: Get | None = None

    def __post_init__(self) -> None:
        self.url = self.url or self.address

    async def entries(self) -> Sequence[Entry]:
        """The file, of which the first byte is asked for: that tells the size."""
        name = check_name(unquote(urlsplit(self.url).path).rpartition("/")[2], self.address)
        async with self._get({"Range": "bytes=0-0"}) as response:
            size = _whole_size(response)
            if size is None:
                raise TransferRefused(f"{self.address}: the server does not say how large it is")
            return [Entry(name=name, size_bytes=size, version=_version(response))]

    async def read(self, entry: Entry, offset: int) -> AsyncIterator[bytes]:
        if offset >= entry.size_bytes:
            return
        wanted = {"Range": f"bytes={offset}-"} if offset else {}
        async with self._get(wanted) as response:
            if entry.version and _version(response) != entry.version:
                raise TransferBroken(f"{self.address}: it was changed meanwhile")
            skip = 0 if response.status == 206 else offset
            async for piece in response.content.iter_chunked(PIECE_BYTES):
                part, skip = piece[skip:], max(0, skip - len(piece))
                if part:
                    yield part

    async def close(self) -> None:
        await self.session.close()

    @contextlib.asynccontextmanager
    async def _get(self, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that is good. Raises `TransferRefused` or `TransferBroken` for any other."""
        with translated(self.address):
            async with asyncio.timeout(ANSWER_SECONDS):
                url, headers = exact(self.url), {**self.headers, **headers}
                if self.get is None:
                    response = await self.session.get(url, headers=headers)
                else:
                    response = await self.get(url, headers)
            with contextlib.closing(response):
                if response.status not in (200, 206) and not _is_empty(response):
                    raise refusal(self.address, response)
                yield response

    async def put(self, entry: Entry, read: Read, on_bytes: OnBytes) -> None:
        url = _below(self.address, check_name(entry.name, self.address))
        now = asyncio.get_running_loop().time

        def taken(count: int) -> None:
            deadline.reschedule(now() + ANSWER_SECONDS)
            on_bytes(count)

        passing = Passing(entry, read, taken)
        with translated(self.address, passing):
            async with (
                asyncio.timeout(ANSWER_SECONDS) as deadline,
                self.session.put(
                    exact(url),
                    data=passing.pieces() if entry.size_bytes else b"",
                    headers=_describing(entry) | dict(self.headers),
                    allow_redirects=False,
                ) as response,
            ):
                self._check(response)

    def _check(self, response: aiohttp.ClientResponse) -> None:
        if 300 <= response.status < 400:
            to = response.headers.get("Location", "elsewhere")
            raise TransferRefused(f"{self.address}: redirects to {to}; write that")
        if response.status not in (200, 201, 204):
            raise refusal(self.address, response)


def _describing(entry: Entry) -> dict[str, str]:
    """Headers of a file: its length, and its checksum (RFC 9530) for servers that look at it."""
    headers = {
        "Content-Length": str(entry.size_bytes),
        "Content-Type": "application/octet-stream",
    }
    if entry.digest:
        digest = base64.b64encode(bytes.fromhex(hexadecimal(entry.digest))).decode()
        headers["Content-Digest"] = f"sha-256=:{digest}:"
    return headers


def _below(address: str, name: str) -> str:
    """The address of a file in a folder; a query, which may be a signature, stays."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{quote(name)}"))


def exact(url: str) -> URL:
    """An address that is sent as it was given: a signature may be of the very letters."""
    return URL(url, encoded=" " not in url)


def refusal(address: str, response: aiohttp.ClientResponse) -> TransferRefused | TransferBroken:
    """What a status that is not good means."""
    text = f"{address}: the server answers {response.status} {response.reason}"
    if 400 <= response.status < 500 and response.status not in _TRANSIENT:
        return TransferRefused(text)
    return TransferBroken(text)


async def read_whole(response: aiohttp.ClientResponse, limit_bytes: int, address: str) -> bytes:
    """A body of at most `limit_bytes`. Raises `TransferRefused`, and what the session raises."""
    content = bytearray()
    async for piece in response.content.iter_any():
        content += piece
        if len(content) > limit_bytes:
            raise TransferRefused(f"{address}: the answer has more than {limit_bytes >> 20} MiB")
    return bytes(content)


@contextlib.contextmanager
def translated(address: str, passing: Passing | None = None) -> Iterator[None]:
    """Turn an error of a connection into one of a place, or into what was wrong with the bytes."""
    try:
        yield
    except (aiohttp.ClientError, OSError) as error:
        if passing is not None and passing.problem is not None:
            raise passing.problem from error
        text = str(error) or type(error).__name__
        if isinstance(error, TimeoutError) and not str(error):
            text = "the server does not answer in time"
        kind = TransferRefused if isinstance(error, _FINAL) else TransferBroken
        raise kind(f"{address}: {text}") from error


def _is_empty(response: aiohttp.ClientResponse) -> bool:
    """Of a file without bytes, no range can be given."""
    return response.status == 416 and response.headers.get("Content-Range") == "bytes */0"


def _whole_size(response: aiohttp.ClientResponse) -> int | None:
    if response.status == 200:
        return response.content_length
    _, _, whole = response.headers.get("Content-Range", "").partition("/")
    return parse_whole(whole)


def _version(response: aiohttp.ClientResponse) -> str:
    return response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
