"""Items on their itinerary: items that go the same way together are one frame, and nobody
acknowledges them (`v1/tensors.proto`).

The tensors of one item after another have the same names, types and shapes. So these are bytes of
their own in the header, the layout: it is made and checked once, and then found by its bytes.
Arrays lie in the frame's payload as they are, and the receiver's arrays are views of it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol, TypeVar

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
ITEMS_TOGETHER: Final = 32
"""In one frame. A device has the next ones while these are on their way from it."""
ARRAY_BYTES: Final = 256
"""What an array takes in memory beside its bytes, and its place in an item."""
_LAYOUT_BYTES: Final = 8 << 10
_KNOWN_LAYOUTS: Final = 64
_ALIGNMENT: Final = 64
_RANK: Final = 32
_PADDING: Final = bytes(_ALIGNMENT)
_COPIED_BYTES: Final = 4 << 10
"""Up to here an array is copied: to refer to its memory costs more."""
_FEW_PIECES: Final = 16
"""More are joined: a system call takes few."""

Numbered = tuple[int, Mapping[str, Array]]
"""An item: the number of its instruction, and its tensors."""


_Key = TypeVar("_Key")


class OfJob(Protocol):
    """What is known of a job's itineraries."""

    @property
    def job(self) -> str: ...


def to_forget(known: Mapping[_Key, OfJob]) -> _Key:
    """Of too much that is known: the oldest of the job of which most is. So what is planned for
    others, again and again, takes nothing from a job that rests."""
    ((job, _),) = Counter(each.job for each in known.values()).most_common(1)
    return next(key for key, each in known.items() if each.job == job)


class _Place(NamedTuple):
    """A tensor of a layout, and where it lies in the payload."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    is_bool: bool


class Layout(NamedTuple):
    """What an item's part of a payload holds, `size` bytes, and `stride` from one item to the next;
    `message` is the same as it was received."""

    places: tuple[_Place, ...]
    size: int
    stride: int
    has_truths: bool
    message: pb.Layout

    def payload_bytes(self, count: int) -> int:
        """Of so many items."""
        return (count - 1) * self.stride + self.size

    def items(self, payload: memoryview, count: int) -> list[dict[str, Array]]:
        """The tensors of so many items, as views of a payload of their size. Raises
        `MalformedFrame`."""
        # numpy's arrays begin where their type may: a view of a whole message need not.
        buffer = bytes(payload) if payload.readonly else payload
        stride, places = self.stride, self.places
        if self.has_truths:
            self._check_truths(buffer, count)
        return [
            {
                name: np.ndarray(shape, dtype, buffer, number * stride + start)
                for name, dtype, shape, start, _ in places
            }
            for number in range(count)
        ]

    def _check_truths(self, buffer: memoryview | bytes, count: int) -> None:
        whole = np.frombuffer(buffer, np.uint8)
        for place in self.places:
            for begin in range(count) if place.is_bool else ():
                at = begin * self.stride + place.start
                if whole[at : at + math.prod(place.shape)].max(initial=0) > 1:
                    raise MalformedFrame(
                        f"tensor {place.name!r}: a truth value that is neither 0 nor 1"
                    )


def layout_of(items: pb.Items, size: int) -> Layout:
    """The layout of a stranger's items, whose payload has so many bytes; all of it is checked.
    Raises `MalformedFrame`."""
    layout, count = read_layout(items.layout), len(items.instructions)
    if not 0 < count <= ITEMS_TOGETHER or size != layout.payload_bytes(count):
        raise MalformedFrame(f"{count} items of {size} bytes, each of {layout.size}")
    return layout


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
    has_truths = any(place.is_bool for place in places)
    return Layout(tuple(places), size, _aligned(size), has_truths, message)


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


def alike(items: Sequence[Numbered]) -> Iterable[Sequence[Numbered]]:
    """Items as they leave together: those that follow one another and have the same layout, as
    many as one frame may have. One with more than `ITEM_BYTES` is alone."""
    return (items,) if len(items) == 1 else _alike(items)


def _alike(items: Iterable[Numbered]) -> Iterator[list[Numbered]]:
    together: list[Numbered] = []
    known: object = None
    room = 0
    for item in items:
        described = _described(item[1])
        if described != known or len(together) >= ITEMS_TOGETHER or room <= 0:
            if together:
                yield together
            together, known = [], described
            size = _aligned(sum(array.nbytes + _ALIGNMENT for array in item[1].values()))
            room = ITEM_BYTES // max(1, size)
        together.append(item)
        room -= 1
    if together:
        yield together


def items_frame(ticket: bytes, compute: Iterable[int], items: Sequence[Numbered]) -> Frame:
    """Items that are `alike` as a frame. Raises `UnsupportedTensor` also where one is more than a
    frame holds."""
    header = pb.FrameHeader(last=True)
    message = header.items
    message.ticket = ticket
    message.instructions.extend([number for number, _ in items])
    message.compute.extend(compute)
    described = _described(items[0][1])
    message.layout = _write_layout(described)
    pieces: list[Buffer] = []
    size = 0
    for _, tensors in items:
        size = _add_pieces(pieces, size, tensors)
    if size > MAXIMUM_PAYLOAD_BYTES:
        raise UnsupportedTensor(described[-1][0], f"makes an item of {size} bytes")
    payload = pieces if len(pieces) <= _FEW_PIECES else [b"".join(pieces)]
    return Frame(header.SerializeToString(), payload, size)


def _described(tensors: Mapping[str, Array]) -> tuple[tuple[str, np.dtype[Any], Any], ...]:
    return tuple([(name, array.dtype, array.shape) for name, array in tensors.items()])


def _pad(pieces: list[Buffer], size: int) -> int:
    """Where the next tensor begins, behind so many bytes."""
    if gap := -size % _ALIGNMENT:
        pieces.append(_PADDING[:gap])
        size += gap
    return size


def _add_pieces(pieces: list[Buffer], size: int, tensors: Mapping[str, Array]) -> int:
    """Add the bytes of tensors, each at its place behind `size` bytes; how many there are now."""
    for array in tensors.values():
        size = _pad(pieces, size)
        count = array.nbytes
        if count <= _COPIED_BYTES:
            pieces.append(array.tobytes())
        else:
            if not array.flags.c_contiguous:
                array = np.ascontiguousarray(array)  # noqa: PLW2901 - the same in another order
            pieces.append(array.reshape(-1).view(np.uint8).data)
        size += count
    return size


def _aligned(position: int) -> int:
    return position + -position % _ALIGNMENT
