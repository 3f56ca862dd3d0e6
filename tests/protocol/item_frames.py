"""Frames of items as tests look at them: item by item."""

from typing import NamedTuple

from shoal_protocol.items import items_frame, read_layout
from shoal_protocol.tensors import Array
from shoal_protocol.v1.tensors_pb2 import Items


class Came(NamedTuple):
    """An item that came in a frame."""

    ticket: bytes
    instruction: int
    compute: tuple[int, ...]
    tensors: dict[str, Array]


def came(items: Items, payload: memoryview) -> list[Came]:
    """The items of a frame."""
    arrays = read_layout(items.layout).items(payload, len(items.instructions))
    return [
        Came(items.ticket, number, tuple(items.compute), each)
        for number, each in zip(items.instructions, arrays, strict=True)
    ]


def one_item(
    ticket: bytes, instruction: int, compute: tuple[int, ...], tensors: dict[str, Array]
) -> bytes:
    """A frame of one item."""
    return bytes(items_frame(ticket, compute, [(instruction, tensors)]))
