"""The items of a program's call (`Infer`) as frames: inputs on the way in, results on the way back.

Over gRPC a frame is in a message of the call. On a local stream it is one of the stream's own.

A small item is one frame of the kind that goes from device to device (`items`), with a layout that
is read once. What is larger, holds text or has its bytes in another order is a transfer
(`tensors`).
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from shoal_protocol.assembly import ActivationAssembler, Limits
from shoal_protocol.bulk.local import LocalTransport
from shoal_protocol.control import LocalControl, StreamClosed
from shoal_protocol.frames import Frame, MalformedFrame, split_frame
from shoal_protocol.items import ITEM_BYTES, items_frame, read_layout
from shoal_protocol.tensors import (
    MODEL,
    ActivationKey,
    Array,
    UnsupportedTensor,
    encode_activation,
)
from shoal_protocol.v1.coordinator_pb2 import InferAnswer, InferRequest
from shoal_protocol.v1.tensors_pb2 import Activation, FrameHeader, Items, Layout

_KNOWN_LAYOUTS: Final = 64

Check = Callable[[Activation | Layout], None]


Ours = TypeVar("Ours", InferRequest, InferAnswer)
Theirs = TypeVar("Theirs", InferRequest, InferAnswer)


class ItemFrame(NamedTuple):
    """A frame of an item that has come."""

    header: FrameHeader
    payload: memoryview


def item_frame(message: Theirs) -> Theirs | ItemFrame:
    """A message of a call, or the frame that it holds. Raises `MalformedFrame`."""
    if message.WhichOneof("message") == "frame":
        return ItemFrame(*split_frame(message.frame))
    return message


class LocalCall(Generic[Ours, Theirs]):
    """Either end of a call on a local stream. `parse` reads the other side's messages."""

    def __init__(self, transport: LocalTransport, parse: Callable[[bytes], Theirs]) -> None:
        self._transport = transport
        self._control: LocalControl[Ours, Theirs] = LocalControl(transport, parse)

    async def received(self) -> AsyncIterator[Theirs | ItemFrame]:
        """The other side's messages and frames, until it ends the stream. Raises
        `TransportBroken`, `MalformedFrame`."""
        async for frames in self._transport.received():
            for frame in frames:
                match frame.header.WhichOneof("kind"):
                    case "items" | "activation" | None:  # what follows an activation has no kind
                        yield ItemFrame(frame.header, await frame.payload.read())
                    case "closing":
                        raise StreamClosed(frame.header.closing.reason)
                    case _:
                        yield item_frame(self._control.message(frame))

    async def write(self, message: Ours | Frame) -> None:
        """Raises `TransportBroken`, of a message `MessageTooLarge` as well."""
        if isinstance(message, Frame):
            await self._transport.write((message,))
        else:
            await self._control.write((message,))

    async def close(self) -> None:
        await self._transport.close()


class CalledItem(NamedTuple):
    """An item that has come; `size` are the bytes of its tensors. `whole`: it was one frame of
    items, so its results may be one as well."""

    number: int
    tensors: dict[str, Array]
    size: int
    whole: bool


def frames_of(number: int, tensors: Mapping[str, Array], *, whole: bool = True) -> Sequence[Frame]:
    """An item with the caller's number; a frame of items only if `whole`. The tensors must not
    change before the frames have left. Raises `UnsupportedTensor`."""
    if whole and sum([array.nbytes for array in tensors.values()]) <= ITEM_BYTES:
        try:
            return (items_frame(b"", (), ((number, tensors),)),)
        except UnsupportedTensor:
            pass  # text, for one: a transfer carries it, or says what is wrong
    key = ActivationKey(job="", epoch=0, item=number, producer=MODEL, consumer=MODEL)
    encoded = encode_activation(key, "", tensors, transfer=number)
    return tuple(encoded.frames())


def number_in(header: FrameHeader) -> int | None:
    """The caller's number of the item that begins with a frame; None: none begins."""
    match header.WhichOneof("kind"):
        case "items":
            return header.items.instructions[0] if header.items.instructions else 0
        case "activation":
            return header.activation.key.item
        case _:
            return None


class ItemReader:
    """Takes the frames of one call. Each item raises or is returned by itself."""

    def __init__(self, check: Check, limits: Limits) -> None:
        """`check` raises `TransferError` for tensors that are not wanted."""
        self._check = check
        self._checked: set[bytes] = set()
        self._assembler = ActivationAssembler(limits, lambda activation, _: check(activation))

    def add(self, header: FrameHeader, payload: memoryview) -> CalledItem | None:
        """The item that is whole with this frame. Raises `TransferError`."""
        if header.WhichOneof("kind") == "items":
            return self._whole(header.items, payload)
        received = self._assembler.add(header, payload)
        if received is None:
            return None
        return CalledItem(received.key.item, received.tensors, received.decoded_bytes, whole=False)

    def _whole(self, items: Items, payload: memoryview) -> CalledItem:
        if len(items.instructions) != 1:
            raise MalformedFrame(f"{len(items.instructions)} items in a frame of a call, not one")
        data = items.layout
        layout = read_layout(data)
        if layout.size != len(payload):
            raise MalformedFrame(f"an item of {len(payload)} bytes, not {layout.size}")
        if data not in self._checked:
            self._check(layout.message)
            if len(self._checked) < _KNOWN_LAYOUTS:
                self._checked.add(data)
        # Whoever gets the arrays may change them.
        own = memoryview(bytearray(payload)) if payload.readonly else payload
        (tensors,) = layout.items(own, 1)
        return CalledItem(items.instructions[0], tensors, layout.size, whole=True)
