"""Rows of tables, read from the files of a fragment when it runs in blocks.

A table that is mapped comes into memory in windows of 64 KiB, one around each row that an item
reads. Where rows are small and all over the table, that is a hundred times what the rows take. Here
they are read by themselves, each where it belongs in what the block takes.

What the kernel keeps of the file in its cache meanwhile are single pages, which nobody has mapped:
it lets go of them whenever something else needs the memory.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime

from shoal_agent.runtime.failures import RuntimeFailed, Stopper, Terminated
from shoal_protocol.blocks import Gathered
from shoal_protocol.manifest import WEIGHTS, FragmentDamaged
from shoal_protocol.row_readers import ELEMENTS, Element
from shoal_protocol.tensors import Array

_MOST_BUFFERS: Final = 256
"""Rows that are read by one call, where they lie side by side: the kernel takes up to 1024."""
_ORDERED: Final = 4096
"""Rows of which the places are numbers of Python's at one time."""
_COMING_BYTES: Final = 256 << 10
"""What is on its way from the disk at one time, which cannot be taken back."""
_PAGE_BYTES: Final = 4096
_CACHED: Final = os.RWF_NOWAIT
_COPIED_BYTES: Final = 64 << 10
"""Of rows that an item reads several times, what is copied at one time."""


@dataclass(frozen=True, slots=True)
class Table:
    """Where in a file of the fragment a table is, and what."""

    file: str
    offset: int
    element: Element
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape[1:])

    @property
    def bytes(self) -> int:
        return self.row_bytes * self.shape[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of a type that numpy has not, that of one of its size."""
        return np.dtype(self.element.code)


def tables_of(manifest: Mapping[str, Any], names: Iterable[str]) -> dict[str, Table]:
    """Those of a fragment, as its manifest describes them. Raises `ValueError`, `KeyError`,
    `TypeError`."""
    tables = {}
    for name in names:
        described = manifest["initializers"][name]
        if (element := ELEMENTS.get(described["dtype"])) is None:
            raise ValueError(f"rows of {name}, of type {described['dtype']!r}, cannot be read")
        table = Table(
            file=str(described.get("file", WEIGHTS)),
            offset=int(described["offset"]),
            element=element,
            shape=tuple(int(size) for size in described["shape"]),
        )
        if not table.shape or min(table.shape) < 1 or table.offset < 0:
            raise ValueError(f"{name} of shape {list(table.shape)} is no table")
        file = manifest["files"][table.file]
        if table.offset + table.bytes > file["bytes"]:
            raise ValueError(f"{name} is beyond the end of {table.file}")
        tables[name] = table
    return tables


class TableRows:
    """The files of a fragment's tables, open for as long as it is."""

    def __init__(self, folder: Path, tables: Mapping[str, Table]) -> None:
        """Raises `FragmentDamaged`, `OSError`."""
        self._tables = tables
        self._files: dict[str, int] = {}
        for table in tables.values():
            if table.file not in self._files:
                self._files[table.file] = file = os.open(folder / table.file, os.O_RDONLY)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # read nothing ahead
            if table.offset + table.bytes > os.fstat(self._files[table.file]).st_size:
                raise FragmentDamaged(f"{folder / table.file} ends within a table")

    def __del__(self) -> None:
        for file in getattr(self, "_files", {}).values():
            os.close(file)

    def gather(
        self, gathered: Gathered, values: dict[str, onnxruntime.OrtValue], stopper: Stopper
    ) -> Array:
        """Put rows among the values where their indices are, as views of what is returned. Raises
        `RuntimeFailed` and its kinds."""
        table = self._tables[gathered.table]
        indices = values[gathered.indices].numpy()
        rows = read_rows(self._files[table.file], table, indices, stopper)
        made = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(rows, table.element.number)
        values[gathered.rows] = made
        return rows

    def shaped(self, feed: Mapping[str, Array], gathers: Iterable[Gathered]) -> dict[str, Array]:
        """By name, arrays like the rows that inputs ask for, which hold nothing and take no memory;
        without those whose indices are yet to be computed."""
        made = {}
        for each in gathers:
            if each.indices in feed:
                table = self._tables[each.table]
                shape = (*feed[each.indices].shape, *table.shape[1:])
                made[each.rows] = np.broadcast_to(np.zeros((), table.dtype), shape)
        return made


def read_rows(file: int, table: Table, indices: Array, stopper: Stopper) -> Array:
    """The rows of a table in an open file: what `Gather` gives. Raises as `TableRows.gather`."""
    rows = np.empty((*indices.shape, *table.shape[1:]), table.dtype)
    if indices.size == 0:
        return rows
    wanted = _within(np.ravel(indices).astype(np.int64, copy=False), table.shape[0])
    order = np.argsort(wanted, kind="stable")
    wanted = wanted[order]
    is_new = np.empty(order.size, np.bool_)
    is_new[0] = True
    np.not_equal(wanted[1:], wanted[:-1], out=is_new[1:])
    flat = rows.reshape(-1).view(np.uint8)
    for start in range(0, order.size, _ORDERED):
        part = slice(start, start + _ORDERED)
        chosen = is_new[part]
        if stopper.stopped:
            raise Terminated("stopped while it read rows of a table")
        _read(file, table, flat.data, wanted[part][chosen], order[part][chosen])
    if not is_new.all():
        _repeat(flat.reshape(order.size, table.row_bytes), order, is_new)
    return rows


def _within(wanted: Array, count: int) -> Array:
    least, most = int(wanted.min()), int(wanted.max())
    if least < -count or most >= count:
        wrong = most if most >= count else least
        raise RuntimeFailed(
            f"indices element out of data bounds, idx={wrong} must be within the inclusive range "
            f"[{-count},{count - 1}]"
        )
    return np.where(wanted < 0, wanted + count, wanted) if least < 0 else wanted


def _read(file: int, table: Table, target: memoryview, wanted: Array, places: Array) -> None:
    """Read rows that are all different, in their order in the file, each to its place: what the
    page cache has, at once, and what comes from the disk, several together."""
    size = table.row_bytes
    starts = [place * size for place in places.tolist()]
    numbers = wanted.tolist()
    coming: list[_Part] = []
    coming_bytes = 0
    for start, end in _side_by_side(wanted, max(1, min(_MOST_BUFFERS, _COMING_BYTES // size))):
        buffers = [target[at : at + size] for at in starts[start:end]]
        part = _Part(buffers, table.offset + numbers[start] * size)
        if part.fill(file, _CACHED):
            continue
        os.posix_fadvise(file, part.offset, part.bytes, os.POSIX_FADV_WILLNEED)
        coming.append(part)
        coming_bytes += part.bytes + _PAGE_BYTES
        if coming_bytes >= _COMING_BYTES:
            _await(file, table, coming)
            coming_bytes = 0
    _await(file, table, coming)


def _await(file: int, table: Table, coming: list["_Part"]) -> None:
    for part in coming:
        if not part.fill(file, 0):
            raise RuntimeFailed(f"{table.file} ends within a table: it was changed")
    coming.clear()


def _side_by_side(wanted: Array, most: int) -> Iterator[tuple[int, int]]:
    """The runs of rows that one call reads, each of so many at most."""
    borders = np.flatnonzero(np.diff(wanted) != 1) + 1
    start = 0
    for end in (*borders.tolist(), wanted.size):
        for begin in range(start, end, most):
            yield begin, min(end, begin + most)
        start = end


@dataclass(slots=True)
class _Part:
    """Rows that lie side by side in a file from an offset on, each with a place of its own."""

    buffers: list[memoryview]
    offset: int

    @property
    def bytes(self) -> int:
        return sum(map(len, self.buffers))

    def fill(self, file: int, flags: int) -> bool:
        """Read what there is; whether that is all. Raises `RuntimeFailed`."""
        while self.buffers:
            try:
                got = os.preadv(file, self.buffers, self.offset, flags)
            except OSError as error:
                if flags:  # it is not in the page cache, or this file system does not say
                    return False
                raise RuntimeFailed(f"a table cannot be read: {error.strerror}") from error
            if got == 0:
                return False
            self.offset += got
            while self.buffers and got >= len(self.buffers[0]):
                got -= len(self.buffers.pop(0))
            if self.buffers:
                self.buffers[0] = self.buffers[0][got:]
        return True


def _repeat(rows: Array, order: Array, is_new: Array) -> None:
    """Copy rows to all other places where they belong."""
    first = order[np.maximum.accumulate(np.where(is_new, np.arange(order.size), 0))]
    again = np.flatnonzero(~is_new)
    step = max(1, _COPIED_BYTES // rows.shape[1])
    for start in range(0, again.size, step):
        part = again[start : start + step]
        rows[order[part]] = rows[first[part]]
