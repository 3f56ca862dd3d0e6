"""Items on their itinerary: a frame each, with a layout that is checked once."""

import numpy as np
import pytest

from shoal_protocol.frames import MalformedFrame, split_frame
from shoal_protocol.items import TICKET_BYTES, item_frame, read_layout
from shoal_protocol.tensors import Array, UnsupportedTensor
from shoal_protocol.v1 import tensors_pb2 as pb

TICKET = bytes(range(TICKET_BYTES))


def received(tensors: dict[str, Array]) -> tuple[pb.Item, dict[str, Array]]:
    """What arrives of an item."""
    header, payload = split_frame(bytes(item_frame(TICKET, 7, (3, 4), tensors)))
    layout = read_layout(header.item.layout)
    assert layout.size == len(payload)
    return header.item, layout.arrays(payload)


def test_an_item_arrives_as_it_was_sent() -> None:
    sent: dict[str, Array] = {
        "odd": np.arange(3, dtype=np.int8),
        "truth": np.array([True, False]),
        "none": np.zeros((0, 5), np.float32),
        "turned": np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "number": np.array(5, np.int64),
        "empty at the end": np.zeros((2, 0), np.int16),
    }
    item, arrays = received(sent)
    assert (item.ticket, item.instruction, list(item.compute)) == (TICKET, 7, [3, 4])
    assert list(arrays) == list(sent)
    for name, array in sent.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
        np.testing.assert_array_equal(arrays[name], array)


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
        item_frame(TICKET, 1, (), {"x": array})


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
        layout.arrays(memoryview(bytes([0, 1, 2, 0])))


def test_rubbish_is_no_layout() -> None:
    with pytest.raises(MalformedFrame, match="cannot be parsed"):
        read_layout(b"\xff\xff\xff")
