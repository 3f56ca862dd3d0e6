"""Result files, made of the records of their items (`parts`)."""

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, BinaryIO, Final

import numpy as np

from shoal_coordinator.storage.archives import ArrayStream, archive_of, write_archive
from shoal_coordinator.storage.arrays import ArrayKind
from shoal_coordinator.storage.folders import Folder
from shoal_coordinator.storage.parts import ROWS, Part, bytes_of

_HELD_BYTES: Final = 1 << 20
"""Up to here the records are read into memory: each is looked for by itself."""
_HELD_ROWS: Final = 4096
"""Of so many rows it is known where their arrays lie, while a file is made."""


def content_of(part: Part) -> bytes:
    """The content of the result file of a part whose rows have ended. Raises `OSError`."""
    if part.held:
        arrays = [part.held[name] for name in part.names]
        kinds = tuple(
            [
                ArrayKind(name, array.dtype, _shape(part, array.shape, 1))
                for name, array in zip(part.names, arrays, strict=True)
            ]
        )
        return archive_of(kinds, list(map(bytes_of, arrays)))
    archive = io.BytesIO()
    with part.reading() as source:
        write_archive(archive, _Rows(part, source).streams())
    return archive.getvalue()


def make_file(part: Part, outputs: Folder) -> int:
    """Make the result file of a part whose rows have ended, durably; its size. Raises `OSError`."""
    temporary = f"{part.name}.tmp"
    try:
        with _reading(part) as source, os.fdopen(part.folder.create(temporary), "wb") as file:
            write_archive(file, _Rows(part, source).streams())
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        part.folder.move(temporary, outputs, part.file.name)
    except OSError:
        part.folder.remove(temporary)
        raise
    return size


def _shape(part: Part, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """That of an array in the file, of rows of this shape."""
    if not part.file.stacked:
        return shape
    return (rows, *(shape[1:] if part.file.joined and shape[:1] == (1,) else shape))


def _reading(part: Part) -> BinaryIO:
    """The records of a part."""
    source = part.reading()
    if part.written > _HELD_BYTES:
        return source
    with source:
        return io.BytesIO(source.read())


def row_name(name: str, row: int, names: Iterable[str]) -> str:
    """What the array of one row is called, where rows differ in their shapes: `NAME.3`, with as
    many dots as it takes where another of the `names` of the model's outputs is like that."""
    start = f"{name}."
    while any(each.startswith(start) and each[len(start) :].isdecimal() for each in names):
        start += "."
    return f"{start}{row}"


class _Rows:
    """The rows of a part, whose records are read from a file."""

    def __init__(self, part: Part, file: BinaryIO) -> None:
        self._part = part
        self._file = file
        self._extents = lru_cache(_HELD_ROWS)(partial(part.extents, file))

    def streams(self) -> Iterator[ArrayStream]:
        """The arrays of the file."""
        part, extents = self._part, self._extents
        rows = list(part.stored_rows())

        def stream(
            label: str, name: str, of: Sequence[int], dtype: np.dtype[Any], shape: tuple[int, ...]
        ) -> ArrayStream:
            pieces = self._pieces(name, of, dtype)
            return ArrayStream(name=label, dtype=dtype, shape=shape, pieces=pieces)

        for name in part.names:
            kinds = {(e.dtype, e.shape) for e in (extents(row)[name] for row in rows)}
            dtype, shape = next(iter(kinds))
            if all(each.kind == "U" for each, _ in kinds):
                dtype = max((each for each, _ in kinds), key=lambda each: each.itemsize)
                kinds = {(dtype, shape) for _, shape in kinds}
            if part.file.stacked and len(kinds) > 1:
                for row in rows:
                    extent = extents(row)[name]
                    label = row_name(name, row, part.names)
                    yield stream(label, name, [row], extent.dtype, extent.shape)
            else:
                yield stream(name, name, rows, dtype, _shape(part, shape, len(rows)))
        if part.failed_rows:
            numbers = np.array(rows, np.int64)
            yield ArrayStream(
                name=ROWS, dtype=numbers.dtype, shape=numbers.shape, pieces=[numbers.tobytes()]
            )

    def _pieces(self, name: str, rows: Sequence[int], dtype: np.dtype[Any]) -> Iterator[bytes]:
        """The bytes of an array of these rows, one row after the other, as `dtype`. Raises
        `OSError`, also for damage."""
        for row in rows:
            extent = self._extents(row)[name]
            data = self._part.data(self._file, extent)
            if extent.dtype == dtype:
                yield from data
            else:
                yield np.frombuffer(b"".join(data), extent.dtype).astype(dtype).tobytes()
