"""Activations on their way out: over the stream to the coordinator, and over one stream per peer.

A transfer counts as delivered when the other side has acknowledged it. What can go wrong is one
error, `Undelivered`, whose `outcome` says what the receiver thought of it; None: it could not be
reached.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from time import perf_counter
from typing import Final

import grpc

from shoal_agent.shell.shaping import STREAM_ERRORS, DelayLine, Uplink, Write
from shoal_protocol.channels import AddressRefused, Credentials, open_channel
from shoal_protocol.codecs import LinkCodec
from shoal_protocol.frames import (
    MAXIMUM_PAYLOAD_BYTES,
    MalformedFrame,
    split_frame,
)
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
class Parcel:
    """What is to be sent: tensors on one edge, and the device they are for (empty: a result)."""

    key: ActivationKey
    device: str
    tensors: Mapping[str, Array]
    lossy: bool = False


class Sender:
    """The sending half of one bulk stream. Transfers follow one another; several may be unanswered.

    The reading half gives acknowledgements to `acknowledge`, and the stream's end to `fail`.
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
        self._turn = asyncio.Lock()
        self._unanswered: dict[int, asyncio.Future[Acknowledgement]] = {}
        self._answers: set[asyncio.Task[None]] = set()
        self._broken: str | None = None
        self.round_trip_seconds: float | None = None

    async def send(self, parcel: Parcel) -> int:
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

    def answer(self, frame: bytes) -> None:
        """Send an acknowledgement, between two transfers. (The reader must never wait for this.)"""
        task = asyncio.create_task(self._answer(frame), name="acknowledge")
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    def acknowledge(self, header: FrameHeader) -> None:
        """An acknowledgement has come; one that nobody waits for is ignored."""
        future = self._unanswered.pop(header.transfer, None)
        if future is not None and not future.done():
            future.set_result(header.acknowledgement)

    def fail(self, reason: str) -> None:
        """The stream has ended: nothing that is under way will be acknowledged."""
        self._broken = reason
        for future in self._unanswered.values():
            if not future.done():
                future.set_exception(Undelivered(reason))
                future.exception()  # a sender that gave up must not make it a warning
        self._unanswered.clear()

    async def close(self) -> None:
        """`fail`, and stop what works for this stream."""
        self.fail(self._broken or "closed")
        for task in list(self._answers):
            task.cancel()
        if self._line is not None:
            await self._line.close()

    async def _encode(self, parcel: Parcel) -> EncodedActivation:
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
        """One try: the frames, when it is their turn, and the other side's answer."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Acknowledgement] = loop.create_future()
        number = 0
        try:
            async with asyncio.timeout(None) as limit:
                async with self._turn:
                    if self._broken is not None:
                        raise Undelivered(self._broken)
                    number = next(self._numbers)
                    self._unanswered[number] = answered
                    begun = perf_counter()
                    await self._write_frames(replace(encoded, transfer=number), limit)
                sent = perf_counter()
                answer = await answered
        except STREAM_ERRORS as error:
            raise Undelivered(self._broken or describe(error)) from error
        except TimeoutError as error:
            raise Undelivered(f"no progress within {_STEP_SECONDS:.0f} s") from error
        finally:
            self._unanswered.pop(number, None)
        answered_at = perf_counter()
        self.round_trip_seconds = answered_at - sent
        if answer.outcome == Acknowledgement.ACCEPTED:
            self._codec.observe_transfer(encoded.encoded_bytes, answered_at - begun)
        return answer

    async def _write_frames(self, encoded: EncodedActivation, limit: asyncio.Timeout) -> None:
        """Each step, and the answer after the last, may take `_STEP_SECONDS`."""
        loop = asyncio.get_running_loop()
        whole = False
        try:
            for frame in encoded:
                limit.reschedule(loop.time() + _STEP_SECONDS)
                await self._write(frame)
            limit.reschedule(loop.time() + _STEP_SECONDS)
            whole = True
        finally:
            if not whole:
                self.fail("a transfer broke off")
                self._abort()

    async def _answer(self, frame: bytes) -> None:
        async with self._turn:
            # By the same way as the rest: two writes at once break a stream.
            with suppress(*STREAM_ERRORS):
                await self._write(frame)


class PeerLink:
    """The stream to one peer, opened when it is first needed and again after it broke."""

    def __init__(self, channel: grpc.aio.Channel, uplink: Uplink) -> None:
        self._channel = channel
        self.client = PeerClient(channel)
        self._uplink = uplink
        self._codec = LinkCodec()
        self._sender: Sender | None = None
        self._reader: asyncio.Task[None] | None = None

    async def send(self, parcel: Parcel) -> int:
        """Deliver to the peer; raises `Undelivered`."""
        if self._sender is None:
            call = self.client.push()
            self._sender = Sender(call.write, self._uplink, self._codec, call.cancel)
            self._reader = asyncio.create_task(
                self._read(call, self._sender), name="acks of a peer"
            )
        return await self._sender.send(parcel)

    async def close(self) -> None:
        """Hang up."""
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
                header, _ = split_frame(message)
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

    async def close(self) -> None:
        """Hang up everywhere."""
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links))


def describe(error: BaseException) -> str:
    """A gRPC error in one line."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
