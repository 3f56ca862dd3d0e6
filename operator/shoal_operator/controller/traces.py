"""What every request of the HTTP session tells, ours and kopf's: counters, and how old watches are.

A watch that only stands is not alive: its age is counted from the last answer of the API server to
a watch request, or the last event. Watches are asked for anew every `server_timeout`, so a quiet
one is young, and a frozen one grows old.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final

import aiohttp
from yarl import URL

from shoal_operator.controller.api import OWN
from shoal_operator.controller.metrics import OperatorMetrics
from shoal_operator.controller.resources import WATCHED, Resource

_BY_PLURAL: Final = {each.plural: each for each in WATCHED}
_VERBS: Final = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class WatchAges:
    """When each watch was last known to be alive, by kind and namespace ("" for all)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._alive_at: dict[tuple[str, str], float] = {}

    def expect(self, kind: str, namespace: str) -> None:
        """A watch that there is to be; it is as old as this call until it is heard of."""
        self._alive_at.setdefault((kind, namespace), self._clock())

    def heard(self, kind: str, namespace: str) -> None:
        """The API server has answered for this watch."""
        for key in ((kind, namespace), (kind, "")):
            if key in self._alive_at:
                self._alive_at[key] = self._clock()

    def seconds(self) -> Mapping[str, float]:
        """By kind, the age of its oldest watch."""
        now, ages = self._clock(), dict[str, float]()
        for (kind, _), alive_at in tuple(self._alive_at.items()):
            ages[kind] = max(ages.get(kind, 0.0), now - alive_at)
        return ages


class Lists:
    """The kinds that kopf has listed, other than the first time in each place."""

    def __init__(self) -> None:
        self._seen: set[tuple[Resource, str]] = set()
        self._anew: set[Resource] = set()
        self._any = asyncio.Event()

    def listed(self, resource: Resource, namespace: str, *, first_page: bool) -> None:
        """kopf has listed a kind in a namespace ("" for all)."""
        if (resource, namespace) not in self._seen:
            self._seen.add((resource, namespace))
        elif first_page:
            self.add(resource)

    def add(self, resource: Resource) -> None:
        """A kind that is to be listed by us as well."""
        self._anew.add(resource)
        self._any.set()

    async def take(self) -> frozenset[Resource]:
        """Those listed anew since the last call; waits for one."""
        await self._any.wait()
        self._any.clear()
        anew, self._anew = frozenset(self._anew), set()
        return anew


@dataclass(frozen=True, slots=True)
class Signs:
    """Where what is seen is noted."""

    metrics: OperatorMetrics
    ages: WatchAges
    lists: Lists


def make_trace(signs: Signs) -> aiohttp.TraceConfig:
    """Counts requests, renews ages, notes kopf's lists."""
    metrics, ages, lists = signs.metrics, signs.ages, signs.lists

    async def ended(
        session: aiohttp.ClientSession,
        context: SimpleNamespace,
        request: aiohttp.TraceRequestEndParams,
    ) -> None:
        resource, namespace, is_list = _target(request.url)
        watch = is_list and request.method == "GET" and request.url.query.get("watch") == "true"
        verb = _verb(request.method, is_list=is_list, watch=watch)
        metrics.requests.labels(verb=verb, code=str(request.response.status)).inc()
        if resource is None or request.response.status != 200:
            return
        if watch:
            ages.heard(resource.kind, namespace)
        elif verb == "list" and context.trace_request_ctx != OWN:
            first_page = "continue" not in request.url.query
            lists.listed(resource, namespace, first_page=first_page)

    async def failed(
        session: aiohttp.ClientSession,
        context: SimpleNamespace,
        request: aiohttp.TraceRequestExceptionParams,
    ) -> None:
        _, _, is_list = _target(request.url)
        watch = is_list and request.url.query.get("watch") == "true"
        verb = _verb(request.method, is_list=is_list, watch=watch)
        metrics.requests.labels(verb=verb, code="error").inc()

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(ended)
    trace.on_request_exception.append(failed)
    return trace


def _verb(method: str, *, is_list: bool, watch: bool) -> str:
    if watch:
        return "watch"
    if method == "GET":
        return "list" if is_list else "get"
    return _VERBS.get(method, method.lower())


def _target(url: URL) -> tuple[Resource | None, str, bool]:
    """The watched kind of a path, its namespace, and whether all objects are meant."""
    *rest, last = url.path.strip("/").split("/")
    resource = _BY_PLURAL.get(last)
    if resource is None or not url.path.startswith(resource.path().rsplit("/", 1)[0]):
        return None, "", False
    namespace = rest[-1] if len(rest) > 1 and rest[-2] == "namespaces" else ""
    return resource, namespace, True
