"""Frames of bulk streams, written and read without protobuf (`v1/tensors.proto`).

A frame is a small protobuf header followed by payload bytes. Only the header is parsed. Over gRPC a
frame is a message: the payload is joined in once on the way out (`bytes(frame)`) and is a view of
the message on the way in. Over the local link its pieces are written as they are. A relay that
passes a transfer on rewrites the header's transfer number and hands the payload through untouched.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from shoal_protocol.frame_sizes import MAXIMUM_PAYLOAD_BYTES
from shoal_protocol.v1.tensors_pb2 import Acknowledgement, FrameHeader

MAXIMUM_HEADER_BYTES: Final = 1 << 20
FRAMES_TOGETHER: Final = 64
"""What one message holds at most."""

_HEADER_TAG: Final = 0x0A  # field 1, length-delimited
_PAYLOAD_TAG: Final = 0x12  # field 2, length-delimited
_FRAMES_TAG: Final = 0x1A  # field 3, length-delimited
_FRAMES_PREFIX: Final = bytes((_FRAMES_TAG,))
_TRANSFER_TAG: Final = b"\x08"  # of a header: field 1, a varint
_MESSAGE_TAG: Final = b"\x52"  # of a header: field 10, length-delimited
_ALIGNMENT: Final = 16
"""Of a payload in its message, which Python allocates at a multiple of that. Any type may begin
there."""
_PADDINGS: Final = [b"\x62" + bytes((gap,)) + bytes(gap) for gap in range(2 * _ALIGNMENT)]
"""Of a header: field 12, length-delimited. Its own length may become a byte longer by it."""
_ACCEPTED: Final = b"\x2a\x00\x30\x01"
"""Of a header: an acknowledgement (field 5) without contents, and `last` (field 6)."""

Buffer = bytes | bytearray | memoryview


class TransferError(Exception):
    """A transfer that is not accepted.

    `transfer` is its number, or None where not even that could be read; `outcome` is what to put
    into the acknowledgement (an `Acknowledgement.Outcome`).
    """

    def __init__(
        self, reason: str, *, outcome: Acknowledgement.Outcome, transfer: int | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.outcome = outcome
        self.transfer = transfer

    def __str__(self) -> str:
        return self.reason if self.transfer is None else f"transfer {self.transfer}: {self.reason}"


class MalformedFrame(TransferError):
    """The bytes break the protocol or pass a limit: sending them again will not help."""

    def __init__(self, reason: str, *, transfer: int | None = None) -> None:
        super().__init__(reason, outcome=Acknowledgement.REFUSED, transfer=transfer)


class Frame(NamedTuple):
    """A serialised `FrameHeader`, and the pieces of memory that are the payload."""

    header: bytes
    payload: Sequence[Buffer] = ()
    payload_bytes: int = 0

    @property
    def size(self) -> int:
        """Bytes of header and payload, without what a transport puts around them."""
        return len(self.header) + self.payload_bytes

    def copy(self) -> "Frame":
        """The same with a payload of its own."""
        return self._replace(payload=(b"".join(self.payload),))

    def __bytes__(self) -> bytes:
        """The frame as a message of gRPC."""
        head = (b"\x0a", _length(len(self.header)), self.header)
        if not self.payload_bytes:
            return b"".join(head)
        return b"".join((*head, b"\x12", _length(self.payload_bytes), *self.payload))


def split_frame(message: bytes) -> tuple[FrameHeader, memoryview]:
    """Header of a frame, and its payload as a view of `message`. Raises `MalformedFrame`."""
    if not message or message[0] != _HEADER_TAG:
        raise MalformedFrame("the frame does not start with a header")
    header_bytes, start = _read_length(message, 1)
    end = start + header_bytes
    if header_bytes > MAXIMUM_HEADER_BYTES or end > len(message):
        raise MalformedFrame(f"a header of {header_bytes} bytes in a message of {len(message)}")
    try:
        header = FrameHeader.FromString(message[start:end])
    except DecodeError as error:
        raise MalformedFrame(f"the frame's header cannot be parsed: {error}") from error
    if end == len(message):
        return header, memoryview(b"")
    if message[end] != _PAYLOAD_TAG:
        raise MalformedFrame("what follows the header is no payload", transfer=header.transfer)
    payload_bytes, start = _read_length(message, end + 1)
    if payload_bytes != len(message) - start or payload_bytes > MAXIMUM_PAYLOAD_BYTES:
        raise MalformedFrame(
            f"a payload of {payload_bytes} bytes where {len(message) - start} follow",
            transfer=header.transfer,
        )
    return header, memoryview(message)[start:]


def frames_in(message: bytes) -> Iterable[bytes]:
    """The frames that one message holds, mostly one. Raises `MalformedFrame`."""
    if not message or message[0] != _FRAMES_TAG:
        return (message,)
    frames: list[bytes] = []
    position = 0
    while position < len(message):
        length, start = _read_length(message, position + 1)
        position = start + length
        if position > len(message):
            raise MalformedFrame("the message ends within a frame")
        frames.append(message[start:position])
        if message[position : position + 1] not in (b"", _FRAMES_PREFIX):
            raise MalformedFrame("what follows a frame is no frame")
        if len(frames) > FRAMES_TOGETHER:
            raise MalformedFrame(f"more than {FRAMES_TOGETHER} frames in one message")
    return frames


def join_frames(frames: Sequence[Frame | bytes]) -> bytes:
    """One message that holds these frames, at most `FRAMES_TOGETHER`."""
    if len(frames) == 1:
        return bytes(frames[0])
    pieces: list[bytes] = []
    for each in frames:
        frame = bytes(each)
        pieces += (_FRAMES_PREFIX, _length(len(frame)), frame)
    return b"".join(pieces)


def join_frame(header: FrameHeader, payload: Buffer = b"") -> bytes:
    return bytes(Frame(header.SerializeToString(), (payload,), len(payload)))


def acknowledgement(
    transfer: int,
    outcome: Acknowledgement.Outcome = Acknowledgement.ACCEPTED,
    message: str = "",
    *,
    payload: Buffer = b"",
) -> Frame:
    """The frame that answers a transfer; of a ping it may have a payload."""
    if outcome == Acknowledgement.ACCEPTED and not message and not payload:
        return Frame(_TRANSFER_TAG + _varint(transfer) + _ACCEPTED)
    header = FrameHeader(transfer=transfer, last=True)
    header.acknowledgement.SetInParent()
    header.acknowledgement.outcome = outcome
    header.acknowledgement.message = message[:1000]
    return Frame(header.SerializeToString(), (payload,), len(payload))


def ping(transfer: int, payload: Buffer = b"", answer_bytes: int = 0) -> Frame:
    """The frame of a transfer that is acknowledged and means nothing."""
    header = FrameHeader(transfer=transfer, last=True)
    header.ping.answer_bytes = answer_bytes
    return Frame(header.SerializeToString(), (payload,), len(payload))


def control_message(message: bytes) -> Frame:
    """The frame of a local control stream: one serialised message."""
    return Frame(_MESSAGE_TAG + _length(len(message)) + message)


def opening(device: str) -> Frame:
    """The first frame of a local link."""
    header = FrameHeader(last=True)
    header.opening.device = device
    return Frame(header.SerializeToString())


def closing(reason: str) -> Frame:
    """The last frame of a local link, of the side that listens."""
    header = FrameHeader(last=True)
    header.closing.reason = reason[:1000]
    return Frame(header.SerializeToString())


def transfer_frames(
    first: FrameHeader, buffers: Sequence[memoryview], total_bytes: int, frame_bytes: int
) -> Iterable[Frame]:
    """The frames of one transfer: `buffers` (bytes, `total_bytes` in all) cut every `frame_bytes`.

    `first` is the first frame's header, with its kind and its offset; the others get a bare one.
    """
    assert 0 < frame_bytes <= MAXIMUM_PAYLOAD_BYTES, f"frames of {frame_bytes} bytes"
    if total_bytes > frame_bytes:
        return _cut(first, buffers, total_bytes, frame_bytes)
    first.last = True
    header = first.SerializeToString()
    return [Frame(header + _padding(len(header), total_bytes), buffers, total_bytes)]


def _cut(
    first: FrameHeader, buffers: Sequence[memoryview], total_bytes: int, frame_bytes: int
) -> Iterator[Frame]:
    transfer, offset = first.transfer, first.offset
    remaining = iter(buffers)
    current = memoryview(b"")
    for sent in range(0, total_bytes, frame_bytes):
        wanted = size = min(frame_bytes, total_bytes - sent)
        pieces: list[memoryview] = []
        while wanted:
            if not current:
                current = next(remaining)
            pieces.append(current[:wanted])
            wanted -= len(pieces[-1])
            current = current[len(pieces[-1]) :]
        header = FrameHeader(transfer=transfer, offset=offset + sent) if sent else first
        header.last = sent + size == total_bytes
        yield Frame(header.SerializeToString(), pieces, size)


@lru_cache(maxsize=1024)
def _padding(header_bytes: int, payload_bytes: int) -> bytes:
    """The field that makes a payload begin where an array may, behind a header of so many bytes."""

    def start(padding: bytes) -> int:
        padded = header_bytes + len(padding)
        return 2 + len(_varint(padded)) + padded + len(_varint(payload_bytes))

    return next(padding for padding in _PADDINGS if start(padding) % _ALIGNMENT == 0)


@lru_cache(maxsize=1024)
def _length(value: int) -> bytes:
    """A size as a varint. (The same few sizes come again and again.)"""
    return _varint(value)


def _varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _read_length(message: bytes, position: int) -> tuple[int, int]:
    """A varint at a position, and where it ends. No message is so long that it needs six bytes."""
    value = shift = 0
    while shift < 35 and position < len(message):
        byte = message[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7
    raise MalformedFrame("the frame ends within a length")
