"""The external data of an ONNX model file, written anew at offsets that suit memory mapping.

ONNX Runtime saves an optimised model with its weights, and what it has packed of them, in one file.
It aligns only tensors of 1 MiB or more. A smaller packed one is then mapped at an address that the
processor's vector instructions refuse: the process ends with SIGSEGV in the first run (1.31).
Here every tensor begins a page.

The kernel caches what is written at once in one piece, as far as it can, and maps a piece with each
page of it that is read. So weights are written in large pieces, and those of a model that has a
table, of which items read some rows, in such small ones as the kernel maps at the least.

ONNX Runtime maps each packed form by itself, so of one that begins in the middle of a huge page the
kernel maps no more than the huge pages that are wholly in it: none of most that have 2 to 4 MiB. So
those begin a huge page, where they are read in such. What is left free before them takes no room on
disk.
"""

import os
from collections.abc import Set
from pathlib import Path
from typing import BinaryIO, Final

from shoal_agent.memory.swapping import HUGE_PAGE_BYTES
from shoal_agent.runtime.onnx_subset import table_places, tables, tensors
from shoal_protocol.manifest import WEIGHTS
from shoal_protocol.onnx_subset_pb2 import Graph, Model, Tensor

_ALIGNMENT: Final = 4096
_CHUNK_BYTES: Final = 1 << 20
_ROWS_CHUNK_BYTES: Final = 64 << 10
_PACKED: Final = "prepacked_"
_HALVES: Final = (10, 16)
"""Of the types of tensors in onnx.proto, both of 16 bits."""


def align(folder: Path, model: Model, *, rows: bool) -> None:
    """Write `weights.bin` of a folder anew, every tensor at the start of a page, and say so in the
    model. Those without a packed form come first, for they are mapped in one piece. `rows`: it has
    a table of which items read rows.

    Raises `OSError`, `ValueError`.
    """
    temporary = folder / f"{WEIGHTS}.tmp"
    with (folder / WEIGHTS).open("rb") as source, temporary.open("wb") as target:
        chunk_bytes = _ROWS_CHUNK_BYTES if rows else _CHUNK_BYTES
        copier = _Copier(source, target, chunk_bytes, huge_pages=not rows)
        for tensor in sorted(tensors(model.graph), key=is_packed):
            _move(tensor, copier)
    temporary.replace(folder / WEIGHTS)


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor has a packed form beside it."""
    return any(entry.key.startswith(_PACKED) for entry in tensor.external_data)


def mapped_bytes(model: bytes) -> int:
    """What ONNX Runtime maps of a model's external data: whole pages for each tensor."""
    ranges = {
        (entries["offset"].value, int(entries["length"].value))
        for tensor in tensors(Model.FromString(model).graph)
        if (entries := {entry.key: entry for entry in tensor.external_data})
    }
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for _, size in ranges)


def saved_bytes(model: bytes, without: Set[str] = frozenset()) -> int:
    """What ONNX Runtime saves of a model's weights, `without` some and packed forms: once for each
    tensor that refers to them, and of a table of which items read rows and that is also multiplied,
    a transposed copy besides."""
    graph = Model.FromString(model).graph
    whole = _read_as_a_whole(graph)
    copied = (table for table in tables(graph) if table.name in whole)
    kept = (each for each in tensors(graph) if each.name not in without)
    return sum(map(_size, kept)) + sum(map(_size, copied))


def half_bytes(model: bytes, without: Set[str] = frozenset()) -> int:
    """Weights of half precision, `without` some: they are saved as floats, and packed as such."""
    found = [each for each in tensors(Model.FromString(model).graph) if each.name not in without]
    return sum(_size(each) for each in found if each.data_type in _HALVES)


def table_bytes(model: bytes) -> int:
    """Weights of which items read some rows."""
    return sum(map(_size, tables(Model.FromString(model).graph)))


def table_ranges(model: bytes) -> list[tuple[int, int]]:
    """Where in the file of weights those are of which items read no more than some rows: from where
    on, and up to where, in bytes."""
    graph = Model.FromString(model).graph
    whole, found = _read_as_a_whole(graph), []
    for tensor in tables(graph):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries and tensor.name not in whole:
            start = int(entries["offset"])
            found.append((start, start + int(entries["length"])))
    return found


def _read_as_a_whole(graph: Graph) -> set[str]:
    """What nodes read otherwise than by rows."""
    return {
        name
        for node in graph.node
        for place, name in enumerate(node.input)
        if place not in table_places(node)
    }


def _size(tensor: Tensor) -> int:
    return sum(int(entry.value) for entry in tensor.external_data if entry.key == "length")


class _Copier:
    """Copies ranges of a file to pages of another; a range that several tensors share, once."""

    def __init__(
        self, source: BinaryIO, target: BinaryIO, chunk_bytes: int, *, huge_pages: bool
    ) -> None:
        self._source = source
        self._target = target
        self._chunk_bytes = chunk_bytes
        self._huge_pages = huge_pages
        self._copied: dict[tuple[int, int], int] = {}

    def copy(self, offset: int, size: int, alignment: int = _ALIGNMENT) -> int:
        """The offset of the copy."""
        if (copied := self._copied.get((offset, size))) is not None:
            return copied
        start = self._target.seek(-self._target.tell() % alignment, os.SEEK_CUR)
        self._source.seek(offset)
        left = size
        while left > 0:
            if not (data := self._source.read(min(left, self._chunk_bytes))):
                raise ValueError(f"{WEIGHTS} ends before {offset + size}")
            self._target.write(data)
            left -= len(data)
        self._copied[offset, size] = start
        return start

    def copy_packed(self, offset: int, size: int) -> int:
        """The same of a packed form, at the start of a huge page where it has one."""
        in_huge_pages = self._huge_pages and size >= HUGE_PAGE_BYTES
        return self.copy(offset, size, HUGE_PAGE_BYTES if in_huge_pages else _ALIGNMENT)


def _move(tensor: Tensor, copier: _Copier) -> None:
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
        moved.append(f"{copier.copy_packed(int(offset), int(size))};{size};{rest}")
    return "|".join([key, *moved])
