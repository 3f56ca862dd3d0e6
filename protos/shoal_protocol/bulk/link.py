"""One bulk stream: the loop that both processes run on either end of it.

Transfers leave one after the other; several may be unacknowledged. A small one that is alone leaves
at once, and so does each item on a local link. The writer sends what is small and waits as one
message, acknowledgements between the frames of a large transfer, and one that the receiver has no
room for (BUSY) again after a while.

Two peers that write while neither reads would block each other for ever. So the reader never waits
for the writer. It writes itself where nothing of this end is under way: acknowledgements alone, and
then the other end has none to write.

Everything is bounded. `WAITING_TRANSFERS` may wait for the writer; who sends more waits for room.
A link ends when one write takes longer than `STEP_SECONDS`, when the other side stops for so long
within a transfer, and when it leaves `UNREAD_ANSWERS` acknowledgements unread; a transfer fails
that is not acknowledged in that time.
"""

import asyncio
import math
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from itertools import count
from time import perf_counter
from typing import Final, cast

from shoal_protocol import eager
from shoal_protocol.bulk.handlers import FrameHandler, ItemHandler
from shoal_protocol.bulk.outgoing import Leaving, Unanswered, UnansweredFrames, encode
from shoal_protocol.bulk.outgoing import (
    OutboundActivation as OutboundActivation,  # noqa: PLC0414 (offered from here)
)
from shoal_protocol.bulk.outgoing import Outgoing as Outgoing  # noqa: PLC0414 (as well)
from shoal_protocol.bulk.outgoing import Traffic as Traffic  # noqa: PLC0414 (as well)
from shoal_protocol.bulk.outgoing import Undelivered as Undelivered  # noqa: PLC0414 (as well)
from shoal_protocol.bulk.sources import Frames, read_in_thread
from shoal_protocol.bulk.standstill import LOOKS, Standstill
from shoal_protocol.bulk.transport import Received, Transport, TransportBroken
from shoal_protocol.codecs import LinkCodec
from shoal_protocol.frames import FRAMES_TOGETHER, Frame, MalformedFrame, acknowledgement, ping
from shoal_protocol.pacing import LONGEST_SECONDS, Pace
from shoal_protocol.partition import MODEL
from shoal_protocol.v1.tensors_pb2 import Acknowledgement, FrameHeader

WAITING_TRANSFERS: Final = 64
UNREAD_ANSWERS: Final = 4096
STEP_SECONDS: Final = 30.0
BUSY_SECONDS: Final = 60.0
"""For how long a result that the coordinator has no room for is sent again."""
ROOM_SECONDS: Final = 5.0
"""The same of what a device has no room for: what waits for it may keep the room from others."""
PING_BYTES: Final = 256 << 10
_LARGE_ANSWERS: Final = 4
"""A ping that finds so many answers unread gets one without bytes."""
_SMALL_BYTES: Final = 64 << 10
"""Transfers that leave as one message may have so many bytes together."""
_PUSHED_BYTES: Final = 256 << 10
"""The same of items: a message has room for more beside them."""
_LOCAL_ANSWERS: Final = 8
"""Acknowledgements that leave together where a write costs little: a sender that waits for them
continues while the rest of what came with them is still being taken."""


class BulkLink:
    """One end of a stream. `run` serves it; `send` may be called from the start."""

    def __init__(
        self,
        transport: Transport,
        handler: FrameHandler | None = None,
        *,
        codec: LinkCodec | None = None,
        traffic: Traffic | None = None,
        items: ItemHandler | None = None,
    ) -> None:
        """Without a handler the other side may acknowledge and nothing else; without one for items
        it may send none."""
        self._transport = transport
        self._handler = handler
        self._items = items
        self._codec = codec or LinkCodec()
        self._traffic = traffic or Traffic()
        self._numbers = count(1)
        # A write to a local stream costs so little that nobody waits for more to leave with it.
        self._pace = None if transport.local else Pace(LONGEST_SECONDS)
        self.broken: str | None = None
        """Why the link has ended; None while it has not."""
        self._room = asyncio.Event()
        self._waiting: deque[Outgoing] = deque()
        self._answers: deque[Frame] = deque()
        self.pushed = UnansweredFrames()
        self._answers_together = _LOCAL_ANSWERS if transport.local else FRAMES_TOGETHER
        self._unanswered: dict[int, Outgoing] = {}
        self.leaving = Leaving()
        self._writer: eager.Running[None] | None = None
        self._writing = self._left_at_once = self._items_came = self._full = False
        self._writing_since = math.inf
        self._coming = Standstill(transport)
        self._watch: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = self._loop.create_future()

    async def run(self) -> str:
        """Serve the stream until it ends; why it did. Raises `MalformedFrame`."""
        reading = eager.Running(self._read(), None)
        reason = "closed"
        try:
            await asyncio.wait((reading.ended, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if reading.ended.done():
                reason = reading.ended.result()
                await self._flush_answers()
        except MalformedFrame as error:
            reason = str(error)
            raise
        finally:
            self.end(reason)
            running = [each for each in (reading, self._writer) if each is not None]
            for each in running:
                each.cancel()
            await asyncio.gather(*(each.ended for each in running), return_exceptions=True)
            await self._transport.close()
        return self.broken or reason

    def end(self, reason: str) -> None:
        """End the link: what is on its way will not be acknowledged. `run` returns."""
        if self.broken is not None:
            return
        self.broken = reason
        self._ended.set_result(reason)
        for outgoing in (*self._unanswered.values(), *self._waiting):
            outgoing.fail(reason)
        self._unanswered.clear()
        self._waiting.clear()
        self._answers.clear()
        self.pushed.drop()
        self._full = False
        self._room.set()
        if self._watch is not None:
            self._watch.cancel()

    # ---- sending ---------------------------------------------------------------------------------

    async def send(self, outbound: OutboundActivation) -> int:
        """Deliver; the bytes that it took on the wire. Raises `Undelivered`,
        `UnsupportedTensor`."""
        codec = None if self._transport.local or self._codec.fast else self._codec
        encoded = await encode(outbound, codec, self._transport.frame_bytes)
        settle = outbound.settle

        def frames_from_disk(number: int) -> AsyncIterator[Frame]:
            assert settle is not None, "it is on disk"
            return read_in_thread(encoded.frames(number), settle)

        patience = BUSY_SECONDS if outbound.key.consumer == MODEL else ROOM_SECONDS
        started, delay = perf_counter(), 0.02
        while True:
            begun = perf_counter()
            if settle is None:
                outgoing = await self.enqueue(encoded.frames, size=encoded.encoded_bytes)
            else:
                outgoing = await self.enqueue(frames_from_disk)
            try:
                answer = await outgoing.answered
            except asyncio.CancelledError:
                await self.leaving.until_left(outgoing)
                raise
            if answer.outcome == Acknowledgement.ACCEPTED:
                self._codec.observe_transfer(encoded.encoded_bytes, perf_counter() - begun)
                return encoded.encoded_bytes
            late = perf_counter() - started > patience
            if answer.outcome != Acknowledgement.BUSY or late:
                raise Undelivered(answer.message, answer.outcome)
            await asyncio.sleep(delay)
            delay = min(1.0, 2 * delay)

    async def ping(self, size: int = 0, answer_bytes: int = 0) -> float:
        """Seconds to the other side and back, for so many bytes that leave when it is their turn,
        at most `PING_BYTES`. Raises `Undelivered`."""
        frame = partial(ping, payload=os.urandom(size), answer_bytes=answer_bytes)
        outgoing = await self.enqueue(lambda number: [frame(number)], size=size)
        await outgoing.answered
        return perf_counter() - outgoing.left_at

    @property
    def probed(self) -> bool:
        """Whether a probe would tell what it carries, and disturb nothing: it goes to another host,
        and nothing is on its way."""
        return not (self._transport.local or self._writing or self._waiting or self._unanswered)

    async def enqueue(self, frames: Frames, *, size: float = math.inf) -> Outgoing:
        """Have a transfer sent once (see `Outgoing`), when there is room for it and it is its turn.
        Raises `Undelivered`; so does waiting for `answered`."""
        if self._full or len(self._waiting) >= WAITING_TRANSFERS:
            await self._wait_for_room()
        if self.broken is not None:
            raise Undelivered(self.broken)
        answered: eager.Prompt[Acknowledgement] = eager.Prompt(loop=self._loop)
        outgoing = Outgoing(next(self._numbers), frames, size, answered)
        self._waiting.append(outgoing)
        self._wake()
        return outgoing

    async def _wait_for_room(self) -> None:
        """Returns when there is room, or the link has ended. Once it is full, whoever comes waits
        until half has left: so nobody who waits is overtaken for ever."""
        self._traffic.full_queues += 1
        while self._full or len(self._waiting) >= WAITING_TRANSFERS:
            self._full = True
            self._room.clear()
            await self._room.wait()

    def answer(self, frame: Frame) -> None:
        """Send an acknowledgement, as soon as a frame can leave."""
        if self.broken is None:
            self._answers.append(frame)
            self._wake()

    def push(self, frame: Frame, left: Callable[[], None]) -> None:
        """Send a small frame that nobody acknowledges; `left` is called once, when it has left or
        never will. Whoever calls bounds how many wait. Raises `Undelivered`."""
        if self.broken is not None:
            raise Undelivered(self.broken)
        self.pushed.append(Unanswered(frame, left))
        self._wake()

    async def confirm(self) -> None:
        """Learn that all that was pushed has arrived. Raises `Undelivered`."""
        if self.pushed.arrived < self.pushed.number:
            await self.ping()

    def on_end(self, act: Callable[[str], None]) -> None:
        """Have it called with the reason when the link has ended."""
        self._ended.add_done_callback(lambda ended: act(ended.result()))

    # ---- writing ---------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._writing:
            self._writing = True
            # What is alone leaves at once; where more is under way, the next of this turn join it.
            alone = not (self._left_at_once or self._unanswered)
            alone = alone and len(self._waiting) + len(self._answers) + len(self.pushed) == 1
            work = self._write_all()
            self._writer = eager.start(work) if alone else eager.Running(work, None)
            # A turn of the loop, only to count it, costs more than another write to a local stream.
            if alone and not self._unanswered and self._pace is not None:
                self._left_at_once = True
                self._loop.call_soon(self._end_turn)
            if self._watch is None:
                self._watch_progress()

    def _end_turn(self) -> None:
        self._left_at_once = False

    async def _write_all(self) -> None:
        try:
            while self._answers or self.pushed or self._waiting:
                # Whatever is small leaves as one message.
                if self._answers or self.pushed or self._waiting[0].size <= _SMALL_BYTES:
                    await self._write_together()
                elif (outgoing := self._next()) is not None:
                    # What is yet to come may wait for it as only a task can.
                    work = self._write_transfer(outgoing)
                    await (work if outgoing.size < math.inf else asyncio.create_task(work))
        except TransportBroken as error:
            self.end(str(error))
        except Exception as error:
            self.end(f"internal error: {error!r}")
            raise
        finally:
            self._writing = False

    async def _write_together(self) -> None:
        """Acknowledgements, items and small transfers, in one message."""
        if self._pace is not None:
            await self._pace.turn(busy=bool(self._unanswered))
        frames = self._take_answers() if self._answers else []
        pushed: list[Unanswered] = []
        if self.pushed:
            pushed = self.pushed.take(FRAMES_TOGETHER - len(frames), _PUSHED_BYTES)
            frames += [each.frame for each in pushed]
        transfers = self._join(frames, pushed) if self._waiting else []
        if self._pace is not None:
            self._pace.leave(len(frames))
        try:
            if frames:
                await self._write(frames)
        finally:
            for each in pushed:
                each.left()
        for outgoing in transfers:
            outgoing.written_at = perf_counter()

    def _join(self, frames: list[Frame], pushed: Iterable[Unanswered]) -> list[Outgoing]:
        """Have small transfers leave with these frames, of which some were pushed."""
        room = float(_SMALL_BYTES)
        transfers: list[Outgoing] = []
        for each in pushed:
            room -= each.frame.size
        while self._waiting and len(frames) < FRAMES_TOGETHER:
            room -= self._waiting[0].size
            if room < 0:
                break
            if (outgoing := self._next()) is not None:
                transfers.append(outgoing)
                # What has a size is at hand.
                frames += cast("Iterable[Frame]", outgoing.frames(outgoing.number))
                outgoing.forget()
        return transfers

    async def _write_transfer(self, outgoing: Outgoing) -> None:
        frames = outgoing.frames(outgoing.number)
        with self.leaving.of(outgoing):
            if isinstance(frames, AsyncIterator):
                async for frame in frames:
                    await self._write_frame(frame)
            else:
                for frame in frames:
                    await self._write_frame(frame)
        outgoing.written_at = perf_counter()

    async def _write_frame(self, frame: Frame) -> None:
        """One of a large transfer, and the acknowledgements that have gathered."""
        await self._write((frame,))
        while self._answers:
            await self._write(self._take_answers())

    async def _flush_answers(self) -> None:
        """The other side has ended its direction: it may still wait for acknowledgements."""
        if self._writer is not None and not self._waiting and not self._unanswered:
            await asyncio.wait((self._writer.ended,), timeout=STEP_SECONDS)

    def _next(self) -> Outgoing | None:
        """The transfer whose turn it is; None: its sender has given it up."""
        outgoing = self._waiting.popleft()
        if self._full and len(self._waiting) <= WAITING_TRANSFERS // 2:
            self._full = False
            self._room.set()
        if outgoing.answered.cancelled():
            return None
        self._unanswered[outgoing.number] = outgoing
        outgoing.left_at, outgoing.behind = perf_counter(), self.pushed.left
        return outgoing

    def _take_answers(self) -> list[Frame]:
        taken: list[Frame] = []
        while self._answers and len(taken) < FRAMES_TOGETHER:
            taken.append(self._answers.popleft())
        return taken

    async def _write(self, frames: Sequence[Frame]) -> None:
        self._writing_since = perf_counter()
        await self._transport.write(frames)
        self._writing_since = math.inf
        for frame in frames:
            self._traffic.sent_bytes += len(frame.header) + frame.payload_bytes

    def _watch_progress(self) -> None:
        if self.broken is None:
            self._watch = self._loop.call_later(STEP_SECONDS / LOOKS, self._check_progress)

    def _check_progress(self) -> None:
        """End a link that has stalled; again later, while something is under way."""
        self._watch = None
        overdue = perf_counter() - STEP_SECONDS
        if self._writing_since < overdue:
            self.end(f"the other side does not read: no progress within {STEP_SECONDS:g} s")
            return
        if self._coming.look():
            self.end(f"the other side has stopped within a transfer for {STEP_SECONDS:g} s")
            return
        for number, outgoing in list(self._unanswered.items()):
            if outgoing.written_at < overdue:
                del self._unanswered[number]
                outgoing.fail(f"no acknowledgement within {STEP_SECONDS:g} s")
        if self._writing or self._unanswered or self._coming.within:
            self._watch_progress()

    # ---- reading ---------------------------------------------------------------------------------

    async def _read(self) -> str:
        """Handle what the other side sends until it ends; why it did."""
        try:
            async for frames in self._transport.received():
                try:
                    for frame in frames:
                        await self._handle(frame)
                        if len(self._answers) >= self._answers_together:
                            await self._acknowledge()
                finally:  # items do not wait for others where rubbish follows them
                    if self._items is not None and self._items_came:
                        self._items_came = False
                        self._items.all_taken()
                if self._answers:
                    await self._acknowledge()
        except TransportBroken as error:
            return str(error)
        return "the other side has closed the stream"

    async def _handle(self, frame: Received) -> None:
        header = frame.header
        self._traffic.received_bytes += frame.size
        self._coming.within = True
        if self._watch is None:
            self._watch_progress()
        match header.WhichOneof("kind"):
            case "acknowledgement":
                self._take_answer(header)
            case "ping":
                wanted = header.ping.answer_bytes if len(self._answers) < _LARGE_ANSWERS else 0
                payload = os.urandom(min(wanted, PING_BYTES))
                self._answers.append(acknowledgement(header.transfer, payload=payload))
            case "closing":
                raise TransportBroken(header.closing.reason)
            case "items":
                if self._items is None:
                    raise MalformedFrame("items where none belong")
                self._items_came = True
                await self._items.take_items(header.items, frame.payload)
            case _ if self._handler is None:
                raise MalformedFrame("a transfer where only acknowledgements belong")
            case _:
                if (answer := await self._handler.take(header, frame.payload)) is not None:
                    self._answers.append(answer)
        self._coming.within = not header.last

    def _take_answer(self, header: FrameHeader) -> None:
        if (outgoing := self._unanswered.pop(header.transfer, None)) is not None:
            self.pushed.arrived = max(self.pushed.arrived, outgoing.behind)
            if not outgoing.answered.done():
                outgoing.answered.give(header.acknowledgement)

    async def _acknowledge(self) -> None:
        """Write acknowledgements here where nothing else is under way: a task of its own would cost
        as much as the message. Raises `TransportBroken`."""
        if len(self._answers) > UNREAD_ANSWERS:
            self.end("the other side does not read its acknowledgements")
        elif self._writing or self._waiting or self._unanswered:
            self._wake()
        else:
            self._writing = True
            if self._watch is None:
                self._watch_progress()
            try:
                await self._write(self._take_answers())
            finally:
                self._writing = False
            if self._answers or self.pushed or self._waiting:
                self._wake()
