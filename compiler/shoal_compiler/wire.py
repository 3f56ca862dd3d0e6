"""A protobuf file walked field by field, without a parser: bounded, and without its weights.

An ONNX file is untrusted and may be two gigabytes, nearly all of them weights. So before
any parser sees it, it is walked over a memory map: lengths are checked against their enclosing
message, nesting and counts against limits, text against UTF-8. Tensors' contents are stepped over,
so that their pages are never read, and left out of the *skeleton*: the same message in which each
tensor of `LARGE` bytes or more says where in the file its contents are, in the form that ONNX has
for external data, with `INLINE` as the location (which no file can be called).
"""

import mmap
import os
import stat
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import onnx
from google.protobuf.descriptor import FieldDescriptor

from shoal_compiler.errors import ModelRefused
from shoal_compiler.foreign import HEAD_BYTES, foreign_format
from shoal_compiler.lists import listed

if TYPE_CHECKING:
    from google._upb._message import Descriptor as FastDescriptor
    from google.protobuf.descriptor import Descriptor

LARGE: Final = 1024
INLINE: Final = "\0"
MAX_FILE_BYTES: Final = 2**31 - 1  # protobuf's own limit
MAX_SKELETON_BYTES: Final = 1 << 28
MAX_FIELDS: Final = 4_000_000
"""Fields that are read one by one: about a microsecond and up to some hundred bytes each."""
MAX_LISTED: Final = 1 << 25
"""Values in lists, as attributes have them: decision trees of about 150 MiB."""
MAX_DEPTH: Final = 80  # below the parser's own limit of 100 nested messages
MAX_NODES: Final = 200_000
"""Nodes of a model, those of sub-graphs and functions included."""
MAX_INITIALIZERS: Final = 200_000

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MODEL: Final = onnx.ModelProto.DESCRIPTOR
_GRAPH: Final = onnx.GraphProto.DESCRIPTOR
_NODE: Final = onnx.NodeProto.DESCRIPTOR
_FUNCTION: Final = onnx.FunctionProto.DESCRIPTOR
_TENSOR: Final = onnx.TensorProto.DESCRIPTOR
_LIMITS: Final = {_NODE: MAX_NODES, _TENSOR: MAX_INITIALIZERS}
_SPARSE: Final = onnx.SparseTensorProto.DESCRIPTOR
_NUMBER: Final = {each.name: each.number for each in _TENSOR.fields}
# Fields whose packed bytes are the tensor's contents unchanged, by the types that use them.
_UNCHANGED: Final = {
    _NUMBER["float_data"]: {onnx.TensorProto.FLOAT, onnx.TensorProto.COMPLEX64},
    _NUMBER["double_data"]: {onnx.TensorProto.DOUBLE, onnx.TensorProto.COMPLEX128},
}

Piece = bytes | slice
"""Bytes of the skeleton: new ones, or a range of the file."""


def read_skeleton(path: Path) -> bytes:
    """The file's message without its large tensors. Raises `ModelRefused`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ModelRefused(f"cannot be opened ({error.strerror})", path=path) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelRefused("is not a file", path=path)
        if not 0 < status.st_size <= MAX_FILE_BYTES:
            raise ModelRefused(
                f"has {status.st_size} bytes; an ONNX file has 1 to {MAX_FILE_BYTES}, "
                "larger models keep their weights in files of external data",
                path=path,
            )
        with mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ) as data:
            try:
                return _Walk(data=data, path=path).skeleton()
            except ModelRefused as refused:
                foreign = foreign_format(data[:HEAD_BYTES])
                if foreign is None:
                    raise
                reason = f"is not an ONNX model but {foreign}"
                raise ModelRefused(reason, path=path) from refused
    finally:
        os.close(descriptor)


class _Field(NamedTuple):
    """A field in the file: `start` is the offset of its tag, `value` that of its contents."""

    number: int
    wire: int
    start: int
    value: int
    end: int


class _Kind(NamedTuple):
    """What a message's descriptor says of a length-delimited field: its name if it is text, the
    type of its message if it is one that is walked."""

    text: str | None
    child: "Descriptor | FastDescriptor | None"


@cache
def _kinds(message: "Descriptor | FastDescriptor") -> dict[int, _Kind]:
    """The fields of a message that are text or messages, by number."""
    kinds: dict[int, _Kind] = {}
    for each in message.fields:
        text = each.full_name if each.type == FieldDescriptor.TYPE_STRING else None
        child = None if each.message_type is _SPARSE else each.message_type
        if text is not None or child is not None:
            kinds[each.number] = _Kind(text, child)
    return kinds


@dataclass(slots=True, kw_only=True)
class _Walk:
    data: mmap.mmap
    path: Path
    fields: int = field(default=0)
    listed: int = field(default=0)
    nodes: int = field(default=0)

    def skeleton(self) -> bytes:
        size = len(self.data)
        self._count(0, size, _MODEL, Counter())
        pieces = self._message(0, size, _MODEL, 0)
        if pieces is None:
            pieces = [slice(0, size)]
        if _length(pieces) > MAX_SKELETON_BYTES:
            raise self._refused(
                f"holds {_length(pieces)} bytes besides weights; at most {MAX_SKELETON_BYTES}"
            )
        return b"".join(self.data[each] if isinstance(each, slice) else each for each in pieces)

    def _refused(self, reason: str) -> ModelRefused:
        return ModelRefused(reason, path=self.path)

    def _count(
        self,
        position: int,
        end: int,
        message: "Descriptor | FastDescriptor",
        counts: "Counter[Descriptor | FastDescriptor]",
    ) -> None:
        """Refuse a graph of too many nodes or initializers before anything inside them is read."""
        kinds = _kinds(message)
        while position < end:
            each = self._field(position, end)
            position = each.end
            kind = kinds.get(each.number)
            if kind is None or kind.child is None or each.wire != _BYTES:
                continue
            if kind.child in (_GRAPH, _FUNCTION):
                self._count(each.value, each.end, kind.child, counts)
            counts[kind.child] += 1
            if counts[kind.child] > _LIMITS.get(kind.child, MAX_FIELDS):
                raise self._too_many(kind.child)

    def _too_many(self, message: "Descriptor | FastDescriptor") -> ModelRefused:
        what = "nodes" if message is _NODE else "initializers"
        return self._refused(f"has more than {_LIMITS[message]} {what}, the limit of Shoal")

    def _message(
        self, position: int, end: int, message: "Descriptor | FastDescriptor", depth: int
    ) -> list[Piece] | None:
        """Walk one message; the pieces of what replaces it, or None where nothing is left out."""
        if depth > MAX_DEPTH:
            raise self._refused(f"messages are nested more than {MAX_DEPTH} deep")
        if message is _TENSOR:
            return self._tensor(position, end)
        self.nodes += message is _NODE
        if self.nodes > MAX_NODES:
            raise self._too_many(_NODE)
        kinds = _kinds(message)
        pieces: list[Piece] = []
        kept = position
        while position < end:
            each = self._field(position, end)
            position = each.end
            kind = kinds.get(each.number)
            if kind is None:
                position = self._list(each, end)
            if kind is None or each.wire != _BYTES:
                continue
            if kind.child is None:
                self._check_text(each, kind.text)
                continue
            inner = self._message(each.value, each.end, kind.child, depth + 1)
            if inner is not None:
                pieces.append(slice(kept, each.start))
                pieces.extend(_wrapped(each.number, inner))
                kept = each.end
        if not pieces:
            return None
        pieces.append(slice(kept, end))
        return pieces

    def _tensor(self, position: int, end: int) -> list[Piece] | None:
        """Leave a large tensor's contents out, and say where they are."""
        contents: list[_Field] = []
        kept: list[Piece] = []
        data_type = 0
        while position < end:
            each = self._field(position, end)
            position = each.end
            packed = each.wire == _BYTES
            if packed and (each.number == _NUMBER["raw_data"] or each.number in _UNCHANGED):
                contents.append(each)
                continue
            if each.number == _NUMBER["data_type"] and each.wire == _VARINT:
                data_type = self._varint(each.value, each.end)[0]
            kind = _kinds(_TENSOR).get(each.number)
            if packed and kind is not None and kind.text is not None:
                self._check_text(each, kind.text)
            elif packed and kind is None:
                position = self._list(each, end)
            kept.append(slice(each.start, position))
        if len(contents) != 1:
            return None
        (only,) = contents
        if only.end - only.value < LARGE:
            return None
        if only.number in _UNCHANGED and data_type not in _UNCHANGED[only.number]:
            return None
        marker = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
        for key, value in (("offset", only.value), ("length", only.end - only.value)):
            marker.external_data.add(key=key, value=str(value))
        marker.external_data.add(key="location", value=INLINE)
        return [*kept, marker.SerializeToString()]

    def _list(self, first: _Field, end: int) -> int:
        """Step over more values of the same field; where the last of them ends."""
        tag = first.number << 3 | first.wire
        count, position = listed(self.data, tag, first.end, end)
        self.listed += count
        if self.listed > MAX_LISTED:
            raise self._refused(
                f"has more than {MAX_LISTED} values in lists of attributes, the limit of Shoal. "
                "Decision trees have about eight for each of their nodes: train fewer or "
                "shallower trees, or save them as several models"
            )
        return position

    def _field(self, start: int, end: int) -> _Field:
        self.fields += 1
        if self.fields > MAX_FIELDS:
            raise self._refused(
                f"has more than {MAX_FIELDS} fields of protobuf, the limit of Shoal. Each attribute"
                ", name and text is one: keep large tables as tensors"
            )
        tag, value = self._varint(start, end)
        number, wire = tag >> 3, tag & 7
        if number == 0:
            raise self._refused(f"is not an ONNX model: no field at byte {start}")
        match wire:
            case 0:
                stop = self._varint(value, end)[1]
            case 1:
                stop = value + 8
            case 2:
                length, value = self._varint(value, end)
                stop = value + length
            case 5:
                stop = value + 4
            case _:
                raise self._refused(f"is not an ONNX model: wire type {wire} at byte {start}")
        if stop > end:
            raise self._refused(f"is cut short: the field at byte {start} ends at {stop} of {end}")
        return _Field(number, wire, start, value, stop)

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        result = shift = 0
        start = position
        while position < end and shift < 70:
            byte = self.data[position]
            position += 1
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                return result, position
            shift += 7
        raise self._refused(f"is not an ONNX model, or is cut short: no number at byte {start}")

    def _check_text(self, each: _Field, name: str | None) -> None:
        try:
            self.data[each.value : each.end].decode()
        except UnicodeDecodeError as error:
            raise self._refused(f"{name} at byte {each.start} is not text") from error


def _length(pieces: list[Piece]) -> int:
    return sum(each.stop - each.start if isinstance(each, slice) else len(each) for each in pieces)


def _wrapped(number: int, inner: list[Piece]) -> list[Piece]:
    return [_encode(number << 3 | _BYTES) + _encode(_length(inner)), *inner]


def _encode(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
