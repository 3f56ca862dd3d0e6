"""The local link: bulk frames between processes of one host, over a stream socket.

Beside the Unix socket that serves gRPC a process listens on another one, named after it. A frame
is written as its pieces lie in memory, and its payload is received straight into the memory that
it was granted: the only copies are the kernel's. `v1/tensors.proto` describes the bytes.

Whoever connects is trusted with no more than on gRPC's streams. Sizes are checked before anything
is allocated for them; a peer that says nothing at first, or too much, is cut off; what a link
above does not read stays in the kernel, which makes the sender wait.

Reading waits for the event loop to report the socket before every call: so a peer that floods its
stream leaves the loop to the others.
"""

import asyncio
import logging
import os
import select
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from shoal_protocol.bulk.socket_calls import SocketCalls, gone
from shoal_protocol.bulk.transport import Allocate, Received, TransportBroken, new_memory
from shoal_protocol.frame_sizes import MAXIMUM_PAYLOAD_BYTES
from shoal_protocol.frames import (
    MAXIMUM_HEADER_BYTES,
    Buffer,
    Frame,
    MalformedFrame,
    closing,
    opening,
)
from shoal_protocol.v1.tensors_pb2 import FrameHeader

logger = logging.getLogger(__name__)

OPENING_SECONDS: Final = 10.0
"""How long a peer may take to say who it is."""
BULK: Final = ".bulk"
CONTROL: Final = ".control"
INFER: Final = ".infer"
"""What is appended to a Unix socket's path for the streams that a process offers beside it."""
_PREFIX: Final = struct.Struct("<II")
_BUFFER_BYTES: Final = 32 << 10
_PIECES: Final = 64
"""What one system call takes; the kernel's own bound is 1024."""
_WAITING_CONNECTIONS: Final = 128
_ACCEPT_PAUSE_SECONDS: Final = 0.1

Serve = Callable[[str, "LocalTransport"], Awaitable[str]]
"""Serves the stream of a device (as its `Opening` names it); why it ended."""


def local_path(address: str, suffix: str = BULK) -> Path | None:
    """The socket of local streams beside a gRPC target; None where that is no Unix socket."""
    return Path(address.removeprefix("unix:") + suffix) if address.startswith("unix:/") else None


def connect(
    address: str,
    device: str = "",
    suffix: str = BULK,
    *,
    unsent_bytes: int = MAXIMUM_PAYLOAD_BYTES,
) -> "LocalTransport | None":
    """A local stream to whoever serves a gRPC target; None where nobody offers one.

    The kernel holds up to twice `unsent_bytes`, and a packet of 32 KiB, that the other side has not
    read. It charges them to the memory of the group that this process is in.
    """
    if (path := local_path(address, suffix)) is None:
        return None
    with ExitStack() as undo:
        try:
            connection = undo.enter_context(socket.socket(socket.AF_UNIX))
            connection.setblocking(False)
            connection.connect(str(path))
            connection.send(_head(opening(device)))
        except OSError:
            return None
        undo.pop_all()
    return LocalTransport(connection, unsent_bytes=unsent_bytes)


class LocalTransport:
    """Either end of a local link, as a `Transport`."""

    frame_bytes = MAXIMUM_PAYLOAD_BYTES
    local = True

    def __init__(
        self,
        connection: socket.socket,
        *,
        served: bool = False,
        unsent_bytes: int = MAXIMUM_PAYLOAD_BYTES,
    ) -> None:
        """Takes a connected socket that does not block; `served`: a listener's."""
        self._socket = connection
        # What fits is written at once, and the receiver is woken once. A kernel may allow less.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, unsent_bytes)
        self._served = served
        self._within_frame = False
        self._reading = SocketCalls(connection, write=False)
        self._writing = SocketCalls(connection, write=True)
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        self._unread = 0
        """Bytes of the last payload that nobody has taken."""
        self._heard_bytes = 0

    @property
    def is_abandoned(self) -> bool:
        """Whether the other side has gone. Who reads learns that only behind all that has come."""
        waiting = select.poll()
        waiting.register(self._socket, 0)  # of a hang-up it always tells
        return bool(waiting.poll(0))

    async def opened_by(self) -> str:
        """The device that the peer's `Opening` names. Raises `TransportBroken`,
        `MalformedFrame`."""
        while (first := self._next()) is None:
            if not await self._fill():
                raise TransportBroken("it ended before it had begun")
        if first.header.WhichOneof("kind") != "opening":
            raise MalformedFrame("the first frame of a local link is no opening")
        return first.header.opening.device

    async def received(self) -> AsyncIterator[Iterable[Received]]:
        while True:
            if self._start < self._end:
                yield self._at_hand()
            if not await self._fill():
                return

    def heard(self) -> int | None:
        """See `Transport.heard`."""
        return self._heard_bytes if self._reading.waiting else None

    async def write(self, frames: Sequence[Frame]) -> None:
        """See `Transport.write`. After one that was cancelled within a frame, every other raises
        `TransportBroken`."""
        if self._within_frame:
            raise TransportBroken("an earlier write was given up")
        pieces: list[Buffer] = []
        size = 0
        for frame in frames:
            head = _head(frame)
            pieces.append(head)
            pieces += frame.payload
            size += len(head) + frame.payload_bytes
        self._within_frame = True
        if (sent := self._send(pieces)) < size:
            remaining = _after(pieces, sent)
            while remaining:
                sent = await self._writing.do(partial(self._send, remaining))
                remaining = _after(remaining, sent)
        self._within_frame = False

    async def close(self) -> None:
        """A listener's link ends when `Serve` returns, as a stream of gRPC does."""
        if not self._served:
            self.disconnect()

    def disconnect(self, reason: str = "") -> None:
        """End the stream. The peer learns the reason, if it can take that at once."""
        if reason and not self._within_frame:
            with suppress(OSError):
                self._socket.send(_head(closing(reason)))
        self._reading.close()
        self._writing.close()
        self._socket.close()

    def _send(self, pieces: Sequence[Buffer]) -> int:
        """How many of these bytes the kernel takes now."""
        try:
            return self._socket.sendmsg(pieces[:_PIECES])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise gone(error) from error

    # ---- receiving -------------------------------------------------------------------------------

    def _at_hand(self) -> Iterator[Received]:
        """The frames of which at least the header is in the buffer."""
        while self._start < self._end and (received := self._next()) is not None:
            yield received

    def _next(self) -> Received | None:
        """The next frame, if its header is in the buffer. Raises `MalformedFrame`."""
        if self._unread:
            self._skip()
        begin = self._start + _PREFIX.size
        if begin > self._end:
            return None
        header_bytes, payload_bytes = _PREFIX.unpack_from(self._buffer, self._start)
        if header_bytes > MAXIMUM_HEADER_BYTES or payload_bytes > MAXIMUM_PAYLOAD_BYTES:
            raise MalformedFrame(f"a header of {header_bytes} bytes, {payload_bytes} of payload")
        if (end := begin + header_bytes) > self._end:
            self._need(_PREFIX.size + header_bytes)
            return None
        try:
            header = FrameHeader.FromString(bytes(self._buffer[begin:end]))
        except DecodeError as error:
            raise MalformedFrame(f"the frame's header cannot be parsed: {error}") from error
        self._start, self._unread = end, payload_bytes
        return Received(header, _Arriving(self, payload_bytes), header_bytes + payload_bytes)

    def _skip(self) -> None:
        """Pass over what is in the buffer of a payload that was not taken."""
        skipped = min(self._unread, self._end - self._start)
        self._start += skipped
        self._unread -= skipped

    def _need(self, size: int) -> None:
        """Have a buffer for so many bytes; one that is larger than most is not kept."""
        wanted = max(size, _BUFFER_BYTES)
        held = self._end - self._start
        if wanted != len(self._buffer) and held <= wanted:
            buffer = memoryview(bytearray(wanted))
            buffer[:held] = self._buffer[self._start : self._end]
            self._buffer, self._start, self._end = buffer, 0, held

    async def _fill(self) -> bool:
        """Wait for more bytes; False: the stream has ended where a frame has."""
        if self._unread:
            self._skip()
        if self._start == self._end:
            self._start = self._end = 0
            self._need(0)
        elif self._start:
            held = self._end - self._start
            self._buffer[:held] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, held
        into = self._buffer[self._end :]
        count = await self._reading.do(partial(self._socket.recv_into, into))
        self._end += count
        self._heard_bytes += count
        if not count and (self._end or self._unread):
            raise TransportBroken("the stream ended within a frame")
        return count > 0

    def take_held(self, size: int) -> memoryview | None:
        """A payload in memory of its own; None: some of it is yet to come."""
        if (end := self._start + size) > self._end:
            return None
        taken = memoryview(bytearray(self._buffer[self._start : end]))
        self._start, self._unread = end, self._unread - size
        return taken

    async def take(self, targets: Sequence[memoryview]) -> None:
        """Put as much of the payload as they take into the targets. Raises `TransportBroken`."""
        remaining = [target for target in targets if target]
        while remaining and self._start < self._end:
            target = remaining[0]
            count = min(len(target), self._end - self._start)
            target[:count] = self._buffer[self._start : self._start + count]
            self._start += count
            self._unread -= count
            remaining[0] = target[count:]
            if not remaining[0]:
                del remaining[0]
        while remaining:
            # What has come of one payload is taken without asking the event loop before each call.
            pieces = remaining[:_PIECES]
            count = self._receive_now(pieces) or await self._receive(pieces)
            if not count:
                raise TransportBroken("the stream ended within a frame")
            self._unread -= count
            self._heard_bytes += count
            remaining = _after(remaining, count)

    def _receive_now(self, targets: Sequence[memoryview]) -> int:
        """Bytes that had come already; 0: none, or no more will."""
        try:
            return self._socket.recvmsg_into(targets)[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise gone(error) from error

    def _receive(self, targets: Sequence[memoryview]) -> Awaitable[int]:
        """Bytes that come into the targets; 0: no more will."""
        return self._reading.do(lambda: self._socket.recvmsg_into(targets)[0])


class _Arriving:
    """The payload of the frame that was received last."""

    __slots__ = ("_transport", "size")

    def __init__(self, transport: LocalTransport, size: int) -> None:
        self._transport = transport
        self.size = size

    async def read(self, allocate: Allocate = new_memory) -> memoryview:
        if allocate is new_memory and (held := self._transport.take_held(self.size)) is not None:
            return held
        view = allocate(self.size).data
        await self._transport.take([view])
        return view

    async def read_into(self, targets: Sequence[memoryview]) -> None:
        await self._transport.take(targets)

    async def pieces(self, most_bytes: int) -> AsyncIterator[memoryview]:
        view = memoryview(bytearray(min(self.size, most_bytes)))
        for start in range(0, max(1, self.size), most_bytes):
            piece = view[: self.size - start]
            await self._transport.take([piece])
            yield piece


class LocalListener:
    """Serves the local link of one process."""

    def __init__(self, path: Path, serve: Serve, *, connections: int) -> None:
        """`connections` at one time; more are closed at once. Raises `OSError`."""
        self._path = path
        self._serve = serve
        self._connections = connections
        self._serving: set[asyncio.Task[None]] = set()
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.setblocking(False)
            self._socket.bind(str(path))
            os.chmod(path, 0o600)
            self._socket.listen(_WAITING_CONNECTIONS)
        except OSError:
            self._socket.close()
            raise
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._socket, self._accept)

    async def stop(self) -> None:
        """Accept no more, and end the links; again does nothing."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
        if self._pause is not None:
            self._pause.cancel()
        tasks = list(self._serving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        """Not by `loop.sock_accept`: that looks whether the socket is one of `ssl`, a module that
        an idle agent does without."""
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # who asked has gone
        except OSError as error:  # no descriptors are left, for one
            logger.warning("%s: cannot accept: %s", self._path, error)
            self._loop.remove_reader(self._socket)
            self._pause = self._loop.call_later(
                _ACCEPT_PAUSE_SECONDS, self._loop.add_reader, self._socket, self._accept
            )
            return
        if len(self._serving) >= self._connections:
            connection.close()
            return
        connection.setblocking(False)
        serving = asyncio.create_task(self._serve_one(connection))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve_one(self, connection: socket.socket) -> None:
        transport, reason = LocalTransport(connection, served=True), "the server stops"
        try:
            async with asyncio.timeout(OPENING_SECONDS):
                device = await transport.opened_by()
            reason = await self._serve(device, transport)
        except (MalformedFrame, TransportBroken) as error:
            reason = str(error)
        except TimeoutError:
            reason = f"no opening came within {OPENING_SECONDS:g} s"
        except Exception:
            reason = "internal error"
            logger.exception("%s: a stream failed", self._path)
        finally:
            transport.disconnect(reason)


def listen(
    address: str, serve: Serve, *, connections: int, suffix: str = BULK
) -> LocalListener | None:
    """Offer local streams beside a gRPC target that this process serves; None where there can be
    none. Peers use gRPC then."""
    if (path := local_path(address, suffix)) is None:
        return None
    try:
        return LocalListener(path, serve, connections=connections)
    except OSError as error:
        logger.warning("%s: no local link: %s", path, error)
        return None


def _head(frame: Frame) -> bytes:
    return _PREFIX.pack(len(frame.header), frame.payload_bytes) + frame.header


def _after(pieces: Sequence[Buffer], count: int) -> list[memoryview]:
    """What is left of pieces of memory after so many bytes."""
    for index, piece in enumerate(pieces):
        if count < len(piece):
            return [memoryview(piece)[count:], *(memoryview(each) for each in pieces[index + 1 :])]
        count -= len(piece)
    return []
