"""Activations on their way in, from any stream: assembled, admitted, stored, acknowledged.

A sender learns one of four things: taken, stale (drop it), busy (come again), refused (malformed,
or not for this device: do not come again). Nothing is allocated before the header has been checked
and a place been found.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoal_agent.telemetry.counters import Counters
from shoal_agent.transport.activations import ReceiveBuffer, SpillFull
from shoal_protocol.assembly import ActivationAssembler, Allocate, Limits, ReceivedActivation
from shoal_protocol.frames import MalformedFrame, TransferError, acknowledgement
from shoal_protocol.v1.tensors_pb2 import NONE, Acknowledgement, Activation, FrameHeader

MAXIMUM_DECODED_BYTES = 1 << 30


class Receiver(Protocol):
    """Who takes what has come: the present session's `Tasks`."""

    def stale(self, job: str, epoch: int) -> bool:
        """Whether a newer epoch of the job is known."""
        ...

    def has_room(self, size: int) -> bool:
        """Whether an activation of that size has a place."""
        ...

    def land(self, decoded_bytes: int, encoded_bytes: int) -> ReceiveBuffer:
        """A place for an activation that begins to come; raises `SpillFull`."""
        ...

    def take(self, received: ReceivedActivation, landing: ReceiveBuffer) -> bool:
        """Take one that has come whole. False: it is of an older epoch or session."""
        ...


class Intake:
    """The receiving half of one stream."""

    def __init__(
        self,
        device: str,
        receiver: Callable[[], Receiver | None],
        counters: Counters,
        limit_bytes: int = MAXIMUM_DECODED_BYTES,
    ) -> None:
        """`receiver` gives that of the present session, None without one.

        What would be larger than `limit_bytes` (the device's budget) is refused for good.
        """
        self._device = device
        self._receiver = receiver
        self._counters = counters
        limits = Limits(decoded_bytes=min(limit_bytes, MAXIMUM_DECODED_BYTES))
        self._assembler = ActivationAssembler(limits, self._admit)
        self._landing: ReceiveBuffer | None = None

    def feed(self, header: FrameHeader, payload: memoryview) -> bytes | None:
        """Take one frame that is no acknowledgement; the frame that answers its transfer."""
        try:
            taken = self.take(header, payload)
        except TransferError as error:
            return acknowledgement(header.transfer, error.outcome, error.reason)
        return acknowledgement(header.transfer) if taken else None

    def take(self, header: FrameHeader, payload: memoryview) -> bool:
        """Take one frame; whether it was a transfer's last. Raises `TransferError`."""
        try:
            received = self._assembler.add(header, payload)
            landing = self._landing
            if received is None or landing is None:
                if landing is not None:
                    landing.settle()
                return False
            receiver = self._receiver()
            try:
                taken = receiver is not None and receiver.take(received, landing)
            except (SpillFull, OSError) as error:
                raise TransferError(f"no room: {error}", outcome=Acknowledgement.BUSY) from error
            if not taken:
                raise TransferError("of an older epoch", outcome=Acknowledgement.STALE)
        except TransferError as error:
            self._counters.transfers_refused[Acknowledgement.Outcome.Name(error.outcome)] += 1
            self.close()
            raise
        self._landing = None
        self._counters.received_bytes += received.encoded_bytes
        return True

    def close(self) -> None:
        """The stream has ended: what has come in part will not come whole."""
        if self._landing is not None:
            self._landing.abandon()
            self._landing = None

    def _admit(self, activation: Activation, decoded_bytes: int) -> Allocate:
        key, receiver = activation.key, self._receiver()
        if activation.device != self._device:
            raise MalformedFrame(f"it is for {activation.device!r}, this is {self._device!r}")
        if receiver is None:
            raise TransferError("no session", outcome=Acknowledgement.BUSY)
        if receiver.stale(key.job, key.epoch):
            raise TransferError("of an older epoch", outcome=Acknowledgement.STALE)
        if not receiver.has_room(decoded_bytes):
            raise TransferError("no room for activations", outcome=Acknowledgement.BUSY)
        encoded = [each for each in activation.tensors if each.codec != NONE]
        beside = sum(each.encoded_bytes for each in encoded)
        beside += max((each.decoded_bytes for each in encoded), default=0)  # as a codec gives it
        try:
            landing = self._landing = receiver.land(decoded_bytes, beside)
        except SpillFull as error:
            raise TransferError(str(error), outcome=Acknowledgement.BUSY) from error
        return partial(_allocate, landing)


def _allocate(landing: ReceiveBuffer, size: int) -> NDArray[np.uint8]:
    try:
        return landing.allocate(size)
    except OSError as error:
        raise TransferError(f"no room: {error}", outcome=Acknowledgement.BUSY) from error
