"""One session: the control stream to the coordinator and the bulk stream beside it.

Instructions are taken in the order in which they come. What takes long (a load, a fetch, a
transfer) runs beside the stream, so that a probe is always answered at once. Telemetry is the
heartbeat: it is sent at an interval also where nothing has changed, and the coordinator probes a
device that is silent. While the outbox is full, no further instructions are read. When either
stream breaks, the session is over, and all its instructions are void.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from time import perf_counter
from typing import Final

from shoal_agent.cache.fetching import FragmentUnavailable, Source
from shoal_agent.memory.residency import short
from shoal_agent.session.answers import EXPECTED, failure, failure_of, refused_inputs
from shoal_agent.session.device import Device
from shoal_agent.session.greeting import (
    Instructions,
    SessionBroken,
    Stream,
    introduce,
    open_stream,
)
from shoal_agent.session.tasks import Tasks
from shoal_agent.telemetry.link import COORDINATOR
from shoal_agent.telemetry.logs import log
from shoal_agent.transport.activations import ActivationStore
from shoal_agent.transport.intake import InlineInputs, open_intake
from shoal_agent.transport.probing import Neighbours, probe_idle
from shoal_protocol.bulk.link import ROOM_SECONDS, BulkLink, OutboundActivation, Undelivered
from shoal_protocol.bulk.receiving import Intake
from shoal_protocol.bulk.transport import Held, TransportBroken
from shoal_protocol.digests import is_digest
from shoal_protocol.frames import MalformedFrame, TransferError, split_frame
from shoal_protocol.pacing import LONGEST_SECONDS, Outbox
from shoal_protocol.services import SessionClient
from shoal_protocol.tensors import UnsupportedTensor
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import Acknowledgement

_FLUSH_SECONDS: Final = 2.0
_DEFAULT_TELEMETRY_SECONDS: Final = 2.0
_ROOM_SECONDS: Final = 0.05
"""How often inputs that came with their task are tried again where there was no room."""
_COORDINATOR: Final = "coordinator"


class Session:
    """From Hello to the end of the stream."""

    def __init__(
        self,
        device: Device,
        client: SessionClient,
        interval_seconds: float | None,
        store: ActivationStore,
        *,
        address: str = "",
    ) -> None:
        """`store` is empty; `address` the coordinator's, for the local link that may be there."""
        self._device = device
        self._client = client
        self._address = address
        self._interval_seconds = interval_seconds
        self._outbox: Outbox[pb.AgentMessage] = Outbox()
        self._work: dict[int, asyncio.Task[None]] = {}
        self._late: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._bulk: BulkLink | None = None
        self._draining = False
        self._lost_peers: set[str] = set()
        self._neighbours = Neighbours(device.links, device.link_meters)
        self.round_trip_seconds: float | None = None
        """To the coordinator and back, as the last ping saw it."""
        self.number = 0
        self._budget_bytes = 0
        self._opened = self.last_contact = perf_counter()
        self.tasks = Tasks(device.name, device.fragments, store, self, device.counters)
        self._inline_inputs = InlineInputs(device.name, lambda: self.tasks, device.counters)

    # ---- life --------------------------------------------------------------------------------

    async def run(self, on_open: Callable[[], None]) -> None:
        """Open, serve until the session breaks, clean up. Raises `SessionBroken`."""
        hello = self._device.hello()
        self._budget_bytes = hello.budget_bytes
        stream = open_stream(self._client, self._address, hello)
        incoming = stream.received()
        parts: list[asyncio.Task[None]] = []
        try:
            welcome, first = await introduce(hello, stream, incoming)
            self.number, self.tasks.ticket_key = welcome.session, welcome.ticket_key
            intake = self._intake()
            bulk = self._bulk = self._open_bulk(intake)
            on_open()
            interval = (
                self._interval_seconds
                or welcome.telemetry_interval_seconds
                or _DEFAULT_TELEMETRY_SECONDS
            )
            for part in (
                self._read(first, incoming),
                self._write(stream),
                self._serve_bulk(bulk, intake),
                self._report(interval),
                self._ping(interval, bulk),
                self._probe(bulk),
            ):
                parts.append(asyncio.create_task(self._guard(part)))
            reason = await self._broken
        finally:
            await self._close(stream, parts)
        raise SessionBroken(reason)

    async def drain(self, reason: str = "drained") -> None:
        """Take no new tasks; returns when every running one has been answered and sent."""
        self._draining = True
        self._outbox.put(pb.AgentMessage(draining=pb.Draining()))
        self.tasks.drain()
        while not (self.tasks.idle or self._broken.done()):
            await asyncio.sleep(0.01)
        self._send_telemetry()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await self._outbox.sent()
        self.end(reason)

    def end(self, reason: str) -> None:
        if not self._broken.done():
            self._broken.set_result(reason)

    @property
    def age_seconds(self) -> float:
        return perf_counter() - self._opened

    # ---- what tasks send through (ReplySink) ----------------------------------------------------

    async def deliver(self, outbound: OutboundActivation, address: str) -> int:
        """Send to a peer, or with no address through the coordinator."""
        if outbound.device in self._lost_peers:
            raise Undelivered(f"the coordinator has lost {outbound.device}")
        began = perf_counter()
        try:
            if address:
                size = await self._device.links.link(outbound.device, address).send(outbound)
            elif self._bulk is None:
                raise Undelivered("the session is not open")
            else:
                size = await self._bulk.send(outbound)
        except UnsupportedTensor as error:
            raise Undelivered(str(error), Acknowledgement.REFUSED) from error
        peer = outbound.device if address else COORDINATOR
        self._device.link_meters.to(peer).transferred(size, perf_counter() - began)
        self._device.counters.sent_bytes += size
        self._device.counters.transfers += 1
        return size

    def way(self, device: str, address: str) -> BulkLink:
        """The stream to a peer, or to the coordinator (empty). Raises `Undelivered`."""
        if device in self._lost_peers or self._bulk is None:
            raise Undelivered(f"the coordinator has lost {device}")
        return self._device.links.link(device, address).open() if device else self._bulk

    @property
    def full(self) -> bool:
        """Whether so much is unsent that what can do without an answer gets none."""
        return self._outbox.full

    def reply(self, reply: pb.Reply) -> None:
        self._tell_budget()
        self._outbox.put(pb.AgentMessage(reply=reply))

    def fail(self, error: BaseException) -> None:
        """An error of this program: it is logged, and the session ends, so that its tasks are
        assigned again."""
        log.error("a task failed with an unexpected error", exc_info=error)
        self.end(f"internal error: {error!r}")

    def evicted(self, digest: str, reason: str) -> None:
        """This device evicted a fragment by itself."""
        self._tell_budget()
        self._outbox.put(pb.AgentMessage(evicted=pb.Evicted(digest=digest, reason=reason)))

    # ---- the streams -------------------------------------------------------------------------

    async def _read(self, first: Sequence[pb.CoordinatorMessage], incoming: Instructions) -> None:
        for each in first:
            self._take(each)
        async for messages in incoming:
            self.last_contact = perf_counter()
            for each in messages:
                self._take(each)
            if self._outbox.full:
                self._device.counters.full_queues["outbox"] += 1
                await self._outbox.sent()
        self.end("the coordinator closed the stream")

    async def _write(self, stream: Stream) -> None:
        async def write(messages: Sequence[pb.AgentMessage]) -> None:
            await stream.write(messages)
            self.last_contact = perf_counter()

        longest = 0.0 if stream.local else LONGEST_SECONDS
        await self._outbox.write_all(
            write, lambda: self.tasks.unanswered > 0, longest_seconds=longest
        )

    def _open_bulk(self, intake: Intake) -> BulkLink:
        device = self._device
        exchange = partial(self._client.exchange, device.name)
        return BulkLink(
            device.uplink.open(self._address, exchange, device.name),
            intake,
            traffic=device.counters.traffic,
            items=self.tasks.itineraries,
        )

    async def _serve_bulk(self, bulk: BulkLink, intake: Intake) -> None:
        try:
            reason = await bulk.run()
        finally:
            intake.close()
        self.end(reason)

    def _intake(self) -> Intake:
        device, limit = self._device, self._device.largest_budget_bytes
        return open_intake(device.name, lambda: self.tasks, device.counters, limit_bytes=limit)

    async def _report(self, interval_seconds: float) -> None:
        while True:
            self._send_telemetry()
            self.tasks.tick()
            await asyncio.sleep(interval_seconds)

    async def _ping(self, interval_seconds: float, bulk: BulkLink) -> None:
        """Measure the way to the coordinator. A ping leaves when the last one was answered: they
        never pile up on a slow link."""
        while True:
            try:
                self.round_trip_seconds = await bulk.ping()
                self._device.link_meters.to(COORDINATOR).pinged(self.round_trip_seconds)
            except Undelivered:
                self.round_trip_seconds = None  # `_serve_bulk` ends the session where it must
            await asyncio.sleep(interval_seconds)

    async def _probe(self, bulk: BulkLink) -> None:
        meters = self._device.link_meters
        await probe_idle(bulk, self._neighbours, meters, lambda: self.tasks.idle and not self._work)

    def _send_telemetry(self) -> None:
        """Send the present readings, unless the outbox is full; the last ones make the sums of a
        run complete."""
        budget_bytes = self._device.fragments.ledger.budget
        if self._outbox.full and budget_bytes == self._budget_bytes:
            return
        telemetry = self._device.telemetry()
        if budget_bytes != self._budget_bytes:
            self._budget_bytes = telemetry.budget_bytes = budget_bytes
            telemetry.resident.extend(self._device.resident())
        telemetry.queued_tasks = self.tasks.queued
        telemetry.tasks.extend(self.tasks.itineraries.measured())
        self._outbox.put(pb.AgentMessage(telemetry=telemetry))

    def _tell_budget(self) -> None:
        """What follows from another budget is understood by who knows of it."""
        if self._device.fragments.ledger.budget != self._budget_bytes:
            self._send_telemetry()

    async def _guard(self, part: Coroutine[None, None, None]) -> None:
        """Any part that ends, ends the session."""
        try:
            await part
        except TransportBroken as error:
            self.end(str(error))
        except MalformedFrame as error:
            self.end(f"the coordinator breaks the protocol: {error}")
        except Exception as error:
            self.fail(error)

    async def _close(self, stream: Stream, parts: list[asyncio.Task[None]]) -> None:
        self.end("closed")
        self._device.links.interrupt("its session has ended")
        self.tasks.close()
        running = [*parts, *self._work.values(), *self._late]
        for task in running:
            task.cancel()
        await stream.close()
        await asyncio.gather(*running, return_exceptions=True)

    # ---- instructions ------------------------------------------------------------------------

    def _take(self, message: pb.CoordinatorMessage) -> None:  # noqa: C901, PLR0912 - one for each kind
        match message.WhichOneof("message"):
            case "probe":
                answer = pb.ProbeReply(nonce=message.probe.nonce)
                self._outbox.put(pb.AgentMessage(probe_reply=answer))
            case "execute":
                self._execute(message.execute)
            case "forward":
                self._lost_peers.discard(message.forward.route.device)
                self.tasks.forward(message.forward)
            case "plan":
                self._lost_peers.discard(message.plan.device)
                self.tasks.plan(message.plan)
            case "release":
                self.tasks.release(message.release.tasks)
            case "cancel":
                self._cancel(message.cancel)
            case "load":
                self._start(message.load.instruction, self._load(message.load))
            case "unload":
                self.tasks.unload(message.unload.digest)
                self._start(message.unload.instruction, self._unload(message.unload))
            case "prefetch":
                self._start(message.prefetch.instruction, self._prefetch(message.prefetch))
            case "peer_lost":
                self._lost_peers.add(message.peer_lost.device)
                self._device.links.lose(message.peer_lost.device)
            case "neighbours":
                self._neighbours.expect(message.neighbours)
            case "welcome":
                self.end("the coordinator welcomed twice")
            case _:
                pass  # of a newer version of the protocol: what has no number has no reply

    def _execute(self, execute: pb.Execute) -> None:
        if self.tasks.waits(execute.instruction):
            self.end(f"the coordinator gave instruction {execute.instruction} twice")
            return
        self._lost_peers.difference_update(route.device for route in execute.routes)
        if self._device.uplink.shaped:
            execute.reply_bytes = 0  # a simulated link is that of the bulk streams
        late = None
        if execute.input_frame:
            try:
                self._inline_inputs.take(execute.input_frame)
            except TransferError as error:
                if error.outcome != Acknowledgement.BUSY:
                    self.tasks.fail(execute.instruction, refused_inputs(error))
                    return
                late = self._take_inputs_later(execute)
        self.tasks.execute(execute)
        if late is not None:
            self._late.add(task := asyncio.create_task(self._guard(late)))
            task.add_done_callback(self._late.discard)
        if self._draining:
            self.tasks.cancel(execute.instruction)

    async def _take_inputs_later(self, execute: pb.Execute) -> None:
        """There is no room in memory: the task waits until its inputs are on disk, until its own
        end, or for so long: what waits here may be what keeps the room from becoming free."""
        header, payload = split_frame(execute.input_frame)
        began = perf_counter()
        while self.tasks.waits(execute.instruction):
            if perf_counter() - began > ROOM_SECONDS:
                why = failure(pb.DISK_FULL, "there is no room for the inputs")
                self.tasks.refuse(execute.instruction, why)
                return
            await asyncio.sleep(_ROOM_SECONDS)
            with closing(self._intake()) as intake, suppress(TransferError):
                await intake.receive(header, Held(payload))
                return

    def _cancel(self, cancel: pb.Cancel) -> None:
        if cancel.job:
            self.tasks.void(cancel.job, cancel.epoch)
        elif (work := self._work.get(cancel.instruction)) is not None:
            work.cancel()
        else:
            self.tasks.cancel(cancel.instruction)

    def _start(self, instruction: int, work: Coroutine[None, None, pb.Reply]) -> None:
        """Do work beside the stream; its reply goes out when it ends, whichever way."""

        async def run() -> None:
            try:
                reply = await work
            except EXPECTED as error:
                reply = pb.Reply(failure=failure_of(error))
            reply.instruction = instruction
            self.reply(reply)

        def ended(task: asyncio.Task[None]) -> None:
            self._work.pop(instruction, None)
            if task.cancelled():
                answer = failure(pb.CANCELLED, "cancelled")
                self.reply(pb.Reply(instruction=instruction, failure=answer))
            work.close()  # it may have been cancelled before it began

        task = self._work[instruction] = asyncio.create_task(self._guard(run()))
        task.add_done_callback(ended)

    async def _load(self, load: pb.Load) -> pb.Reply:
        counters, sources = self._device.counters, self._sources(load)
        try:
            result = await self._device.fragments.load(
                load.digest, load.resident_bytes, sources, load.priority
            )
        except EXPECTED as error:
            counters.loads[pb.FailureCode.Name(failure_of(error).code).lower()] += 1
            log.info("load of %s failed: %s", short(load.digest), error)
            raise
        counters.loads["loaded"] += 1
        log.info("loaded %s in %.3f s", short(load.digest), result.seconds)
        return pb.Reply(
            loaded=pb.Loaded(
                resident_bytes=result.resident_bytes,
                seconds=result.seconds,
                fetched_bytes=result.fetched_bytes,
                processor_seconds=result.processor_seconds,
                dropped=self._device.fragments.cache.take_dropped(),
            )
        )

    async def _unload(self, unload: pb.Unload) -> pb.Reply:
        result = await self._device.fragments.unload(unload.digest)
        self._device.counters.evictions += 1
        log.info("unloaded %s", short(unload.digest))
        return pb.Reply(unloaded=pb.Unloaded(**asdict(result)))

    async def _prefetch(self, prefetch: pb.Prefetch) -> pb.Reply:
        sources = self._sources(prefetch)
        fetched = await self._device.fragments.prefetch(prefetch.digest, sources)
        if not prefetch.peers:
            meter = self._device.link_meters.to(COORDINATOR)
            meter.transferred(fetched.fetched_bytes, fetched.seconds)
        return pb.Reply(
            prefetched=pb.Prefetched(
                fetched_bytes=fetched.fetched_bytes,
                seconds=fetched.seconds,
                dropped=self._device.fragments.cache.take_dropped(),
            )
        )

    def _sources(self, wanted: pb.Load | pb.Prefetch) -> list[Source]:
        """Where to fetch from: the peers in the order given, then the coordinator's store."""
        if not is_digest(wanted.digest):
            raise FragmentUnavailable(f"{wanted.digest!r} is no digest")
        sources: list[Source] = []
        for peer in wanted.peers:
            device, _, target = peer.rpartition("@")
            fetch = partial(self._device.links.fetch_fragment, device, target)
            sources.append(Source(peer, fetch))
        return [*sources, Source(_COORDINATOR, self._client.fetch_fragment)]
