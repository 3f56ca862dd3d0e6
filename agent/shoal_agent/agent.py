"""The agent process: puts its parts together, keeps a session open, and shuts down in order."""

import asyncio
import contextlib
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final

import grpc
import onnxruntime

from shoal_agent import __version__
from shoal_agent.budget import BudgetFollower, beyond
from shoal_agent.cache.disk import FragmentCache
from shoal_agent.cache.fetching import Fetcher
from shoal_agent.calibration.joining import calibrate, gauges
from shoal_agent.enrolment.identity import Identity
from shoal_agent.memory.residency import Ledger, short
from shoal_agent.runtime.failures import RuntimeFailed
from shoal_agent.runtime.fragments import Fragments
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.process_memory import (
    RESERVES_BYTES,
    MemoryMeter,
    drop_library_pages,
)
from shoal_agent.runtime.processor import Processor
from shoal_agent.runtime.rehearsal import rehearse_transfers
from shoal_agent.session.control import Session
from shoal_agent.session.greeting import SessionBroken, in_words, why_unreachable
from shoal_agent.session.tasks import Tasks
from shoal_agent.settings import Settings
from shoal_agent.telemetry.counters import Counters
from shoal_agent.telemetry.handling import HandlingMeter
from shoal_agent.telemetry.link import LinkMeters
from shoal_agent.telemetry.logs import log
from shoal_agent.telemetry.machine import Machine
from shoal_agent.transport.activations import ActivationStore
from shoal_agent.transport.addresses import advertised
from shoal_agent.transport.links import PeerLinks
from shoal_agent.transport.serving import Peers
from shoal_agent.transport.shaping import Uplink, unsent_bytes
from shoal_protocol import PROTOCOL
from shoal_protocol.bulk.local import LocalListener, listen
from shoal_protocol.certificate_times import expiration_seconds
from shoal_protocol.disk_shares import for_activations, for_fragments
from shoal_protocol.listener import Listener
from shoal_protocol.services import SessionClient, add_peer_service
from shoal_protocol.speeds import UNKNOWN_SPEED, report_link, speed_message
from shoal_protocol.supervision import supervise
from shoal_protocol.threads import in_thread
from shoal_protocol.units import Bytes, format_bytes
from shoal_protocol.v1 import session_pb2 as pb

if TYPE_CHECKING:
    from shoal_agent import readings
    from shoal_protocol.exposition import ExpositionServer

_BACKOFF_SECONDS: Final = (0.1, 5.0)
_SILENT_SECONDS: Final = 15.0
_RENEWED: Final = "its certificate was renewed"
_GOODBYE_SECONDS: Final = 1.0
_IDLE_SECONDS: Final = 2.0
_TIMES: Final = "times.json"
_CONNECTIONS: Final = 256
"""Of peers, at one time; what strangers hold of them costs memory on a small device."""


class Agent:
    """One device. `run` returns when it has drained."""

    def __init__(self, settings: Settings) -> None:
        """Scans the cache and warms ONNX Runtime up; raises `OSError`."""
        self.settings = settings
        self.name = settings.name
        self.counters = Counters()
        self.uplink = Uplink(
            settings.link_rate,
            settings.link_latency_seconds,
            unsent_bytes=unsent_bytes(settings.budget),
        )
        self._downlink = Uplink(settings.link_rate)
        self._handling = HandlingMeter(lambda: self.counters.moved)
        self.link_meters = LinkMeters(handling=self._handling)
        self.links = PeerLinks(
            settings.credentials, self.uplink, self.counters, insecure=settings.insecure
        )
        self._incarnation = time.time_ns()
        self._machine = Machine()
        # What is told later may be more than the budget of now.
        self.largest_budget_bytes = (
            settings.budget if settings.budget_file is None else Bytes(self._machine.physical_bytes)
        )
        self._meter = MemoryMeter()
        self._cache = FragmentCache(settings.cache, for_fragments(settings.cache_bytes))
        if dropped := self._cache.dropped_at_start:
            log.warning("removed damaged fragments: %s", ", ".join(map(short, dropped)))
        self._executor = ThreadPoolExecutor(1, "processor")
        self._threads = settings.threads or self._machine.processors
        self._speed = UNKNOWN_SPEED
        ledger = Ledger(budget=settings.budget, single=settings.single)
        self._runtime = self._executor.submit(
            Runtime,
            self._meter,
            threads=self._threads,
            limit_bytes=settings.budget,
            free=lambda: ledger.free,
            held=lambda: ledger.activations,
        ).result()
        self.fragments = Fragments(
            ledger=ledger,
            cache=self._cache,
            fetcher=Fetcher(self._cache, self._count_fetched, self._downlink.depart),
            runtime=self._runtime,
            processor=Processor(self._runtime, self._executor, self._handling),
            counters=self.counters,
            on_evicted=self._evicted,
        )
        self._follower = BudgetFollower(settings, self._machine, self._meter, self.fragments)
        self._times = self.fragments.processor.times
        self._times_path = settings.cache / _TIMES
        self._times.restore(self._times_path, self._cache.cached())
        self._address, self._port = "", 0
        self._local: LocalListener | None = None
        self._session: Session | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._why_no_session = "not connected yet"
        self._drain = asyncio.Event()
        self._settled = False
        self._identity = None if settings.enrolment is None else Identity(settings.enrolment)

    # ---- life --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until drained. Raises `AddressRefused`, `OSError` for an unusable address."""
        metrics = self._serve_metrics()
        self._handle_signals()
        if not await self._enrolled():
            if metrics is not None:
                metrics.close()
            return
        listener = await self._listen()
        self._speed = await calibrate(
            self.settings, self.fragments.processor.call, self._threads, self._machine.share
        )
        self._times.measured(self._speed)
        self._handling.measured(self._speed)
        await self._rehearse()
        connecting = asyncio.create_task(self._stay_connected(), name="session")
        loops = {"identity": self._renew, "rest": self._rest, **self._follower.loops()}
        beside = [supervise(*each, self.counters.failed, log) for each in loops.items()]
        draining = asyncio.create_task(self._drain.wait(), name="drain")
        try:
            await asyncio.wait((connecting, draining), return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                connecting.result()  # it only ends by failing
            log.info("draining")
            if self._session is not None:
                await asyncio.wait(
                    (asyncio.create_task(self._session.drain()),),
                    timeout=self.settings.drain_seconds,
                )
        finally:
            background = (connecting, draining, *beside)
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self.links.close()
            if listener is not None:
                await listener.stop(_GOODBYE_SECONDS)
            if self._local is not None:
                await self._local.stop()
            await self.fragments.close()
            if metrics is not None:
                metrics.close()
            self._executor.shutdown(wait=False, cancel_futures=True)

    def tasks(self) -> Tasks | None:
        """Those of the present session."""
        return None if self._session is None else self._session.tasks

    # ---- what sessions ask (Device) ----------------------------------------------------------

    def hello(self) -> pb.Hello:
        """Who this is and what it has."""
        ledger, times = self.fragments.ledger, self._times
        return pb.Hello(
            protocol=PROTOCOL,
            device=self.name,
            incarnation=self._incarnation,
            version=__version__,
            address=self._address,
            capabilities=pb.Capabilities(
                architecture=self._machine.architecture,
                processors=self._machine.processors,
                memory_bytes=self._machine.memory_bytes,
                runtime=f"onnxruntime {onnxruntime.__version__}",
            ),
            budget_bytes=ledger.budget,
            largest_budget_bytes=self._runtime.limit_bytes,
            floor_bytes=self._meter.floor_bytes,
            residency=pb.SINGLE if ledger.single else pb.ADAPTIVE,
            cached=[
                pb.CachedFragment(
                    digest=of, bytes=size, task_seconds=times.read(of), within=times.within(of)
                )
                for of, size in self._cache.listed().items()
            ],
            resident=self.resident(),
            cache_bytes=self._cache.limit_bytes,
            speed=speed_message(self._speed),
        )

    def resident(self) -> list[pb.ResidentFragment]:
        """What is, and what each counts."""
        return [
            pb.ResidentFragment(digest=key, resident_bytes=self.fragments.planned_bytes(key))
            for key in self.fragments.ledger.resident
        ]

    def telemetry(self) -> pb.Telemetry:
        """Readings now; what is None stays absent."""
        telemetry = self._machine.read()
        if self._session is not None and self._session.round_trip_seconds is not None:
            telemetry.round_trip_seconds = self._session.round_trip_seconds
        report_link(telemetry, self.link_meters.read())
        telemetry.peak_bytes, telemetry.used_bytes = self._meter.reading()
        telemetry.sent_bytes = self.counters.sent_bytes
        telemetry.received_bytes = self.counters.received_bytes
        telemetry.fetched_bytes = self.counters.fetched_bytes.total()
        return telemetry

    # ---- inside ------------------------------------------------------------------------------

    async def _listen(self) -> Listener | None:
        settings = self.settings
        if settings.listen is None:
            return None
        limit, uplink, counters = self.largest_budget_bytes, self.uplink, self.counters
        peers = Peers(self.name, self._cache, self.tasks, uplink, counters, limit_bytes=limit)
        listener = Listener(
            lambda server: add_peer_service(server, peers), connections=_CONNECTIONS
        )
        port = self._port = await listener.open(
            settings.listen, settings.credentials, insecure=settings.insecure
        )
        log.info("listening on %s, port %d", settings.listen, port)
        self._local = listen(settings.listen, peers.receive, connections=_CONNECTIONS)
        return listener

    def _reached_at(self) -> str:
        """What peers dial: a network may be late, and give another address. Raises `OSError`."""
        if self.settings.listen is None:
            return ""
        return advertised(self.settings.advertise or self.settings.reached_at(), self._port)

    def _serve_metrics(self) -> "ExpositionServer | None":
        if self.settings.metrics is None:
            return None
        from shoal_agent import readings  # noqa: PLC0415 - heavy
        from shoal_agent.telemetry.metrics import AgentCollector, serve  # noqa: PLC0415 - heavy

        info = {"version": __version__, "architecture": self._machine.architecture}
        shares = partial(readings.shares, self.fragments.ledger)
        collector = AgentCollector(info, self.counters, self._gauges, shares, self.link_meters.read)
        server = serve(self.settings.metrics, self.readiness, collector)
        log.warning("metrics at %s/metrics", server.url)
        return server

    def readiness(self) -> str | None:
        """None while the agent makes progress: it has a session, and that is alive."""
        session = self._session
        if self._drain.is_set():
            return "draining"
        if self._identity is not None and not self._identity.obtained:
            return f"not enrolled: {self._identity.why}"
        if session is None:
            return f"no session: {self._why_no_session}"
        silent = perf_counter() - session.last_contact
        if silent > _SILENT_SECONDS + 3 * (self.settings.telemetry_interval_seconds or 0):
            return f"no progress on the session for {silent:.0f} s"
        return None

    def _gauges(self) -> "readings.Gauges":
        from shoal_agent import readings  # noqa: PLC0415 - heavy

        ledger, session = self.fragments.ledger, self._session
        found = readings.gauges(self.settings, self._meter, self._cache, ledger, session)
        measured = gauges(self._speed, self.link_meters.read())
        return {**found, "peer_links": len(self.links), **measured}

    async def _stay_connected(self) -> None:
        """Open one session after the other; the pause doubles, with jitter, while that fails."""
        shortest, longest = _BACKOFF_SECONDS
        delay, said = shortest, set[str]()
        while not self._drain.is_set():
            try:
                await self._serve_session()
            except SessionBroken as error:
                if self._session is not None and self._session.age_seconds > longest:
                    delay = shortest
                if self._identity is not None and self._session is None:
                    self._identity.refused()
                files = self.settings.credentials
                expires_at = None if files is None else expiration_seconds(files.certificate)
                why = self._why_no_session = in_words(str(error), time.time(), expires_at)
                if self._session is not None:
                    log.warning("no session: %s", why)
                    said.clear()
                elif why not in said:  # each reason once: it is tried for ever
                    log.info("no session: %s; trying again and again", why)
                said.add(why)
            finally:
                self._session = None
            # Half of it is chance: devices that lost one coordinator must not come back as one.
            await asyncio.sleep(delay * (0.5 + random.random() / 2))  # noqa: S311 - no secret
            delay = min(longest, 2 * delay)

    async def _serve_session(self) -> None:
        """One, until it ends. Raises `SessionBroken`, `AddressRefused`."""
        settings, identity = self.settings, self._identity
        renewed = 0 if identity is None else identity.renewed
        try:
            channel = settings.channel()
        except OSError as error:  # a file is away, for one, and may come back
            raise SessionBroken(str(error)) from error
        try:
            self._address = await in_thread(self._reached_at)
            await self._settle(channel)
            client, store = SessionClient(channel), await self._open_store()
            interval = settings.telemetry_interval_seconds
            session = Session(self, client, interval, store, address=settings.coordinator)

            def opened() -> None:
                self._session = session
                self.counters.sessions += 1
                log.info("session %d with %s", session.number, settings.coordinator)
                if identity is not None and identity.accepted(renewed):
                    self._leaving = asyncio.create_task(session.drain(_RENEWED))

            await session.run(opened)
        except OSError as error:
            raise SessionBroken(str(error)) from error
        finally:
            await channel.close()

    async def _open_store(self) -> ActivationStore:
        """An empty store for a session's activations; what the last one held is gone by now."""
        cache, fragments = self.settings.cache, self.fragments
        limit = for_activations(self.settings.cache_bytes)
        store = await in_thread(ActivationStore, cache, limit, fragments, fragments.buffers)
        fragments.spilling.spill = store.spill
        return store

    async def _rehearse(self) -> None:
        """See `rehearsal`. The coordinator is connected after it, so that this is warm too."""
        await in_thread(drop_library_pages, recached=not self.settings.exit_with_parent)
        try:
            await self.fragments.processor.call(self._runtime.rehearse)
        except RuntimeFailed as error:
            log.warning("no model could be rehearsed, the floor is too low: %s", error)
        await rehearse_transfers()
        pb.AgentMessage(hello=self.hello()).SerializeToString()

    async def _enrolled(self) -> bool:
        """Have an identity, where one is to be got; False: drained before there was one."""
        if self._identity is None:
            return True
        obtaining = asyncio.create_task(self._identity.obtain(), name="enrolment")
        leaving = asyncio.create_task(self._drain.wait(), name="drain")
        await asyncio.wait((obtaining, leaving), return_when=asyncio.FIRST_COMPLETED)
        if obtaining.done():
            obtaining.result()  # raises what nobody expected
        for task in (obtaining, leaving):
            task.cancel()
        await asyncio.gather(obtaining, leaving, return_exceptions=True)
        return self._identity.obtained

    async def _renew(self) -> None:
        """Renew the identity in time, and with it streams to peers, and a session that it ends."""
        if self._identity is None:
            return
        async for _ in self._identity.renewals():
            self.links.renew()
            if self._identity.ends_sessions and self._session is not None:
                await self._session.drain(_RENEWED)

    async def _settle(self, channel: grpc.aio.Channel) -> None:
        """Take the floor, once, when there is a connection: that is part of being idle."""
        if self._settled:
            return
        try:
            async with asyncio.timeout(_SILENT_SECONDS):
                await channel.channel_ready()
        except TimeoutError as error:
            raise SessionBroken(await why_unreachable(channel)) from error
        self._follower.find_libraries()
        floor = await self.fragments.processor.call(self._meter.settle, *RESERVES_BYTES)
        budget = await self._follower.catch_up()
        # In local mode (`exit_with_parent`) the runner measures the floor first and sets the limit.
        limit = None if self.settings.exit_with_parent else self._machine.memory_limit_bytes()
        if (excess := beyond(limit, floor, budget)) is not None:
            raise SessionBroken(excess)
        await self._follower.settled()
        self._settled = True
        log.info("floor %s, budget %s", format_bytes(floor), format_bytes(budget))

    async def _rest(self) -> None:
        """Hang up on peers and give memory back whenever the agent has had nothing to do for a
        while, and once more a while later: gRPC takes down in the background what was closed."""
        before, rests = self.counters.activity(), 0
        while True:
            await asyncio.sleep(_IDLE_SECONDS)
            now, tasks = self.counters.activity(), self.tasks()
            is_idle = now == before and (tasks is None or tasks.idle)
            before, rests = now, rests + 1 if is_idle else 0
            if 0 < rests <= 2:
                await self.links.close_idle()
                await self.fragments.batches.give_back()
                self.fragments.buffers.give_back()
                await self.fragments.processor.call(self._meter.give_back)
                with contextlib.suppress(OSError):  # the next start measures anew
                    await in_thread(self._times.store, self._times_path)

    def _evicted(self, digest: str, reason: str) -> None:
        log.warning("gave up %s: %s", digest, reason)
        self.counters.evictions += 1
        if self._session is not None:
            self._session.evicted(digest, reason)

    def _count_fetched(self, source: str, size: int) -> None:
        self.counters.fetched_bytes["coordinator" if source == "coordinator" else "peer"] += size

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        loop.add_signal_handler(signal.SIGINT, os._exit, 128 + signal.SIGINT)

    def _terminate(self) -> None:
        if self._drain.is_set():
            os._exit(128 + signal.SIGTERM)
        self._drain.set()
