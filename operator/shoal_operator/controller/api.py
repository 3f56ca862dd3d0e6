"""Requests to the API server over one HTTP session, which kopf's watches use as well.

What may be expected to go wrong is an `ApiError` with what was asked and what was answered: `Gone`
(404), `Conflict` (409), `Refused` (the server will say the same again), `Trouble` (it may not).
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import aiohttp

from shoal_operator.controller.login import Account, Token
from shoal_operator.controller.resources import Resource, resource_for, resource_of
from shoal_operator.reconcile.decision import Manifest, ObjectKey
from shoal_operator.reconcile.names import MANAGER

REQUEST_SECONDS: Final = 30.0
PAGE: Final = 250
"""Objects per page of a list, so that a list of thousands never stands in memory at once."""
OWN: Final = "shoal"
"""Marks requests that are not kopf's, for the traces."""

_OVERLAP: Final = "Apply failed with"

Json = dict[str, object]


class ApiError(Exception):
    """A request that did not do what it should: what was asked, status, reason, message."""

    def __init__(self, asked: str, status: int, reason: str, message: str) -> None:
        super().__init__(f"{asked}: {message or reason} ({status})" if status else message)
        self.asked = asked
        self.status = status
        self.reason = reason
        self.message = message


class Gone(ApiError):
    """The object is not there."""


class Conflict(ApiError):
    """Somebody else has written, or made it, in between."""


class Overlap(Conflict):
    """What would be applied is set by somebody else, and otherwise."""


class Refused(ApiError):
    """Forbidden, invalid: asking again brings the same answer."""


class Trouble(ApiError):
    """The server is overloaded, restarts, or cannot be reached."""


class Api:
    """The requests. `trace` sees each of the session; `namespace` is the operator's own."""

    def __init__(self, account: Account, trace: aiohttp.TraceConfig, *, namespace: str) -> None:
        self.server = account.server
        self.namespace = namespace
        self._connector = aiohttp.TCPConnector(limit=0, ssl=account.tls)
        self._trace = trace
        self._bearer = _bearer(account.token)
        self._session = self.open_session()

    def open_session(self) -> aiohttp.ClientSession:
        """A session over the same connections; who asks closes it, the connections stay."""
        return aiohttp.ClientSession(
            connector=self._connector,
            connector_owner=False,
            headers={"User-Agent": MANAGER},
            trace_configs=[self._trace],
            middlewares=(self._bearer,),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()
        await self._connector.close()

    async def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        """An object, or None when it is not there."""
        try:
            return await self._json("GET", resource.path(namespace, name))
        except Gone:
            return None

    async def list(
        self, resource: Resource, namespace: str = "", *, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Json]:
        """All objects, page by page; apiVersion and kind are filled in."""
        query = {"limit": str(PAGE)}
        if labels:
            query["labelSelector"] = labels
        if fields:
            query["fieldSelector"] = fields
        while True:
            page = await self._json("GET", resource.path(namespace), query=query)
            items = page.get("items")
            for item in items if isinstance(items, list) else []:
                yield {"apiVersion": resource.api_version, "kind": resource.kind, **item}
            metadata = page.get("metadata")
            more = metadata.get("continue") if isinstance(metadata, dict) else None
            if not isinstance(more, str) or not more:
                return
            query["continue"] = more

    async def apply(self, manifest: Manifest, subresource: str = "", *, force: bool = True) -> Json:
        """Server-side apply, taking over fields that somebody else has set; without `force` that is
        `Overlap`.
        """
        key = key_of_manifest(manifest)
        path = resource_for(key).path(key.namespace, key.name, subresource)
        query = {"fieldManager": MANAGER, "force": str(force).lower()}
        kind = "application/apply-patch+yaml"
        return await self._json("PATCH", path, query=query, body=manifest, content_type=kind)

    async def create(self, manifest: Manifest) -> Json:
        """Make an object; `Conflict` when there is one of that name."""
        key = key_of_manifest(manifest)
        path = resource_for(key).path(key.namespace)
        query = {"fieldManager": MANAGER}
        return await self._json("POST", path, query=query, body=manifest)

    async def replace(self, manifest: Manifest) -> Json:
        """Write an object as it was read and changed; `Conflict` when it has moved on."""
        key = key_of_manifest(manifest)
        path = resource_for(key).path(key.namespace, key.name)
        query = {"fieldManager": MANAGER}
        return await self._json("PUT", path, query=query, body=manifest)

    async def delete(self, key: ObjectKey, *, uid: str, resource_version: str = "") -> bool:
        """Delete exactly this object, its children behind it; False when it is gone already."""
        preconditions = {"uid": uid}
        if resource_version:
            preconditions["resourceVersion"] = resource_version
        options = {"propagationPolicy": "Background", "preconditions": preconditions}
        path = resource_for(key).path(key.namespace, key.name)
        try:
            await self._json("DELETE", path, body=options)
        except Gone:
            return False
        return True

    async def log(self, namespace: str, pod: str, *, limit_bytes: int) -> bytes:
        """What a pod's first container has printed, from the beginning, at most so much."""
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        query = {"limitBytes": str(limit_bytes)}
        _, body = await self._request("GET", path, query=query)
        return body

    async def raw(self, path: str) -> Json | None:
        """A document of the server itself, such as `/apis/GROUP/VERSION`; None: not there."""
        try:
            return await self._json("GET", path)
        except Gone:
            return None

    async def _json(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
        content_type: str = "application/json",
    ) -> Json:
        asked, answer = await self._request(
            method, path, query=query, body=body, content_type=content_type
        )
        try:
            value: object = json.loads(answer)
        except ValueError as error:
            raise Trouble(asked, 0, "NotJson", f"{asked}: the answer is not JSON") from error
        assert isinstance(value, dict), f"{asked} answered {type(value)}"
        return value

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
        content_type: str = "application/json",
    ) -> tuple[str, bytes]:
        asked = f"{method} {path}"
        arguments: dict[str, Any] = {"params": query, "trace_request_ctx": OWN}
        if body is not None:
            arguments["data"] = json.dumps(body, separators=(",", ":")).encode()
            arguments["headers"] = {"Content-Type": content_type}
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                url = self.server + path
                async with self._session.request(method, url, **arguments) as response:
                    answer = await response.read()
        except TimeoutError as error:
            message = f"{asked}: no answer within {REQUEST_SECONDS:.0f} s"
            raise Trouble(asked, 0, "Timeout", message) from error
        except aiohttp.ClientError as error:
            raise Trouble(asked, 0, "Unreachable", f"{asked}: {error}") from error
        if response.status >= 400:
            raise _error(asked, response.status, answer)
        return asked, answer


def key_of_manifest(manifest: Manifest) -> ObjectKey:
    """What a manifest is about; apiVersion, kind and metadata.name must be there."""
    metadata = manifest["metadata"]
    assert isinstance(metadata, Mapping), "a manifest without metadata"
    resource = resource_of(str(manifest["apiVersion"]), str(manifest["kind"]))
    return ObjectKey(
        api_version=resource.api_version,
        kind=resource.kind,
        namespace=str(metadata.get("namespace", "")) if resource.namespaced else "",
        name=str(metadata["name"]),
    )


def _error(asked: str, status: int, answer: bytes) -> ApiError:
    """The API server explains itself in a `Status` object; a proxy in between may not."""
    try:
        parsed: object = json.loads(answer)
    except ValueError:
        parsed = None
    document = parsed if isinstance(parsed, dict) else {}
    reason, message = (str(document.get(each) or "") for each in ("reason", "message"))
    match status:
        case 404 | 410:
            kind: type[ApiError] = Gone
        case 409:
            kind = Overlap if message.startswith(_OVERLAP) else Conflict
        case 401 | 408 | 429:
            kind = Trouble
        case _:
            kind = Trouble if status >= 500 else Refused
    return kind(asked, status, reason, message or answer[:200].decode(errors="replace"))


def _bearer(token: Token) -> aiohttp.ClientMiddlewareType:
    """Send the token, and read it again when the server does not know it any more."""

    async def send(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        value = token.value()
        if value:
            request.headers["Authorization"] = f"Bearer {value}"
        response = await handler(request)
        if response.status == 401 and value:
            fresh = token.value(fresh=True)
            if fresh != value:
                response.release()
                request.headers["Authorization"] = f"Bearer {fresh}"
                return await handler(request)
        return response

    return send
