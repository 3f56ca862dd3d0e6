"""Files of fragments on the wire: one transfer per request, from an offset to the file's end, or
the end of the part that was asked for.

These functions do not verify the bytes: the receiver checks the digest of the whole file
(`transfers`). They open no file; `file_frames` reads one that is open.
"""

from collections.abc import Iterator
from typing import BinaryIO, Final

from shoal_protocol.frames import MalformedFrame, join_frame, split_frame
from shoal_protocol.v1.tensors_pb2 import FetchFragmentRequest, FileSlice, FrameHeader

FILE_FRAME_BYTES: Final = 128 << 10
"""Small, since the buffers of either side hold several, and both may be devices on a budget."""


def file_frames(
    source: BinaryIO,
    request: FetchFragmentRequest,
    file_bytes: int,
    *,
    frame_bytes: int = FILE_FRAME_BYTES,
) -> Iterator[bytes]:
    """The frames that answer a request, read from an open file of `file_bytes` bytes, each when
    the caller takes it.

    Raises `ValueError` for an offset past the end, `EOFError` if the file turns out shorter.
    """
    if request.offset > file_bytes:
        raise ValueError(
            f"offset {request.offset} is past the {file_bytes} bytes of {request.file}"
        )
    source.seek(request.offset)
    offset = request.offset
    end = _end(request, file_bytes)
    kind = FileSlice(digest=request.digest, file=request.file, file_bytes=file_bytes)
    header = FrameHeader(transfer=1, offset=offset, file=kind)
    while True:
        payload = source.read(min(frame_bytes, end - offset))
        if not payload and offset < end:
            raise EOFError(f"{request.file} ends at {offset} of {file_bytes} bytes")
        header.last = offset + len(payload) == end
        yield join_frame(header, payload)
        if header.last:
            return
        offset += len(payload)
        header = FrameHeader(transfer=1, offset=offset)


def _end(request: FetchFragmentRequest, file_bytes: int) -> int:
    """Where the answer to a request ends."""
    return min(file_bytes, request.offset + request.bytes) if request.bytes else file_bytes


class FileReceiver:
    """Follows the answer to one request: `feed` gives the bytes to write at the position before.

    `position` is where the next bytes belong, `file_bytes` the whole file's size once the first
    frame has come, `complete` whether all that was asked for has. Raises `MalformedFrame`, also for
    a file above `limit_bytes`.
    """

    def __init__(self, request: FetchFragmentRequest, limit_bytes: int) -> None:
        self._request = request
        self._limit_bytes = limit_bytes
        self.position = request.offset
        self.file_bytes: int | None = None
        self.complete = False

    def feed(self, message: bytes) -> memoryview:
        """The bytes that this frame adds to the file, a view of the message."""
        header, payload = split_frame(message)
        if self.complete:
            raise MalformedFrame("a frame after the last")
        if self.file_bytes is None:
            self.file_bytes = self._begin(header)
        elif header.WhichOneof("kind") is not None:
            raise MalformedFrame("another transfer begins before the file has ended")
        if header.offset != self.position:
            raise MalformedFrame(f"offset {header.offset} where {self.position} comes next")
        end, last = self.position + len(payload), _end(self._request, self.file_bytes)
        if end > last or header.last != (end == last):
            raise MalformedFrame(f"{end} of {last} bytes, last: {header.last}")
        self.position = end
        self.complete = header.last
        return payload

    def _begin(self, header: FrameHeader) -> int:
        wanted = self._request
        if header.WhichOneof("kind") != "file":
            raise MalformedFrame("the first frame does not describe a file")
        if (header.file.digest, header.file.file) != (wanted.digest, wanted.file):
            raise MalformedFrame(
                f"it is {header.file.file} of {header.file.digest}, not what was asked"
            )
        if not wanted.offset <= header.file.file_bytes <= self._limit_bytes:
            raise MalformedFrame(
                f"{wanted.file} has {header.file.file_bytes} bytes, at most {self._limit_bytes} fit"
            )
        return header.file.file_bytes
