"""Bulk bytes between the coordinator and its devices: inputs down, results up, activations across.

Each device has one `DeviceLink`. Its reader waits for room for a bounded time only, and then
answers BUSY; the sender stores the activation and sends it again. So relaying has no deadlock.

A transfer that is meant for another device is relayed frame by frame as it comes, under a new
number, through a queue of `RELAY_FRAMES`; its acknowledgement goes back the other way. If it breaks
off in the middle, the receiver gets a last frame that does not add up, and drops the transfer.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal_protocol.assembly import ReceivedActivation
from shoal_protocol.bulk.link import BulkLink, Outgoing, Traffic, Undelivered
from shoal_protocol.bulk.receiving import Intake, ReceiveBuffer, scratch_bytes
from shoal_protocol.bulk.transport import Payload, Transport
from shoal_protocol.frames import Frame, TransferError, acknowledgement
from shoal_protocol.v1.tensors_pb2 import Acknowledgement, Activation, FrameHeader, Items

RELAY_FRAMES: Final = 4
RESULT_BYTES: Final = 1 << 29
"""Results of all devices that are being received, together; one alone may be larger."""
PATIENCE_SECONDS: Final = 2.0
"""How long a reader waits for room on another device's link."""
FRAME_SECONDS: Final = 30.0
"""How long one frame of a relayed transfer may take."""


class Results(Protocol):
    """Decides what devices may send, and takes their results."""

    def admit(self, device: str, activation: Activation) -> None:
        """Raise `TransferError` for a result that this device is not to give."""
        ...

    def admit_relay(self, device: str, activation: Activation) -> None:
        """Raise `TransferError` for an activation that this device is not to send to another."""
        ...

    async def take_items(self, device: str, items: Items, payload: Payload) -> None:
        """Items that have travelled have arrived, if they are what they say. Raises
        `MalformedFrame`."""
        ...

    async def take(self, device: str, received: ReceivedActivation) -> None:
        """A result has arrived; returns when it needs no memory any more. Raises
        `TransferError`."""
        ...


class ExchangeHub:
    """The links of all devices, and what they share."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.links: dict[str, DeviceLink] = {}
        self.traffic = Traffic()
        self.relayed_bytes = 0
        self.receiving_bytes = 0
        """Memory of results that are being received."""

    def reserve(self, size: int) -> "_Reservation":
        """Memory for a result. Raises BUSY."""
        if self.receiving_bytes and self.receiving_bytes + size > RESULT_BYTES:
            raise TransferError("the coordinator is full", outcome=Acknowledgement.BUSY)
        self.receiving_bytes += size
        return _Reservation(self, size)


@dataclass(slots=True)
class _Reservation:
    """Memory for one result (a `ReceiveBuffer`)."""

    hub: ExchangeHub
    size: int
    blocks: bool = False

    def allocate(self, size: int) -> NDArray[np.uint8]:
        return np.empty(size, np.uint8)

    def settle(self) -> None:
        """A result has no place on disk."""

    def abandon(self) -> None:
        self.hub.receiving_bytes -= self.size
        self.size = 0


@dataclass(frozen=True, slots=True)
class _ResultReceiver:
    """Receives the results of one device."""

    device: str
    hub: ExchangeHub

    def admit(self, activation: Activation, memory_bytes: int) -> ReceiveBuffer:
        self.hub.results.admit(self.device, activation)
        return self.hub.reserve(memory_bytes + scratch_bytes(activation))

    async def take(self, received: ReceivedActivation, buffer: ReceiveBuffer) -> None:
        await self.hub.results.take(self.device, received)
        buffer.abandon()

    def refused(self, error: TransferError) -> None:
        """The acknowledgement says it."""


@dataclass(slots=True, eq=False)
class _Relay:
    """A transfer that is being relayed: filled by one link's reader, emptied by another's
    writer."""

    source: int
    frames: asyncio.Queue[tuple[Frame, bool] | None] = field(
        default_factory=lambda: asyncio.Queue(RELAY_FRAMES)
    )
    passed_bytes: int = 0
    outgoing: Outgoing | None = None

    async def drain(self, number: int) -> AsyncIterator[Frame]:
        """The frames; at the end a frame that breaks the transfer, if the source stops."""
        last = False
        while not last:
            try:
                async with asyncio.timeout(FRAME_SECONDS):
                    given = await self.frames.get()
            except TimeoutError:
                given = None
            if given is None:
                assert self.outgoing is not None, "it is being written"
                self.outgoing.fail("the sender broke off")
                end = FrameHeader(transfer=number, offset=self.passed_bytes, last=True)
                given = (Frame(end.SerializeToString()), True)
            frame, last = given
            yield frame

    def stop(self) -> None:
        """It is over: neither the reader nor the writer is to wait for the other any more."""
        while not self.frames.empty():
            self.frames.get_nowait()
        self.frames.put_nowait(None)


class DeviceLink:
    """The bulk stream of one device, for as long as it lasts."""

    def __init__(self, device: str, hub: ExchangeHub, transport: Transport) -> None:
        self.device = device
        self.bulk = BulkLink(transport, self, traffic=hub.traffic, items=self)
        self._hub = hub
        self._intake = Intake(_ResultReceiver(device, hub))
        self._relay: _Relay | None = None
        self._ignored: int | None = None

    async def run(self) -> str:
        """Serve the stream until it ends; why it did. Raises `MalformedFrame`."""
        try:
            return await self.bulk.run()
        finally:
            self._break_relay()
            self._intake.close()

    async def take(self, header: FrameHeader, payload: Payload) -> Frame | None:
        match header.WhichOneof("kind"):
            case "activation" if header.activation.device:
                # Its waiting has an end, for which it must be a task.
                return await asyncio.create_task(self._begin_relay(header, payload))
            case None if self._relay is not None and header.transfer == self._relay.source:
                await asyncio.create_task(self._pass(self._relay, header, payload))
                return None
            case None if self._ignored == header.transfer:
                return None
            case _:
                return await self._intake.take(header, payload)

    async def take_items(self, items: Items, payload: Payload) -> None:
        await self._hub.results.take_items(self.device, items, payload)

    def all_taken(self) -> None:
        """The dispatcher has the results already."""

    async def _begin_relay(self, header: FrameHeader, payload: Payload) -> Frame | None:
        self._break_relay()
        source = self._ignored = header.transfer
        relay = _Relay(source)
        try:
            relay.outgoing = outgoing = await self._open(relay, header.activation)
        except TransferError as error:
            return acknowledgement(source, error.outcome, error.reason)
        outgoing.answered.add_done_callback(lambda _: relay.stop())
        outgoing.answered.add_done_callback(lambda answered: self._answered(source, answered))
        self._relay, self._ignored = relay, None
        await self._pass(relay, header, payload)
        return None

    async def _open(self, relay: _Relay, activation: Activation) -> Outgoing:
        """A transfer on the receiver's link. Raises `TransferError`."""
        self._hub.results.admit_relay(self.device, activation)
        target = self._hub.links.get(activation.device)
        if target is None:
            reason = f"{activation.device} is not connected"
            raise TransferError(reason, outcome=Acknowledgement.STALE)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await target.bulk.enqueue(relay.drain)
        except (TimeoutError, Undelivered) as error:
            reason = f"{target.device} is behind"
            raise TransferError(reason, outcome=Acknowledgement.BUSY) from error

    async def _pass(self, relay: _Relay, header: FrameHeader, payload: Payload) -> None:
        assert relay.outgoing is not None, "it was opened"
        header.transfer = relay.outgoing.number
        frame = Frame(header.SerializeToString(), (await payload.read(),), payload.size)
        try:
            async with asyncio.timeout(FRAME_SECONDS):
                await relay.frames.put((frame, header.last))
        except TimeoutError:
            self._break_relay()
            self._ignored = relay.source
            return
        relay.passed_bytes += payload.size
        self._hub.relayed_bytes += payload.size
        if relay.outgoing.answered.done():
            # Refused before its end: what is still to come of it is of no use.
            self._relay, self._ignored = None, None if header.last else relay.source
        elif header.last:
            self._relay = None

    def _answered(self, source: int, answered: asyncio.Future[Acknowledgement]) -> None:
        """The receiver of a relayed transfer has answered, or is gone."""
        if answered.cancelled() or answered.exception() is not None:
            outcome, message = Acknowledgement.BUSY, "the receiver's link broke"
        else:
            outcome, message = answered.result().outcome, answered.result().message
        self.bulk.answer(acknowledgement(source, outcome, message))

    def _break_relay(self) -> None:
        """The transfer that is being relayed will not be completed."""
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.stop()
