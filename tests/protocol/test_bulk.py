"""Two links joined by a pipe: what both processes run, with a fake wire."""

import asyncio
import mmap
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal_protocol import codecs
from shoal_protocol.assembly import ReceivedActivation
from shoal_protocol.bulk import link as bulk_link
from shoal_protocol.bulk.link import (
    PING_BYTES,
    UNREAD_ANSWERS,
    WAITING_TRANSFERS,
    BulkLink,
    OutboundActivation,
    Traffic,
    Undelivered,
)
from shoal_protocol.bulk.receiving import Intake, ReceiveBuffer
from shoal_protocol.bulk.transport import Received, read_message
from shoal_protocol.frame_sizes import DISK_PIECE_BYTES, MAXIMUM_PAYLOAD_BYTES
from shoal_protocol.frames import (
    Frame,
    MalformedFrame,
    TransferError,
    acknowledgement,
    join_frames,
    ping,
)
from shoal_protocol.tensors import ActivationKey, encode_activation
from shoal_protocol.v1 import tensors_pb2 as pb


class Pipe:
    """One end of a pipe (a `Transport`); the other end is `other`. `flows` cleared: nobody reads
    what is written at this end."""

    frame_bytes = MAXIMUM_PAYLOAD_BYTES
    local = False

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.flows = asyncio.Event()
        self.flows.set()
        self.written: list[bytes] = []
        self.other: Pipe | None = None

    async def received(self) -> AsyncIterator[Iterable[Received]]:
        while (message := await self.incoming.get()) is not None:
            yield read_message(message)

    def heard(self) -> int | None:
        """Nobody asks."""
        return None

    async def write(self, frames: Sequence[Frame]) -> None:
        message = join_frames([bytes(frame) for frame in frames])
        await self.flows.wait()
        self.written.append(message)
        if self.other is not None:
            self.other.incoming.put_nowait(message)

    async def close(self) -> None:
        if self.other is not None:
            self.other.incoming.put_nowait(None)


class Buffer:
    """Memory, and what became of it."""

    blocks = False

    def __init__(self) -> None:
        self.abandoned = False

    def allocate(self, size: int) -> NDArray[np.uint8]:
        return np.empty(size, np.uint8)

    def settle(self) -> None:
        """Memory is memory."""

    def abandon(self) -> None:
        self.abandoned = True


class Taker:
    """Takes all, unless `refuses` is set."""

    def __init__(self) -> None:
        self.taken: list[ReceivedActivation] = []
        self.buffers: list[Buffer] = []
        self.refusals: list[pb.Acknowledgement.Outcome] = []
        self.refuses: TransferError | None = None

    def admit(self, activation: pb.Activation, decoded_bytes: int) -> ReceiveBuffer:
        if self.refuses is not None:
            raise self.refuses
        self.buffers.append(Buffer())
        return self.buffers[-1]

    async def take(self, received: ReceivedActivation, buffer: ReceiveBuffer) -> None:
        self.taken.append(received)

    def refused(self, error: TransferError) -> None:
        self.refusals.append(error.outcome)


def outbound(item: int = 0, size: int = 100) -> OutboundActivation:
    key = ActivationKey(job="j", epoch=1, item=item, producer=0, consumer=1)
    tensors = {"x": np.full(size, item % 251, np.uint8)}
    return OutboundActivation(key=key, device="b", tensors=tensors, ticket=b"t")


@asynccontextmanager
async def serving(*links: BulkLink) -> AsyncIterator[list["asyncio.Task[str]"]]:
    tasks = [asyncio.create_task(link.run()) for link in links]
    try:
        yield tasks
    finally:
        for link in links:
            link.end("the test is over")
        await asyncio.gather(*tasks, return_exceptions=True)


Joined = tuple[Pipe, BulkLink, Taker, BulkLink]


@pytest.fixture
async def joined() -> Joined:
    """A sender's pipe and link; a receiver and its link."""
    near, far = Pipe(), Pipe()
    near.other, far.other = far, near
    taker = Taker()
    return near, BulkLink(near), taker, BulkLink(far, Intake(taker))


async def test_what_is_sent_from_disk_has_little_of_a_frame_in_memory(
    joined: Joined, tmp_path: Path
) -> None:
    _, sender, taker, receiver = joined
    size, most, path = 3 * MAXIMUM_PAYLOAD_BYTES, 0, tmp_path / "tensor"
    with path.open("wb", buffering=0) as made:
        for _ in range(0, size, DISK_PIECE_BYTES):
            made.write(bytes(DISK_PIECE_BYTES))
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)

    def settle() -> None:
        nonlocal most
        most = max(most, resident_bytes(path))
        mapping.madvise(mmap.MADV_DONTNEED)

    tensors = {"x": np.frombuffer(mapping, np.uint8)}
    async with serving(sender, receiver):
        await sender.send(outbound()._replace(tensors=tensors, settle=settle))
    assert len(taker.taken) == 1
    assert 0 < most <= 8 * DISK_PIECE_BYTES


def resident_bytes(path: Path) -> int:
    """Of a mapped file's pages, those in this process."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    return sum(
        int(next(each for each in lines if each.startswith("Rss:")).split()[1]) << 10
        for line in lines
        if line.endswith(str(path))
    )


async def test_much_text_is_encoded_beside_the_event_loop(joined: Joined) -> None:
    _, sender, taker, receiver = joined
    encoders: set[int] = set()

    class Text(str):
        def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
            encoders.add(threading.get_ident())
            return super().encode(encoding, errors)

    texts = np.array([Text("text")] * 10_000, object)
    async with serving(sender, receiver):
        await sender.send(outbound()._replace(tensors={"x": texts}))
    assert (taker.taken[0].tensors["x"] == texts).all()
    assert encoders
    assert threading.get_ident() not in encoders


async def test_what_is_sent_arrives_and_both_sides_count_the_same_bytes() -> None:
    near, far = Pipe(), Pipe()
    near.other, far.other = far, near
    taker, sent, received = Taker(), Traffic(), Traffic()
    sender = BulkLink(near, traffic=sent)
    receiver = BulkLink(far, Intake(taker), traffic=received)
    sizes = (0, 1, 1 << 16, 3 << 20)
    async with serving(sender, receiver):
        for item, size in enumerate(sizes):
            assert await sender.send(outbound(item, size)) == size
        assert await sender.ping() >= 0
        assert sender.probed
        before, answered = sent.sent_bytes, sent.received_bytes
        assert await sender.ping(PING_BYTES, answer_bytes=2 * PING_BYTES) > 0
        assert PING_BYTES < sent.sent_bytes - before < PING_BYTES + 100
        assert PING_BYTES < sent.received_bytes - answered < PING_BYTES + 100, "it is bounded"
    assert [each.tensors["x"].nbytes for each in taker.taken] == list(sizes)
    assert [each.key.item for each in taker.taken] == [0, 1, 2, 3]
    assert not any(buffer.abandoned for buffer in taker.buffers), "they are the receiver's now"
    assert sent.sent_bytes == received.received_bytes > sum(sizes)


async def test_a_full_queue_makes_senders_wait_and_is_counted() -> None:
    pipe, traffic = Pipe(), Traffic()
    pipe.flows.clear()
    link = BulkLink(pipe, traffic=traffic)
    async with serving(link):
        sending = [
            asyncio.create_task(link.enqueue(lambda number: (ping(number),), size=1 << 20))
            for _ in range(WAITING_TRANSFERS + 10)
        ]
        for _ in range(10):
            await asyncio.sleep(0)
        # One is being written.
        assert sum(task.done() for task in sending) == WAITING_TRANSFERS + 1
        assert traffic.full_queues == 9
        pipe.flows.set()
        await asyncio.wait_for(asyncio.gather(*sending), 10)


async def test_who_waits_for_room_is_not_overtaken_for_ever(joined: Joined) -> None:
    """Senders that go on as soon as they are answered always find a place that has just left."""
    _, sender, _, receiver = joined
    sent = [0] * (2 * WAITING_TRANSFERS)

    async def send(number: int) -> None:
        while min(sent) < 3:
            outgoing = await sender.enqueue(lambda number: (ping(number),), size=1)
            await outgoing.answered
            sent[number] += 1

    async with serving(sender, receiver):
        await asyncio.wait_for(asyncio.gather(*map(send, range(len(sent)))), 10)
    assert max(sent) < 20


@pytest.mark.parametrize("size", [100, 1 << 20])
async def test_a_transfer_that_is_alone_leaves_at_once(size: int, joined: Joined) -> None:
    pipe, sender, _, receiver = joined
    async with serving(sender, receiver):
        await asyncio.sleep(0)
        await sender.enqueue(lambda number: (ping(number, bytes(size)),), size=size)
        assert len(pipe.written) == 1, "nobody had to run for that"


async def test_everybody_who_waits_for_room_learns_that_the_link_has_ended() -> None:
    pipe = Pipe()
    pipe.flows.clear()
    link = BulkLink(pipe)
    async with serving(link):
        sending = [
            asyncio.create_task(link.send(outbound(item))) for item in range(3 * WAITING_TRANSFERS)
        ]
        await asyncio.sleep(0.01)
        link.end("cut")
        answers = await asyncio.wait_for(asyncio.gather(*sending, return_exceptions=True), 10)
    assert {str(answer) for answer in answers} == {"cut"}
    assert all(isinstance(answer, Undelivered) and answer.outcome is None for answer in answers)


async def test_a_transfer_that_its_sender_gave_up_before_its_turn_is_not_sent(
    joined: Joined,
) -> None:
    pipe, sender, taker, receiver = joined
    pipe.flows.clear()
    async with serving(sender, receiver):
        first, second, third = (
            asyncio.create_task(sender.send(outbound(item, 1 << 20))) for item in range(3)
        )
        await asyncio.sleep(0.01)
        second.cancel()
        pipe.flows.set()
        await asyncio.wait_for(asyncio.gather(first, third), 10)
    assert [each.key.item for each in taker.taken] == [0, 2]


async def test_busy_is_tried_again_and_refused_is_not(joined: Joined) -> None:
    _, sender, taker, receiver = joined
    taker.refuses = TransferError("later", outcome=pb.Acknowledgement.BUSY)
    async with serving(sender, receiver):
        sending = asyncio.create_task(sender.send(outbound()))
        while len(taker.refusals) < 2:
            await asyncio.sleep(0.01)
        taker.refuses = None
        await asyncio.wait_for(sending, 10)
        taker.refuses = MalformedFrame("never")
        with pytest.raises(Undelivered, match="never") as caught:
            await sender.send(outbound(1))
    assert caught.value.outcome == pb.Acknowledgement.REFUSED
    assert [each.key.item for each in taker.taken] == [0]


async def test_a_busy_receiver_is_given_up_after_a_while(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_link, "BUSY_SECONDS", 0.0)
    _, sender, taker, receiver = joined
    taker.refuses = TransferError("full", outcome=pb.Acknowledgement.BUSY)
    async with serving(sender, receiver):
        with pytest.raises(Undelivered, match="full") as caught:
            await sender.send(outbound())
    assert caught.value.outcome == pb.Acknowledgement.BUSY


@pytest.mark.parametrize("reads", [False, True])
async def test_a_side_that_stops_reading_or_answering_is_given_up(
    monkeypatch: pytest.MonkeyPatch, *, reads: bool
) -> None:
    monkeypatch.setattr(bulk_link, "STEP_SECONDS", 0.1)
    pipe = Pipe()
    if not reads:
        pipe.flows.clear()
    link = BulkLink(pipe)
    async with serving(link) as (running,):
        reason = "no acknowledgement within" if reads else "the other side does not read"
        with pytest.raises(Undelivered, match=reason):
            await asyncio.wait_for(link.send(outbound(size=1 << 20)), 10)
        if not reads:
            assert "does not read" in await running


async def test_a_side_that_leaves_its_acknowledgements_unread_is_cut_off() -> None:
    pipe = Pipe()
    pipe.flows.clear()
    link = BulkLink(pipe)
    async with serving(link) as (running,):
        # Its own transfer is under way: its reader does not wait for the writer then.
        await link.enqueue(lambda number: (ping(number),))
        for number in range(UNREAD_ANSWERS + 200):
            pipe.incoming.put_nowait(bytes(ping(number + 1)))
        assert await asyncio.wait_for(running, 10) == (
            "the other side does not read its acknowledgements"
        )


async def test_pings_whose_answers_are_not_read_cost_next_to_no_memory() -> None:
    pipe = Pipe()
    pipe.flows.clear()
    link = BulkLink(pipe)
    tracemalloc.start()
    async with serving(link):
        await link.enqueue(lambda number: (ping(number),))
        for number in range(1000):
            pipe.incoming.put_nowait(bytes(ping(number + 1, answer_bytes=PING_BYTES)))
        while not pipe.incoming.empty():
            await asyncio.sleep(0)
        held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 16 * PING_BYTES


async def test_acknowledgements_leave_before_a_stream_whose_other_side_has_finished(
    joined: Joined,
) -> None:
    pipe, _, taker, receiver = joined
    frames = encode_activation(outbound().key, "b", outbound().tensors, transfer=7)
    assert pipe.other is not None
    for frame in frames:
        pipe.other.incoming.put_nowait(frame)
    pipe.other.incoming.put_nowait(None)
    assert await asyncio.wait_for(receiver.run(), 10) == "the other side has closed the stream"
    assert pipe.incoming.get_nowait() == bytes(acknowledgement(7))
    assert len(taker.taken) == 1


async def test_what_waits_for_a_turn_leaves_before_such_a_stream_as_well(joined: Joined) -> None:
    pipe, link, _, _ = joined
    running = asyncio.create_task(link.run())
    await asyncio.sleep(0)
    link.push(ping(1), lambda: None)
    link.answer(acknowledgement(7))
    pipe.incoming.put_nowait(None)
    assert await asyncio.wait_for(running, 10) == "the other side has closed the stream"
    assert pipe.written == [bytes(ping(1)), bytes(acknowledgement(7))]


async def test_where_only_acknowledgements_belong_a_transfer_ends_the_stream() -> None:
    pipe = Pipe()
    link = BulkLink(pipe)
    for frame in encode_activation(outbound().key, "b", outbound().tensors, transfer=1):
        pipe.incoming.put_nowait(frame)
    with pytest.raises(MalformedFrame, match="only acknowledgements"):
        await asyncio.wait_for(link.run(), 10)
    assert link.broken is not None


async def test_an_activation_whose_stream_ends_within_it_gives_its_buffer_back() -> None:
    pipe, taker = Pipe(), Taker()
    intake = Intake(taker)
    frames = list(
        encode_activation(outbound().key, "b", outbound().tensors, transfer=1, frame_bytes=10)
    )
    for frame in frames[:-1]:
        pipe.incoming.put_nowait(frame)
    pipe.incoming.put_nowait(None)
    await asyncio.wait_for(BulkLink(pipe, intake).run(), 10)
    intake.close()
    assert [buffer.abandoned for buffer in taker.buffers] == [True]


async def test_other_streams_are_served_while_megabytes_are_decoded(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, _, taker, receiver = joined
    entered, leave = threading.Event(), threading.Event()
    decode: Callable[..., None] = codecs.decode

    def slowly(*arguments: object, **options: object) -> None:
        entered.set()
        assert leave.wait(10), "nothing else could run meanwhile"
        decode(*arguments, **options)

    monkeypatch.setattr(codecs, "decode", slowly)
    zeros = {"x": np.zeros(2 << 20, np.uint8)}
    assert pipe.other is not None
    for frame in encode_activation(outbound().key, "b", zeros, transfer=1, codec=pb.ZSTD):
        pipe.other.incoming.put_nowait(frame)
    another, its_end = Pipe(), Pipe()
    another.other, its_end.other = its_end, another
    pinging = BulkLink(another)
    async with serving(receiver, pinging, BulkLink(its_end)):
        assert await asyncio.to_thread(entered.wait, 10)
        assert await asyncio.wait_for(pinging.ping(), 10) >= 0
        assert not taker.taken
        leave.set()
        while not taker.taken:
            await asyncio.sleep(0.01)
    np.testing.assert_array_equal(taker.taken[0].tensors["x"], zeros["x"])
