"""Several frames as one message, and when a writer waits for more."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_protocol.bulk.link import BulkLink, OutboundActivation
from shoal_protocol.bulk.transport import Received, read_message
from shoal_protocol.frame_sizes import MAXIMUM_PAYLOAD_BYTES
from shoal_protocol.frames import (
    FRAMES_TOGETHER,
    Frame,
    MalformedFrame,
    acknowledgement,
    frames_in,
    join_frame,
    join_frames,
    split_frame,
)
from shoal_protocol.pacing import Pace
from shoal_protocol.tensors import ActivationKey
from shoal_protocol.v1 import tensors_pb2 as pb

frames = st.builds(
    lambda transfer, payload: join_frame(pb.FrameHeader(transfer=transfer), payload),
    st.integers(1, 1 << 40),
    st.binary(max_size=300),
)


@given(st.lists(frames, min_size=1, max_size=FRAMES_TOGETHER))
def test_frames_come_out_of_a_message_as_they_went_in(together: list[bytes]) -> None:
    message = join_frames(together)
    assert list(frames_in(message)) == together
    if len(together) > 1:
        assert pb.Frame.FromString(message) == pb.Frame(
            frames=[pb.Frame.FromString(frame) for frame in together]
        )


def test_more_frames_than_the_bound_are_refused() -> None:
    message = join_frames([bytes(acknowledgement(1))] * (FRAMES_TOGETHER + 1))
    with pytest.raises(MalformedFrame, match="more than 64 frames in one message"):
        frames_in(message)


@given(st.binary(max_size=100), st.lists(frames, min_size=2, max_size=3), st.integers(1, 20))
def test_damaged_messages_are_refused_or_hold_frames(
    noise: bytes, together: list[bytes], cut: int
) -> None:
    whole = join_frames(together)
    for message in (noise, b"\x1a" + noise, whole[:-cut], whole + noise, whole + b"\x0a"):
        with contextlib.suppress(MalformedFrame):
            found = list(frames_in(message))
            assert 0 < len(found) <= FRAMES_TOGETHER
            for frame in found:
                split_frame(frame)


def test_what_ends_within_a_frame_is_refused() -> None:
    whole = join_frames([bytes(acknowledgement(1)), bytes(acknowledgement(2))])
    for message in (whole[:-1], whole[:1], whole + b"\x1a"):
        with pytest.raises(MalformedFrame, match="ends within"):
            frames_in(message)
    with pytest.raises(MalformedFrame, match="no frame"):
        frames_in(whole + b"\x0a")


def paced(interval_seconds: float, turns: int = 200) -> Pace:
    """A pace after many turns at regular intervals, in each of which one thing left."""
    pace = Pace(longest_seconds=0.02)
    for turn in range(turns):
        pace.leave(1, at=turn * interval_seconds)
    return pace


@given(st.floats(1e-6, 10.0))
def test_a_moment_is_as_long_as_a_few_things_take_to_come_and_is_bounded(interval: float) -> None:
    gap = paced(interval).gap_seconds
    assert gap <= 0.02
    if interval < 0.001:
        assert gap == pytest.approx(16 * interval, rel=0.01)


@given(st.floats(0.011, 10.0))
def test_nobody_waits_where_nothing_else_would_come_meanwhile(interval: float) -> None:
    assert paced(interval).gap_seconds == 0.0


async def test_a_writer_waits_only_while_something_is_unanswered() -> None:
    loop = asyncio.get_running_loop()
    pace = Pace(longest_seconds=3600)
    for _ in range(100):
        pace.leave(count=1, at=loop.time())
    for _ in range(10):
        pace.leave(count=1, at=loop.time() + 1000)
    assert pace.gap_seconds > 100
    async with asyncio.timeout(60):
        await pace.turn(busy=False)
    brief, began = Pace(), loop.time()
    for number in range(100):  # the last of them now
        brief.leave(count=1, at=began + 1e-6 + (number - 99) * 1e-4)
    gap = brief.gap_seconds
    await brief.turn(busy=True)
    assert loop.time() - began >= gap > 0


def outbound(item: int, size: int = 16) -> OutboundActivation:
    key = ActivationKey(job="j", epoch=1, item=item, producer=0, consumer=1)
    return OutboundActivation(key=key, device="b", tensors={"x": np.full(size, item, np.uint8)})


class Answering:
    """A transport whose other side accepts every transfer; `written` has the headers of each
    message."""

    frame_bytes = MAXIMUM_PAYLOAD_BYTES
    local = False

    def __init__(self) -> None:
        self.written: list[list[pb.FrameHeader]] = []
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def received(self) -> AsyncIterator[Iterable[Received]]:
        while True:
            yield read_message(await self._answers.get())

    def heard(self) -> int | None:
        """Nobody asks."""
        return None

    async def write(self, frames: Sequence[Frame]) -> None:
        headers = [pb.FrameHeader.FromString(frame.header) for frame in frames]
        self.written.append(headers)
        for header in headers:
            if header.last:
                self._answers.put_nowait(bytes(acknowledgement(header.transfer)))

    async def close(self) -> None:
        """Nothing to let go of."""


async def test_one_small_transfer_goes_at_once_those_that_wait_together_large_ones_alone() -> None:
    transport = Answering()
    link = BulkLink(transport)
    running = asyncio.create_task(link.run())
    sizes = [16] * 10 + [3 << 20] + [16] * 5
    sent = await asyncio.wait_for(
        asyncio.gather(*(link.send(outbound(item, size)) for item, size in enumerate(sizes))), 20
    )
    link.end("done")
    assert await running == "done"
    assert list(sent) == sizes
    assert [len(headers) for headers in transport.written] == [1, 9, 1, 1, 1, 5]
    begun = [
        each for headers in transport.written for each in headers if each.HasField("activation")
    ]
    assert [header.activation.key.item for header in begun] == list(range(16))
    numbers = [header.transfer for header in begun]
    assert numbers == sorted(set(numbers))
