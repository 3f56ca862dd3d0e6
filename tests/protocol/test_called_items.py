"""The items of a program's call as frames."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping

import numpy as np
import pytest

from shoal_protocol.assembly import Limits
from shoal_protocol.bulk.local import LocalTransport
from shoal_protocol.called_items import (
    CalledItem,
    ItemFrame,
    ItemReader,
    LocalCall,
    frames_of,
    number_in,
)
from shoal_protocol.control import StreamClosed
from shoal_protocol.frames import Frame, MalformedFrame, TransferError, closing, ping, split_frame
from shoal_protocol.items import ITEM_BYTES, items_frame
from shoal_protocol.tensors import Array
from shoal_protocol.v1.coordinator_pb2 import InferAnswer, InferRequest, SubmitJobRequest
from shoal_protocol.v1.tensors_pb2 import Acknowledgement, Activation, Layout

Program = LocalCall[InferRequest, InferAnswer]
Coordinator = LocalCall[InferAnswer, InferRequest]

SMALL = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "truth": np.array([True, False])}
LARGE = {"x": np.zeros(ITEM_BYTES + 1, np.uint8)}
TEXT = {"x": np.array(["one", "two"], object)}
SWAPPED = {"x": np.arange(3, dtype=">f4")}


def take_any(_: object) -> None:
    """Any tensors are wanted."""


def read(reader: ItemReader, frame: Frame) -> CalledItem | None:
    return reader.add(*split_frame(bytes(frame)))


@pytest.mark.parametrize("number", [0, 7, 2**64 - 1])
@pytest.mark.parametrize(
    ("tensors", "whole"),
    [(SMALL, True), ({}, True), (LARGE, False), (TEXT, False), (SWAPPED, False)],
)
def test_an_item_comes_as_it_left(
    tensors: Mapping[str, Array], number: int, *, whole: bool
) -> None:
    reader = ItemReader(take_any, Limits())
    *first, last = frames_of(number, tensors)
    assert [read(reader, frame) for frame in first] == [None for _ in first]
    item = read(reader, last)
    assert item is not None
    assert (item.number, item.whole) == (number, whole)
    assert item.tensors.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(item.tensors[name], array)
        assert item.tensors[name].flags.writeable


def test_whoever_knows_transfers_alone_gets_one() -> None:
    (frame,) = frames_of(7, SMALL, whole=False)
    header, _ = split_frame(bytes(frame))
    assert (header.WhichOneof("kind"), number_in(header)) == ("activation", 7)


def test_tensors_are_checked_once_for_each_layout() -> None:
    checked: list[Activation | Layout] = []
    reader = ItemReader(checked.append, Limits())
    for number, tensors in enumerate((SMALL, SMALL, {"x": SMALL["x"]}, SMALL)):
        (frame,) = frames_of(number, tensors)
        assert read(reader, frame) is not None
    assert [[each.name for each in layout.tensors] for layout in checked] == [["x", "truth"], ["x"]]


def test_what_is_not_wanted_is_refused_each_time() -> None:
    def refuse(_: object) -> None:
        raise TransferError("not wanted", outcome=Acknowledgement.REFUSED)

    reader = ItemReader(refuse, Limits())
    for _ in range(2):
        with pytest.raises(TransferError, match="not wanted"):
            read(reader, *frames_of(7, SMALL))


@pytest.mark.parametrize("numbers", [(), (7, 8)])
def test_a_frame_of_a_call_has_one_item(numbers: tuple[int, ...]) -> None:
    frame = items_frame(b"", (), [(number, SMALL) for number in numbers or (7,)])
    header, payload = split_frame(bytes(frame))
    if not numbers:
        header.items.ClearField("instructions")
    with pytest.raises(MalformedFrame, match="not one"):
        ItemReader(take_any, Limits()).add(header, payload)


def test_an_item_is_as_long_as_its_layout_says() -> None:
    header, payload = split_frame(bytes(*frames_of(7, SMALL)))
    with pytest.raises(MalformedFrame, match="bytes, not"):
        ItemReader(take_any, Limits()).add(header, payload[:-1])


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Program, Coordinator]]:
    """Both ends of a local call."""
    near, far = socket.socketpair(socket.AF_UNIX)
    near.setblocking(False)
    far.setblocking(False)
    ours: Program = LocalCall(LocalTransport(near), InferAnswer.FromString)
    theirs: Coordinator = LocalCall(LocalTransport(far), InferRequest.FromString)
    yield ours, theirs
    await ours.close()
    await theirs.close()


@pytest.mark.parametrize("size", [0, 8, 100_000, 3 << 20])
async def test_a_local_call_carries_items_as_frames_between_its_messages(
    ends: tuple[Program, Coordinator], size: int
) -> None:
    ours, theirs = ends
    item = {"x": np.arange(size, dtype=np.uint8)}

    async def send() -> None:
        await ours.write(InferRequest(start=SubmitJobRequest(name="calls")))
        for frame in frames_of(7, item):
            await ours.write(frame)
        await ours.write(InferRequest(start=SubmitJobRequest(name="end")))

    sending = asyncio.create_task(send())
    received, reader, found = theirs.received(), ItemReader(lambda _: None, Limits()), []
    first = await anext(received)
    assert isinstance(first, InferRequest)
    while isinstance(each := await anext(received), ItemFrame):
        found.append(reader.add(*each))
    await sending
    assert each.start.name == "end"
    *parts, whole = found
    assert set(parts) <= {None}
    assert whole is not None
    assert whole.number == 7
    np.testing.assert_array_equal(whole.tensors["x"], item["x"])
    whole.tensors["x"][:] = 0  # it is the receiver's own


async def test_a_frame_in_a_message_of_a_local_call_is_that_frame(
    ends: tuple[Program, Coordinator],
) -> None:
    ours, theirs = ends
    (frame,) = frames_of(7, {"x": np.ones(3, np.float32)})
    await ours.write(InferRequest(frame=bytes(frame)))
    await ours.write(frame)
    received = theirs.received()
    assert await anext(received) == await anext(received)


async def test_a_local_call_ends_with_what_has_no_place_in_it(
    ends: tuple[Program, Coordinator],
) -> None:
    ours, theirs = ends
    await ours.write(ping(1))
    with pytest.raises(MalformedFrame, match="ping"):
        await anext(theirs.received())


async def test_the_reason_is_known_where_the_other_side_has_ended_a_local_call(
    ends: tuple[Program, Coordinator],
) -> None:
    ours, theirs = ends
    await theirs.write(closing("the coordinator stops"))
    with pytest.raises(StreamClosed, match="the coordinator stops"):
        await anext(ours.received())
