"""The informers: kopf lists and watches, and each event updates the cache.

Of kopf only `on.event` is used, which writes nothing: no finalizer, no annotation, no Event. kopf
retries a failed watch without end (`_Backoff`), and renews each after `server_timeout`, so one that
a load balancer has silently dropped is noticed. When kopf lists a kind again it reports no object
that was deleted meanwhile, so `follow_relists` lists that kind once more; `resync` lists all. A
namespace that cannot be read (`namespaces`) is asked for again and again.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

import kopf

from shoal_operator.controller.api import PAGE, Api, ApiError, Rejected
from shoal_operator.controller.cache import Cache
from shoal_operator.controller.foreign import identity_of
from shoal_operator.controller.namespaces import Namespaces
from shoal_operator.controller.telemetry import Telemetry
from shoal_operator.reconcile.names import MANAGED_BY, MANAGER
from shoal_operator.reconcile.resources import CHILDREN, SHOAL, WATCHED, Resource

logger = logging.getLogger(__name__)

OURS: Final = f"{MANAGED_BY}={MANAGER}"
_CONNECT_SECONDS: Final = 10.0
_LATE_SECONDS: Final = 15.0
"""The API server may be so late to end a watch."""
_SILENT_SECONDS: Final = 10.0
"""A watch without any event, bookmarks included, is renewed so long after its time."""
_CRD_SECONDS: Final = 2.0
_LOGIN_SECONDS: Final = 2.0
_SETTLE_SECONDS: Final = 1.0
_CLOSED_SECONDS: Final = 10.0
"""How often a namespace that cannot be read is asked for."""
_SILENT_ROUNDS: Final = 2
"""A namespace whose watch is so many times as old as it becomes may be unreadable."""
_IDLE_SECONDS: Final = 0.1
"""kopf stores an object in full until no event of it has come for so long."""


@dataclass(slots=True)
class Watches:
    """Updates the cache from the API server until cancelled. The API server ends each watch after
    `watch_seconds`.
    """

    api: Api
    cache: Cache
    telemetry: Telemetry
    namespaces: Namespaces
    watch_seconds: int
    _listing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _login_at: float = -_LOGIN_SECONDS
    first_list: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _missing_kinds: frozenset[str] = frozenset()

    def unseen(self) -> str | None:
        """Why the cache does not have every object yet; None when it has."""
        if self._missing_kinds:
            missing = ", ".join(sorted(self._missing_kinds))
            return f"the API server does not know {missing}: install the CRDs of Shoal"
        if not self.first_list.is_set():
            return "it has not seen all objects yet"
        return self.namespaces.problem()

    async def wait_for_kinds(self) -> None:
        """Return when the API server knows our kinds; kopf would not ask a second time."""
        while True:
            missing = await self._find_missing()
            if missing and missing != self._missing_kinds:
                logger.warning("waiting for the CRDs of %s", ", ".join(sorted(missing)))
            self._missing_kinds = missing
            if not missing:
                return
            await asyncio.sleep(_CRD_SECONDS)

    async def _find_missing(self) -> frozenset[str]:
        root = next(iter(SHOAL.values())).path().rsplit("/", 1)[0]
        try:
            answer = await self.api.raw(root)
        except ApiError as error:
            logger.warning("%s", error)
            return frozenset(SHOAL)
        resources = answer.get("resources") if answer else None
        known = resources if isinstance(resources, list) else []
        return frozenset(SHOAL) - {each.get("kind") for each in known if isinstance(each, dict)}

    async def run(self, take_signals: Callable[[], None]) -> None:
        """Watch; sets `first_list` once the cache has every object, and calls `take_signals` when
        kopf has installed its own handler of SIGTERM. Ends only by cancellation, or with the error
        of a watch that cannot resume.
        """
        for resource in WATCHED:
            for namespace in self._scopes(resource):
                self.telemetry.expect_watch(resource.kind, namespace)
        await self._initial_list()
        self.first_list.set()
        others = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=self._registry(),
            settings=self._settings(),
            standalone=True,
            clusterwide=not self.namespaces.names,
            namespaces=self.namespaces.names,
        )
        take_signals()
        await kopf.run_tasks(tasks, ignored=others)
        raise RuntimeError("kopf has ended by itself")

    async def _initial_list(self) -> None:
        for delay in _Backoff():
            try:
                await self.resync()
            except ApiError as error:
                logger.warning("%s", error)
                await asyncio.sleep(delay)
            else:
                return

    async def resync(self) -> None:
        """List all kinds, so that the cache recovers whatever event was lost."""
        for resource in WATCHED:
            if not resource.namespaced:
                await self._list(resource, "")
        for namespace in self.namespaces.scopes:
            await self._list_namespace(namespace)

    async def follow_closed(self) -> None:
        """List what cannot be read, until it can: a Role may come later than the operator."""
        while True:
            await asyncio.sleep(_CLOSED_SECONDS)
            await self.list_unread()

    async def list_unread(self) -> None:
        """List the namespaces that cannot be read, or may be: kopf asks for minutes for a
        watch that is refused before it lists anything."""
        silent = self.telemetry.silent_namespaces(_SILENT_ROUNDS * self.watch_seconds)
        for namespace in sorted(silent.union(self.namespaces.closed)):
            try:
                await self._list_namespace(namespace)
            except ApiError as error:
                logger.warning("%s", error)

    async def follow_relists(self) -> None:
        """List what kopf has listed again: it reports no object that was deleted meanwhile."""
        relists = self.telemetry.relists
        while True:
            relisted = {await relists.get()}
            # Time for what kopf has listed to reach the cache, or it would all be parsed twice.
            await asyncio.sleep(_SETTLE_SECONDS)
            while not relists.empty():
                relisted.add(relists.get_nowait())
            for resource in relisted:
                open_scopes = set(self._scopes(resource)).difference(self.namespaces.closed)
                try:
                    for namespace in sorted(open_scopes):
                        await self._list_all((resource,), namespace)
                except ApiError as error:
                    logger.warning("%s; %s will be listed again", error, resource.plural)
                    relists.put_nowait(resource)

    async def _list_namespace(self, namespace: str) -> None:
        """List all kinds of a namespace; "" is all of them."""
        kinds = [resource for resource in WATCHED if resource.namespaced]
        if await self._list_all(kinds, namespace):
            self.namespaces.open(namespace)

    async def _list_all(self, kinds: Iterable[Resource], namespace: str) -> bool:
        """List some kinds; False where the API server refuses that of one namespace."""
        try:
            for resource in kinds:
                await self._list(resource, namespace)
        except Rejected as error:
            if not namespace:
                raise
            self.namespaces.close(namespace, str(error))
            return False
        return True

    async def _list(self, resource: Resource, namespace: str) -> None:
        labels = OURS if resource in CHILDREN else ""
        async with self._listing:
            with self.cache.listing(resource.kind, namespace) as listed:
                async for document in self.api.list(resource, namespace, labels=labels):
                    listed.add(self.cache.put_document(document).uid)

    def _scopes(self, resource: Resource) -> tuple[str, ...]:
        """The namespaces to list and watch; "" is all of them, or the cluster's own objects."""
        return self.namespaces.scopes if resource.namespaced else ("",)

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        async def login(**_: object) -> kopf.AiohttpSession:
            # kopf logs in again at once, and without end, while the API server answers 401.
            await asyncio.sleep(max(0.0, self._login_at + _LOGIN_SECONDS - monotonic()))
            self._login_at = monotonic()
            return kopf.AiohttpSession(
                server=self.api.server, aiohttp_session=self.api.open_session()
            )

        kopf.on.login(registry=registry, retries=1)(login)
        for resource in WATCHED:
            group, _, version = resource.api_version.rpartition("/")
            kopf.on.event(group, version, resource.plural, registry=registry)(
                self._handler(resource)
            )
        return registry

    def _handler(self, resource: Resource) -> Callable[..., Any]:
        async def on_event(event: kopf.RawEvent, **_: object) -> None:
            self.telemetry.metrics.events.labels(kind=resource.kind).inc()
            document: Mapping[str, object] = {
                **event["object"],
                "apiVersion": resource.api_version,
                "kind": resource.kind,
            }
            if event["type"] == "DELETED":
                identity = identity_of(document)
                self.cache.remove(identity)
            else:
                identity = self.cache.put_document(document)
            self.telemetry.renew_watch(resource.kind, identity.namespace)

        return on_event

    def _settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.networking.error_backoffs = _Backoff()
        settings.watching.server_timeout = self.watch_seconds
        client_seconds = self.watch_seconds + _LATE_SECONDS
        settings.networking.request_timeout = settings.watching.client_timeout = client_seconds
        settings.networking.connect_timeout = settings.watching.connect_timeout = _CONNECT_SECONDS
        settings.watching.inactivity_timeout = self.watch_seconds + _SILENT_SECONDS
        settings.watching.chunk_size = PAGE
        settings.queueing.idle_timeout = _IDLE_SECONDS
        for resource in CHILDREN:
            group, _, version = resource.api_version.rpartition("/")
            settings.watching.label_selectors[group, version, resource.plural] = OURS
        return settings


class _Backoff:
    """Endless delays between attempts, in seconds: each longer, up to half a minute."""

    def __iter__(self) -> Iterator[float]:
        for count in itertools.count():
            yield min(0.5 * 2.0 ** min(count, 6), 30.0) * random.uniform(0.5, 1.0)  # noqa: S311
