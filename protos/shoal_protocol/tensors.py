"""Tensors on the wire: names and types, and numpy arrays made into the frames of one transfer.

A transfer carries the tensors of one `ActivationKey`. Its first frame's header describes every
tensor, then the bytes of all of them follow without gaps, cut into frames. An array that is
little-endian and row-major is copied once, into the frame. `assembly` is the way back.
"""

import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from shoal_protocol import codecs
from shoal_protocol.codecs import LinkCodec
from shoal_protocol.frame_sizes import MAXIMUM_PAYLOAD_BYTES
from shoal_protocol.frames import Frame, transfer_frames
from shoal_protocol.v1 import tensors_pb2 as pb

Array = NDArray[Any]

KNOWN_TENSORS: Final = 256
"""Of so many headers, a few kilobytes each at most, what was made of them is kept: item after item
has the same ones."""

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


class UnsupportedTensor(TypeError):
    """An array that has no place on the wire."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"tensor {name!r}: {reason}")


class ActivationKey(NamedTuple):
    """Names the tensors on one edge of a job's graph, for one item (see `v1/tensors.proto`)."""

    job: str
    epoch: int
    item: int
    producer: int
    consumer: int

    @classmethod
    def of(cls, message: pb.ActivationKey) -> Self:
        """The key in a message from the wire."""
        return cls(
            job=message.job,
            epoch=message.epoch,
            item=message.item,
            producer=message.producer,
            consumer=message.consumer,
        )

    def write(self, message: pb.ActivationKey) -> None:
        """Set all fields of a message to the key."""
        message.job = self.job
        message.epoch = self.epoch
        message.item = self.item
        message.producer = self.producer
        message.consumer = self.consumer


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedActivation:
    """Tensors ready for a stream; `frames` gives them as often as wanted, iterating does so as
    messages of gRPC."""

    header: pb.FrameHeader
    buffers: list[memoryview]
    decoded_bytes: int
    encoded_bytes: int
    frame_bytes: int

    def __iter__(self) -> Iterator[bytes]:
        return map(bytes, self.frames())

    def frames(self, transfer: int | None = None) -> Iterable[Frame]:
        """`transfer` is another number: a new try on the same stream needs one."""
        if transfer is not None:
            self.header.transfer = transfer
        return transfer_frames(self.header, self.buffers, self.encoded_bytes, self.frame_bytes)


class TensorFields(NamedTuple):
    """What a `TensorHeader` says."""

    name: str
    dtype: pb.DataType
    shape: tuple[int, ...]
    codec: pb.Codec
    shuffled: bool
    encoded_bytes: int
    decoded_bytes: int


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
    """Prepare tensors for a device (empty: the coordinator); all encoding happens in this call.

    Arrays that need neither a codec nor another layout are referenced, not copied: they must not
    change until the frames are made. `lossy` permits float16 to a `LinkCodec`; `bfloat16` names the
    uint16 arrays that are that. Raises `UnsupportedTensor`.
    """
    # Built in place: protobuf copies every message that is given to another's constructor.
    header = pb.FrameHeader(transfer=transfer)
    activation = header.activation
    activation.device = device
    key.write(activation.key)
    buffers: list[memoryview] = []
    decoded_bytes = encoded_bytes = 0
    for name, array in tensors.items():
        data_type = pb.BFLOAT16 if name in bfloat16 else data_type_of(name, array)
        plain = _wire_bytes(name, array, data_type)
        used, shuffled, encoded = pb.NONE, False, plain
        if codec != pb.NONE:
            edge = (key.job, key.producer, key.consumer, name)
            used, shuffled, encoded = _encode(plain, data_type, codec, edge, lossy=lossy)
        fields = TensorFields(
            name, data_type, array.shape, used, shuffled, len(encoded), len(plain)
        )
        activation.MergeFromString(_described(fields))
        buffers.append(encoded)
        decoded_bytes += len(plain)
        encoded_bytes += len(encoded)
    return EncodedActivation(
        header=header,
        buffers=buffers,
        decoded_bytes=decoded_bytes,
        encoded_bytes=encoded_bytes,
        frame_bytes=frame_bytes,
    )


@lru_cache(KNOWN_TENSORS)
def _described(fields: TensorFields) -> bytes:
    """An activation's field that describes a tensor."""
    activation = pb.Activation()
    activation.tensors.add(**fields._asdict())
    return activation.SerializeToString()


def data_type_of(name: str, array: Array) -> pb.DataType:
    """The wire's type of an array; `UnsupportedTensor` if there is none."""
    known = _DATA_TYPES.get(array.dtype)
    if known is None:
        if array.dtype.kind in "OU":
            return pb.STRING
        known = _DATA_TYPES.get(array.dtype.newbyteorder("="))
        if known is None:
            raise UnsupportedTensor(name, f"arrays of {array.dtype} cannot be sent")
    return known


def memory_bytes(array: Array) -> int:
    """What an array takes in memory, its texts included."""
    return array.nbytes + (sum(map(sys.getsizeof, array.flat)) if array.dtype == object else 0)


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


def _encode_strings(name: str, array: Array) -> bytearray:
    encoded = bytearray()  # pieces of it would take twenty times as much
    for element in array.reshape(-1):
        if not isinstance(element, str):
            raise UnsupportedTensor(name, f"holds {type(element).__name__}, not text")
        try:
            text = element.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedTensor(name, f"holds text that is not Unicode: {error}") from error
        encoded += struct.pack("<I", len(text))
        encoded += text
    return encoded


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
