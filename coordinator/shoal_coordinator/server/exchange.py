"""Bulk bytes between the coordinator and its devices: inputs down, results up, activations across.

Each device has one `ExchangeLink`. Reading and writing never wait for each other, which is what
keeps relaying free of deadlock: two devices that send to one another while neither reads would
otherwise hold each other up for ever. So whatever a reader has to wait for, it waits for a bounded
time, and then says BUSY; the sender keeps the activation and comes again.

A transfer that is meant for another device is passed on frame by frame as it comes, under a new
number, through a buffer of `PASSAGE_FRAMES`; its acknowledgement goes back the other way. If it
breaks off in the middle, the receiver is sent a last frame that does not add up, which makes it
drop the transfer.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import Final, Protocol

from shoal_protocol.assembly import ActivationAssembler, Limits, ReceivedActivation
from shoal_protocol.codecs import LinkCodec
from shoal_protocol.frames import (
    FRAMES_TOGETHER,
    TransferError,
    acknowledgement,
    frames_in,
    join_frame,
    join_frames,
    split_frame,
)
from shoal_protocol.v1.tensors_pb2 import Acknowledgement, Activation, FrameHeader

PASSAGE_FRAMES: Final = 4
WAITING_TRANSFERS: Final = 64
"""Transfers that may wait for one device's link."""
UNREAD_ANSWERS: Final = 4096
RESULT_BYTES: Final = 1 << 29
"""Results of all devices that are being received, together; one alone may be larger."""
PATIENCE_SECONDS: Final = 2.0
"""How long a reader waits for room."""
STEP_SECONDS: Final = 30.0
"""How long one frame, or the acknowledgement after the last, may take."""

Write = Callable[[bytes], Awaitable[None]]


class LinkBroken(ConnectionError):
    """The stream ended, or stood still for too long."""


class StallWatch:
    """Notices a write that stands still. (A timer for each write would cost more than the write.)

    Late by a quarter of the limit, at most.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._begun: float | None = None

    def begin(self) -> None:
        self._begun = monotonic()

    def end(self) -> None:
        self._begun = None

    async def watch(self) -> None:
        """Raise `TimeoutError` once a write has taken too long."""
        while True:
            await asyncio.sleep(self._limit_seconds / 4)
            if self._begun is not None and monotonic() - self._begun > self._limit_seconds:
                raise TimeoutError


class ResultTaker(Protocol):
    """Who knows the jobs."""

    def admit(self, device: str, activation: Activation) -> None:
        """Raise `TransferError` for a result that nobody waits for."""
        ...

    def passes(self, activation: Activation) -> bool:
        """Whether an activation to be relayed is of a job that runs, and of its epoch."""
        ...

    async def take(self, device: str, received: ReceivedActivation) -> None:
        """A result has arrived; returns when it needs no memory any more. Raises
        `TransferError`."""
        ...


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A transfer on its way to a device."""

    number: int
    frames: AsyncIterator[bytes]
    answered: asyncio.Future[Acknowledgement]


@dataclass(slots=True, eq=False)
class _Passage:
    """A transfer that is being relayed: filled by one link's reader, emptied by another's
    writer."""

    source: int
    number: int
    answered: asyncio.Future[Acknowledgement]
    frames: asyncio.Queue[tuple[bytes, bool] | None] = field(
        default_factory=lambda: asyncio.Queue(PASSAGE_FRAMES)
    )
    passed: int = 0

    async def drain(self) -> AsyncIterator[bytes]:
        """The frames; the one that ends a broken transfer if the source stops giving any."""
        last = False
        while not last:
            try:
                async with asyncio.timeout(STEP_SECONDS):
                    given = await self.frames.get()
            except TimeoutError:
                given = None
            if given is None:
                if not self.answered.done():
                    self.answered.set_exception(LinkBroken("the sender broke off"))
                given = (_ending(self.number, self.passed), True)
            frame, last = given
            yield frame

    def clear(self) -> None:
        """Make room for whoever waits to put a frame."""
        while not self.frames.empty():
            self.frames.get_nowait()


def _ending(number: int, offset: int) -> bytes:
    return join_frame(FrameHeader(transfer=number, offset=offset, last=True))


class ExchangeHub:
    """The links of all devices."""

    def __init__(self, taker: ResultTaker) -> None:
        self.taker = taker
        self.links: dict[str, ExchangeLink] = {}
        self.relayed_bytes = 0
        self.received_bytes = 0
        self.sent_bytes = 0
        self._receiving = 0

    def reserve(self, size: int) -> None:
        """Make room for a result, or raise BUSY."""
        if self._receiving and self._receiving + size > RESULT_BYTES:
            raise TransferError("the coordinator is full", outcome=Acknowledgement.BUSY)
        self._receiving += size

    def give_back(self, size: int) -> None:
        self._receiving -= size

    def bytes_receiving(self) -> int:
        """What unfinished results take in memory."""
        return self._receiving


class ExchangeLink:
    """The bulk stream of one device, for as long as it lasts."""

    def __init__(self, device: str, hub: ExchangeHub, write: Write) -> None:
        self.device = device
        self.codec = LinkCodec()
        self._hub = hub
        self._write = write
        self._numbers = count(1)
        self._assembler = ActivationAssembler(Limits(), self._admit)
        self._reserved = 0
        self._passage: _Passage | None = None
        self._passed_over: int | None = None
        self._answers: deque[bytes] = deque()
        self._waiting: deque[_Outgoing] = deque()
        self._unanswered: dict[int, asyncio.Future[Acknowledgement]] = {}
        self._work = asyncio.Event()
        self._writes = StallWatch(STEP_SECONDS)
        self._room = asyncio.Event()
        self._room.set()
        self.broken: str | None = None

    # ---- sending ---------------------------------------------------------------------------------

    async def send(self, frames: Callable[[int], Iterable[bytes]]) -> Acknowledgement:
        """Send one transfer, whose frames are made from its number; the device's answer.

        Raises `LinkBroken`.
        """
        outgoing = self._enqueue(lambda number: _given(frames(number)))
        return await outgoing.answered

    async def write_all(self) -> None:
        """Write what is waiting, until the stream breaks."""
        while True:
            await self._write_answers()
            if self._waiting:
                outgoing = self._waiting.popleft()
                if len(self._waiting) < WAITING_TRANSFERS:
                    self._room.set()
                await self._write_transfer(outgoing)
            else:
                self._work.clear()
                await self._work.wait()

    async def watch_writes(self) -> None:
        """Raise `TimeoutError` once the device does not read."""
        await self._writes.watch()

    async def _write_transfer(self, outgoing: _Outgoing) -> None:
        async for frame in outgoing.frames:
            await self._write_frame(frame)
            await self._write_answers()
        loop = asyncio.get_running_loop()
        loop.call_later(STEP_SECONDS, self._expire, outgoing.number)

    async def _write_answers(self) -> None:
        while self._answers:
            together = min(len(self._answers), FRAMES_TOGETHER)
            await self._write_frame(join_frames([self._answers.popleft() for _ in range(together)]))

    async def _write_frame(self, frame: bytes) -> None:
        self._writes.begin()
        await self._write(frame)
        self._writes.end()
        self._hub.sent_bytes += len(frame)

    def _enqueue(self, frames: Callable[[int], AsyncIterator[bytes]]) -> _Outgoing:
        if self.broken is not None:
            raise LinkBroken(self.broken)
        number = next(self._numbers)
        answered: asyncio.Future[Acknowledgement] = asyncio.get_running_loop().create_future()
        outgoing = _Outgoing(number, frames(number), answered)
        self._unanswered[number] = answered
        self._waiting.append(outgoing)
        if len(self._waiting) >= WAITING_TRANSFERS:
            self._room.clear()
        self._work.set()
        return outgoing

    def _answer(self, transfer: int, outcome: Acknowledgement.Outcome, message: str = "") -> None:
        self._answers.append(acknowledgement(transfer, outcome, message))
        self._work.set()
        if len(self._answers) > UNREAD_ANSWERS:
            raise LinkBroken(f"{self.device} does not read its acknowledgements")

    def _expire(self, number: int) -> None:
        self._fail(number, f"no acknowledgement from {self.device} within {STEP_SECONDS:g} s")

    def _fail(self, number: int, reason: str) -> None:
        answered = self._unanswered.pop(number, None)
        if answered is not None and not answered.done():
            answered.set_exception(LinkBroken(reason))
            answered.exception()  # a relay's source may be gone: nobody has to ask for it

    # ---- receiving -------------------------------------------------------------------------------

    async def read_all(self, requests: AsyncIterator[bytes]) -> None:
        """Handle what the device sends until it ends. Raises `MalformedFrame`."""
        async for message in requests:
            self._hub.received_bytes += len(message)
            for frame in frames_in(message):
                await self._take(*split_frame(frame))

    async def _take(self, header: FrameHeader, payload: memoryview) -> None:
        match header.WhichOneof("kind"):
            case "acknowledgement":
                answered = self._unanswered.pop(header.transfer, None)
                if answered is not None and not answered.done():
                    answered.set_result(header.acknowledgement)
            case "ping":
                self._answer(header.transfer, Acknowledgement.ACCEPTED)
            case "activation" if header.activation.device:
                await self._begin_passage(header, payload)
            case None if self._passage and header.transfer == self._passage.source:
                await self._pass(header, payload)
            case None if self._passed_over == header.transfer:
                pass
            case _:
                await self._receive(header, payload)

    async def _receive(self, header: FrameHeader, payload: memoryview) -> None:
        """A frame of a result."""
        try:
            received = self._assembler.add(header, payload)
            if received is None:
                return
            await self._hub.taker.take(self.device, received)
        except TransferError as error:
            self._give_back()
            self._answer(header.transfer, error.outcome, error.reason)
        else:
            self._give_back()
            self._answer(header.transfer, Acknowledgement.ACCEPTED)

    def _admit(self, activation: Activation, cost: int) -> None:
        self._hub.taker.admit(self.device, activation)
        self._hub.reserve(cost)
        self._reserved = cost

    def _give_back(self) -> None:
        self._hub.give_back(self._reserved)
        self._reserved = 0

    # ---- relaying --------------------------------------------------------------------------------

    async def _begin_passage(self, header: FrameHeader, payload: memoryview) -> None:
        source, target = header.transfer, self._hub.links.get(header.activation.device)
        self._break_passage()
        self._passed_over = source
        if not self._hub.taker.passes(header.activation):
            self._answer(source, Acknowledgement.STALE, "the job does not run in this epoch")
            return
        if target is None:
            reason = f"{header.activation.device} is not connected"
            self._answer(source, Acknowledgement.STALE, reason)
            return
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await target._room.wait()
            passage = target._open_passage(source)
        except (TimeoutError, LinkBroken):
            self._answer(source, Acknowledgement.BUSY, f"{target.device} is behind")
            return
        passage.answered.add_done_callback(lambda _: passage.clear())
        passage.answered.add_done_callback(lambda answered: self._passed(source, answered))
        self._passage, self._passed_over = passage, None
        await self._pass(header, payload)

    def _open_passage(self, source: int) -> _Passage:
        """A way for another link's transfer to this device."""
        answered: asyncio.Future[Acknowledgement] = asyncio.get_running_loop().create_future()
        passage = _Passage(source, 0, answered)
        outgoing = self._enqueue(lambda _: passage.drain())
        passage.number, passage.answered = outgoing.number, outgoing.answered
        return passage

    async def _pass(self, header: FrameHeader, payload: memoryview) -> None:
        passage = self._passage
        assert passage is not None
        header.transfer = passage.number
        try:
            async with asyncio.timeout(STEP_SECONDS):
                await passage.frames.put((join_frame(header, payload), header.last))
        except TimeoutError:
            self._break_passage()
            self._passed_over = passage.source
            return
        passage.passed += len(payload)
        self._hub.relayed_bytes += len(payload)
        if passage.answered.done():
            # Refused before its end: what is still to come of it is of no use.
            self._passage, self._passed_over = None, None if header.last else passage.source
        elif header.last:
            self._passage = None

    def _passed(self, source: int, answered: asyncio.Future[Acknowledgement]) -> None:
        """The receiver of a relayed transfer has answered, or is gone."""
        if answered.cancelled() or answered.exception() is not None:
            self._answer(source, Acknowledgement.BUSY, "the receiver's link broke")
        else:
            self._answer(source, answered.result().outcome, answered.result().message)

    def _break_passage(self) -> None:
        """The transfer that is being relayed will not be completed."""
        passage, self._passage = self._passage, None
        if passage is not None:
            passage.clear()
            passage.frames.put_nowait(None)

    # ---- the end ---------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Nothing more will be sent or received."""
        self.broken = self.broken or reason
        self._break_passage()
        self._give_back()
        for number in list(self._unanswered):
            self._fail(number, reason)
        self._waiting.clear()
        self._room.set()


async def _given(frames: Iterable[bytes]) -> AsyncIterator[bytes]:
    for frame in frames:
        yield frame
