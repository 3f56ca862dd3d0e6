"""Results of the items of one file, while the file is not complete (`made_files`: how it is made of
them).

A part is a log of records, each with some arrays of one item:

    length of the head (4 bytes), length of the data (8), CRC-32 of these and of the head (4),
    head (JSON: row, where the row's record before it starts, name, dtype, shape and CRC-32 of
    each array), data (the arrays, C order, little-endian)

A record is its own proof: an item is stored once its records hold all of the model's outputs and
are on the disk, and opening the part verifies all checksums. An item's records form a chain from
the newest to the oldest, so a stage that ran again replaces what it gave before. The memory per
item is one offset, so that a file of millions of rows takes little.

The newest records are the part's *tail*: in memory, until it is long enough or the part is synced.
So the rows of a batch cost one write. Small arrays of a file's only item become no record until the
tail is written: mostly the file is made of them as they are (`made_files`), and the part of such a
file never touches the disk: `result_log` stores it.
"""

import contextlib
import io
import json
import math
import os
import re
import struct
import zlib
from array import array as packed
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np

from shoal_coordinator.storage.folders import Folder
from shoal_coordinator.storage.journal import write_at
from shoal_protocol.durable_files import is_transient
from shoal_protocol.elements import Array, little_endian
from shoal_protocol.units import Bytes, format_bytes

ROWS: Final = "__rows__"
_LENGTHS: Final = struct.Struct("<IQ")
_CHECKSUM: Final = struct.Struct("<I")
_PREFIX_BYTES: Final = _LENGTHS.size + _CHECKSUM.size
_HEAD_BYTES: Final = 16 << 20
_DTYPE: Final = re.compile("[<|=][biufcU][0-9]{1,9}")
_COPY_BYTES: Final = 1024 * 1024
_TAIL_BYTES: Final = 256 * 1024
_TEXT_BYTES: Final = 1 << 27
"""What one array of text may take: one long element makes all of them as wide."""
_ABSENT: Final = -1
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode
_decode: Final = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A file to be made. Its items are numbered from `first`; one that is not `stacked` has one
    item, whose arrays are not stacked. `joined` rows have the model's own first axis, of length
    1."""

    name: str
    first: int
    items: int
    stacked: bool = False
    joined: bool = False


class Extent(NamedTuple):
    """Where an array of a record lies."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    size: int
    checksum: int


class _Record(NamedTuple):
    row: int
    before: int
    arrays: Mapping[str, Extent]
    end: int


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest record of a row that is not committed, and all names in its chain."""

    start: int
    names: frozenset[str]


class Part:
    """The part of one file. Rows are counted from 0; *committed* ones have all of the model's
    outputs on the disk. `names` are those outputs."""

    def __init__(self, folder: Folder, number: int, file: ResultFile, names: Sequence[str]) -> None:
        self.file = file
        self.folder = folder
        self.name = f"{number}.part"
        self.names = tuple(names)
        self._committed = packed("q", [_ABSENT]) * file.items
        self._pending: dict[int, _Newest] = {}
        self._written = 0
        self._has_file = self._is_named = False
        self._tail = bytearray()
        self.held: dict[str, Array] = {}
        """Arrays of the only item, of which no record is made yet: all of them, once it ended."""
        self._problems: dict[int, dict[str, str | OSError]] = {}
        """Why arrays of a row are not here, by their names; others that came since do not make up
        for them."""
        self._remaining = file.items
        self.failed_rows: set[int] = set()

    @property
    def ended(self) -> bool:
        """Every row is committed or has failed."""
        return self._remaining == 0

    @property
    def written(self) -> int:
        """Bytes in the file."""
        return self._written

    @property
    def in_memory(self) -> bool:
        """The tail is all there is."""
        return not self._written

    @property
    def any_stored(self) -> bool:
        return len(self.failed_rows) < self.file.items

    def stored_items(self) -> Iterator[range]:
        """The items of committed rows, as runs of consecutive ones."""
        there = np.frombuffer(self._committed, np.int64) != _ABSENT
        edges = np.flatnonzero(np.diff(there, prepend=False, append=False)) + self.file.first
        return map(range, edges[::2].tolist(), edges[1::2].tolist())

    def stored_rows(self) -> Iterator[int]:
        first = self.file.first
        return (item - first for item in chain.from_iterable(self.stored_items()))

    # ---- writing ---------------------------------------------------------------------------------

    def add(self, row: int, arrays: Mapping[str, Array]) -> None:
        """Append some arrays of a row. `problem` reports what went wrong; an `OSError` that says
        nothing of the part (`is_transient`) is raised."""
        try:
            written = {name: _storable(array) for name, array in arrays.items()}
        except _TooWide as e:
            self._note_problem(row, arrays, str(e))
            return
        if self._may_hold(written):
            self.held |= written
            self._pending[row] = _Newest(0, frozenset(self.held))
            self._forget_problem(row, arrays)
            return
        self._settle()
        before = self._pending.get(row)
        try:
            start = self._append(_record(row, _ABSENT if before is None else before.start, written))
        except OSError as e:
            if is_transient(e):
                raise
            self._note_problem(row, arrays, e)
            return
        names = frozenset(arrays)
        self._pending[row] = _Newest(start, names if before is None else names | before.names)
        self._forget_problem(row, arrays)

    def refuse(self, row: int, names: Iterable[str], error: OSError) -> None:
        """There is no room for these arrays of a row."""
        self._note_problem(row, names, error)

    def _note_problem(self, row: int, names: Iterable[str], why: str | OSError) -> None:
        self._problems.setdefault(row, {}).update(dict.fromkeys(names, why))

    def _forget_problem(self, row: int, names: Iterable[str]) -> None:
        """These arrays are here after all."""
        if (lacking := self._problems.get(row)) is not None:
            for name in names:
                lacking.pop(name, None)
            if not lacking:
                del self._problems[row]

    def _may_hold(self, arrays: Mapping[str, Array]) -> bool:
        if self.file.items > 1 or self._tail or self._written:
            return False
        size = sum(array.nbytes for each in (self.held, arrays) for array in each.values())
        return size <= _TAIL_BYTES

    def _settle(self) -> None:
        """Make the first record, of what is held."""
        if self.held:
            held, self.held = self.held, {}
            for piece in _record(0, _ABSENT, held):
                self._tail += piece

    def _append(self, pieces: Sequence[bytes | memoryview]) -> int:
        """Add to the tail, or to the file what is too long for it; where it starts."""
        size = sum(map(len, pieces))
        if len(self._tail) + size > _TAIL_BYTES:
            self._write_tail()
        start = self._written + len(self._tail)
        if size > _TAIL_BYTES:
            self._write(pieces)
        else:
            for piece in pieces:
                self._tail += piece
        return start

    def flush(self) -> None:
        """Free the tail's memory; `problem` reports what went wrong."""
        if self._tail or self.held:
            with contextlib.suppress(OSError):
                self._write_tail()

    def _write_tail(self) -> None:
        """Write the tail to the file. On `OSError` it is gone, and its rows have that problem;
        unless the error says nothing of the part."""
        self._settle()
        tail, self._tail = self._tail, bytearray()
        try:
            if tail:
                self._write([tail])
        except OSError as e:
            if is_transient(e):
                self._tail = tail
                raise
            lost = [row for row, record in self._pending.items() if record.start >= self._written]
            for row in lost:
                self._note_problem(row, self._pending.pop(row).names, e)
            raise

    def _write(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """Add to the file, whose end is at `_written`; all or nothing."""
        self._has_file = True
        descriptor = self.folder.open(self.name, os.O_WRONLY | os.O_CREAT)
        try:
            position = self._written
            try:
                for piece in pieces:
                    position = write_at(descriptor, piece, position)
            except OSError:
                os.ftruncate(descriptor, self._written)
                raise
            self._written = position
        finally:
            os.close(descriptor)

    def problem(self, row: int) -> str | OSError | None:
        """Why a row cannot be committed; None if it can. Ask after `flush`."""
        if row in self._problems:
            return next(iter(self._problems[row].values()))
        record = self._pending.get(row)
        if record is None:
            return None if self._committed[row] != _ABSENT else "no result has arrived"
        missing = set(self.names) - record.names
        return f"no {', '.join(sorted(missing))} has arrived" if missing else None

    def sync(self) -> None:
        """Wait until everything is on the disk. Raises `OSError`."""
        self._write_tail()
        descriptor = self.folder.open(self.name, os.O_WRONLY)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        if not self._is_named:
            self.folder.sync()
            self._is_named = True

    def commit(self, row: int) -> None:
        """The row's results are on the disk, or the file is about to be made."""
        if row in self._pending:
            self._commit(row, self._pending.pop(row).start)

    def _commit(self, row: int, at: int) -> None:
        self._remaining -= self._committed[row] == _ABSENT
        self._committed[row] = at

    def fail(self, row: int) -> None:
        self._pending.pop(row, None)
        self._problems.pop(row, None)
        if row not in self.failed_rows and self._committed[row] == _ABSENT:
            self.held = {}
            self.failed_rows.add(row)
            self._remaining -= 1

    def remove(self) -> None:
        if self._has_file:
            self.folder.remove(self.name)

    # ---- after a restart -------------------------------------------------------------------------

    def recover(self) -> None:
        """Commit the rows of which the file holds all, whole; the others are as if they had never
        been. What follows a damaged head cannot be parsed, and is truncated. Raises `OSError`.
        """
        with self.reading() as file:
            size = file.seek(0, os.SEEK_END)
            while (record := self._record_at(file, self._written, size)) is not None:
                self._replay(record, self._written, sound=self._is_sound(file, record))
                self._written = record.end
            os.ftruncate(file.fileno(), self._written)
        self._pending.clear()
        self._has_file = self._is_named = True

    def _replay(self, record: _Record, start: int, *, sound: bool) -> None:
        """Take a record in as `add` and `commit` once did."""
        known = self._pending.pop(record.row, None)
        names = frozenset(record.arrays)
        if record.before != _ABSENT:
            if known is None or known.start != record.before:
                return  # a record before it is damaged
            names |= known.names
        if not sound:
            return
        if names.issuperset(self.names):
            self._commit(record.row, start)
        self._pending[record.row] = _Newest(start, names)

    # ---- reading ---------------------------------------------------------------------------------

    def reading(self) -> BinaryIO:
        """The records; those of a part that has no file yet are in memory."""
        self._settle()
        if self._tail and self.in_memory:
            return io.BytesIO(self._tail)
        self._write_tail()
        return os.fdopen(self.folder.open(self.name, os.O_RDWR), "rb+")

    def _record_at(self, file: BinaryIO, start: int, size: int) -> _Record | None:
        """The record that starts there, in so many bytes; None if there is no sound head of one."""
        file.seek(start)
        prefix = file.read(_PREFIX_BYTES)
        if len(prefix) < _PREFIX_BYTES:
            return None
        lengths, checksum = prefix[: _LENGTHS.size], prefix[_LENGTHS.size :]
        head_bytes, data_bytes = _LENGTHS.unpack(lengths)
        at = start + _PREFIX_BYTES + head_bytes
        if head_bytes > _HEAD_BYTES or at + data_bytes > size:
            return None
        text = file.read(head_bytes)
        if _CHECKSUM.pack(zlib.crc32(text, zlib.crc32(lengths))) != checksum:
            return None
        try:
            return self._parsed(_decode(text.decode())[0], at, at + data_bytes)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None  # a checksum is no signature: anybody may have written it

    def _parsed(self, head: dict[str, Any], at: int, end: int) -> _Record | None:
        arrays: dict[str, Extent] = {}
        for name, description, sizes, checksum in head["arrays"]:
            shape = tuple(map(int, sizes))
            if (dtype := _dtype(description)) is None or min(shape, default=0) < 0:
                return None
            extent = Extent(dtype, shape, at, math.prod(shape) * dtype.itemsize, int(checksum))
            arrays[str(name)] = extent
            at += extent.size
        row, before = int(head["row"]), int(head["before"])
        if at != end or not 0 <= row < self.file.items:
            return None
        return _Record(row, before, arrays, end)

    def extents(self, file: BinaryIO, row: int) -> Mapping[str, Extent]:
        """The arrays of a committed row by name. Raises `OSError` if the part has been damaged."""
        found: dict[str, Extent] = {}
        at, size = self._committed[row], self._written or len(self._tail)
        while at != _ABSENT:
            record = self._record_at(file, at, size)
            if record is None or record.row != row or record.before >= at:
                raise self._damaged(at)
            found = {**record.arrays, **found}
            at = record.before
        return found

    def data(self, file: BinaryIO, extent: Extent) -> Iterator[bytes]:
        """The bytes of an array in pieces; their checksum is known to be right at the end only."""
        file.seek(extent.start)
        checksum, remaining = 0, extent.size
        while remaining and (piece := file.read(min(_COPY_BYTES, remaining))):
            checksum = zlib.crc32(piece, checksum)
            remaining -= len(piece)
            yield piece
        if remaining or checksum != extent.checksum:
            raise self._damaged(extent.start)

    def _is_sound(self, file: BinaryIO, record: _Record) -> bool:
        try:
            for extent in record.arrays.values():
                for _ in self.data(file, extent):
                    pass
        except OSError:
            return False
        return True

    def _damaged(self, at: int) -> OSError:
        return OSError(f"{self.folder.path / self.name} is damaged at {at}; run the job again")


@lru_cache(256)
def _dtype(description: str) -> np.dtype[Any] | None:
    """None: it is no type that is stored."""
    return np.dtype(description) if _DTYPE.fullmatch(description) else None


def _record(row: int, before: int, arrays: Mapping[str, Array]) -> Sequence[bytes | memoryview]:
    """The record of some arrays of a row, in pieces; `before` is where the one before it starts."""
    data = [bytes_of(array) for array in arrays.values()]
    head = {
        "row": row,
        "before": before,
        "arrays": [
            [name, array.dtype.str, array.shape, zlib.crc32(content)]
            for (name, array), content in zip(arrays.items(), data, strict=True)
        ],
    }
    text = _encode(head).encode()
    lengths = _LENGTHS.pack(len(text), sum(map(len, data)))
    checksum = _CHECKSUM.pack(zlib.crc32(text, zlib.crc32(lengths)))
    return [lengths + checksum + text, *data]


def bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")


class _TooWide(ValueError):
    """Text that its fixed width would make too large."""


def _storable(array: Array) -> Array:
    """As it is written: C order, little-endian, text of fixed width. Raises `_TooWide`."""
    if array.dtype.kind == "O":
        size = 4 * array.size * max(map(len, array.flat), default=0)
        if size > _TEXT_BYTES:
            raise _TooWide(
                f"text of {array.size} elements takes {format_bytes(Bytes(size))} of fixed width; "
                f"at most {format_bytes(Bytes(_TEXT_BYTES))} are written"
            )
        array = array.astype(np.str_)
    return np.ascontiguousarray(little_endian(array)).reshape(array.shape)
