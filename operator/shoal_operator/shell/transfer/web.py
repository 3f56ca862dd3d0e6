"""One file on a web server (`https://...`), as a source; the registry reads its blobs by it too.

An address may be signed and good for GET alone, so nothing but GET is asked. Proxies are those of
the environment. `HTTP_BEARER_TOKEN`, or `HTTP_USERNAME` with `HTTP_PASSWORD`, are sent to the
address itself and never to where it redirects on another host.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

import aiohttp
from yarl import URL

from shoal_operator.shell.transfer.places import (
    PIECE_BYTES,
    Entry,
    TransferBroken,
    TransferRefused,
    check_name,
)

_PASSING: Final = (408, 425, 429)
"""Statuses of the 400s that go by."""
Errors: Final = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


def open_session() -> aiohttp.ClientSession:
    """A session whose requests last as long as bytes come."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=60),
        headers={"User-Agent": "shoal", "Accept-Encoding": "identity"},
        auto_decompress=False,
        trust_env=True,
    )


def environment_headers(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the environment says about who asks."""
    if token := environment.get("HTTP_BEARER_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    if user := environment.get("HTTP_USERNAME"):
        return {"Authorization": basic(user, environment.get("HTTP_PASSWORD", ""))}
    return {}


def basic(user: str, password: str) -> str:
    """The value of an Authorization header."""
    return aiohttp.BasicAuth(user, password).encode()


@dataclass(slots=True)
class WebSource:
    """One file. `headers` go with every request."""

    address: str
    url: str
    session: aiohttp.ClientSession
    headers: Mapping[str, str] = field(default_factory=dict)

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
            try:
                async for piece in response.content.iter_chunked(PIECE_BYTES):
                    part, skip = piece[skip:], max(0, skip - len(piece))
                    if part:
                        yield part
            except Errors as error:
                raise TransferBroken(f"{self.address}: {describe(error)}") from error

    async def sha256(self, entry: Entry) -> str:
        return entry.sha256

    async def close(self) -> None:
        await self.session.close()

    def _get(self, headers: Mapping[str, str]) -> "_Response":
        return _Response(self.address, self.url, self.session, {**self.headers, **headers})


@dataclass(slots=True)
class _Response:
    """An answer that is good; `TransferRefused` or `TransferBroken` on entering otherwise."""

    address: str
    url: str
    session: aiohttp.ClientSession
    headers: Mapping[str, str]
    _open: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            self._open = await self.session.get(exact(self.url), headers=self.headers)
        except (aiohttp.InvalidURL, aiohttp.ClientConnectorCertificateError) as error:
            raise TransferRefused(f"{self.address}: {describe(error)}") from error
        except Errors as error:
            raise TransferBroken(f"{self.address}: {describe(error)}") from error
        if self._open.status in (200, 206) or _is_empty(self._open):
            return self._open
        refused = refusal(self.address, self._open)
        self._open.close()
        raise refused

    async def __aexit__(self, *error: object) -> None:
        assert self._open is not None
        self._open.close()


def exact(url: str) -> URL:
    """An address that is sent as it was given: a signature may be of the very letters."""
    return URL(url, encoded=" " not in url)


def refusal(address: str, response: aiohttp.ClientResponse) -> TransferRefused | TransferBroken:
    """What a status that is not good means."""
    text = f"{address}: the server answers {response.status} {response.reason}"
    if 400 <= response.status < 500 and response.status not in _PASSING:
        return TransferRefused(text)
    return TransferBroken(text)


def describe(error: BaseException) -> str:
    """An error in one line."""
    return str(error) or type(error).__name__


def _is_empty(response: aiohttp.ClientResponse) -> bool:
    """Of a file without bytes, no range can be given."""
    return response.status == 416 and response.headers.get("Content-Range") == "bytes */0"


def _whole_size(response: aiohttp.ClientResponse) -> int | None:
    if response.status == 200:
        return response.content_length
    _, _, whole = response.headers.get("Content-Range", "").partition("/")
    return int(whole) if whole.isascii() and whole.isdigit() else None


def _version(response: aiohttp.ClientResponse) -> str:
    return response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
