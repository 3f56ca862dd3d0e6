"""The operator as one process: what runs when, and what ends it.

    always          the Lease, probes and metrics, enrolment
    once it leads   watches (for good), a resync now and then
    while it leads  the workers

An operator that loses the Lease stops its workers but not its watches, so that it resumes at once
when it leads again. Whatever else ends by itself ends the process with status 1; it is restarted.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from shoal_api.kinds import DevicePool, InferenceJob
from shoal_operator.controller.actions import Actions
from shoal_operator.controller.api import Api, ApiError
from shoal_operator.controller.cache import ObjectName, Own
from shoal_operator.controller.certificates import Certificates
from shoal_operator.controller.children import Children
from shoal_operator.controller.clock import now_text
from shoal_operator.controller.controller import Controller
from shoal_operator.controller.coordinators import Coordinators, dial
from shoal_operator.controller.enrolling import Enrolling
from shoal_operator.controller.event_router import EventRouter
from shoal_operator.controller.health import Health, HealthLimits
from shoal_operator.controller.lease import Lease, LeaseTimes
from shoal_operator.controller.login import log_in
from shoal_operator.controller.namespaces import Namespaces
from shoal_operator.controller.planning import Planning
from shoal_operator.controller.snapshots import Snapshots
from shoal_operator.controller.telemetry import Telemetry
from shoal_operator.controller.watches import Watches
from shoal_operator.reconcile.device_pool import is_awaited
from shoal_operator.reconcile.job_status import has_ended
from shoal_operator.reconcile.settings import OperatorSettings
from shoal_protocol.exposition import ExpositionServer
from shoal_protocol.pki.authority import expiry

logger = logging.getLogger(__name__)

LEASE_NAME: Final = "shoal-operator"
MEASURE_SECONDS: Final = 5.0
FIRST_ANSWERS_SECONDS: Final = 5.0
"""How long a new leader waits for coordinators before it reports what it knows of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConfig:
    """How one operator is run. `namespaces`: those that it reconciles, none means all.
    `coordinators`: targets of pools (NAMESPACE/POOL) that are not reached by their Service.
    """

    settings: OperatorSettings
    identity: str
    kubeconfig: Path | None
    namespaces: tuple[str, ...]
    metrics: tuple[str, int]
    enrolment: tuple[str, int]
    coordinators: Mapping[str, str]
    resync_seconds: float
    watch_seconds: int


def run_operator(config: OperatorConfig) -> int:
    """Run until SIGTERM or SIGINT; the exit status. Raises `LoginRefused`."""
    return asyncio.run(_run(config))


async def _run(config: OperatorConfig) -> int:
    telemetry = Telemetry(asyncio.get_running_loop().time)
    login = await log_in(config.kubeconfig)
    api = Api(login, telemetry, namespace=config.settings.namespace)
    try:
        return await _Operator(config, api, telemetry).run()
    finally:
        await api.close()


class _Operator:
    """The parts, and their life."""

    def __init__(self, config: OperatorConfig, api: Api, telemetry: Telemetry) -> None:
        settings, clock = config.settings, asyncio.get_running_loop().time
        self._config = config
        self._metrics = telemetry.metrics
        self._leading = asyncio.Event()
        self._stopping = asyncio.Event()
        self._workers: asyncio.Task[None] | None = None
        self._event_router = router = EventRouter(self._object_changed)
        namespaces = Namespaces(config.namespaces, router.add_all)
        self._watches = Watches(
            api, router.cache, telemetry, namespaces, watch_seconds=config.watch_seconds
        )
        self._lease = lease = Lease(
            api, name=LEASE_NAME, identity=config.identity, times=LeaseTimes(), clock=clock
        )
        self._health = Health(
            router,
            lease,
            telemetry,
            clock=clock,
            limits=HealthLimits(watch_age=config.watch_seconds * 2.5),
            unseen=self._watches.unseen,
        )
        self._children = Children(api, router.cache, clock, router.topics_changed)
        self._certificates = Certificates(
            api, self._children, clock, cert_manager=settings.cert_manager
        )
        self._enrolling = Enrolling(
            api,
            self._certificates,
            config.enrolment,
            host=settings.enrolment.rpartition(":")[0],
            changed=router.add_all,
        )
        self._coordinators = Coordinators(
            partial(dial, self._certificates),
            self._metrics,
            has_work=self._has_work,
            changed=router.topics_changed,
        )
        self._planning = Planning()
        self._controller = self._make_controller(api, namespaces.is_seen)

    def _make_controller(self, api: Api, is_seen: Callable[[str], bool]) -> Controller:
        """Who decides about objects, and carries that out."""
        router, metrics = self._event_router, self._metrics
        certificates, coordinators = self._certificates, self._coordinators
        snapshots = Snapshots(
            api,
            router.cache,
            certificates,
            coordinators,
            self._config.settings,
            enrolment_authority=lambda: self._enrolling.trusted,
        )
        actions = Actions(
            api,
            router.cache,
            self._children,
            certificates,
            coordinators,
            metrics,
            leads=lambda: self._lease.leads,
        )
        return Controller(router, snapshots, actions, self._planning, metrics, is_seen=is_seen)

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT; the exit status."""
        host, port = self._config.metrics
        exposition = ExpositionServer(
            self._health.problem,
            host=host,
            port=port,
            registry=self._metrics.registry,
            liveness=self._health.hung,
        )
        with exposition:
            logger.info("metrics and probes at %s", exposition.url)
            return await self._run_tasks()

    async def _run_tasks(self) -> int:
        self._take_signals()
        tasks = [
            asyncio.create_task(work, name=name)
            for name, work in (
                ("lease", self._lease.run(self._leading.set, self._lost)),
                ("heartbeat", self._health.heartbeat()),
                ("measure", self._measure()),
                ("authority", self._enrolling.keep_authority()),
                ("enrolment", self._enrolling.serve()),
                ("lead", self._lead()),
                ("stop", self._wait_for_stop()),
            )
        ]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        failed = [task for task in done if not task.cancelled() and task.exception()]
        for task in failed:
            logger.error("%s has failed", task.get_name(), exc_info=task.exception())
        await self._lost()
        self._planning.close()
        await self._coordinators.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._lease.release()
        self._event_router.queue.close()
        return int(bool(failed))

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)

    async def _wait_for_stop(self) -> None:
        await self._stopping.wait()
        logger.info("received a signal to stop")

    async def _lost(self) -> None:
        """Stop the workers, whatever they do."""
        self._leading.clear()
        if self._workers is not None:
            self._workers.cancel()
            await asyncio.gather(self._workers, return_exceptions=True)

    async def _lead(self) -> None:
        """Watch once it leads for the first time; work whenever it leads."""
        await self._leading.wait()
        await self._watches.wait_for_kinds()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watches.run(self._take_signals), name="watches")
            group.create_task(self._watches.follow_relists(), name="relists")
            group.create_task(self._watches.follow_closed(), name="closed namespaces")
            group.create_task(self._resync(), name="resync")
            group.create_task(self._work(), name="work")

    async def _work(self) -> None:
        while True:
            await self._watches.first_list.wait()
            await self._coordinators.all_polled(FIRST_ANSWERS_SECONDS)
            await self._leading.wait()
            self._event_router.add_all()
            self._workers = asyncio.create_task(self._controller.run(), name="workers")
            await asyncio.wait([self._workers])
            if not self._workers.cancelled():
                self._workers.result()
            self._workers = None

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(self._config.resync_seconds)
            try:
                await self._watches.resync()
            except ApiError as error:
                logger.warning("no resync: %s", error)
            self._children.expire()
            self._event_router.add_all()

    async def _measure(self) -> None:
        """Bring the gauges up to date that take a look at all objects."""
        cache, metrics = self._event_router.cache, self._metrics
        while True:
            states = cache.states(InferenceJob.__name__)
            values = [state.value for state in states if isinstance(state, Own)]
            jobs = (value for value in values if isinstance(value, InferenceJob))
            metrics.count_jobs(jobs, now_text())
            self._coordinators.measure()
            if trusted := self._enrolling.trusted:
                metrics.authority_expiration = expiry(trusted.encode()).timestamp()
            await asyncio.sleep(MEASURE_SECONDS)

    def _object_changed(self, name: ObjectName) -> None:
        """Follow the coordinators of pools."""
        kind, namespace, own = name
        if kind != DevicePool.__name__:
            return
        if self._event_router.cache.state(*name) is None:
            self._coordinators.leave(namespace, own)
            return
        pool = self._event_router.cache.own(DevicePool, namespace, own)
        endpoint = pool.status.coordinator_endpoint if pool and pool.status else None
        target = self._config.coordinators.get(f"{namespace}/{own}", endpoint)
        if target is not None:
            self._coordinators.follow(namespace, own, target)

    def _has_work(self, namespace: str, pool: str) -> bool:
        """Whether a job of the namespace has not ended, which may be this pool's, or the pool is
        about to be ready."""
        cache = self._event_router.cache
        if is_awaited(cache.own(DevicePool, namespace, pool), now_text()):
            return True
        jobs = cache.all_own(InferenceJob, namespace)
        return any(not (job.status and has_ended(job.status)) for job in jobs)
