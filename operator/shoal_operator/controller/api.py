"""Requests to the API server by the official client, as JSON; kopf's watches share connections.

An expected failure is an `ApiError` with the request and the response: `NotFound` (404, or the
namespace is being deleted), `Conflict` (409), `Rejected` (a retry gets the same response),
`Unavailable` (a retry may succeed).
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

import aiohttp

from shoal_operator.controller.foreign import Raw
from shoal_operator.controller.login import Login
from shoal_operator.controller.telemetry import Telemetry, make_trace
from shoal_operator.reconcile.decision import Manifest, ObjectKey
from shoal_operator.reconcile.names import MANAGER
from shoal_operator.reconcile.resources import Resource, key_of, resource_for

REQUEST_SECONDS: Final = 30.0
PAGE: Final = 50
"""Objects per page of a list: so many are in memory in full at once."""

_FAREWELL_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.01
_OVERLAP: Final = "Apply failed with"
_TERMINATING: Final = "NamespaceTerminating"

Json = dict[str, object]


class ApiError(Exception):
    """A request that failed: the request, the status, its reason and message."""

    def __init__(self, asked: str, status: int, reason: str, message: str) -> None:
        super().__init__(f"{asked}: {message or reason} ({status})" if status else message)
        self.asked = asked
        self.status = status
        self.reason = reason
        self.message = message


class NotFound(ApiError):
    """The object does not exist."""


class NamespaceLeaving(NotFound):
    """The namespace is being deleted, and what is in it: nothing can be created there."""


class Conflict(ApiError):
    """Somebody else has written or created the object first."""


class ApplyConflict(Conflict):
    """Somebody else manages a field that would be applied, and has set another value."""


class Gone(Conflict):
    """Somebody has deleted the object since it was read."""


class Rejected(ApiError):
    """Forbidden or invalid: a retry gets the same response."""


class Unavailable(ApiError):
    """The server is overloaded, restarting, or cannot be reached."""


class Api:
    """The requests. `telemetry` counts them; `namespace` is the operator's own."""

    def __init__(self, login: Login, telemetry: Telemetry, *, namespace: str) -> None:
        assert login.client is not None, "not logged in"
        self.server = str(login.configuration.host)
        self.namespace = namespace
        self._telemetry = telemetry
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._connector = aiohttp.TCPConnector(
            limit=0, ssl=login.tls, socket_factory=self._make_socket
        )
        self._session: dict[str, Any] = {
            "connector": self._connector,
            "connector_owner": False,
            "middlewares": (login.authenticate,),
            "proxy": login.configuration.proxy,
            "trust_env": False,
        }
        self._client = login.client
        self._client.user_agent = MANAGER
        login.configuration.client_session_kwargs = self._session
        login.configuration.trace_configs = [make_trace(telemetry, of_kopf=False)]

    def open_session(self) -> aiohttp.ClientSession:
        """A session for watches over the same connections; the caller closes it, not them."""
        return aiohttp.ClientSession(
            **self._session,
            headers={"User-Agent": MANAGER},
            trace_configs=[make_trace(self._telemetry, of_kopf=True)],
        )

    async def close(self) -> None:
        """Close all connections. Those on which an answer was broken off tell the server, which may
        take a while to confirm it; nobody else waits for these."""
        await self._client.close()
        await self._connector.close()
        await self._all_closed()
        for each in self._open_sockets():
            with suppress(OSError):  # it has no server yet
                each.shutdown(socket.SHUT_RDWR)
        await self._all_closed()

    async def _all_closed(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_SECONDS):
                while self._open_sockets():
                    await asyncio.sleep(_LOOK_SECONDS)

    def _open_sockets(self) -> list[socket.socket]:
        return [each for each in self._sockets if each.fileno() >= 0]

    def _make_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, *_ = address
        made = socket.socket(family, kind, protocol)
        self._sockets.add(made)
        return made

    async def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        """An object, or None if it does not exist."""
        return await self.raw(resource.path(namespace, name))

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
            for item in Raw(page).items("items"):
                yield {"apiVersion": resource.api_version, "kind": resource.kind, **item.value}
            more = Raw(page).table("metadata").text("continue")
            if not more:
                return
            query["continue"] = more

    async def apply(self, manifest: Manifest, subresource: str = "", *, force: bool = True) -> Json:
        """Server-side apply, taking over fields that somebody else has set; without `force` that is
        `ApplyConflict`.
        """
        kind = "application/apply-patch+yaml"
        forced = str(force).lower()
        return await self._write("PATCH", manifest, subresource, content_type=kind, force=forced)

    async def create(self, manifest: Manifest) -> Json:
        """Create an object; `Conflict` if one of that name exists."""
        return await self._write("POST", manifest)

    async def replace(self, manifest: Manifest) -> Json:
        """Replace an object that was read and changed; `Conflict` if its version is outdated."""
        return await self._write("PUT", manifest)

    async def delete(self, key: ObjectKey, *, uid: str, resource_version: str = "") -> bool:
        """Delete the object with this uid, then its children; False if it does not exist."""
        preconditions = {"uid": uid}
        if resource_version:
            preconditions["resourceVersion"] = resource_version
        options = {"propagationPolicy": "Background", "preconditions": preconditions}
        path = resource_for(key).path(key.namespace, key.name)
        try:
            await self._json("DELETE", path, body=options)
        except NotFound:
            return False
        return True

    async def log(self, namespace: str, pod: str, *, limit_bytes: int) -> bytes:
        """The beginning of the log of a pod's first container."""
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        query = {"limitBytes": str(limit_bytes)}
        return await self._request("GET", path, query=query)

    async def raw(self, path: str) -> Json | None:
        """A document of the server itself, such as `/apis/GROUP/VERSION`; None if it has none."""
        try:
            return await self._json("GET", path)
        except NotFound:
            return None

    async def _write(
        self,
        method: str,
        manifest: Manifest,
        subresource: str = "",
        content_type: str = "application/json",
        **query: str,
    ) -> Json:
        key = key_of(manifest)
        name = "" if method == "POST" else key.name
        path = resource_for(key).path(key.namespace, name, subresource)
        query["fieldManager"] = MANAGER
        return await self._json(method, path, query=query, body=manifest, content_type=content_type)

    async def _json(self, method: str, path: str, **arguments: Any) -> Json:
        answer = await self._request(method, path, **arguments)
        try:
            value: object = json.loads(answer)
        except ValueError as error:
            asked = f"{method} {path}"
            raise Unavailable(asked, 0, "NotJson", f"{asked}: the answer is not JSON") from error
        assert isinstance(value, dict), f"{method} {path} answered {type(value)}"
        return value

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        asked = f"{method} {path}"
        headers = {"Accept": "*/*", "Content-Type": content_type}
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                request = await self._client.param_serialize(
                    method, path, query_params=query, header_params=headers, body=body
                )
                response = await self._client.call_api(*request)
                answer: bytes = await response.read()
        except TimeoutError as error:
            message = f"{asked}: no answer within {REQUEST_SECONDS:.0f} s"
            raise Unavailable(asked, 0, "Timeout", message) from error
        except aiohttp.ClientError as error:
            raise Unavailable(asked, 0, "Unreachable", f"{asked}: {error}") from error
        if response.status >= 400:
            raise _error(asked, response.status, answer)
        return answer


def _error(asked: str, status: int, answer: bytes) -> ApiError:
    """The API server explains itself in a `Status` object; a proxy in between may not."""
    try:
        parsed: object = json.loads(answer)
    except ValueError:
        parsed = None
    document = Raw(parsed if isinstance(parsed, dict) else {})
    reason, message = document.text("reason"), document.text("message")
    causes = {each.text("reason") for each in document.table("details").items("causes")}
    match status:
        case 404 | 410:
            kind: type[ApiError] = NotFound
        case 403 if _TERMINATING in causes:
            kind = NamespaceLeaving
        case 409:
            kind = ApplyConflict if message.startswith(_OVERLAP) else Conflict
        case 401 | 408 | 429:
            kind = Unavailable
        case _:
            kind = Unavailable if status >= 500 else Rejected
    return kind(asked, status, reason, message or answer[:200].decode(errors="replace"))
