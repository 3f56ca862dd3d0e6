"""Activations on their way out: over the stream to the coordinator, and over one stream per peer.

A transfer counts as delivered when the other side has acknowledged it. What can go wrong is one
error, `Undelivered`, whose `outcome` says what the receiver thought of it; None: it could not be
reached.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from time import perf_counter
from typing import Final

import grpc

from shoal_agent.transport.shaping import STREAM_ERRORS, DelayLine, Uplink, Write
from shoal_protocol.channels import AddressRefused, Credentials, open_channel
from shoal_protocol.codecs import LinkCodec
from shoal_protocol.frames import (
    FRAMES_TOGETHER,
    MAXIMUM_PAYLOAD_BYTES,
    MalformedFrame,
    frames_in,
    join_frames,
    ping,
    split_frame,
)
from shoal_protocol.pacing import Pace
from shoal_protocol.services import FrameStream, PeerClient
from shoal_protocol.tensors import (
    ActivationKey,
    Array,
    EncodedActivation,
    UnsupportedTensor,
    encode_activation,
)
from shoal_protocol.v1.tensors_pb2 import Acknowledgement, FrameHeader

_SHAPED_FRAME_BYTES: Final = 64 << 10
_SMALL_BYTES: Final = 64 << 10
"""Transfers that go as one message may have so many bytes together."""
_STEP_SECONDS: Final = 30.0
"""How long one frame, or the acknowledgement after the last, may take."""
_BUSY_SECONDS: Final = 60.0
_ENCODE_IN_THREAD_FROM_BYTES: Final = 64 << 10


class Undelivered(Exception):
    """A transfer was not taken. `outcome` is the receiver's; None: it was not reached."""

    def __init__(self, reason: str, outcome: Acknowledgement.Outcome | None = None) -> None:
        super().__init__(reason)
        self.outcome = outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboundActivation:
    """What is to be sent: tensors on one edge, and the device they are for (empty: a result)."""

    key: ActivationKey
    device: str
    tensors: Mapping[str, Array]
    lossy: bool = False


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A transfer on its way: `frames` are made from its number, `size` is that of what they carry,
    `left_at` when their turn came, `written_at` when the last one was written."""

    frames: Callable[[int], Iterable[bytes]]
    size: int
    answered: asyncio.Future[Acknowledgement] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    left_at: float = math.inf
    written_at: float = math.inf


class Sender:
    """The sending half of one bulk stream. Transfers follow one another; several may be unanswered.

    One task writes, for as long as there is something to write. What is small and waits goes as one
    message; after such a one the next lets a moment pass, in which others come. The reading half
    gives acknowledgements to `acknowledge`, and the stream's end to `fail`.
    """

    def __init__(
        self, write: Write, uplink: Uplink, codec: LinkCodec, abort: Callable[[], object]
    ) -> None:
        """`abort` ends the stream: half a transfer cannot be taken back otherwise."""
        self._abort = abort
        self._line = DelayLine(uplink, write) if uplink.shaped else None
        self._write: Write = write if self._line is None else self._line.write
        self._frame_bytes = MAXIMUM_PAYLOAD_BYTES if self._line is None else _SHAPED_FRAME_BYTES
        self._codec = codec
        self._numbers = count(1)
        self._pace = Pace()
        self._waiting: deque[_Outgoing] = deque()
        self._answers: deque[bytes] = deque()
        self._unanswered: dict[int, _Outgoing] = {}
        self._writer: asyncio.Task[None] | None = None
        self._writing_since = math.inf
        self._watch: asyncio.TimerHandle | None = None
        self._broken: str | None = None

    async def send(self, parcel: OutboundActivation) -> int:
        """Deliver; the bytes that it took on the wire. Raises `Undelivered`."""
        started = perf_counter()
        encoded = await self._encode(parcel)
        delay = 0.02
        while True:
            answer = await self._send_once(encoded)
            if answer.outcome == Acknowledgement.ACCEPTED:
                return encoded.encoded_bytes
            late = perf_counter() - started > _BUSY_SECONDS
            if answer.outcome != Acknowledgement.BUSY or late:
                raise Undelivered(answer.message, answer.outcome)
            await asyncio.sleep(delay)
            delay = min(1.0, 2 * delay)

    async def ping(self) -> float:
        """How long the way to the other side and back takes, in seconds, for next to nothing that
        leaves when it is its turn. Raises `Undelivered`."""
        outgoing = _Outgoing(lambda number: (ping(number),), 0)
        await self._answered(outgoing)
        return perf_counter() - outgoing.left_at

    def answer(self, frame: bytes) -> None:
        """Send an acknowledgement, between two transfers. (The reader must never wait for this.)"""
        self._answers.append(frame)
        self._wake()

    def acknowledge(self, header: FrameHeader) -> None:
        """An acknowledgement has come; one that nobody waits for is ignored."""
        outgoing = self._unanswered.pop(header.transfer, None)
        if outgoing is not None and not outgoing.answered.done():
            outgoing.answered.set_result(header.acknowledgement)

    def fail(self, reason: str) -> None:
        """The stream has ended: nothing that is under way will be acknowledged."""
        self._broken = reason
        for outgoing in (*self._unanswered.values(), *self._waiting):
            _give_up(outgoing, reason)
        self._unanswered.clear()
        self._waiting.clear()
        self._answers.clear()

    def break_off(self, reason: str) -> None:
        """`fail`, and end the stream."""
        self.fail(reason)
        self._abort()

    async def close(self) -> None:
        """`fail`, and stop what works for this stream."""
        self.fail(self._broken or "closed")
        if self._watch is not None:
            self._watch.cancel()
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        if self._line is not None:
            await self._line.close()

    async def _encode(self, parcel: OutboundActivation) -> EncodedActivation:
        def encode() -> EncodedActivation:
            return encode_activation(
                parcel.key,
                parcel.device,
                parcel.tensors,
                transfer=0,
                codec=self._codec,
                lossy=parcel.lossy,
                frame_bytes=self._frame_bytes,
            )

        speed = self._codec.bytes_per_second
        plain = speed is None or speed >= LinkCodec.FAST_BYTES_PER_SECOND
        size = sum(tensor.nbytes for tensor in parcel.tensors.values())
        try:
            if plain or size < _ENCODE_IN_THREAD_FROM_BYTES:
                return encode()
            return await asyncio.to_thread(encode)
        except UnsupportedTensor as error:
            raise Undelivered(str(error), Acknowledgement.REFUSED) from error

    async def _send_once(self, encoded: EncodedActivation) -> Acknowledgement:
        """One try, with its frames numbered anew."""
        begun = perf_counter()
        outgoing = _Outgoing(
            lambda number: replace(encoded, transfer=number), encoded.encoded_bytes
        )
        answer = await self._answered(outgoing)
        if answer.outcome == Acknowledgement.ACCEPTED:
            self._codec.observe_transfer(encoded.encoded_bytes, perf_counter() - begun)
        return answer

    async def _answered(self, outgoing: _Outgoing) -> Acknowledgement:
        """Send it when it is its turn; the other side's answer. Raises `Undelivered`."""
        if self._broken is not None:
            raise Undelivered(self._broken)
        self._waiting.append(outgoing)
        self._wake()
        return await outgoing.answered

    # ---- writing -----------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._broken is None and self._writer is None:
            self._writer = asyncio.create_task(self._write_all(), name="bulk writer")
            if self._watch is None:
                self._look_again()

    async def _write_all(self) -> None:
        """Write until nothing waits."""
        try:
            while self._answers or self._waiting:
                if self._answers or self._waiting[0].size <= _SMALL_BYTES:
                    await self._write_together()
                else:
                    await self._write_transfer(self._waiting.popleft())
        except STREAM_ERRORS as error:
            self.break_off(describe(error))
        finally:
            self._writer = None

    async def _write_together(self) -> None:
        """Acknowledgements and small transfers, in one message."""
        await self._pace.turn(busy=bool(self._unanswered))
        frames: list[bytes] = []
        transfers: list[_Outgoing] = []
        while self._answers and len(frames) < FRAMES_TOGETHER:
            frames.append(self._answers.popleft())
        room = _SMALL_BYTES
        while self._waiting and len(frames) < FRAMES_TOGETHER:
            room -= self._waiting[0].size
            if room < 0:
                break
            transfers.append(self._waiting.popleft())
            frames += self._number(transfers[-1])
        self._pace.leave(len(frames))
        if frames:
            await self._write_message(join_frames(frames))
        for outgoing in transfers:
            outgoing.written_at = perf_counter()

    async def _write_transfer(self, outgoing: _Outgoing) -> None:
        for frame in self._number(outgoing):
            await self._write_message(frame)
        outgoing.written_at = perf_counter()

    def _number(self, outgoing: _Outgoing) -> Iterable[bytes]:
        number = next(self._numbers)
        self._unanswered[number] = outgoing
        outgoing.left_at = perf_counter()
        return outgoing.frames(number)

    async def _write_message(self, message: bytes) -> None:
        self._writing_since = perf_counter()
        await self._write(message)
        self._writing_since = math.inf

    def _look_again(self) -> None:
        """See whether anything stands still; later again, while something is under way."""
        overdue = perf_counter() - _STEP_SECONDS
        if self._writing_since < overdue:
            self.break_off(f"no progress within {_STEP_SECONDS:.0f} s")
        for number, outgoing in list(self._unanswered.items()):
            if outgoing.written_at < overdue:
                del self._unanswered[number]
                _give_up(outgoing, f"no acknowledgement within {_STEP_SECONDS:.0f} s")
        self._watch = None
        if self._broken is None and (self._writer is not None or self._unanswered):
            loop = asyncio.get_running_loop()
            self._watch = loop.call_later(_STEP_SECONDS / 4, self._look_again)


def _give_up(outgoing: _Outgoing, reason: str) -> None:
    if not outgoing.answered.done():
        outgoing.answered.set_exception(Undelivered(reason))
        outgoing.answered.exception()  # a sender that gave up must not make it a warning


class PeerLink:
    """The stream to one peer, opened when it is first needed and again after it broke."""

    def __init__(self, channel: grpc.aio.Channel, uplink: Uplink) -> None:
        self._channel = channel
        self.client = PeerClient(channel)
        self._uplink = uplink
        self._codec = LinkCodec()
        self._sender: Sender | None = None
        self._reader: asyncio.Task[None] | None = None

    async def send(self, parcel: OutboundActivation) -> int:
        """Deliver to the peer; raises `Undelivered`."""
        if self._sender is None:
            call = self.client.push()
            self._sender = Sender(call.write, self._uplink, self._codec, call.cancel)
            self._reader = asyncio.create_task(
                self._read(call, self._sender), name="acks of a peer"
            )
        return await self._sender.send(parcel)

    def hang_up(self, reason: str) -> None:
        """Give up what is on its way; what is sent later goes over another stream."""
        if self._sender is not None:
            self._sender.break_off(reason)
            self._sender = None

    async def close(self) -> None:
        """Hang up, for good."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._sender is not None:
            await self._sender.close()
        await self._channel.close()

    async def _read(self, call: FrameStream, sender: Sender) -> None:
        reason = "the peer has closed the stream"
        try:
            async for message in call:
                for frame in frames_in(message):
                    header, _ = split_frame(frame)
                    if header.WhichOneof("kind") == "acknowledgement":
                        sender.acknowledge(header)
        except STREAM_ERRORS as error:
            reason = describe(error)
        except MalformedFrame as error:
            reason = f"the peer breaks the protocol: {error}"
        finally:
            call.cancel()
            sender.fail(reason)
            if self._sender is sender:
                self._sender = None
            await sender.close()


class PeerLinks:
    """The links to all peers, by address. The certificate there must be the meant device's."""

    def __init__(self, credentials: Credentials | None, uplink: Uplink, *, insecure: bool) -> None:
        self._credentials = credentials
        self._insecure = insecure
        self._uplink = uplink
        self._links: dict[tuple[str, str], PeerLink] = {}

    def link(self, device: str, address: str) -> PeerLink:
        """The link to a peer; raises `Undelivered` where its address cannot be used."""
        key = (device, address)
        if key not in self._links:
            try:
                channel = open_channel(
                    address,
                    self._credentials,
                    insecure=self._insecure,
                    server_name=device or None,
                )
            except (AddressRefused, OSError) as error:
                raise Undelivered(str(error)) from error
            self._links[key] = PeerLink(channel, self._uplink)
        return self._links[key]

    def hang_up(self, device: str) -> None:
        """A device is lost: who waits for it is told so at once."""
        for (name, _), link in self._links.items():
            if name == device:
                link.hang_up(f"the coordinator has lost {device}")

    async def close(self) -> None:
        """Hang up everywhere."""
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links))


def describe(error: BaseException) -> str:
    """A gRPC error in one line."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
