"""What the reader of a link hands frames to."""

from typing import Protocol

from shoal_protocol.bulk.transport import Payload
from shoal_protocol.frames import Frame
from shoal_protocol.v1.tensors_pb2 import FrameHeader, Items


class FrameHandler(Protocol):
    """Takes the frames of a stream that are neither acknowledgements nor pings."""

    async def take(self, header: FrameHeader, payload: Payload) -> Frame | None:
        """Handle one frame; the acknowledgement, if there is one to give now. Raises
        `MalformedFrame` where the stream must end."""
        ...


class ItemHandler(Protocol):
    """Takes the items that come on a stream, which nobody acknowledges."""

    async def take_items(self, items: Items, payload: Payload) -> None:
        """Take the items of a frame, or leave its payload. Raises `MalformedFrame` where the stream
        must end."""
        ...

    def all_taken(self) -> None:
        """What was at hand has been taken: more is still to come over the wire."""
        ...
