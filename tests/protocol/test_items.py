"""Items on their itinerary: a frame each, with a layout that is checked once."""

import numpy as np
import pytest

from shoal_protocol.frames import MalformedFrame, split_frame
from shoal_protocol.items import (
    ITEM_BYTES,
    ITEMS_TOGETHER,
    TICKET_BYTES,
    alike,
    items_frame,
    read_layout,
)
from shoal_protocol.tensors import Array, UnsupportedTensor
from shoal_protocol.v1 import tensors_pb2 as pb

TICKET = bytes(range(TICKET_BYTES))


def received(*items: dict[str, Array]) -> tuple[pb.Items, list[dict[str, Array]]]:
    """What arrives of items in one frame."""
    frame = items_frame(TICKET, (3, 4), list(enumerate(items, 7)))
    header, payload = split_frame(bytes(frame))
    layout = read_layout(header.items.layout)
    assert layout.payload_bytes(len(items)) == len(payload)
    return header.items, layout.items(payload, len(items))


def test_an_item_arrives_as_it_was_sent() -> None:
    sent: dict[str, Array] = {
        "odd": np.arange(3, dtype=np.int8),
        "truth": np.array([True, False]),
        "none": np.zeros((0, 5), np.float32),
        "turned": np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "number": np.array(5, np.int64),
        "empty at the end": np.zeros((2, 0), np.int16),
    }
    other = {name: np.flip(array) for name, array in sent.items()}
    items, arrived = received(sent, other, sent)
    assert (items.ticket, list(items.compute)) == (TICKET, [3, 4])
    assert list(items.instructions) == [7, 8, 9]
    for arrays, expected in zip(arrived, (sent, other, sent), strict=True):
        assert list(arrays) == list(sent)
        for name, array in expected.items():
            assert arrays[name].dtype == array.dtype
            assert arrays[name].shape == array.shape
            np.testing.assert_array_equal(arrays[name], array)


def test_items_without_bytes_are_as_many_as_they_were() -> None:
    _, arrived = received({}, {})
    assert arrived == [{}, {}]
    _, arrived = received(*[{"none": np.zeros((0, 5), np.float32)}] * 3)
    assert [each["none"].shape for each in arrived] == [(0, 5)] * 3


def test_items_of_one_layout_that_follow_one_another_leave_together() -> None:
    small, other = {"x": np.zeros(4, np.float32)}, {"x": np.zeros(5, np.float32)}
    items = list(enumerate([small, small, other, small]))
    assert [len(each) for each in alike(items)] == [2, 1, 1]
    many = list(enumerate([small] * (2 * ITEMS_TOGETHER + 1)))
    assert [len(each) for each in alike(many)] == [ITEMS_TOGETHER, ITEMS_TOGETHER, 1]
    assert [item for each in alike(many) for item in each] == many
    assert list(alike([])) == []


def test_items_together_have_no_more_bytes_than_one_may_have() -> None:
    half = {"x": np.zeros(ITEM_BYTES // 2 - 64, np.uint8)}
    assert [len(each) for each in alike(list(enumerate([half] * 5)))] == [2, 2, 1]
    large = {"x": np.zeros(2 * ITEM_BYTES, np.uint8)}
    assert [len(each) for each in alike(list(enumerate([large] * 3)))] == [1, 1, 1]


def test_equal_layouts_are_read_once() -> None:
    first, _ = received({"x": np.zeros(4, np.float32)})
    second, _ = received({"x": np.ones(4, np.float32)})
    assert first.layout == second.layout
    assert read_layout(first.layout) is read_layout(second.layout)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["text"], object),
        np.zeros(1 << 18, np.float64),
        np.zeros(2, np.dtype(">f4")),
        np.zeros(1, np.dtype("M8[s]")),
    ],
)
def test_what_an_item_cannot_carry_is_refused_where_it_leaves(array: Array) -> None:
    with pytest.raises(UnsupportedTensor, match="'x'"):
        items_frame(TICKET, (), [(1, {"x": array})])


def tensor(**changes: object) -> pb.TensorHeader:
    """Four floats, but for some changes."""
    values = {"name": "x", "dtype": pb.FLOAT, "shape": [4], "encoded_bytes": 16}
    values |= {"decoded_bytes": 16, **changes}
    return pb.TensorHeader(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tensors",
    [
        [tensor(shape=[5])],
        [tensor(shape=[0, 1 << 62], encoded_bytes=0, decoded_bytes=0)],
        [tensor(shape=[1 << 40, 1 << 40])],
        [tensor(dtype=pb.STRING)],
        [tensor(dtype=99)],
        [tensor(codec=pb.ZSTD)],
        [tensor(shuffled=True)],
        [tensor(encoded_bytes=8)],
        [tensor(shape=[1] * 33 + [4])],
        [tensor(), tensor()],
        [tensor(name=str(n), shape=[1 << 17], encoded_bytes=1 << 19, decoded_bytes=1 << 19)
         for n in range(3)],
        [tensor(name=str(n) * 100) for n in range(200)],
    ],
)  # fmt: skip
def test_a_layout_that_lies_is_refused(tensors: list[pb.TensorHeader]) -> None:
    with pytest.raises(MalformedFrame):
        read_layout(pb.Layout(tensors=tensors).SerializeToString())


def test_a_truth_value_of_a_stranger_is_checked() -> None:
    layout = read_layout(
        pb.Layout(
            tensors=[tensor(dtype=pb.BOOL, encoded_bytes=4, decoded_bytes=4)]
        ).SerializeToString()
    )
    with pytest.raises(MalformedFrame, match="truth value"):
        layout.items(memoryview(bytes([0, 1, 2, 0])), 1)
    second = bytes(64) + bytes([0, 0, 0, 255])
    with pytest.raises(MalformedFrame, match="truth value"):
        layout.items(memoryview(second), 2)
    assert len(layout.items(memoryview(second[:64] + bytes(4)), 2)) == 2


def test_rubbish_is_no_layout() -> None:
    with pytest.raises(MalformedFrame, match="cannot be parsed"):
        read_layout(b"\xff\xff\xff")
