"""Items on their itinerary: an item is one frame, and nobody acknowledges it (`v1/tensors.proto`).

The tensors of one item after another have the same names, types and shapes. So these are bytes of
their own in the header, the layout: it is made and checked once, and then found by its bytes.
Arrays lie in the frame's payload as they are, and the receiver's arrays are views of it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from shoal_protocol.frame_sizes import MAXIMUM_PAYLOAD_BYTES
from shoal_protocol.frames import Buffer, Frame, MalformedFrame
from shoal_protocol.tensors import (
    DTYPES,
    Array,
    UnsupportedTensor,
    data_type_of,
)
from shoal_protocol.v1 import tensors_pb2 as pb

TICKET_BYTES: Final = 16
ITEM_BYTES: Final = 128 << 10
"""The tensors of an item that has an itinerary take no more where it leaves a device: what is
larger is encoded on slow links, and its message costs little beside its bytes."""
_LAYOUT_BYTES: Final = 8 << 10
_KNOWN_LAYOUTS: Final = 64
_ALIGNMENT: Final = 64
_RANK: Final = 32
_PADDING: Final = bytes(_ALIGNMENT)


class _Place(NamedTuple):
    """A tensor of a layout, and where it lies in the payload."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    is_bool: bool


class Layout(NamedTuple):
    """What a payload of `size` bytes holds; `message` is the same as it was received."""

    places: tuple[_Place, ...]
    size: int
    message: pb.Layout

    def arrays(self, payload: memoryview) -> dict[str, Array]:
        """The tensors, as views of a payload of that size. Raises `MalformedFrame`."""
        # numpy's arrays begin where their type may: a view of a whole message need not.
        buffer = bytes(payload) if payload.readonly else payload
        arrays: dict[str, Array] = {}
        for place in self.places:
            array: Array = np.ndarray(place.shape, place.dtype, buffer, place.start)
            if place.is_bool and array.size and array.view(np.uint8).max() > 1:
                raise MalformedFrame(
                    f"tensor {place.name!r}: a truth value that is neither 0 nor 1"
                )
            arrays[place.name] = array
        return arrays


@lru_cache(_KNOWN_LAYOUTS)
def read_layout(data: bytes) -> Layout:
    """A layout of a stranger, checked. Raises `MalformedFrame`."""
    if len(data) > _LAYOUT_BYTES:
        raise MalformedFrame(f"a layout of {len(data)} bytes, at most {_LAYOUT_BYTES}")
    try:
        message = pb.Layout.FromString(data)
    except Exception as error:  # of the kind that the parser's implementation has
        raise MalformedFrame(f"the layout cannot be parsed: {error}") from error
    places: list[_Place] = []
    size = 0
    for tensor in message.tensors:
        start = _aligned(size)
        places.append(_read_place(tensor, start))
        size = start + tensor.decoded_bytes
        if size > MAXIMUM_PAYLOAD_BYTES:
            raise MalformedFrame(f"an item of {size} bytes, at most {MAXIMUM_PAYLOAD_BYTES}")
    if len({place.name for place in places}) != len(places):
        raise MalformedFrame("two tensors of one name")
    return Layout(tuple(places), size, message)


def _read_place(tensor: pb.TensorHeader, start: int) -> _Place:
    dtype, shape = DTYPES.get(tensor.dtype), tuple(tensor.shape[:])
    if dtype is None or dtype.hasobject or tensor.dtype == pb.BFLOAT16:
        raise MalformedFrame(f"tensor {tensor.name!r}: type {tensor.dtype} has no place here")
    if tensor.codec != pb.NONE or tensor.shuffled or len(shape) > _RANK:
        raise MalformedFrame(f"tensor {tensor.name!r}: a codec, or rank {len(shape)}")
    # Beside a zero the other dimensions count as well: numpy's own arithmetic overflows.
    largest = math.prod(filter(None, shape)) * dtype.itemsize
    size = math.prod(shape) * dtype.itemsize
    if largest > MAXIMUM_PAYLOAD_BYTES or not size == tensor.decoded_bytes == tensor.encoded_bytes:
        raise MalformedFrame(
            f"tensor {tensor.name!r}: {tensor.decoded_bytes} bytes do not make {list(shape)}"
        )
    return _Place(tensor.name, dtype, shape, start, tensor.dtype == pb.BOOL)


@lru_cache(_KNOWN_LAYOUTS)
def _write_layout(tensors: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]) -> bytes:
    message = pb.Layout()
    for name, dtype, shape in tensors:
        size = math.prod(shape) * dtype.itemsize
        data_type = data_type_of(name, np.empty(0, dtype))
        if data_type == pb.STRING:
            raise UnsupportedTensor(name, "is text, which an item does not carry")
        if dtype != DTYPES[data_type]:
            raise UnsupportedTensor(name, f"of {dtype} has its bytes in another order")
        message.tensors.add(
            name=name, dtype=data_type, shape=shape, encoded_bytes=size, decoded_bytes=size
        )
    data = message.SerializeToString()
    if len(data) > _LAYOUT_BYTES:
        raise UnsupportedTensor(tensors[0][0], f"and the others need a layout of {len(data)} bytes")
    return data


def item_frame(
    ticket: bytes, instruction: int, compute: Iterable[int], tensors: Mapping[str, Array]
) -> Frame:
    """An item as a frame that refers to its arrays. Raises `UnsupportedTensor` also where these
    are more than one frame holds."""
    described = tuple([(name, array.dtype, array.shape) for name, array in tensors.items()])
    header = pb.FrameHeader(last=True)
    item = header.item
    item.ticket = ticket
    item.instruction = instruction
    item.compute.extend(compute)
    item.layout = _write_layout(described)
    payload, size = _pieces(tensors)
    if size > MAXIMUM_PAYLOAD_BYTES:
        raise UnsupportedTensor(described[-1][0], f"makes an item of {size} bytes")
    return Frame(header.SerializeToString(), payload, size)


def _pieces(tensors: Mapping[str, Array]) -> tuple[Sequence[Buffer], int]:
    """The bytes of tensors, each at its place, and how many they are together."""
    pieces: list[Buffer] = []
    size = 0
    for array in tensors.values():
        if gap := -size % _ALIGNMENT:
            pieces.append(_PADDING[:gap])
            size += gap
        if array.nbytes:
            if not array.flags.c_contiguous:
                array = np.ascontiguousarray(array)  # noqa: PLW2901 - the same in another order
            pieces.append(array.reshape(-1).view(np.uint8).data)
            size += array.nbytes
    return pieces, size


def _aligned(position: int) -> int:
    return position + -position % _ALIGNMENT
