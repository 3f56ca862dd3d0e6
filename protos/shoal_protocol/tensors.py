"""Tensors on the wire: numpy arrays to the frames of one transfer, and back.

A transfer carries the tensors of one `ActivationKey`. Its first frame's header describes every
tensor, then the bytes of all of them follow without gaps, cut into frames. The receiver believes
nothing: counts are bounded, shape times element size must be the decoded size that the header
states, the sum must be within the receiver's limit, all before anything is allocated; offsets must
be contiguous.

Copies: sending makes one (into the frame); receiving makes one (out of the frame into the array)
and allocates once per transfer. Codecs add their own.
"""

import math
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from shoal_protocol import codecs
from shoal_protocol.codecs import CodecError, LinkCodec
from shoal_protocol.frames import (
    MAXIMUM_PAYLOAD_BYTES,
    MalformedFrame,
    TransferError,
    split_frame,
    transfer_frames,
)
from shoal_protocol.v1 import tensors_pb2 as pb

Array = NDArray[Any]

MODEL: Final = -1
"""As a producer: the model's inputs; as a consumer: the model's outputs."""

DTYPES: Final[Mapping[pb.DataType, np.dtype[Any]]] = {
    pb.FLOAT: np.dtype("<f4"),
    pb.UINT8: np.dtype("u1"),
    pb.INT8: np.dtype("i1"),
    pb.UINT16: np.dtype("<u2"),
    pb.INT16: np.dtype("<i2"),
    pb.INT32: np.dtype("<i4"),
    pb.INT64: np.dtype("<i8"),
    pb.STRING: np.dtype(object),
    pb.BOOL: np.dtype(np.bool_),
    pb.FLOAT16: np.dtype("<f2"),
    pb.DOUBLE: np.dtype("<f8"),
    pb.UINT32: np.dtype("<u4"),
    pb.UINT64: np.dtype("<u8"),
    pb.COMPLEX64: np.dtype("<c8"),
    pb.COMPLEX128: np.dtype("<c16"),
    pb.BFLOAT16: np.dtype("<u2"),
}
"""How each type is held in numpy: strings as objects, bfloat16 as the bits of its uint16."""

_DATA_TYPES: Final = {
    dtype.newbyteorder("="): data_type
    for data_type, dtype in DTYPES.items()
    if data_type not in (pb.BFLOAT16, pb.STRING)
}
_ALIGNMENT: Final = 64
_STRING_OVERHEAD_BYTES: Final = 64
"""What a Python string takes beyond its bytes, for the limit."""


class UnsupportedTensor(TypeError):
    """An array that has no place on the wire."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"tensor {name!r}: {reason}")
        self.name = name
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationKey:
    """Names the tensors on one edge of a job's graph, for one item (see `v1/tensors.proto`)."""

    job: str
    epoch: int
    item: int
    producer: int
    consumer: int

    @classmethod
    def of(cls, message: pb.ActivationKey) -> Self:
        """From the message."""
        return cls(
            job=message.job,
            epoch=message.epoch,
            item=message.item,
            producer=message.producer,
            consumer=message.consumer,
        )

    def message(self) -> pb.ActivationKey:
        """As the message."""
        return pb.ActivationKey(
            job=self.job,
            epoch=self.epoch,
            item=self.item,
            producer=self.producer,
            consumer=self.consumer,
        )


# ---- sending -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedActivation:
    """Tensors ready for a stream; iterating gives the frames, as often as wanted.

    A new try on the same stream needs a new number: `dataclasses.replace(encoded, transfer=...)`.
    """

    transfer: int
    activation: pb.Activation
    buffers: tuple[memoryview, ...]
    decoded_bytes: int
    encoded_bytes: int
    frame_bytes: int

    def __iter__(self) -> Iterator[bytes]:
        first = pb.FrameHeader(transfer=self.transfer, activation=self.activation)
        return transfer_frames(first, self.buffers, self.encoded_bytes, self.frame_bytes)


def encode_activation(  # noqa: PLR0913 - all but three have a default
    key: ActivationKey,
    device: str,
    tensors: Mapping[str, Array],
    *,
    transfer: int,
    codec: pb.Codec | LinkCodec = pb.NONE,
    lossy: bool = False,
    bfloat16: frozenset[str] = frozenset(),
    frame_bytes: int = MAXIMUM_PAYLOAD_BYTES,
) -> EncodedActivation:
    """Prepare tensors for a device (empty: the coordinator); all encoding happens here, in the
    call.

    Arrays that need neither a codec nor another layout are referenced, not copied: they must not
    change until the frames are made. `lossy` permits float16 to a `LinkCodec`; `bfloat16` names the
    uint16 arrays that are that. Raises `UnsupportedTensor`.
    """
    headers: list[pb.TensorHeader] = []
    buffers: list[memoryview] = []
    for name, array in tensors.items():
        data_type = pb.BFLOAT16 if name in bfloat16 else data_type_of(name, array)
        plain = _wire_bytes(name, array, data_type)
        edge = (key.job, key.producer, key.consumer, name)
        used, shuffled, encoded = _encode(plain, data_type, codec, edge, lossy=lossy)
        headers.append(
            pb.TensorHeader(
                name=name,
                dtype=data_type,
                shape=array.shape,
                codec=used,
                shuffled=shuffled,
                encoded_bytes=len(encoded),
                decoded_bytes=len(plain),
            )
        )
        buffers.append(encoded)
    return EncodedActivation(
        transfer=transfer,
        activation=pb.Activation(key=key.message(), device=device, tensors=headers),
        buffers=tuple(buffers),
        decoded_bytes=sum(header.decoded_bytes for header in headers),
        encoded_bytes=sum(map(len, buffers)),
        frame_bytes=frame_bytes,
    )


def data_type_of(name: str, array: Array) -> pb.DataType:
    """The wire's type of an array; `UnsupportedTensor` if there is none."""
    if array.dtype.kind in "OU":
        return pb.STRING
    try:
        return _DATA_TYPES[array.dtype.newbyteorder("=")]
    except KeyError:
        raise UnsupportedTensor(name, f"arrays of {array.dtype} cannot be sent") from None


def _wire_bytes(name: str, array: Array, data_type: pb.DataType) -> memoryview:
    """The array's bytes, little-endian and row-major; a view where it is that already."""
    if data_type == pb.STRING:
        return memoryview(_encode_strings(name, array))
    dtype = DTYPES[data_type]
    if array.dtype != dtype:
        if array.dtype.newbyteorder("=") != dtype.newbyteorder("="):
            raise UnsupportedTensor(
                name, f"{pb.DataType.Name(data_type)} in an array of {array.dtype}"
            )
        array = array.astype(dtype)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _encode_strings(name: str, array: Array) -> bytes:
    pieces: list[bytes] = []
    for element in array.reshape(-1):
        if not isinstance(element, str):
            raise UnsupportedTensor(name, f"holds {type(element).__name__}, not text")
        try:
            text = element.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedTensor(name, f"holds text that is not Unicode: {error}") from error
        pieces += (struct.pack("<I", len(text)), text)
    return b"".join(pieces)


def _encode(
    plain: memoryview,
    data_type: pb.DataType,
    codec: pb.Codec | LinkCodec,
    edge: object,
    *,
    lossy: bool,
) -> tuple[pb.Codec, bool, memoryview]:
    """Codec used, whether shuffled, and the bytes; as they are when the codec gains nothing."""
    half_allowed = data_type == pb.FLOAT
    if isinstance(codec, LinkCodec):
        wanted = codec.choose(edge, len(plain), half_allowed=lossy and half_allowed)
    else:
        wanted = pb.NONE if codec == pb.FP16 and not half_allowed else codec
    if wanted == pb.NONE or not plain:
        return pb.NONE, False, plain
    started = perf_counter()
    result = codecs.encode(plain, wanted, element_bytes=element_bytes(data_type))
    seconds = perf_counter() - started
    gains = result is not None and len(result[0]) < len(plain)
    if isinstance(codec, LinkCodec):
        codec.observe_encoding(
            edge,
            wanted,
            decoded_bytes=len(plain),
            encoded_bytes=len(result[0]) if result is not None and gains else len(plain),
            seconds=seconds,
        )
    if result is None or not gains:
        return pb.NONE, False, plain
    return wanted, result[1], result[0]


def element_bytes(data_type: pb.DataType) -> int:
    """Width of one number, for the byte shuffle: of a complex one's half, 1 for strings."""
    if data_type == pb.STRING:
        return 1
    dtype = DTYPES[data_type]
    return dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize


# ---- receiving -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one transfer may ask of its receiver."""

    decoded_bytes: int = 1 << 30
    tensors: int = 1024
    rank: int = 32
    name_bytes: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedActivation:
    """One complete transfer. The arrays share one buffer, each at a multiple of 64 bytes."""

    transfer: int
    key: ActivationKey
    device: str
    tensors: dict[str, Array]
    data_types: dict[str, pb.DataType]
    decoded_bytes: int
    encoded_bytes: int


Admission = Callable[[pb.Activation, int], None]
"""Sees an activation's header and decoded bytes before anything is allocated for it; may refuse it
by raising `TransferError` (STALE, BUSY)."""


@dataclass(slots=True)
class _Transfer:
    """The transfer being received: `targets` are filled one after the other."""

    number: int
    activation: pb.Activation
    buffer: NDArray[np.uint8]
    slots: list[memoryview]
    targets: list[memoryview]
    size: int
    filled: int = 0
    target: int = 0
    position: int = 0


class ActivationAssembler:
    """Puts the frames of one stream together again.

    `feed` raises `TransferError` (`MalformedFrame` when the sender is wrong) with the transfer's
    number; what is still to come of that transfer is then passed over in silence, so the caller
    answers with an acknowledgement of the error's outcome and goes on. Other streams, other
    assemblers.
    """

    def __init__(self, limits: Limits = Limits(), admit: Admission | None = None) -> None:
        self._limits = limits
        self._admit = admit
        self._current: _Transfer | None = None
        self._passed_over: int | None = None

    def feed(self, message: bytes) -> ReceivedActivation | None:
        """Take the next frame; the activation when it was the last one."""
        return self.add(*split_frame(message))

    def add(self, header: pb.FrameHeader, payload: memoryview) -> ReceivedActivation | None:
        """`feed` for a frame that is split already."""
        try:
            return self._add(header, payload)
        except TransferError as error:
            error.transfer = header.transfer
            self._current = None
            self._passed_over = None if header.last else header.transfer
            raise

    def _add(self, header: pb.FrameHeader, payload: memoryview) -> ReceivedActivation | None:
        kind = header.WhichOneof("kind")
        if kind is None and self._passed_over == header.transfer:
            if header.last:
                self._passed_over = None
            return None
        if kind == "activation":
            if self._current is not None:
                raise MalformedFrame(f"it begins before transfer {self._current.number} has ended")
            self._passed_over = None
            current = self._current = self._begin(header)
        elif kind is None and self._current is not None and self._current.number == header.transfer:
            current = self._current
        else:
            raise MalformedFrame(f"a frame of kind {kind} that belongs to no activation")
        if header.offset != current.filled:
            raise MalformedFrame(f"offset {header.offset} where {current.filled} comes next")
        _fill(current, payload)
        if header.last != (current.filled == current.size):
            raise MalformedFrame(f"{current.filled} of {current.size} bytes, last: {header.last}")
        if not header.last:
            return None
        self._current = None
        return _finish(current)

    def _begin(self, header: pb.FrameHeader) -> _Transfer:
        """Check everything that the header says, then allocate."""
        activation, limits = header.activation, self._limits
        if len(activation.tensors) > limits.tensors:
            raise MalformedFrame(f"{len(activation.tensors)} tensors, at most {limits.tensors}")
        cost = 0
        for tensor in activation.tensors:
            cost += _check_tensor(tensor, limits)
            if cost > limits.decoded_bytes:
                raise MalformedFrame(
                    f"would take {cost} bytes or more, at most {limits.decoded_bytes} are allowed"
                )
        if len({tensor.name for tensor in activation.tensors}) != len(activation.tensors):
            raise MalformedFrame("two tensors of one name")
        if self._admit is not None:
            self._admit(activation, cost)
        return _allocate(header.transfer, activation)


def _check_tensor(tensor: pb.TensorHeader, limits: Limits) -> int:
    """What the tensor will take in memory; `MalformedFrame` if its header contradicts itself."""
    name = tensor.name
    if len(name) > limits.name_bytes:
        raise MalformedFrame(f"a tensor's name of {len(name)} characters")
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise MalformedFrame(f"tensor {name!r}: data type {tensor.dtype} is not known")
    if len(tensor.shape) > limits.rank:
        raise MalformedFrame(f"tensor {name!r}: rank {len(tensor.shape)}, at most {limits.rank}")
    # Python's integers do not overflow; numpy's do, also in dimensions beside a zero.
    if math.prod(size for size in tensor.shape if size) * dtype.itemsize >= sys.maxsize:
        raise MalformedFrame(f"tensor {name!r}: the shape {list(tensor.shape)} is too large")
    elements = math.prod(tensor.shape)
    decoded, encoded = tensor.decoded_bytes, tensor.encoded_bytes
    if tensor.dtype == pb.STRING:
        matches, cost = decoded >= 4 * elements, decoded + elements * _STRING_OVERHEAD_BYTES
    else:
        matches, cost = decoded == elements * dtype.itemsize, decoded
    if not matches:
        raise MalformedFrame(f"tensor {name!r}: {decoded} bytes do not make {list(tensor.shape)}")
    if not _suits_codec(tensor):
        raise MalformedFrame(
            f"tensor {name!r}: codec {tensor.codec} cannot make {decoded} bytes of {encoded}"
        )
    return cost


def _suits_codec(tensor: pb.TensorHeader) -> bool:
    """Whether the codec is known and the sizes are such as a sender of ours would make."""
    match tensor.codec:
        case pb.NONE:
            return tensor.encoded_bytes == tensor.decoded_bytes and not tensor.shuffled
        case pb.FP16:
            halved = 2 * tensor.encoded_bytes == tensor.decoded_bytes
            return halved and tensor.dtype == pb.FLOAT and not tensor.shuffled
        case pb.LZ4 | pb.ZSTD | pb.ZLIB:
            return tensor.encoded_bytes < tensor.decoded_bytes
        case _:
            return False


def _allocate(number: int, activation: pb.Activation) -> _Transfer:
    """One buffer for all decoded tensors; bytes yet to be decoded go beside it."""
    starts: list[int] = []
    end = 0
    for tensor in activation.tensors:
        starts.append(end)
        end += -(-tensor.decoded_bytes // _ALIGNMENT) * _ALIGNMENT
    buffer = np.empty(end + _ALIGNMENT, np.uint8)
    aligned = buffer.data[-buffer.ctypes.data % _ALIGNMENT :]
    slots = [
        aligned[start : start + tensor.decoded_bytes]
        for start, tensor in zip(starts, activation.tensors, strict=True)
    ]
    targets = [
        slot if tensor.codec == pb.NONE else np.empty(tensor.encoded_bytes, np.uint8).data
        for slot, tensor in zip(slots, activation.tensors, strict=True)
    ]
    return _Transfer(
        number=number,
        activation=activation,
        buffer=buffer,
        slots=slots,
        targets=targets,
        size=sum(map(len, targets)),
    )


def _fill(current: _Transfer, payload: memoryview) -> None:
    """Copy a frame's payload to where it belongs."""
    if current.filled + len(payload) > current.size:
        raise MalformedFrame(f"more than the {current.size} bytes that the header states")
    current.filled += len(payload)
    while payload:
        target = current.targets[current.target]
        size = min(len(target) - current.position, len(payload))
        target[current.position : current.position + size] = payload[:size]
        payload = payload[size:]
        current.position += size
        if current.position == len(target):
            current.target += 1
            current.position = 0


def _finish(current: _Transfer) -> ReceivedActivation:
    """Decode what is encoded and make the arrays."""
    tensors: dict[str, Array] = {}
    for header, slot, target in zip(
        current.activation.tensors, current.slots, current.targets, strict=True
    ):
        if header.codec != pb.NONE:
            try:
                codecs.decode(
                    target,
                    slot,
                    header.codec,
                    shuffled=header.shuffled,
                    element_bytes=element_bytes(header.dtype),
                )
            except CodecError as error:
                raise MalformedFrame(f"tensor {header.name!r}: {error}") from error
        tensors[header.name] = _array(header, slot)
    activation = current.activation
    return ReceivedActivation(
        transfer=current.number,
        key=ActivationKey.of(activation.key),
        device=activation.device,
        tensors=tensors,
        data_types={header.name: header.dtype for header in activation.tensors},
        decoded_bytes=sum(map(len, current.slots)),
        encoded_bytes=current.size,
    )


def _array(header: pb.TensorHeader, slot: memoryview) -> Array:
    shape = tuple(header.shape)
    if header.dtype == pb.STRING:
        return _decode_strings(header.name, slot, shape)
    if header.dtype == pb.BOOL and slot and np.frombuffer(slot, np.uint8).max() > 1:
        raise MalformedFrame(f"tensor {header.name!r}: a truth value that is neither 0 nor 1")
    return np.frombuffer(slot, DTYPES[header.dtype]).reshape(shape)


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
