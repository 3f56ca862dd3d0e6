"""Frames of bulk streams, and tensors put together from them."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fuzz.scratch import event_loop
from shoal_protocol.assembly import Limits, ReceivedActivation
from shoal_protocol.bulk.link import BulkLink
from shoal_protocol.bulk.local import LocalTransport
from shoal_protocol.bulk.receiving import Intake
from shoal_protocol.bulk.transport import Payload, Received, TransportBroken, read_message
from shoal_protocol.control import LocalControl
from shoal_protocol.frame_sizes import MAXIMUM_PAYLOAD_BYTES
from shoal_protocol.frames import (
    Frame,
    MalformedFrame,
    TransferError,
    frames_in,
    join_frame,
    join_frames,
    ping,
    split_frame,
)
from shoal_protocol.items import items_frame, layout_of, read_layout
from shoal_protocol.tensors import DTYPES, ActivationKey, encode_activation
from shoal_protocol.v1 import tensors_pb2 as pb
from shoal_protocol.v1.session_pb2 import (
    AgentMessage,
    CoordinatorMessage,
    Hello,
    ProbeReply,
    Reply,
)

LIMITS = Limits(decoded_bytes=16 << 20)
CODECS = (pb.NONE, pb.LZ4, pb.ZSTD, pb.ZLIB, pb.FP16)


def split(data: bytes) -> None:
    """What is read as a frame is the same when it is written again."""
    try:
        frames = [split_frame(frame) for frame in frames_in(data)]
    except MalformedFrame:
        return
    for header, payload in frames:
        again, same = split_frame(join_frame(header, payload))
        assert again == header
        assert same == payload


def receive(data: bytes) -> None:
    """A link takes whatever comes; what it receives has the types and sizes of its headers."""
    event_loop().run(_receive(data))


async def _receive(data: bytes) -> None:
    with contextlib.suppress(MalformedFrame):  # the stream ends
        await BulkLink(_OneMessage(data), Intake(_Receiver(), LIMITS)).run()


def receive_items(data: bytes) -> None:
    """The same of items, which nobody acknowledges."""
    event_loop().run(_receive_items(data))


async def _receive_items(data: bytes) -> None:
    with contextlib.suppress(MalformedFrame):  # the stream ends
        await BulkLink(_OneMessage(data), items=_Items()).run()


class _Items:
    """Takes any item whose payload is as long as its layout says (an `ItemHandler`)."""

    async def take_items(self, items: pb.Items, payload: Payload) -> None:
        count = len(items.instructions)
        arrays = layout_of(items, payload.size).items(await payload.read(), count)
        numbered = list(zip(items.instructions, arrays, strict=True))
        header, same = split_frame(bytes(items_frame(items.ticket, items.compute, numbered)))
        assert header.items.ticket == items.ticket
        again = read_layout(header.items.layout).items(same, count)
        for one, other in zip(arrays, again, strict=True):
            for array, copy in zip(one.values(), other.values(), strict=True):
                assert array.tobytes() == copy.tobytes()

    def all_taken(self) -> None:
        pass


def item_seeds() -> Iterable[bytes]:
    """One item, two in one message, and two in one frame."""
    arrays = {
        str(dtype): np.ones((2, 3), dtype)
        for data_type, dtype in DTYPES.items()
        if data_type not in (pb.STRING, pb.BFLOAT16)
    }
    whole = bytes(items_frame(bytes(16), (5, 6), [(1, arrays)]))
    yield whole
    yield join_frames([whole, bytes(items_frame(b"", (), [(2, {})]))])
    yield bytes(items_frame(bytes(16), (5, 6), [(1, arrays), (2, arrays)]))


def receive_locally(data: bytes) -> None:
    """The same of a local link, on which anything may come after the opening."""
    event_loop().run(_receive_locally(data))


async def _receive_locally(data: bytes) -> None:
    near, far = socket.socketpair(socket.AF_UNIX)
    near.setblocking(False)
    far.setblocking(False)
    link = BulkLink(LocalTransport(far), Intake(_Receiver(), LIMITS))
    running = asyncio.create_task(link.run())
    with contextlib.suppress(OSError):  # the link hangs up before it has read all
        await asyncio.get_running_loop().sock_sendall(near, data)
        near.shutdown(socket.SHUT_WR)
    with contextlib.suppress(MalformedFrame):
        await running
    near.close()


def receive_control(data: bytes) -> None:
    """A local control stream gives messages, or ends with a reason."""
    event_loop().run(_receive_control(data))


async def _receive_control(data: bytes) -> None:
    near, far = socket.socketpair(socket.AF_UNIX)
    near.setblocking(False)
    far.setblocking(False)
    transport = LocalTransport(far)
    stream: LocalControl[CoordinatorMessage, AgentMessage] = LocalControl(
        transport, AgentMessage.FromString
    )
    sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(near, data))
    sending.add_done_callback(lambda _: near.shutdown(socket.SHUT_WR))
    with contextlib.suppress(MalformedFrame, TransportBroken):
        async for messages in stream.received():
            assert all(isinstance(message, AgentMessage) for message in messages)
    await transport.close()
    await asyncio.gather(sending, return_exceptions=True)
    near.close()


def control_seeds() -> Iterable[bytes]:
    """Messages of an agent, as they are written to a local control stream."""
    for message in (
        AgentMessage(hello=Hello(device="a")),
        AgentMessage(reply=Reply(instruction=1)),
        AgentMessage(probe_reply=ProbeReply(nonce=7)),
    ):
        header = pb.FrameHeader(message=message.SerializeToString()).SerializeToString()
        yield struct.pack("<II", len(header), 0) + header


def local_seeds() -> Iterable[bytes]:
    """`seeds`, as they are written to a local link."""
    for message in seeds():
        pieces = bytearray()
        for received in map(split_frame, frames_in(message)):
            header, payload = received[0].SerializeToString(), received[1]
            pieces += struct.pack("<II", len(header), len(payload)) + header + payload
        yield bytes(pieces)


class _OneMessage:
    """A stream with one message on it (a `Transport`)."""

    frame_bytes = MAXIMUM_PAYLOAD_BYTES
    local = False

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def received(self) -> AsyncIterator[Iterable[Received]]:
        yield read_message(self._data)

    def heard(self) -> int | None:
        """Nobody asks."""
        return None

    async def write(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            split_frame(bytes(frame))

    async def close(self) -> None:
        """There is nothing to close."""


class _Memory:
    """Memory for one activation (a `ReceiveBuffer`)."""

    blocks = False

    def allocate(self, size: int) -> NDArray[np.uint8]:
        assert size <= LIMITS.decoded_bytes + 128 * LIMITS.tensors
        return np.empty(size, np.uint8)

    def settle(self) -> None:
        """Memory is memory."""

    def abandon(self) -> None:
        """It is garbage."""


class _Receiver:
    """Takes all (a `Receiver`)."""

    def admit(self, activation: pb.Activation, decoded_bytes: int) -> _Memory:
        assert decoded_bytes <= LIMITS.decoded_bytes
        return _Memory()

    async def take(self, received: ReceivedActivation, buffer: object) -> None:
        assert received.decoded_bytes <= LIMITS.decoded_bytes
        for name, array in received.tensors.items():
            assert array.dtype in DTYPES.values(), name
            if array.dtype == object:
                assert all(isinstance(text, str) for text in array.reshape(-1))

    def refused(self, error: TransferError) -> None:
        """The acknowledgement says it."""


def seeds() -> Iterable[bytes]:
    """Tensors of every type under every codec, transfers of several frames, and the other kinds."""
    key = ActivationKey(job="job", epoch=1, item=0, producer=0, consumer=1)
    plain = {
        pb.DataType.Name(kind): np.zeros((2, 3), dtype)
        for kind, dtype in DTYPES.items()
        if kind not in (pb.STRING, pb.BFLOAT16)
    }
    text = {"text": np.array([["a", ""], ["ß", "long"]], object), "empty": np.empty((0, 5))}
    for codec in CODECS:
        yield join_frames(list(encode_activation(key, "pi-4", plain, transfer=7, codec=codec)))
    long = {"x": np.arange(256, dtype=np.float32), **text}
    for codec in CODECS:
        encoded = encode_activation(
            key, "", long, transfer=8, codec=codec, lossy=True, frame_bytes=400
        )
        yield join_frames([*encoded, bytes(ping(9))])
    file = pb.FrameHeader(transfer=1, last=True)
    file.file.digest, file.file.file, file.file.file_bytes = "sha256:0", "model.onnx", 3
    yield join_frame(file, b"abc")
    yield join_frame(pb.FrameHeader(transfer=3, acknowledgement=pb.Acknowledgement(message="no")))
