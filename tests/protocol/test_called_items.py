"""The items of a program's call as frames."""

from collections.abc import Mapping

import numpy as np
import pytest

from shoal_protocol.assembly import Limits
from shoal_protocol.called_items import CalledItem, ItemReader, frames_of, number_in
from shoal_protocol.frames import Frame, MalformedFrame, TransferError, split_frame
from shoal_protocol.items import ITEM_BYTES, items_frame
from shoal_protocol.tensors import Array
from shoal_protocol.v1.tensors_pb2 import Acknowledgement, Activation, Layout

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
