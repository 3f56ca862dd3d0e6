"""A coordinator that does what a test tells it, over the real gRPC service."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc

from protocol.item_frames import Came, came
from shoal_protocol.assembly import ActivationAssembler, ReceivedActivation
from shoal_protocol.bulk.local import LocalListener, listen
from shoal_protocol.bulk.transport import Transport
from shoal_protocol.channels import Credentials
from shoal_protocol.files import file_frames
from shoal_protocol.frames import Frame, acknowledgement, frames_in, join_frame, split_frame
from shoal_protocol.items import Numbered, items_frame
from shoal_protocol.listener import Listener
from shoal_protocol.services import (
    DEVICE_METADATA,
    ConnectContext,
    FileContext,
    FrameContext,
    add_session_service,
    device_metadata,
)
from shoal_protocol.tensors import ActivationKey, Array, encode_activation
from shoal_protocol.tickets import make_ticket, new_ticket_key
from shoal_protocol.v1 import session_pb2 as pb
from shoal_protocol.v1.session_pb2 import AgentMessage, CoordinatorMessage
from shoal_protocol.v1.tensors_pb2 import Acknowledgement, FetchFragmentRequest

PATIENCE_SECONDS = 60


@dataclass(eq=False)
class ConnectedDevice:
    """One session of an agent, as the coordinator has it."""

    hello: pb.Hello
    session: int
    ticket_keys: dict[str, bytes]
    """Of every device's session."""
    down: asyncio.Queue[CoordinatorMessage | None] = field(default_factory=asyncio.Queue)
    telemetry: asyncio.Queue[pb.Telemetry] = field(default_factory=asyncio.Queue)
    probe_replies: asyncio.Queue[pb.ProbeReply] = field(default_factory=asyncio.Queue)
    evicted: asyncio.Queue[pb.Evicted] = field(default_factory=asyncio.Queue)
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    exchange: asyncio.Future[FrameContext] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    # gRPC takes one write of a stream at a time; tests give while the service acknowledges.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    results: asyncio.Queue[ReceivedActivation] = field(default_factory=asyncio.Queue)
    items: asyncio.Queue[Came] = field(default_factory=asyncio.Queue)
    item_frames: list[int] = field(default_factory=list)
    """How many items each frame had."""
    replies: dict[int, asyncio.Future[pb.Reply]] = field(default_factory=dict)
    acknowledged: dict[int, asyncio.Future[Acknowledgement]] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)
    """How many messages came as one, in order; 0: one by itself."""
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    def send(self, **message: Any) -> None:
        self.down.put_nowait(CoordinatorMessage(**message))

    def begin(self, kind: str, message: Any) -> asyncio.Future[pb.Reply]:
        """Give an instruction; its reply comes in the future."""
        message.instruction = next(self.numbers)
        future = asyncio.get_running_loop().create_future()
        self.replies[message.instruction] = future
        if kind in ("execute", "forward"):
            for route in message.routes if kind == "execute" else [message.route]:
                route.ticket = self.ticket(message.task, route)
        self.send(**{kind: message})
        return future

    def ticket(self, task: pb.Task, route: pb.Route) -> bytes:
        """What the device at a route's end takes an activation with; empty: there is none."""
        if route.device not in self.ticket_keys:
            return b""
        key = ActivationKey(
            job=task.job,
            epoch=task.epoch,
            item=task.item,
            producer=task.stage,
            consumer=route.consumer,
        )
        return make_ticket(self.ticket_keys[route.device], key)

    async def ask(self, kind: str, message: Any) -> pb.Reply:
        return await asyncio.wait_for(self.begin(kind, message), PATIENCE_SECONDS)

    async def load(self, digest: str, resident_bytes: int, *peers: str) -> pb.Reply:
        load = pb.Load(digest=digest, resident_bytes=resident_bytes, peers=peers)
        return await self.ask("load", load)

    async def unload(self, digest: str) -> pb.Reply:
        return await self.ask("unload", pb.Unload(digest=digest))

    async def give(
        self, key: ActivationKey, tensors: Mapping[str, Array], device: str | None = None
    ) -> Acknowledgement:
        """Send an activation down the exchange stream; its acknowledgement."""
        context = await asyncio.wait_for(asyncio.shield(self.exchange), PATIENCE_SECONDS)
        number = next(self.numbers)
        future = asyncio.get_running_loop().create_future()
        self.acknowledged[number] = future
        name = self.hello.device if device is None else device
        for frame in encode_activation(key, name, tensors, transfer=number):
            async with self.turn:
                await context.write(frame)
        return await asyncio.wait_for(future, PATIENCE_SECONDS)

    async def send_item(
        self, ticket: bytes, instruction: int, tensors: Mapping[str, Array]
    ) -> asyncio.Future[pb.Reply]:
        """Send an item down the exchange stream; if it fails, the future has its reply."""
        (future,) = await self.send_items(ticket, [(instruction, tensors)])
        return future

    async def send_items(
        self, ticket: bytes, items: Sequence[Numbered]
    ) -> list[asyncio.Future[pb.Reply]]:
        """The same for several, in one frame."""
        context = await asyncio.wait_for(asyncio.shield(self.exchange), PATIENCE_SECONDS)
        futures = []
        for number, _ in items:
            self.replies[number] = asyncio.get_running_loop().create_future()
            futures.append(self.replies[number])
        async with self.turn:
            await context.write(bytes(items_frame(ticket, (), items)))
        return futures

    async def item(self) -> tuple[Came, dict[str, Array]]:
        """The next item that comes from the device."""
        item = await asyncio.wait_for(self.items.get(), PATIENCE_SECONDS)
        return item, item.tensors

    async def result(self) -> ReceivedActivation:
        return await asyncio.wait_for(self.results.get(), PATIENCE_SECONDS)


async def each_frame(messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for message in messages:
        for frame in frames_in(message):
            yield frame


async def received_messages(transport: Transport) -> AsyncIterator[bytes]:
    """The frames of a local link as messages of gRPC."""
    async for frames in transport.received():
        for header, payload, _ in frames:
            yield join_frame(header, await payload.read())


@dataclass
class LocalContext:
    """A local link as the context of a call of gRPC."""

    device: str
    transport: Transport

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((DEVICE_METADATA, self.device),)

    async def write(self, message: bytes) -> None:
        header, payload = split_frame(message)
        await self.transport.write([Frame(header.SerializeToString(), (payload,), len(payload))])


class ScriptedCoordinator:
    """Serves sessions and a store of fragments; what comes in waits for the test."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.joined: asyncio.Queue[ConnectedDevice] = asyncio.Queue()
        self.devices: dict[str, ConnectedDevice] = {}
        self.ticket_keys: dict[str, bytes] = {}
        self.fetches: list[FetchFragmentRequest] = []
        self.interval_seconds = 0.2
        self.outcomes: list[Any] = []
        self.reason = ""
        self.relay = True
        self.pong = asyncio.Event()
        self.pong.set()
        self.cut_fetch_after_bytes: int | None = None
        self._sessions = itertools.count(1)
        self._listener: Listener | None = None
        self._local: LocalListener | None = None

    async def start(
        self, address: str, credentials: Credentials | None = None, *, insecure: bool = False
    ) -> int:
        self._listener = Listener(lambda server: add_session_service(server, self), connections=100)
        port = await self._listener.open(address, credentials, insecure=insecure)
        self._local = listen(address, self._exchange_locally, connections=100)
        return port

    async def stop(self) -> None:
        if self._local is not None:
            await self._local.stop()
        if self._listener is not None:
            await self._listener.stop(None)

    async def device(self) -> ConnectedDevice:
        """The next agent that joins."""
        return await asyncio.wait_for(self.joined.get(), PATIENCE_SECONDS)

    # ---- the service ----------------------------------------------------------------------------

    async def connect(self, requests: AsyncIterator[AgentMessage], context: ConnectContext) -> None:
        first = await anext(aiter(requests))
        device = ConnectedDevice(first.hello, next(self._sessions), self.ticket_keys)
        self.devices[device.hello.device] = device
        ticket_key = self.ticket_keys[device.hello.device] = new_ticket_key()
        welcome = pb.Welcome(
            session=device.session,
            telemetry_interval_seconds=self.interval_seconds,
            ticket_key=ticket_key,
        )
        await context.write(CoordinatorMessage(welcome=welcome))
        reader = asyncio.create_task(self._read(requests, device))
        self.joined.put_nowait(device)
        try:
            while (message := await device.down.get()) is not None:
                await context.write(message)
        finally:
            reader.cancel()
            device.gone.set()

    async def _read(self, requests: AsyncIterator[AgentMessage], device: ConnectedDevice) -> None:
        try:
            async for message in requests:
                device.batches.append(len(message.batch.messages))
                for each in message.batch.messages or (message,):
                    self._hear(each, device)
        finally:
            device.down.put_nowait(None)

    @staticmethod
    def _hear(message: AgentMessage, device: ConnectedDevice) -> None:
        match message.WhichOneof("message"):
            case "reply":
                device.replies.pop(message.reply.instruction).set_result(message.reply)
            case "telemetry":
                device.telemetry.put_nowait(message.telemetry)
            case "probe_reply":
                device.probe_replies.put_nowait(message.probe_reply)
            case "evicted":
                device.evicted.put_nowait(message.evicted)
            case "draining":
                device.draining.set()
            case other:
                raise AssertionError(other)

    async def _exchange_locally(self, device: str, transport: Transport) -> str:
        """The bulk stream of an agent on this host, as if it came over gRPC."""
        context = cast(FrameContext, LocalContext(device, transport))
        await self.exchange(received_messages(transport), context)
        return "the test coordinator has ended the stream"

    async def exchange(self, requests: AsyncIterator[bytes], context: FrameContext) -> None:
        device = self.devices[device_metadata(context) or ""]
        if not device.exchange.done():
            device.exchange.set_result(context)
        assembler = ActivationAssembler()
        async for frame in each_frame(requests):
            header, payload = split_frame(frame)
            if header.WhichOneof("kind") == "acknowledgement":
                device.acknowledged.pop(header.transfer).set_result(header.acknowledgement)
                continue
            if header.WhichOneof("kind") == "ping":
                await self.pong.wait()
                async with device.turn:
                    await context.write(bytes(acknowledgement(header.transfer)))
                continue
            if header.WhichOneof("kind") == "items":
                device.item_frames.append(len(header.items.instructions))
                for item in came(header.items, payload):
                    device.items.put_nowait(item)
                continue
            received = assembler.add(header, payload)
            if received is None:
                continue
            outcome = self.outcomes.pop(0) if self.outcomes else Acknowledgement.ACCEPTED
            if outcome == Acknowledgement.ACCEPTED:
                if received.device and self.relay:
                    target = self.devices[received.device]
                    outcome = (await target.give(received.key, received.tensors)).outcome
                else:
                    device.results.put_nowait(received)
            async with device.turn:
                await context.write(bytes(acknowledgement(header.transfer, outcome, self.reason)))

    async def fetch_fragment(self, request: FetchFragmentRequest, context: FileContext) -> None:
        self.fetches.append(request)
        path = self.store / "fragments" / request.digest.removeprefix("sha256:") / request.file
        if not path.exists():
            await context.abort(grpc.StatusCode.NOT_FOUND, f"{request.digest} is not in the store")
        with path.open("rb") as file:
            sent = 0
            for frame in file_frames(file, request, path.stat().st_size, frame_bytes=64 << 10):
                await context.write(frame)
                sent += len(frame)
                if self.cut_fetch_after_bytes is not None and sent > self.cut_fetch_after_bytes:
                    self.cut_fetch_after_bytes = None
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the link broke")
