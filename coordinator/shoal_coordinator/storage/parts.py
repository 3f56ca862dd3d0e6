"""Results of the items of one file, while the file is not complete; and how the file is made of
them.

A part is a sequence of records, each with some arrays of one item: length of a JSON head, the head,
the arrays' bytes. An item's records form a chain from the newest to the oldest, so a stage that ran
again replaces what it gave before. What is known per item is one offset, so that a file of millions
of rows takes little memory.

The newest records are the part's *tail*: in memory, until it is long enough or the part is synced.
So the rows of a batch cost one write, and a small file of one item is made without its part ever
touching the disk.
"""

import contextlib
import io
import json
import os
import struct
from array import array as packed
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np

from shoal_coordinator.storage.arrays import Array, ArrayStream, write_archive

ROWS: Final = "__rows__"
_LENGTH: Final = struct.Struct("<I")
_COPY_BYTES: Final = 1024 * 1024
_TAIL_BYTES: Final = 256 * 1024
_ABSENT: Final = -1


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A file to be made. Its items are numbered from `first`; one that is not `stacked` has one
    item, whose arrays stand as they are. `joined` rows have the model's own first axis, of length
    1."""

    name: str
    first: int
    items: int
    stacked: bool = False
    joined: bool = False


class _Extent(NamedTuple):
    """Where an array of an item is in the part."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class _Record:
    """The newest record of a row that is not settled, and all names in its chain."""

    start: int
    names: frozenset[str]


class Part:
    """The part of one file. Rows are counted from 0; *settled* ones are in the journal."""

    def __init__(self, path: Path, file: ResultFile) -> None:
        self.path = path
        self.file = file
        self._settled = packed("q", [_ABSENT]) * file.items
        self._ends = packed("q", [_ABSENT]) * file.items
        self._pending: dict[int, _Record] = {}
        self._written = 0
        self._tail = bytearray()
        self._problems: dict[int, str] = {}
        self._remaining = file.items
        self.failed_rows: set[int] = set()

    @property
    def ended(self) -> bool:
        """Every row is settled or has failed."""
        return self._remaining == 0

    @property
    def in_memory(self) -> bool:
        """The tail is all there is."""
        return not self._written

    @property
    def any_stored(self) -> bool:
        return len(self.failed_rows) < self.file.items

    def stored_rows(self) -> Iterator[int]:
        return (row for row, at in enumerate(self._settled) if at != _ABSENT)

    # ---- writing ---------------------------------------------------------------------------------

    def add(self, row: int, arrays: Mapping[str, Array]) -> None:
        """Append some arrays of a row. Trouble is kept until `problem` asks for it."""
        written = [(name, _storable(array)) for name, array in arrays.items()]
        before = self._pending.get(row)
        head = {
            "row": row,
            "before": _ABSENT if before is None else before.start,
            "arrays": [[name, array.dtype.str, array.shape] for name, array in written],
        }
        text = json.dumps(head, separators=(",", ":")).encode()
        pieces: list[bytes | memoryview] = [_LENGTH.pack(len(text)) + text]
        pieces += [array.reshape(-1).view(np.uint8).data for _, array in written if array.nbytes]
        size = sum(map(len, pieces))
        try:
            if len(self._tail) + size > _TAIL_BYTES:
                self._write_tail()
            start = self._written + len(self._tail)
            if size > _TAIL_BYTES:
                self._write(pieces)
            else:
                for piece in pieces:
                    self._tail += piece
        except OSError as e:
            self._problems[row] = e.strerror or str(e)
            return
        names = frozenset(arrays)
        self._pending[row] = _Record(start, names if before is None else names | before.names)
        self._ends[row] = start + size
        self._problems.pop(row, None)

    def flush(self) -> None:
        """Free the tail's memory; what goes wrong is kept until `problem` asks for it."""
        with contextlib.suppress(OSError):
            self._write_tail()

    def _write_tail(self) -> None:
        """Bring the tail to the file. On `OSError` it is gone, and its rows have that problem."""
        tail, self._tail = self._tail, bytearray()
        try:
            if tail:
                self._write([tail])
        except OSError as e:
            lost = [row for row, record in self._pending.items() if record.start >= self._written]
            for row in lost:
                del self._pending[row]
                self._problems[row] = e.strerror or str(e)
            raise

    def _write(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """Add to the file, whose end is at `_written`; all or nothing."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            position = self._written
            try:
                for piece in pieces:
                    view = memoryview(piece)
                    while view:
                        count = os.pwrite(descriptor, view, position)
                        view, position = view[count:], position + count
            except OSError:
                os.ftruncate(descriptor, self._written)
                raise
            self._written = position
        finally:
            os.close(descriptor)

    def problem(self, row: int, names: Sequence[str]) -> str | None:
        """Why a row cannot be settled; None if it can."""
        if self.file.items > 1:
            self.flush()
        if row in self._problems:
            return self._problems[row]
        record = self._pending.get(row)
        if record is None:
            return None if self._settled[row] != _ABSENT else "no result has arrived"
        missing = set(names) - record.names
        return f"no {', '.join(sorted(missing))} has arrived" if missing else None

    def sync(self) -> None:
        """Wait until everything is on the disk. Raises `OSError`."""
        self._write_tail()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def extent(self, row: int) -> tuple[int, int]:
        """Where the row's newest record starts, and where it ends."""
        record = self._pending.get(row)
        return self._settled[row] if record is None else record.start, self._ends[row]

    def settle(self, row: int) -> None:
        """The row's results are safe: its line is in the journal, or the file is about to be
        made."""
        if row in self._pending:
            self._remaining -= self._settled[row] == _ABSENT
            self._settled[row] = self._pending.pop(row).start

    def fail(self, row: int) -> None:
        """The row will have no result."""
        self._pending.pop(row, None)
        self._problems.pop(row, None)
        if row not in self.failed_rows and self._settled[row] == _ABSENT:
            self.failed_rows.add(row)
            self._remaining -= 1

    def remove(self) -> None:
        """Delete the part; the file is made, or will never be."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    # ---- after a restart -------------------------------------------------------------------------

    def restore(self, row: int, at: int, end: int) -> None:
        """Believe a line of the journal, for now."""
        self._remaining -= self._settled[row] == _ABSENT
        self._settled[row], self._ends[row] = at, end

    def cut(self) -> None:
        """Give up rows that the part does not hold, and what it holds beyond its rows."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            size = 0
        for row in list(self.stored_rows()):
            if self._ends[row] > size:
                self._settled[row] = self._ends[row] = _ABSENT
                self._remaining += 1
        if size:
            self._written = max(0, max(self._ends, default=0))
            os.truncate(self.path, self._written)

    # ---- reading ---------------------------------------------------------------------------------

    def settled_extents(self, row: int) -> dict[str, _Extent]:
        """The arrays of a settled row by name."""
        found: dict[str, _Extent] = {}
        at = self._settled[row]
        with self._reading() as file:
            while at != _ABSENT:
                file.seek(at)
                (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
                head = json.loads(file.read(length))
                if head["row"] != row:
                    raise OSError(f"{self.path} is damaged at {at}; delete it")
                start = at + _LENGTH.size + length
                for name, description, shape in head["arrays"]:
                    dtype = np.dtype(description)
                    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
                    found.setdefault(name, _Extent(dtype, tuple(shape), start, size))
                    start += size
                at = head["before"]
        return found

    def _reading(self) -> BinaryIO:
        """The records; those of a part that has no file yet are in memory."""
        if self.in_memory:
            return io.BytesIO(self._tail)
        self._write_tail()
        return self.path.open("rb")

    def pieces(self, name: str, rows: Sequence[int], dtype: np.dtype[Any]) -> Iterator[bytes]:
        """The bytes of an array of these rows, one row after the other, as `dtype`."""
        with self._reading() as file:
            for row in rows:
                extent = self.settled_extents(row)[name]
                file.seek(extent.start)
                if extent.dtype != dtype:
                    text = np.frombuffer(file.read(extent.size), extent.dtype)
                    yield text.astype(dtype).tobytes()
                    continue
                remaining = extent.size
                while remaining:
                    piece = file.read(min(_COPY_BYTES, remaining))
                    if not piece:
                        raise OSError(f"{self.path} is shorter than it was; delete it")
                    yield piece
                    remaining -= len(piece)


def make_file(part: Part, names: Sequence[str], outputs: Path) -> int:
    """Make the result file of a part whose rows have ended; its size. Raises `OSError`."""
    temporary = part.path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            if part.in_memory:  # at once: an archive's writer goes to and fro
                archive = io.BytesIO()
                write_archive(archive, _streams(part, names))
                file.write(archive.getbuffer())
            else:
                write_archive(file, _streams(part, names))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        temporary.replace(outputs / part.file.name)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return size


def _streams(part: Part, names: Sequence[str]) -> Iterator[ArrayStream]:
    rows = list(part.stored_rows())
    for name in names:
        kinds = {(e.dtype, e.shape) for e in (part.settled_extents(row)[name] for row in rows)}
        dtype, shape = next(iter(kinds))
        if all(each.kind == "U" for each, _ in kinds):
            dtype = max((each for each, _ in kinds), key=lambda each: each.itemsize)
            kinds = {(dtype, shape) for _, shape in kinds}
        if not part.file.stacked:
            yield _stream(part, name, name, rows, dtype, shape)
        elif len(kinds) > 1:
            for row in rows:
                extent = part.settled_extents(row)[name]
                yield _stream(part, f"{name}.{row}", name, [row], extent.dtype, extent.shape)
        elif part.file.joined and shape[:1] == (1,):
            yield _stream(part, name, name, rows, dtype, (len(rows), *shape[1:]))
        else:
            yield _stream(part, name, name, rows, dtype, (len(rows), *shape))
    if part.failed_rows:
        numbers = np.array(rows, np.int64)
        yield ArrayStream(
            name=ROWS, dtype=numbers.dtype, shape=numbers.shape, pieces=[numbers.tobytes()]
        )


def _stream(
    part: Part,
    label: str,
    name: str,
    rows: Sequence[int],
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
) -> ArrayStream:
    return ArrayStream(name=label, dtype=dtype, shape=shape, pieces=part.pieces(name, rows, dtype))


def _storable(array: Array) -> Array:
    """As it is written: C order, little-endian, text of fixed width."""
    if array.dtype.kind == "O":
        array = array.astype(np.str_)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return np.ascontiguousarray(array).reshape(array.shape)
