"""The coordinator as a process: its parts put together, its port opened, its end awaited."""

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import Any, Final

import grpc

from shoal_coordinator.dispatch.machine import Limits
from shoal_coordinator.server.call_memory import CallMemory
from shoal_coordinator.server.device_session import DeviceSession
from shoal_coordinator.server.driver import Driver
from shoal_coordinator.server.exchange import ExchangeHub
from shoal_coordinator.server.files import FilesService
from shoal_coordinator.server.item_streams import ItemStreams
from shoal_coordinator.server.jobs import Jobs
from shoal_coordinator.server.metrics import CoordinatorMetrics
from shoal_coordinator.server.overview import Overviews
from shoal_coordinator.server.placements import Placements
from shoal_coordinator.server.roles import Role, Roles
from shoal_coordinator.server.routes import Relay
from shoal_coordinator.server.service import CoordinatorService
from shoal_coordinator.server.sessions import Sessions
from shoal_coordinator.server.traces import open_traces
from shoal_coordinator.storage.job_records import Ledger
from shoal_coordinator.storage.scrubber import Scrubber
from shoal_coordinator.storage.volume import Volume
from shoal_protocol.arguments import metrics_address
from shoal_protocol.bulk.local import BULK, CONTROL, INFER, LocalListener, listen
from shoal_protocol.channels import (
    AddressRefused,
    Credentials,
    has_expired,
    is_secured,
    peer_name,
)
from shoal_protocol.digests import Digest
from shoal_protocol.exposition import ExpositionServer
from shoal_protocol.files import file_frames
from shoal_protocol.fragment_store import FragmentMissing, FragmentStore
from shoal_protocol.identities import CLIENT, OPERATOR
from shoal_protocol.limits import (
    STALL_SECONDS,
    CallLimiter,
    Stalled,
    StallWatch,
    TooManyCalls,
    end_stalled,
)
from shoal_protocol.listener import Listener
from shoal_protocol.parents import end_with_parent, told_parent
from shoal_protocol.services import (
    ConnectContext,
    FileContext,
    FrameContext,
    add_session_service,
)
from shoal_protocol.supervision import supervise
from shoal_protocol.threads import in_thread, open_in_thread
from shoal_protocol.units import nanoseconds
from shoal_protocol.v1.coordinator_pb2_grpc import add_CoordinatorServicer_to_server
from shoal_protocol.v1.files_pb2_grpc import add_FilesServicer_to_server
from shoal_protocol.v1.session_pb2 import AgentMessage
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest

logger = logging.getLogger(__name__)

GRACE_SECONDS: Final = 5.0
OVERDUE_SECONDS: Final = 600.0
"""When a device that lives but does not answer is disconnected, at the earliest."""
ANSWER_SECONDS: Final = 60.0
"""How much longer than a task an answer may take: the device reports itself that it gave up."""
LOOK_SECONDS: Final = 10.0
"""How often it is counted what running jobs have written to the volume."""
LOOK_SHARE: Final = 20
"""To count that takes at most one part in so many of a processor's time."""
FETCHES: Final = 64
"""Files that are read for devices at once; more wait their turn."""
FETCHES_EACH: Final = 8
"""Of them for one device, which may have 64 calls open altogether."""
CONNECTIONS: Final = 2048
"""A device has one or two."""
_NEW_OBJECTS: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """How a coordinator runs. `listen` is a gRPC target (`unix:/path` or `HOST:PORT`), `store` the
    fragment store, `state` a folder of its own. `store_size` gives what all of the store's folder
    may take, which may change; None: what its disk has.

    A device without a sign of life for `silence_seconds` is probed, and lost when it does not
    answer within `patience_seconds`. `metrics` is HOST:PORT or unix:/path, `otlp` the URL of an
    OpenTelemetry collector. `clients` are the common names that may submit jobs where TLS is used.
    `task_seconds` is the longest that a task may take on a device, its wait for another one there
    included. A caller that takes less than 64 KiB of a file within `stall_seconds` is disconnected.
    `sessions_expire`: a session ends when the certificate expires that it was opened with.
    """

    listen: str
    store: Path
    state: Path
    store_size: Callable[[], int] | None = None
    relay: Relay = Relay.AUTO
    metrics: str | None = None
    otlp: str | None = None
    telemetry_seconds: float = 2.0
    silence_seconds: float = 6.0
    patience_seconds: float = 3.0
    task_seconds: float = 540.0
    stall_seconds: float = STALL_SECONDS
    credentials: Credentials | None = None
    insecure: bool = False
    clients: frozenset[str] = field(default_factory=lambda: frozenset({CLIENT, OPERATOR}))
    exit_with_parent: bool = False
    sessions_expire: bool = False


def run_coordinator(settings: CoordinatorSettings) -> int:
    """Run until SIGTERM or SIGINT; the exit status. The next coordinator resumes the jobs.

    Raises `AddressRefused` or `OSError` where the address or a folder cannot be used, and
    `TracesUnavailable`.
    """
    if settings.exit_with_parent:
        end_with_parent(signal.SIGTERM, told_parent())
    collect_rarely()
    return asyncio.run(_serve_until_signalled(settings))


async def _serve_until_signalled(settings: CoordinatorSettings) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(settings) as coordinator:
        stopped = asyncio.create_task(stop.wait())
        waited: set[asyncio.Future[Any]] = {stopped, coordinator.driver.broken}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        failed = coordinator.driver.broken.done()
    return 1 if failed else 0


@dataclass(frozen=True, slots=True)
class Coordinator:
    """A running coordinator. `port` is the one bound; `metrics_url` where it is observed."""

    driver: Driver
    jobs: Jobs
    sessions: Sessions
    port: int
    metrics_url: str | None


@contextlib.asynccontextmanager
async def serving(settings: CoordinatorSettings) -> AsyncIterator[Coordinator]:
    volume = Volume(settings.store, settings.store_size)
    metrics = CoordinatorMetrics(volume, settings.credentials)
    open_sessions: dict[str, DeviceSession] = {}
    driver = _driver(settings, open_sessions, metrics)
    hub = ExchangeHub(driver.arrivals)
    sessions = _sessions(settings, driver, hub, open_sessions)
    store = FragmentStore(settings.store)
    ledger = Ledger(settings.state)
    driver.room_for_results = volume.for_results
    scrubber = Scrubber(volume)
    driver.on_corrupt = scrubber.report
    jobs = Jobs(driver, store, ledger, volume, metrics)
    streams = ItemStreams(driver, CallMemory())
    placements = Placements(driver)
    volume.in_use = partial(_fragments_in_use, jobs, streams, placements)
    overviews = Overviews(jobs, driver, sessions, store, hub)
    roles = Roles(clients=settings.clients)
    service = CoordinatorService(jobs, streams, overviews, placements, volume, roles)
    listener = _listener(
        _SessionService(sessions, store, scrubber, roles, settings),
        service,
        FilesService(volume, roles, jobs.refuses_inputs),
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, driver.traces.close)
        stack.callback(ledger.close)
        await asyncio.to_thread(volume.sweep)
        url = None
        if settings.metrics is not None:
            exposition = stack.enter_context(_exposition(settings.metrics, driver, metrics))
            url = exposition.url
        port = await listener.open(
            settings.listen, settings.credentials, insecure=settings.insecure
        )
        stack.push_async_callback(listener.stop, GRACE_SECONDS)
        for local in _local_listeners(settings.listen, sessions, service):
            stack.push_async_callback(local.stop)
        stack.callback(sessions.close, "the coordinator stops")
        stack.push_async_callback(driver.deliveries.close)
        stack.push_async_callback(scrubber.close)
        stack.push_async_callback(jobs.close)
        stack.callback(streams.close)
        for name, task in (
            ("tick", driver.tick),
            ("metrics", partial(_measure, driver, hub, metrics)),
            ("statistics", jobs.record_statistics),
            ("volume", partial(_look_after, volume, jobs)),
            ("placements", placements.expire),
        ):
            stack.callback(supervise(name, task, metrics.count_failure, logger).cancel)
        jobs.resume()
        logger.info("listening on %s", settings.listen)
        yield Coordinator(driver, jobs, sessions, port, url)


def _driver(
    settings: CoordinatorSettings,
    open_sessions: Mapping[str, DeviceSession],
    metrics: CoordinatorMetrics,
) -> Driver:
    driver = Driver(
        open_sessions,
        limits=Limits(
            silence=nanoseconds(settings.silence_seconds),
            probe_patience=nanoseconds(settings.patience_seconds),
            overdue=nanoseconds(max(OVERDUE_SECONDS, settings.task_seconds + ANSWER_SECONDS)),
        ),
        relay=settings.relay,
        named_peers=settings.credentials is not None,
        task_seconds=settings.task_seconds,
        metrics=metrics,
    )
    driver.traces = open_traces(settings.otlp, metrics.count_spans)
    return driver


def _sessions(
    settings: CoordinatorSettings,
    driver: Driver,
    hub: ExchangeHub,
    open_sessions: dict[str, DeviceSession],
) -> Sessions:
    return Sessions(
        driver,
        hub,
        open_sessions,
        tls=settings.credentials is not None,
        expire=settings.sessions_expire,
        telemetry_seconds=settings.telemetry_seconds,
    )


def _fragments_in_use(
    jobs: Jobs, streams: ItemStreams, placements: Placements
) -> frozenset[Digest]:
    return jobs.fragments_in_use() | streams.fragments_in_use() | placements.fragments_in_use()


def _listener(
    session: "_SessionService", coordinator: CoordinatorService, files: FilesService
) -> Listener:
    def register(server: grpc.aio.Server) -> None:
        add_session_service(server, session)
        add_CoordinatorServicer_to_server(coordinator, server)
        add_FilesServicer_to_server(files, server)

    return Listener(register, connections=CONNECTIONS)


def _local_listeners(
    address: str, sessions: Sessions, service: CoordinatorService
) -> list[LocalListener]:
    """The local link, control streams and calls of programs, where the address can have them."""
    ways = (
        (BULK, sessions.exchange_locally),
        (CONTROL, sessions.connect_locally),
        (INFER, service.infer_locally),
    )
    offered = [
        listen(address, serve, connections=CONNECTIONS, suffix=suffix) for suffix, serve in ways
    ]
    return [listener for listener in offered if listener is not None]


def _exposition(address: str, driver: Driver, metrics: CoordinatorMetrics) -> ExpositionServer:
    try:
        host, port = metrics_address(address)
    except ValueError as error:
        raise AddressRefused(address, "is no HOST:PORT for metrics") from error

    progress = driver.progress
    progress.moved()  # what was done on disks before may have taken long
    return ExpositionServer(
        progress.problem,
        host=host,
        port=port,
        registry=metrics.registry,
        liveness=progress.hung,
    )


async def _measure(driver: Driver, hub: ExchangeHub, metrics: CoordinatorMetrics) -> None:
    while True:
        metrics.refresh(driver.state, hub, driver.deliveries.budget.used)
        metrics.waiting_files.set(sum(run.waiting_files for run in driver.runs.values()))
        await asyncio.sleep(1.0)


async def _look_after(volume: Volume, jobs: Jobs) -> None:
    """Keep the volume within its size, whoever writes there."""
    before = set[str]()
    while True:
        running = {life.job.name for life in jobs.all() if not life.has_ended}
        began = monotonic_ns()
        await in_thread(volume.look_after, running | before)
        before, took = running, (monotonic_ns() - began) / 1e9
        await asyncio.sleep(max(LOOK_SECONDS, LOOK_SHARE * took))


class _SessionService:
    def __init__(
        self,
        sessions: Sessions,
        store: FragmentStore,
        scrubber: Scrubber,
        roles: Roles,
        settings: CoordinatorSettings,
    ) -> None:
        self._stall_seconds = settings.stall_seconds
        self._expire = settings.sessions_expire
        self._sessions = sessions
        self._store = store
        self._scrubber = scrubber
        self._roles = roles
        self._fetches = CallLimiter(total=FETCHES, each=FETCHES_EACH, waiting=64 - FETCHES_EACH)

    async def connect(self, requests: AsyncIterator[AgentMessage], context: ConnectContext) -> None:
        await self._require_device(context)
        await self._sessions.connect(requests, context)

    async def exchange(self, requests: AsyncIterator[bytes], context: FrameContext) -> None:
        await self._require_device(context)
        await self._sessions.exchange(requests, context)

    async def fetch_fragment(self, request: FetchFragmentRequest, context: FileContext) -> None:
        """A file of a fragment from an offset on, read in a thread as fast as it is taken. A caller
        that takes next to nothing is disconnected."""
        await self._require_device(context)
        caller = peer_name(context) if is_secured(context) else None
        try:
            async with self._fetches.turn(caller):
                await self._send_file(request, context)
        except TooManyCalls as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except Stalled as error:
            await end_stalled(context, error)

    async def _require_device(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await self._roles.require(context, Role.DEVICE)
        if self._expire and has_expired(context):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the certificate has expired")

    async def _send_file(self, request: FetchFragmentRequest, context: FileContext) -> None:
        opened = partial(self._store.open, request.digest, request.file)
        try:
            async with open_in_thread(opened) as (file, size):
                if request.offset > size:
                    reason = f"offset {request.offset} of {size} bytes"
                    await context.abort(grpc.StatusCode.OUT_OF_RANGE, reason)
                watch = StallWatch(seconds=self._stall_seconds)
                frames = file_frames(file, request, size)
                while (frame := await in_thread(next, frames, None)) is not None:
                    await watch.wait(context.write(frame))
                    watch.progress(len(frame))
        except FragmentMissing as error:
            reason = self._scrubber.why_missing(request.digest) or str(error)
            await context.abort(grpc.StatusCode.NOT_FOUND, reason)
        except OSError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))


def collect_rarely() -> None:
    """Have Python's garbage collector search for unused cycles less often, in the whole process.

    The dispatcher leaves none behind, and with a thousand devices it holds tens of thousands of
    objects that are all in use. By default the collector searches once per 700 new objects, which
    took 5 of the 44 microseconds of a task. It still searches, for what libraries leave behind.
    """
    _, *older = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *older)
