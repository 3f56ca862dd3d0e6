"""An artifact in an OCI registry (`oci://HOST/NAME:TAG` or `...@sha256:HEX`), as a source.

The registry's HTTP interface is three requests: a token, a manifest, blobs. They are made here,
over the session that web servers are read with, since the library for it (`oras`) reads a blob in
one go: it can neither resume it nor stop at one that is too large or wrong.

A manifest's layers are files. One that has a title (`org.opencontainers.image.title`, which is how
artifacts are pushed) is called like that; a single layer without one is `model.onnx`.

Credentials: `OCI_USERNAME` and `OCI_PASSWORD`, else those for the host in `config.json` of
`DOCKER_CONFIG`. A registry on loopback is used without TLS, any other with it.
"""

import asyncio
import base64
import binascii
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from shoal_cli.transfer.places import (
    Entry,
    Source,
    TransferBroken,
    TransferRefused,
    check_name,
)
from shoal_cli.transfer.web import (
    ANSWER_SECONDS,
    WebPlace,
    basic,
    check_web,
    read_whole,
    refusal,
    translated,
    why_not_redirect,
)
from shoal_protocol.digests import Digest, digest_of, is_digest

TITLE: Final = "org.opencontainers.image.title"
UNTITLED: Final = "model.onnx"
_MANIFESTS: Final = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_REFERENCE: Final = re.compile(
    r"(?P<host>[A-Za-z0-9.-]+(:[0-9]{1,5})?|\[[0-9a-fA-F:]+\](:[0-9]{1,5})?)/"
    r"(?P<name>[a-z0-9]+([._/-]+[a-z0-9]+)*)"
    r"(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_MANIFEST_BYTES: Final = 4 << 20
_LOOPBACK: Final = re.compile(r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]+)?")
_CHALLENGE: Final = re.compile(r'([a-z]+)="([^"]*)"')


@dataclass(slots=True)
class RegistrySource(Source):
    """The layers of one artifact."""

    address: str
    session: aiohttp.ClientSession
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    _base: str = ""
    _headers: dict[str, str] = field(default_factory=dict)

    async def entries(self) -> Sequence[Entry]:
        match = _REFERENCE.fullmatch(self.address.removeprefix("oci://"))
        if match is None:
            raise TransferRefused(f"{self.address}: write oci://HOST/NAME:TAG")
        host = match["host"]
        scheme = "http" if _LOOPBACK.fullmatch(host) else "https"
        self._base = f"{scheme}://{host}/v2/{match['name']}"
        manifest = await self._manifest(match["digest"] or match["tag"] or "latest")
        match manifest:
            case {"layers": [_, *_] as layers}:
                return self._layers(layers)
            case {"manifests": [*_]}:
                raise TransferRefused(
                    f"{self.address}: is an index of several artifacts; name one by its digest"
                )
        raise TransferRefused(f"{self.address}: the manifest lists no layers")

    def _layers(self, layers: list[object]) -> list[Entry]:
        found: dict[str, Entry] = {}
        for layer in layers:
            match layer:
                case {"digest": str(digest), "size": int(size), **rest} if size >= 0:
                    annotations = rest.get("annotations")
                    title = annotations.get(TITLE) if isinstance(annotations, dict) else None
                    if title is None and len(layers) > 1:
                        continue  # of several, those that are files say what they are called
                    name = check_name(str(title or UNTITLED), self.address)
                    if not is_digest(digest) or name in found:
                        raise TransferRefused(f"{self.address}: layer {name} cannot be used")
                    found[name] = Entry(
                        name=name, size_bytes=size, version=digest, digest=Digest(digest)
                    )
                case _:
                    raise TransferRefused(f"{self.address}: the manifest describes no layer")
        if not found:
            raise TransferRefused(f"{self.address}: none of {len(layers)} layers has a title")
        return sorted(found.values(), key=lambda entry: entry.name)

    def read(self, entry: Entry, offset: int) -> AsyncIterator[bytes]:
        url = f"{self._base}/blobs/{entry.version}"
        # The digest tells the content from another; the server's entity tag need not be the same.
        plain = Entry(name=entry.name, size_bytes=entry.size_bytes)
        address = f"{self.address} ({entry.name})"
        blob = WebPlace(address, self.session, url=url, get=self._get)
        return blob.read(plain, offset)

    async def close(self) -> None:
        await self.session.close()

    async def _get(self, url: URL, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """With a token, once the registry asks for one, and with a new one when that has ended:
        between two files, or in the midst of one."""
        response = await self.session.get(url, headers={**headers, **self._headers})
        if response.status == 401 and response.url.origin() == url.origin():
            response.close()
            self._headers = await self._authorise(response.headers.get("WWW-Authenticate", ""))
            response = await self.session.get(url, headers={**headers, **self._headers})
        return response

    async def _manifest(self, reference: str) -> object:
        url = URL(f"{self._base}/manifests/{reference}")
        accept = {"Accept": ", ".join(_MANIFESTS)}
        with translated(self.address):
            async with asyncio.timeout(ANSWER_SECONDS):
                async with await self._get(url, accept) as response:
                    if response.status != 200:
                        raise refusal(self.address, response)
                    content = await read_whole(response, _MANIFEST_BYTES, self.address)
        if is_digest(reference) and digest_of(content) != reference:
            raise TransferBroken(f"{self.address}: the manifest does not match its digest")
        return self._json(content)

    async def _authorise(self, challenge: str) -> dict[str, str]:
        """The headers that a registry wants, by what it answered without them."""
        scheme, _, rest = challenge.partition(" ")
        login = _login(urlsplit(self._base).netloc, self.environment)
        if scheme.lower() == "basic" and login is not None:
            return {"Authorization": login}
        details = dict(_CHALLENGE.findall(rest))
        if scheme.lower() != "bearer" or "realm" not in details:
            raise TransferRefused(f"{self.address}: the registry asks for credentials")
        realm = details.pop("realm")
        try:
            check_web(realm)
            reason = why_not_redirect(URL(self._base), URL(realm))
        except ValueError:
            reason = "names no address for a token"
        if reason is not None:
            raise TransferRefused(f"{self.address}: the registry sends to {realm}: {reason}")
        headers = {"Authorization": login} if login is not None else {}
        async with await self.session.get(realm, params=details, headers=headers) as response:
            if response.status != 200:
                raise refusal(self.address, response)
            match self._json(await read_whole(response, _MANIFEST_BYTES, self.address)):
                case {"token": str(token)} | {"access_token": str(token)}:
                    return {"Authorization": f"Bearer {token}"}
        raise TransferRefused(f"{self.address}: the registry gives no token")

    def _json(self, content: bytes) -> object:
        try:
            parsed: object = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise TransferRefused(f"{self.address}: the registry does not answer JSON") from error
        return parsed


def _login(host: str, environment: Mapping[str, str]) -> str | None:
    if user := environment.get("OCI_USERNAME"):
        return basic(user, environment.get("OCI_PASSWORD", ""))
    folder = environment.get("DOCKER_CONFIG")
    if folder is None:
        return None
    try:
        document: object = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    match document:
        case {"auths": dict(auths)}:
            match auths.get(host) or auths.get(f"https://{host}"):
                case {"auth": str(encoded)}:
                    with contextlib.suppress(binascii.Error):
                        base64.b64decode(encoded, validate=True)
                        return f"Basic {encoded}"
    return None
