"""Frames put together again as tensors.

The receiver trusts nothing: counts are bounded, shape times element size must be the decoded size
that the header states, the sum must be within the receiver's limit, all before anything is
allocated; offsets must be contiguous. Then there is one allocation and one copy (out of the frame
into the array); what is encoded is received beside it and decoded at the end. What needs neither
decoding nor a check, and is whole in one frame, may stay there.
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal_protocol import codecs
from shoal_protocol.codecs import CodecError
from shoal_protocol.frames import MalformedFrame, TransferError, split_frame
from shoal_protocol.tensors import (
    DTYPES,
    KNOWN_TENSORS,
    ActivationKey,
    Array,
    TensorFields,
    element_bytes,
)
from shoal_protocol.units import format_bytes
from shoal_protocol.v1 import tensors_pb2 as pb

_ALIGNMENT: Final = 64
_STRING_OVERHEAD_BYTES: Final = 64
"""What a Python string takes beyond its bytes, for the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one transfer may ask of its receiver."""

    decoded_bytes: int = 1 << 30
    tensors: int = 1024
    rank: int = 32
    name_bytes: int = 1024


class ReceivedActivation(NamedTuple):
    """One complete transfer. The arrays share one buffer, each where its type may begin."""

    transfer: int
    key: ActivationKey
    device: str
    tensors: dict[str, Array]
    decoded_bytes: int
    encoded_bytes: int


class Buffer(Protocol):
    """Where an activation is received into."""

    def allocate(self, size: int) -> NDArray[np.uint8]:
        """So many writable bytes. Raises `TransferError`."""
        ...


Admission = Callable[[pb.Activation, int], Buffer | None]
"""Sees an activation's header and what it will take in memory before anything is allocated for it;
returns the buffer (None: plain memory). May refuse it by raising `TransferError` (STALE, BUSY)."""


class _Tensor(NamedTuple):
    """What one tensor's header says, and `cost_bytes`, which it takes in memory."""

    name: str
    data_type: pb.DataType
    shape: tuple[int, ...]
    codec: pb.Codec
    shuffled: bool
    encoded_bytes: int
    decoded_bytes: int
    dtype: np.dtype[Any]
    cost_bytes: int


@dataclass(slots=True)
class _Transfer:
    """The transfer being received. Where it has a buffer, each tensor begins in there at its start,
    and its bytes go to its target; the targets are filled one after the other."""

    number: int
    activation: pb.Activation
    tensors: list[_Tensor]
    into: Buffer | None
    decoded_bytes: int
    bytes_to_decode: int
    size: int
    array: NDArray[np.uint8] | None = None
    starts: Sequence[int] = ()
    targets: Sequence[memoryview] = ()
    filled: int = 0
    target: int = 0
    position: int = 0


class ActivationAssembler:
    """Puts the frames of one stream together again.

    Each frame takes three steps: `begin` checks its header and asks for admission, `targets` gives
    the memory that its payload goes to, `complete` decodes what is whole. `fill` copies a payload
    there and completes, `keep` leaves it where it is; `feed` does all, and its arrays may be
    written to. `fill` and `complete` may run in a thread.

    All raise `TransferError` (`MalformedFrame` when the sender is wrong) with the transfer's
    number; what is still to come of that transfer is then ignored, so the caller answers with an
    acknowledgement of the error's outcome and continues. Other streams, other assemblers.
    """

    def __init__(self, limits: Limits = Limits(), admit: Admission | None = None) -> None:
        self._limits = limits
        self._admit = admit
        self._current: _Transfer | None = None
        self._ignored: int | None = None

    @property
    def bytes_to_decode(self) -> int:
        """Decoded bytes that `fill` will make of what has come, with the transfer's last frame."""
        return 0 if self._current is None else self._current.bytes_to_decode

    def feed(self, message: bytes) -> ReceivedActivation | None:
        """Take the next frame; the activation when it was the last one."""
        return self.add(*split_frame(message))

    def add(self, header: pb.FrameHeader, payload: memoryview) -> ReceivedActivation | None:
        """`feed` for a frame that is split already."""
        return self.fill(header, payload) if self.begin(header) else None

    def begin(self, header: pb.FrameHeader) -> bool:
        """Check a frame's header; whether `fill` is to follow. False: it belongs to a transfer that
        was refused."""
        try:
            return self._begin(header)
        except TransferError as error:
            self._refuse(header, error)
            raise

    def fill(self, header: pb.FrameHeader, payload: memoryview) -> ReceivedActivation | None:
        """Take the payload of a frame that `begin` has accepted."""
        copy_into(self.targets(header, len(payload)), payload)
        return self.complete(header)

    def targets(self, header: pb.FrameHeader, size: int) -> list[memoryview]:
        """Where the payload of a frame that `begin` has accepted goes, in order."""
        current = self._current
        assert current is not None, "begin comes first"
        try:
            if current.array is None:
                _allocate(current)
            return _next_targets(current, size)
        except TransferError as error:
            self._refuse(header, error)
            raise

    def whole(self, header: pb.FrameHeader, size: int) -> bool:
        """Whether the frame that `begin` has accepted holds its whole transfer, as arrays have it,
        in a payload of that size."""
        current = self._current
        assert current is not None, "begin comes first"
        alone = header.last and not current.filled and size == current.size
        return alone and not current.bytes_to_decode

    def keep(self, header: pb.FrameHeader, payload: memoryview) -> ReceivedActivation | None:
        """`fill` for a frame that is `whole`: its payload becomes the arrays' memory, where each of
        them may begin where it lies."""
        current = self._current
        assert current is not None, "begin comes first"
        arrays: dict[str, Array] = {}
        start = 0
        for tensor in current.tensors:
            array: Array = np.ndarray(tensor.shape, tensor.dtype, payload, start)
            arrays[tensor.name] = array
            if not array.flags.aligned:
                return self.fill(header, payload)
            start += tensor.decoded_bytes
        self._current = None
        return _received(current, arrays)

    def complete(self, header: pb.FrameHeader) -> ReceivedActivation | None:
        """A frame's payload is in its targets; the activation when that was the last one."""
        current = self._current
        assert current is not None, "begin comes first"
        try:
            if header.last != (current.filled == current.size):
                text = f"{current.filled} of {current.size} bytes, last: {header.last}"
                raise MalformedFrame(text)
            if not header.last:
                return None
            self._current = None
            return _finish(current)
        except TransferError as error:
            self._refuse(header, error)
            raise

    def _refuse(self, header: pb.FrameHeader, error: TransferError) -> None:
        """Ignore what is still to come of a transfer."""
        error.transfer = header.transfer
        self._current = None
        self._ignored = None if header.last else header.transfer

    def _begin(self, header: pb.FrameHeader) -> bool:
        kind, current = header.WhichOneof("kind"), self._current
        if kind is None and self._ignored == header.transfer:
            if header.last:
                self._ignored = None
            return False
        if kind == "activation":
            if current is not None:
                raise MalformedFrame(f"it begins before transfer {current.number} has ended")
            self._ignored = None
            current = self._current = self._read_header(header)
        elif kind is not None or current is None or current.number != header.transfer:
            raise MalformedFrame(f"a frame of kind {kind} that belongs to no activation")
        if header.offset != current.filled:
            raise MalformedFrame(f"offset {header.offset} where {current.filled} comes next")
        return True

    def _read_header(self, header: pb.FrameHeader) -> _Transfer:
        """Check everything that the header says, then ask for admission."""
        activation, limits = header.activation, self._limits
        messages = activation.tensors[:]
        if len(messages) > limits.tensors:
            raise MalformedFrame(f"{len(messages)} tensors, at most {limits.tensors}")
        tensors: list[_Tensor] = []
        size = decoded_bytes = bytes_to_decode = cost = 0
        for message in messages:
            tensor = _read_tensor(message, limits)
            tensors.append(tensor)
            size += tensor.encoded_bytes
            decoded_bytes += tensor.decoded_bytes
            if tensor.codec != pb.NONE or tensor.data_type in (pb.STRING, pb.BOOL):
                bytes_to_decode += tensor.decoded_bytes
            cost += tensor.cost_bytes
            if cost > limits.decoded_bytes:
                least, most = format_bytes(cost), format_bytes(limits.decoded_bytes)
                raise MalformedFrame(f"would take {least} or more, at most {most} are allowed")
        if len(tensors) > 1 and len({tensor.name for tensor in tensors}) != len(tensors):
            raise MalformedFrame("two tensors of one name")
        return _Transfer(
            number=header.transfer,
            activation=activation,
            tensors=tensors,
            into=None if self._admit is None else self._admit(activation, cost),
            decoded_bytes=decoded_bytes,
            bytes_to_decode=bytes_to_decode,
            size=size,
        )


def _read_tensor(message: pb.TensorHeader, limits: Limits) -> _Tensor:
    """A tensor; `MalformedFrame` if its header is above a limit, or contradicts itself."""
    name, shape = message.name, tuple(message.shape[:])  # sliced: iterating asks one by one
    if len(name) > limits.name_bytes:
        raise MalformedFrame(f"a tensor's name of {len(name)} characters")
    if len(shape) > limits.rank:
        raise MalformedFrame(f"tensor {name!r}: rank {len(shape)}, at most {limits.rank}")
    return _check_tensor(
        TensorFields(
            name,
            message.dtype,
            shape,
            message.codec,
            message.shuffled,
            message.encoded_bytes,
            message.decoded_bytes,
        )
    )


@lru_cache(KNOWN_TENSORS)
def _check_tensor(fields: TensorFields) -> _Tensor:
    """The tensor that these make; `MalformedFrame` if they contradict one another. Name and rank
    are within limits."""
    name, data_type, shape, codec, _, encoded_bytes, decoded_bytes = fields
    dtype = DTYPES.get(data_type)
    if dtype is None:
        raise MalformedFrame(f"tensor {name!r}: data type {data_type} is not known")
    # Python's integers do not overflow. numpy's would, in the dimensions beside a zero as well.
    elements = math.prod(shape)
    if not elements and math.prod(filter(None, shape)) * dtype.itemsize > sys.maxsize:
        raise MalformedFrame(f"tensor {name!r}: the shape {list(shape)} is too large")
    cost_bytes = decoded_bytes
    if data_type == pb.STRING:
        cost_bytes += elements * _STRING_OVERHEAD_BYTES
        matches = decoded_bytes >= 4 * elements
    else:
        matches = decoded_bytes == elements * dtype.itemsize
    if not matches:
        raise MalformedFrame(f"tensor {name!r}: {decoded_bytes} bytes do not make {list(shape)}")
    tensor = _Tensor(*fields, dtype, cost_bytes)
    if not _suits_codec(tensor):
        raise MalformedFrame(
            f"tensor {name!r}: codec {codec} cannot make {decoded_bytes} bytes of {encoded_bytes}"
        )
    return tensor


def _suits_codec(tensor: _Tensor) -> bool:
    """Whether the codec is known and the sizes are such as a sender of ours would make."""
    match tensor.codec:
        case pb.NONE:
            return tensor.encoded_bytes == tensor.decoded_bytes and not tensor.shuffled
        case pb.FP16:
            halved = 2 * tensor.encoded_bytes == tensor.decoded_bytes
            return halved and tensor.data_type == pb.FLOAT and not tensor.shuffled
        case pb.LZ4 | pb.ZSTD | pb.ZLIB:
            return tensor.encoded_bytes < tensor.decoded_bytes
        case _:
            return False


def _allocate(current: _Transfer) -> None:
    """One buffer for all decoded tensors; bytes yet to be decoded go beside it."""
    starts: list[int] = []
    end = 0
    for tensor in current.tensors:
        starts.append(end)
        end += -(-tensor.decoded_bytes // _ALIGNMENT) * _ALIGNMENT
    size = end + _ALIGNMENT
    into = current.into
    array = current.array = np.empty(size, np.uint8) if into is None else into.allocate(size)
    shift = -addressof(c_char.from_buffer(array.data)) % _ALIGNMENT
    current.starts = [start + shift for start in starts]
    current.targets = [
        array.data[start : start + tensor.decoded_bytes]
        if tensor.codec == pb.NONE
        else np.empty(tensor.encoded_bytes, np.uint8).data
        for tensor, start in zip(current.tensors, current.starts, strict=True)
    ]


def copy_into(targets: Iterable[memoryview], payload: memoryview) -> None:
    """Copy bytes to where they belong; the targets have as many together."""
    for target in targets:
        target[:] = payload[: len(target)]
        payload = payload[len(target) :]


def _next_targets(current: _Transfer, size: int) -> list[memoryview]:
    if current.filled + size > current.size:
        raise MalformedFrame(f"more than the {current.size} bytes that the header states")
    current.filled += size
    targets: list[memoryview] = []
    while size:
        target = current.targets[current.target]
        start = current.position
        end = min(len(target), start + size)
        if start < end:
            targets.append(target[start:end])
        size -= end - start
        current.position = end
        if end == len(target):
            current.target += 1
            current.position = 0
    return targets


def _finish(current: _Transfer) -> ReceivedActivation:
    array = current.array
    assert array is not None, "it has been filled"
    placed = zip(current.tensors, current.starts, current.targets, strict=True)
    return _received(
        current,
        {tensor.name: _array(tensor, array, start, target) for tensor, start, target in placed},
    )


def _received(current: _Transfer, tensors: dict[str, Array]) -> ReceivedActivation:
    activation = current.activation
    return ReceivedActivation(
        transfer=current.number,
        key=ActivationKey.of(activation.key),
        device=activation.device,
        tensors=tensors,
        decoded_bytes=current.decoded_bytes,
        encoded_bytes=current.size,
    )


def _array(tensor: _Tensor, buffer: NDArray[np.uint8], start: int, target: memoryview) -> Array:
    slot = buffer.data[start : start + tensor.decoded_bytes]
    if tensor.codec != pb.NONE:
        try:
            codecs.decode(
                target,
                slot,
                tensor.codec,
                shuffled=tensor.shuffled,
                element_bytes=element_bytes(tensor.data_type),
            )
        except CodecError as error:
            raise MalformedFrame(f"tensor {tensor.name!r}: {error}") from error
    if tensor.data_type == pb.STRING:
        return _decode_strings(tensor.name, slot, tensor.shape)
    array: Array = np.ndarray(tensor.shape, tensor.dtype, buffer, start)
    if tensor.data_type == pb.BOOL and array.size and array.view(np.uint8).max() > 1:
        raise MalformedFrame(f"tensor {tensor.name!r}: a truth value that is neither 0 nor 1")
    return array


def _decode_strings(name: str, slot: memoryview, shape: tuple[int, ...]) -> Array:
    elements = np.empty(math.prod(shape), object)
    position = 0
    for index in range(len(elements)):
        start = position + 4
        position = start + int.from_bytes(slot[position:start], "little")
        if position > len(slot) or start > len(slot):
            raise MalformedFrame(f"tensor {name!r}: the text ends within element {index}")
        try:
            elements[index] = str(slot[start:position], "utf-8")
        except UnicodeDecodeError as error:
            raise MalformedFrame(f"tensor {name!r}: element {index}: {error}") from error
    if position != len(slot):
        raise MalformedFrame(
            f"tensor {name!r}: {len(slot) - position} bytes after the last element"
        )
    return elements.reshape(shape)
