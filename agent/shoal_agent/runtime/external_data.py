"""The external data of an ONNX model file, written anew at offsets that suit memory mapping.

ONNX Runtime saves an optimised model with its weights, and what it has packed of them, in one file.
It aligns only tensors of 1 MiB or more. A smaller packed one is then mapped at an address that the
processor's vector instructions refuse: the process ends with SIGSEGV in the first run (1.31).
Here every tensor begins a page.

Only the fields of ONNX that lead to external data are declared; protobuf preserves the others.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from shoal_protocol.manifest import MODEL, WEIGHTS

_ALIGNMENT: Final = 4096
_CHUNK_BYTES: Final = 1 << 20
_PACKED: Final = "prepacked_"
_PACKAGE: Final = "shoal.onnx_subset"
_MESSAGES: Final[dict[str, tuple[tuple[str, int, Field.Label.ValueType, str | None], ...]]] = {
    "Entry": (
        ("key", 1, Field.LABEL_OPTIONAL, None),
        ("value", 2, Field.LABEL_OPTIONAL, None),
    ),
    "Tensor": (("external_data", 13, Field.LABEL_REPEATED, "Entry"),),
    "Attribute": (
        ("g", 6, Field.LABEL_OPTIONAL, "Graph"),
        ("graphs", 11, Field.LABEL_REPEATED, "Graph"),
    ),
    "Node": (("attribute", 5, Field.LABEL_REPEATED, "Attribute"),),
    "Graph": (
        ("node", 1, Field.LABEL_REPEATED, "Node"),
        ("initializer", 5, Field.LABEL_REPEATED, "Tensor"),
    ),
    "Model": (("graph", 7, Field.LABEL_OPTIONAL, "Graph"),),
}
"""Fields by name, number in onnx.proto, label, and type (None: a string)."""


def align(folder: Path) -> None:
    """Write `model.onnx` and `weights.bin` of a folder anew, every tensor at the start of a page.

    Raises `OSError`, `ValueError`, and `google.protobuf.message.DecodeError`.
    """
    model = _model_type().FromString((folder / MODEL).read_bytes())
    temporary = folder / f"{WEIGHTS}.tmp"
    with (folder / WEIGHTS).open("rb") as source, temporary.open("wb") as target:
        copier = _Copier(source, target)
        for tensor in _tensors(model.graph):
            _move(tensor, copier)
    temporary.replace(folder / WEIGHTS)
    (folder / MODEL).write_bytes(model.SerializeToString())


def mapped_bytes(model: bytes) -> int:
    """What ONNX Runtime maps of a model's external data: whole pages for each tensor."""
    ranges = {
        (entries["offset"].value, int(entries["length"].value))
        for tensor in _tensors(_model_type().FromString(model).graph)
        if (entries := {entry.key: entry for entry in tensor.external_data})
    }
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for _, size in ranges)


class _Copier:
    """Copies ranges of a file to pages of another; a range that several tensors share, once."""

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source = source
        self._target = target
        self._copied: dict[tuple[int, int], int] = {}

    def copy(self, offset: int, size: int) -> int:
        """The offset of the copy."""
        if (copied := self._copied.get((offset, size))) is not None:
            return copied
        start = self._target.seek(-self._target.tell() % _ALIGNMENT, os.SEEK_CUR)
        self._source.seek(offset)
        left = size
        while left > 0:
            if not (data := self._source.read(min(left, _CHUNK_BYTES))):
                raise ValueError(f"{WEIGHTS} ends before {offset + size}")
            self._target.write(data)
            left -= len(data)
        self._copied[offset, size] = start
        return start


def _move(tensor: Any, copier: _Copier) -> None:
    entries = {entry.key: entry for entry in tensor.external_data}
    if not entries:
        return
    offset, length = entries["offset"], entries["length"]
    offset.value = str(copier.copy(int(offset.value), int(length.value)))
    for key, entry in entries.items():
        if key.startswith(_PACKED):
            entry.value = _moved_packed(entry.value, copier)


def _moved_packed(value: str, copier: _Copier) -> str:
    """`KEY|OFFSET;BYTES;PADDED BYTES|...`: the packed forms of one tensor for one kernel."""
    key, *blobs = value.split("|")
    moved = []
    for blob in blobs:
        offset, size, rest = blob.split(";", 2)
        moved.append(f"{copier.copy(int(offset), int(size))};{size};{rest}")
    return "|".join([key, *moved])


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _tensors(attribute.g)
            for inner in attribute.graphs:
                yield from _tensors(inner)


def _model_type() -> Any:
    file = FileDescriptorProto(name="onnx_subset.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, label, kind in fields:
            field = message.field.add(name=field_name, number=number, label=label)
            if kind is None:
                field.type = Field.TYPE_STRING
            else:
                field.type, field.type_name = Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Model"))
