"""Which activations this device takes, from the coordinator and from peers."""

from collections.abc import Callable
from typing import Final, Protocol

from shoal_agent.telemetry.counters import Counters
from shoal_agent.transport.activations import SpillFull, StoreBuffer
from shoal_protocol.assembly import ActivationAssembler, Limits, ReceivedActivation
from shoal_protocol.bulk.handlers import ItemHandler
from shoal_protocol.bulk.receiving import Intake, ReceiveBuffer, scratch_bytes
from shoal_protocol.bulk.transport import Payload
from shoal_protocol.frames import MalformedFrame, TransferError
from shoal_protocol.tickets import is_ticket
from shoal_protocol.v1.tensors_pb2 import STRING, Acknowledgement, Activation
from shoal_protocol.v1.tensors_pb2 import Items as ItemsMessage

MAXIMUM_DECODED_BYTES: Final = 1 << 30


class Inbox(Protocol):
    """Takes what has come: the present session's `Tasks`."""

    ticket_key: bytes

    def stale(self, job: str, epoch: int) -> bool: ...
    def has_room(self, size: int) -> bool: ...
    def open_buffer(
        self, memory_bytes: int, scratch_bytes: int, text_bytes: int
    ) -> StoreBuffer: ...
    def take(self, received: ReceivedActivation, buffer: StoreBuffer) -> bool: ...
    @property
    def itineraries(self) -> ItemHandler: ...


class _Activations:
    """The `Receiver` of one stream."""

    def __init__(
        self,
        device: str,
        inbox: Callable[[], Inbox | None],
        counters: Counters,
        *,
        from_peer: bool,
    ) -> None:
        self._device = device
        self._inbox = inbox
        self._counters = counters
        self._from_peer = from_peer

    def admit(self, activation: Activation, memory_bytes: int) -> StoreBuffer:
        key, inbox = activation.key, self._inbox()
        if activation.device != self._device:
            raise MalformedFrame(f"it is for {activation.device!r}, this is {self._device!r}")
        if inbox is None:
            raise TransferError("no session", outcome=Acknowledgement.BUSY)
        if inbox.stale(key.job, key.epoch):
            raise TransferError("of an older epoch", outcome=Acknowledgement.STALE)
        if self._from_peer and not is_ticket(activation.ticket, inbox.ticket_key, key):
            raise TransferError(
                "its ticket is not of this session: the coordinator has not asked for it",
                outcome=Acknowledgement.STALE,
            )
        if not inbox.has_room(memory_bytes):
            raise TransferError("no room for activations", outcome=Acknowledgement.BUSY)
        text_bytes = 0
        for tensor in activation.tensors:
            if tensor.dtype == STRING:
                text_bytes = memory_bytes
        try:
            return inbox.open_buffer(memory_bytes, scratch_bytes(activation), text_bytes)
        except SpillFull as error:
            raise TransferError(str(error), outcome=Acknowledgement.BUSY) from error

    async def take(self, received: ReceivedActivation, buffer: ReceiveBuffer) -> None:
        assert isinstance(buffer, StoreBuffer), "it was opened by an inbox"
        self.take_now(received, buffer)

    def take_now(self, received: ReceivedActivation, buffer: StoreBuffer) -> None:
        """`take`, which waits for nothing."""
        inbox = self._inbox()
        if inbox is None or not inbox.take(received, buffer):
            raise TransferError("of an older epoch", outcome=Acknowledgement.STALE)
        self._counters.received_bytes += received.encoded_bytes
        self._counters.transfers += 1

    def refused(self, error: TransferError) -> None:
        self._counters.transfers_refused[Acknowledgement.Outcome.Name(error.outcome)] += 1


def open_intake(
    device: str,
    inbox: Callable[[], Inbox | None],
    counters: Counters,
    *,
    limit_bytes: int = MAXIMUM_DECODED_BYTES,
    from_peer: bool = False,
) -> Intake:
    """The receiving half of one stream. `inbox` gives that of the present session, None without
    one. What would be larger than `limit_bytes` (the device's largest budget) is refused for good,
    and so is what a peer sends without a ticket."""
    receiver = _Activations(device, inbox, counters, from_peer=from_peer)
    return Intake(receiver, Limits(decoded_bytes=min(limit_bytes, MAXIMUM_DECODED_BYTES)))


class Items:
    """Takes items from peers, into whichever session there is (an `ItemHandler`)."""

    def __init__(self, inbox: Callable[[], Inbox | None]) -> None:
        self._inbox = inbox

    async def take_items(self, items: ItemsMessage, payload: Payload) -> None:
        if (inbox := self._inbox()) is not None:
            await inbox.itineraries.take_items(items, payload)

    def all_taken(self) -> None:
        if (inbox := self._inbox()) is not None:
            inbox.itineraries.all_taken()


class InlineInputs:
    """Takes inputs that come with their task, in one frame, where memory has room for them."""

    def __init__(self, device: str, inbox: Callable[[], Inbox | None], counters: Counters) -> None:
        self._receiver = _Activations(device, inbox, counters, from_peer=False)

    def take(self, frame: bytes) -> None:
        """Take them, at once. Raises `TransferError`; BUSY: only the disk has room, or nothing."""
        opened: list[StoreBuffer] = []

        def admit(activation: Activation, memory_bytes: int) -> StoreBuffer:
            opened.append(self._receiver.admit(activation, memory_bytes))
            if opened[0].blocks:
                raise TransferError("memory is full", outcome=Acknowledgement.BUSY)
            return opened[0]

        try:
            received = ActivationAssembler(Limits(), admit).feed(frame)
            if received is None:
                raise MalformedFrame("the inputs end within their frame")
            self._receiver.take_now(received, opened[0])
        except TransferError as error:
            self._receiver.refused(error)
            for buffer in opened:
                buffer.abandon()
            raise
