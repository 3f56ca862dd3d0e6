"""Receiving: the transfers of one stream, admitted, put into buffers, handed over, acknowledged.

A sender receives one of four outcomes: taken; stale (drop it); busy (send it again later); refused
(malformed or not allowed: do not send it again). Nothing is allocated before the header has been
checked and a buffer been granted. Where that is memory, a transfer of one frame stays where its
payload has come, and one of several is put together in it. Work that blocks (a buffer on disk,
decoding megabytes) is done in a thread; the reader waits for it, which is back-pressure on this one
stream.
"""

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal_protocol.assembly import ActivationAssembler, Limits, ReceivedActivation, copy_into
from shoal_protocol.bulk.transport import Payload
from shoal_protocol.frame_sizes import DISK_PIECE_BYTES
from shoal_protocol.frames import Frame, TransferError, acknowledgement
from shoal_protocol.threads import in_thread
from shoal_protocol.v1.tensors_pb2 import NONE, Activation, FrameHeader

_DECODE_IN_THREAD_FROM_BYTES: Final = 1 << 20


class ReceiveBuffer(Protocol):
    """Memory, or room on disk, for one activation that is being received."""

    @property
    def blocks(self) -> bool:
        """Whether `allocate`, writing into it and `settle` wait for a disk."""
        ...

    def allocate(self, size: int) -> NDArray[np.uint8]:
        """So many writable bytes. Raises `TransferError`."""
        ...

    def settle(self) -> None:
        """A piece of a frame has been put into it."""
        ...

    def abandon(self) -> None:
        """The activation will not come whole, or was not taken."""
        ...


class Receiver(Protocol):
    """Decides which activations are taken, and takes them."""

    def admit(self, activation: Activation, memory_bytes: int) -> ReceiveBuffer:
        """A buffer for an activation whose header has been checked, and which will take so much
        memory. Raises `TransferError`."""
        ...

    async def take(self, received: ReceivedActivation, buffer: ReceiveBuffer) -> None:
        """Take an activation that has come whole; the buffer belongs to the receiver from now on.

        Raises `TransferError` where it is not taken; the buffer is abandoned then.
        """
        ...

    def refused(self, error: TransferError) -> None:
        """A transfer was not taken."""
        ...


class Intake:
    """The receiving half of one stream."""

    def __init__(self, receiver: Receiver, limits: Limits | None = None) -> None:
        self._receiver = receiver
        self._assembler = ActivationAssembler(limits or Limits(), self._admit)
        self._buffer: ReceiveBuffer | None = None

    async def take(self, header: FrameHeader, payload: Payload) -> Frame | None:
        """Take one frame; the acknowledgement of the transfer that it ends."""
        try:
            taken = await self.receive(header, payload)
        except TransferError as error:
            return acknowledgement(header.transfer, error.outcome, error.reason)
        return acknowledgement(header.transfer) if taken else None

    async def receive(self, header: FrameHeader, payload: Payload) -> bool:
        """Take one frame; whether it ended its transfer. Raises `TransferError`."""
        try:
            if not self._assembler.begin(header):
                return False
            buffer = self._buffer
            assert buffer is not None, "what has begun was admitted"
            decoded_bytes = self._assembler.bytes_to_decode if header.last else 0
            if buffer.blocks:
                async for piece in payload.pieces(DISK_PIECE_BYTES):
                    await in_thread(self._put, header, piece, buffer)
                received = await in_thread(self._assembler.complete, header)
            elif decoded_bytes >= _DECODE_IN_THREAD_FROM_BYTES:
                received = await in_thread(self._assembler.fill, header, await payload.read())
            elif self._assembler.whole(header, payload.size):
                received = self._assembler.keep(header, await payload.read(buffer.allocate))
            else:
                await payload.read_into(self._assembler.targets(header, payload.size))
                received = self._assembler.complete(header)
            if received is not None:
                await self._receiver.take(received, buffer)
                self._buffer = None
        except TransferError as error:
            self._receiver.refused(error)
            self.close()
            raise
        return received is not None

    def close(self) -> None:
        """The stream has ended: what has come in part will not come whole."""
        if self._buffer is not None:
            self._buffer.abandon()
            self._buffer = None

    def _put(self, header: FrameHeader, piece: memoryview, buffer: ReceiveBuffer) -> None:
        copy_into(self._assembler.targets(header, len(piece)), piece)
        buffer.settle()

    def _admit(self, activation: Activation, memory_bytes: int) -> ReceiveBuffer:
        self._buffer = self._receiver.admit(activation, memory_bytes)
        return self._buffer


def scratch_bytes(activation: Activation) -> int:
    """Memory that decoding takes beside the decoded tensors: their encoded bytes, and the largest
    tensor once more as its codec gives it."""
    encoded_bytes = largest = 0
    for each in activation.tensors:
        if each.codec != NONE:
            encoded_bytes += each.encoded_bytes
            largest = max(largest, each.decoded_bytes)
    return encoded_bytes + largest
