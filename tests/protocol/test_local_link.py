"""The local link: real sockets, both ends. `test_local_listener` has strangers."""

import asyncio
import gc
import socket
import struct
import time
import weakref
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocol.test_bulk import serving
from shoal_protocol.assembly import ReceivedActivation
from shoal_protocol.bulk import link as bulk_link
from shoal_protocol.bulk.link import BulkLink, OutboundActivation, Traffic, Undelivered
from shoal_protocol.bulk.local import LocalTransport
from shoal_protocol.bulk.receiving import Intake, ReceiveBuffer
from shoal_protocol.bulk.transport import TransportBroken
from shoal_protocol.frame_sizes import DISK_PIECE_BYTES
from shoal_protocol.frames import Frame, MalformedFrame, TransferError, acknowledgement
from shoal_protocol.tensors import ActivationKey, Array, encode_activation
from shoal_protocol.v1 import tensors_pb2 as pb
from shoal_protocol.v1.tensors_pb2 import FrameHeader

MORE_THAN_THE_KERNEL_TAKES = 4
"""Frames of 1 MiB."""
SIZES = (0, 1, 100, 4096, 40_000, 1 << 20, 3 << 20)


class Memory:
    """Memory, and what became of it."""

    def __init__(self, *, blocks: bool = False) -> None:
        self.blocks = blocks
        self.settled: list[int] = []
        """Bytes that were there each time."""
        self.array = np.empty(0, np.uint8)
        self.abandoned = False

    def allocate(self, size: int) -> NDArray[np.uint8]:
        self.array = np.zeros(size, np.uint8)
        return self.array

    def settle(self) -> None:
        self.settled.append(int(np.count_nonzero(self.array)))

    def abandon(self) -> None:
        self.abandoned = True


class Taker:
    """Takes all, but items in `refused`; `blocks`: as if its buffers were on disk."""

    def __init__(self, *refused: int, blocks: bool = False) -> None:
        self.taken: list[ReceivedActivation] = []
        self.buffers: list[Memory] = []
        self._refused = refused
        self._blocks = blocks

    def admit(self, activation: pb.Activation, decoded_bytes: int) -> ReceiveBuffer:
        if activation.key.item in self._refused:
            raise TransferError("not this one", outcome=pb.Acknowledgement.REFUSED)
        self.buffers.append(Memory(blocks=self._blocks))
        return self.buffers[-1]

    async def take(self, received: ReceivedActivation, buffer: ReceiveBuffer) -> None:
        self.taken.append(received)

    def refused(self, error: TransferError) -> None:
        """The acknowledgement says it."""


def pair() -> tuple[LocalTransport, LocalTransport]:
    """Both ends of a link."""
    near, far = raw_pair()
    return LocalTransport(near), LocalTransport(far)


def raw_pair() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair(socket.AF_UNIX)
    for end in ends:
        end.setblocking(False)
    return ends


def on_the_wire(frame: Frame) -> bytes:
    """A frame as `v1/tensors.proto` describes it."""
    lengths = struct.pack("<II", len(frame.header), frame.payload_bytes)
    return lengths + frame.header + b"".join(frame.payload)


def outbound(item: int = 0, size: int = 100) -> OutboundActivation:
    key = ActivationKey(job="j", epoch=1, item=item, producer=0, consumer=1)
    return OutboundActivation(
        key=key, device="b", tensors={"x": np.full(size, item % 251, np.uint8)}
    )


def frames_of(sent: OutboundActivation, transfer: int) -> list[Frame]:
    return list(encode_activation(sent.key, "b", sent.tensors, transfer=transfer).frames())


@pytest.mark.parametrize("blocks", [False, True])
async def test_what_is_sent_arrives_and_both_sides_count_the_same_bytes(*, blocks: bool) -> None:
    near, far = pair()
    taker, sent, received = Taker(blocks=blocks), Traffic(), Traffic()
    sender = BulkLink(near, traffic=sent)
    receiver = BulkLink(far, Intake(taker), traffic=received)
    async with serving(sender, receiver):
        for item, size in enumerate(SIZES):
            assert await asyncio.wait_for(sender.send(outbound(item, size)), 10) == size
        assert await asyncio.wait_for(sender.ping(), 10) >= 0
    for item, (each, size) in enumerate(zip(taker.taken, SIZES, strict=True)):
        np.testing.assert_array_equal(each.tensors["x"], np.full(size, item, np.uint8))
    assert not any(buffer.abandoned for buffer in taker.buffers)
    assert sent.sent_bytes == received.received_bytes > sum(SIZES)
    assert sent.received_bytes == received.sent_bytes > 0


async def test_of_what_goes_to_a_disk_little_is_in_memory_at_one_time() -> None:
    near, far = pair()
    taker, size = Taker(blocks=True), 3 << 20
    sender, receiver = BulkLink(near), BulkLink(far, Intake(taker))
    async with serving(sender, receiver):
        assert await asyncio.wait_for(sender.send(outbound(1, size)), 10) == size
    (buffer,) = taker.buffers
    assert buffer.settled[-1] == size
    assert max(np.diff(buffer.settled, prepend=0)) <= DISK_PIECE_BYTES


async def test_both_sides_send_at_once_without_blocking_each_other() -> None:
    near, far = pair()
    takers = Taker(), Taker()
    ends = [BulkLink(end, Intake(taker)) for end, taker in zip((near, far), takers, strict=True)]
    items = [outbound(item, SIZES[item % len(SIZES)]) for item in range(100)]
    async with serving(*ends):
        await asyncio.wait_for(
            asyncio.gather(*(end.send(each) for end in ends for each in items)), 60
        )
    for taker in takers:
        assert sorted(each.key.item for each in taker.taken) == list(range(100))
        for each in taker.taken:
            assert (each.tensors["x"] == each.key.item).all()


async def test_the_runtime_s_input_is_the_memory_that_was_granted() -> None:
    near, far = pair()
    taker = Taker()
    sender, receiver = BulkLink(near), BulkLink(far, Intake(taker))
    tensors: dict[str, Array] = {"x": np.arange(300_000, dtype=np.float32), "y": np.arange(5)}
    async with serving(sender, receiver):
        await asyncio.wait_for(sender.send(outbound()._replace(tensors=tensors)), 10)
    for name, expected in tensors.items():
        received = taker.taken[0].tensors[name]
        np.testing.assert_array_equal(received, expected)
        assert np.shares_memory(received, taker.buffers[0].array)
        assert received.ctypes.data % 64 == 0


async def test_acknowledgements_leave_while_what_came_together_is_still_being_taken() -> None:
    near, far = raw_pair()

    class Watching(Taker):
        answered: list[int]

        async def take(self, received: ReceivedActivation, buffer: ReceiveBuffer) -> None:
            await super().take(received, buffer)
            with suppress(BlockingIOError):
                self.answered.append(len(near.recv(4096)))

    taker = Watching()
    taker.answered = []
    frames = [frame for item in range(32) for frame in frames_of(outbound(item), item + 1)]
    near.sendall(b"".join(map(on_the_wire, frames)))
    async with serving(BulkLink(LocalTransport(far), Intake(taker))):
        async with asyncio.timeout(60):
            while len(taker.taken) < len(frames):
                await asyncio.sleep(0)
    near.close()
    assert len(taker.answered) >= 2, "the sender waits for all of them"


async def test_what_is_refused_is_passed_over_and_the_next_is_taken() -> None:
    near, far = pair()
    taker = Taker(0, 2)
    sender, receiver = BulkLink(near), BulkLink(far, Intake(taker))
    async with serving(sender, receiver):
        answers = await asyncio.wait_for(
            asyncio.gather(
                *(sender.send(outbound(item, 2_500_000)) for item in range(4)),
                return_exceptions=True,
            ),
            10,
        )
    assert [isinstance(answer, Undelivered) for answer in answers] == [True, False, True, False]
    assert [each.key.item for each in taker.taken] == [1, 3]
    assert all((each.tensors["x"] == each.key.item).all() for each in taker.taken)


async def test_a_header_that_is_larger_than_the_buffer_arrives() -> None:
    near, far = pair()
    taker = Taker()
    sender, receiver = BulkLink(near), BulkLink(far, Intake(taker))
    tensors = {f"{number:0200}": np.full(3, number, np.float32) for number in range(1000)}
    async with serving(sender, receiver):
        await asyncio.wait_for(sender.send(outbound()._replace(tensors=tensors)), 10)
        await asyncio.wait_for(sender.send(outbound(1)), 10)
    assert taker.taken[0].tensors.keys() == tensors.keys()
    assert all((taker.taken[0].tensors[name] == tensors[name]).all() for name in tensors)
    assert taker.taken[1].key.item == 1


async def test_a_buffer_that_was_enlarged_for_one_header_does_not_stay() -> None:
    near, far = pair()
    large = FrameHeader(message=bytes(500_000)).SerializeToString()
    held: list[int] = []

    async def read() -> None:
        async for frames in far.received():
            held.extend(far._buffer.nbytes for _ in frames)

    reading = asyncio.create_task(read())
    for count, frame in enumerate((Frame(large), acknowledgement(1), acknowledgement(2)), 1):
        await near.write([frame])
        async with asyncio.timeout(10):
            while len(held) < count:  # or it comes with the one before
                await asyncio.sleep(0.01)
    near.disconnect()
    await reading
    far.disconnect()
    assert held[0] > len(large) > held[-1]
    assert len(held) == 3


PIECES = st.lists(st.integers(min_value=1, max_value=5000), max_size=30)
SENT = st.lists(st.integers(min_value=0, max_value=70_000), min_size=1, max_size=6)


@given(sizes=SENT, pieces=PIECES)
def test_frames_are_the_same_however_the_bytes_are_cut(sizes: list[int], pieces: list[int]) -> None:
    sent = [outbound(item, size) for item, size in enumerate(sizes)]
    data = b"".join(
        on_the_wire(frame)
        for transfer, each in enumerate(sent, 1)
        for frame in frames_of(each, transfer)
    )

    async def receive() -> None:
        near, far = raw_pair()
        taker = Taker()
        link = BulkLink(LocalTransport(far), Intake(taker))
        running, loop, position = asyncio.create_task(link.run()), asyncio.get_running_loop(), 0
        for piece in pieces:
            await loop.sock_sendall(near, data[position : position + piece])
            position += piece
            await asyncio.sleep(0)
        await loop.sock_sendall(near, data[position:])
        near.shutdown(socket.SHUT_WR)
        assert await asyncio.wait_for(running, 10) == "the other side has closed the stream"
        near.close()
        assert [each.tensors["x"].nbytes for each in taker.taken] == sizes
        assert all((each.tensors["x"] == each.key.item).all() for each in taker.taken)

    asyncio.run(receive())


async def test_a_stream_that_ends_within_a_frame_is_broken_and_its_buffer_given_back() -> None:
    (frame,) = frames_of(outbound(size=100_000), 1)
    whole = on_the_wire(frame)
    for end in (1, 7, 20, len(whole) - 50_000, len(whole) - 1):
        near, far = raw_pair()
        taker = Taker()
        intake = Intake(taker)
        link = BulkLink(LocalTransport(far), intake)
        near.send(whole[:end])
        near.close()
        assert await asyncio.wait_for(link.run(), 10) == "the stream ended within a frame"
        intake.close()
        assert not taker.taken
        assert all(buffer.abandoned for buffer in taker.buffers)


async def test_a_peer_that_never_reads_is_given_up_and_holds_a_bounded_amount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bulk_link, "STEP_SECONDS", 0.2)
    near, far = raw_pair()
    link = BulkLink(LocalTransport(near))
    async with serving(link) as (running,):
        with pytest.raises(Undelivered):
            await asyncio.wait_for(link.send(outbound(size=8 << 20)), 10)
        assert "does not read" in await asyncio.wait_for(running, 10)
    far.close()


@pytest.mark.parametrize("sent", [1_000, 1_200_000])
async def test_a_peer_that_stops_within_a_transfer_gives_back_what_was_granted_for_it(
    monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    """It drips within the first frame, or within another."""
    monkeypatch.setattr(bulk_link, "STEP_SECONDS", 0.2)
    near, far = raw_pair()
    taker = Taker()
    intake = Intake(taker)
    whole = b"".join(map(on_the_wire, frames_of(outbound(size=3 << 20), 1)))

    async def send() -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(near, whole[:sent])
        for at in range(sent, sent + 1_000):
            await loop.sock_sendall(near, whole[at : at + 1])
            await asyncio.sleep(0.05)

    sending = asyncio.create_task(send())
    reason = await asyncio.wait_for(BulkLink(LocalTransport(far), intake).run(), 10)
    intake.close()
    assert "stopped within a transfer" in reason
    assert [buffer.abandoned for buffer in taker.buffers] == [True]
    sending.cancel()
    near.close()


async def test_a_peer_is_not_to_blame_while_what_it_has_sent_is_being_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bulk_link, "STEP_SECONDS", 0.1)

    class Slow(Memory):
        def settle(self) -> None:
            super().settle()
            time.sleep(0.3)

    near, far = raw_pair()
    taker = Taker(blocks=True)
    monkeypatch.setattr(taker, "admit", lambda *_: Slow(blocks=True))
    (frame,) = frames_of(outbound(size=2 * DISK_PIECE_BYTES), 1)
    async with serving(BulkLink(LocalTransport(far), Intake(taker))) as (running,):
        await asyncio.get_running_loop().sock_sendall(near, on_the_wire(frame))
        async with asyncio.timeout(10):
            while not taker.taken:
                await asyncio.sleep(0.01)
        assert not running.done()
    near.close()


async def test_a_peer_that_floods_leaves_the_event_loop_to_others() -> None:
    near, far = raw_pair()
    link = BulkLink(LocalTransport(far))
    flood = on_the_wire(acknowledgement(1)) * 2000
    running = asyncio.create_task(link.run())
    turns, loop = 0, asyncio.get_running_loop()
    sending = asyncio.create_task(loop.sock_sendall(near, flood * 200))
    while not sending.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 50
    link.end("the test is over")
    await running
    near.close()


async def test_a_goodbye_never_completes_a_frame_that_was_given_up() -> None:
    """Its bytes would be taken for the end of the payload."""
    near, far = raw_pair()
    transport = LocalTransport(near, served=True)
    (frame,) = frames_of(outbound(size=1 << 20), 1)
    writing = asyncio.create_task(transport.write([frame] * MORE_THAN_THE_KERNEL_TAKES))
    await asyncio.sleep(0.01)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    with pytest.raises(TransportBroken, match="given up"):
        await transport.write([frame])
    received = bytearray()
    reading = asyncio.create_task(_read_all(far, received))
    await asyncio.sleep(0.01)
    transport.disconnect("goodbye")
    await asyncio.wait_for(reading, 10)
    assert (on_the_wire(frame) * MORE_THAN_THE_KERNEL_TAKES).startswith(bytes(received))


async def _read_all(end: socket.socket, into: bytearray) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(end, 1 << 16):
        into += data
    end.close()


async def test_a_peer_that_has_gone_breaks_a_write_that_waits() -> None:
    near, far = raw_pair()
    transport = LocalTransport(near)
    (frame,) = frames_of(outbound(size=1 << 20), 1)
    writing = asyncio.create_task(transport.write([frame] * MORE_THAN_THE_KERNEL_TAKES))
    await asyncio.sleep(0.01)
    far.close()
    with pytest.raises(TransportBroken, match="has gone: Broken pipe"):
        await asyncio.wait_for(writing, 10)
    await transport.close()


async def test_what_was_sent_and_received_is_not_held_by_the_link() -> None:
    near, far = pair()
    taker = Taker()
    sender, receiver = BulkLink(near), BulkLink(far, Intake(taker))
    array = np.zeros(3 << 20, np.uint8)
    sent = weakref.ref(array)
    async with serving(sender, receiver):
        await asyncio.wait_for(sender.send(outbound()._replace(tensors={"x": array})), 10)
        del array
        received = weakref.ref(taker.buffers[0].array)
        taker.buffers.clear()
        taker.taken.clear()
        await asyncio.wait_for(sender.ping(), 10)
        gc.collect()
        assert sent() is None
        assert received() is None


async def test_a_malformed_frame_is_an_error_of_the_link() -> None:
    near, far = raw_pair()
    link = BulkLink(LocalTransport(far))
    near.send(struct.pack("<II", 2, 0) + b"\xff\xff")
    with pytest.raises(MalformedFrame, match="cannot be parsed"):
        await asyncio.wait_for(link.run(), 10)
    near.close()
