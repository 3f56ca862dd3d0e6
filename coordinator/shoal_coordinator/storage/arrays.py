"""NumPy's `.npy` and `.npz` files, read piece by piece.

Files are untrusted: nothing is unpickled, every size in a header is checked against the file
and a limit before anything is allocated, and no file is mapped, so that one which shrinks meanwhile
is an error and not a bus error. A small file is read once, whole; of others only the bytes asked
for are read. Members of a compressed `.npz` have no random access: they are inflated once into an
unnamed file, and read from there. So are the rows of an array in Fortran order: it is copied in C
order first.
"""

import hashlib
import io
import math
import os
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, Literal, NamedTuple

import numpy as np

from shoal_coordinator.storage.archive_forms import LARGEST_BYTES, ArchiveForm
from shoal_coordinator.storage.archive_reading import PIECE_BYTES, open_archive
from shoal_coordinator.storage.array_limits import Limits, UnreadableArrays
from shoal_coordinator.storage.transposing import copy_in_c_order
from shoal_protocol.durable_files import is_transient
from shoal_protocol.elements import Array, little_endian, truths
from shoal_protocol.units import format_apart

_File = io.BytesIO | io.BufferedReader | io.BufferedRandom

_SMALL_FILE_BYTES: Final = LARGEST_BYTES
_HEADER_BYTES: Final = 64 * 1024
_KNOWN_HEADERS: Final = 32
"""Of those parsed last: the files of a folder mostly have the same."""
_KNOWN_SIZES: Final = 128
"""Of small archives whose forms are known."""
_SHOWN_BYTES: Final = 16
"""Of a file that is no array."""
_LENGTH_BYTES: Final = {(1, 0): 2, (2, 0): 4}
"""Of the number that says how long the header of an `.npy` file is, by its version."""
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
_MOST_INFLATION: Final = 1032
"""The most bytes that deflate makes of one."""
_MAX_RANK: Final = 32
"""Axes that every version of NumPy can make an array of."""
SOLE: Final = ""
"""Name of the one array of an `.npy` file."""


class ArrayKind(NamedTuple):
    """What decides how an array is used."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def data_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayHeader:
    """One array in a file. `offset` is where its data starts in the file, `header` the bytes before
    it, from `start`; `checksum` the CRC-32 that the archive holds over both, if it is an
    archive."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    header: bytes
    offset: int
    compressed: bool = False
    checksum: int | None = None

    @property
    def kind(self) -> ArrayKind:
        return ArrayKind(self.name, self.dtype, self.shape)

    @property
    def data_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@contextmanager
def _reading(problem: str) -> Iterator[None]:
    """Damaged bytes make zipfile and NumPy raise nearly anything: it becomes `UnreadableArrays`. An
    `OSError` that says nothing of the file (no descriptor is free) stays."""
    try:
        yield
    except UnreadableArrays:
        raise
    except Exception as e:
        if isinstance(e, OSError) and is_transient(e):
            raise
        raise UnreadableArrays(f"{problem}: {str(e) or type(e).__name__}") from e


def _open_file(path: str) -> tuple[_File, tuple[int, int]]:
    """The file, or what a small one holds; its size, and when it was written to last."""
    # A pipe in the place of the file would be waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    written = status.st_size, status.st_mtime_ns
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise UnreadableArrays("is no file any more")
    if status.st_size > _SMALL_FILE_BYTES:
        return io.BufferedReader(os.fdopen(descriptor, "rb", buffering=0)), written
    try:
        content = os.read(descriptor, status.st_size)
    finally:
        os.close(descriptor)
    return io.BytesIO(content), written


@dataclass(slots=True)
class _Met:
    """The small archives of one size: whether there was one; the form of the last and its headers,
    which one assignment replaces: there are several readers."""

    any: bool = False
    known: tuple[ArchiveForm, tuple[ArrayHeader, ...]] | None = None


@lru_cache(_KNOWN_SIZES)
def _met(_limits: Limits, _size: int) -> _Met:
    """Of archives that were read with these limits."""
    return _Met()


def _small_headers(content: bytes, limits: Limits) -> dict[str, ArrayHeader]:
    """Those of an archive in memory, which is not parsed where its form is known."""
    met = _met(limits, len(content))
    if (known := met.known) is not None:
        form, headers = known
        if (checksums := form.checksums(content)) is not None:
            return {
                header.name: replace(header, checksum=checksum)
                for header, checksum in zip(headers, checksums, strict=True)
            }
    found = archive_headers(io.BytesIO(content), len(content), limits)
    # Where all files of a folder differ in their sizes, a form is of no use.
    if met.any and (new := form_of(content, found)) is not None:
        met.known = new, tuple(found.values())
    met.any = True
    return found


def form_of(content: bytes, headers: Mapping[str, ArrayHeader]) -> ArchiveForm | None:
    """The form of an archive that holds these arrays, if it has one."""
    if any(header.compressed for header in headers.values()):
        return None
    places = {
        f"{name}.npy": slice(header.offset, header.offset + header.data_bytes)
        for name, header in headers.items()
    }
    return ArchiveForm.of(content, places)


def archive_headers(file: BinaryIO, size: int, limits: Limits) -> dict[str, ArrayHeader]:
    """The arrays of an archive by name. Damaged bytes make zipfile and NumPy raise anything."""
    headers: dict[str, ArrayHeader] = {}
    with open_archive(file, limits.members) as archive:
        infos = archive.infolist()
        if len(infos) > limits.members:
            raise UnreadableArrays(f"has {len(infos)} members; the limit is {limits.members}")
        for info in infos:
            name = info.filename.removesuffix(".npy")
            if name == info.filename:
                continue
            if name in headers:
                raise UnreadableArrays(f"holds {name!r} twice")
            if info.flag_bits & 1:
                raise UnreadableArrays(f"is encrypted at {name!r}")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise UnreadableArrays(
                    f"compresses {name!r} in a way that is neither none nor deflate"
                )
            held = min(info.compress_size, size)
            if info.file_size > held * _MOST_INFLATION:
                raise UnreadableArrays(
                    f"is damaged at {name!r}: it claims {info.file_size} bytes, which {held} "
                    "compressed ones cannot hold"
                )
            with archive.open(info) as member:
                header = _parse_header(name, member, info.file_size, limits)
            if more := info.file_size - len(header.header) - header.data_bytes:
                raise UnreadableArrays(f"has {more} bytes after {name!r}")
            headers[name] = _placed(header, info, file)
    return headers


def _placed(header: ArrayHeader, info: zipfile.ZipInfo, file: BinaryIO) -> ArrayHeader:
    file.seek(info.header_offset)
    signature, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if signature != b"PK\3\4":
        raise UnreadableArrays(f"is damaged at {header.name!r}")
    start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    return replace(
        header,
        offset=start + len(header.header),
        compressed=info.compress_type == zipfile.ZIP_DEFLATED,
        checksum=info.CRC,
    )


def _parse_header(name: str, file: Any, total_bytes: int, limits: Limits) -> ArrayHeader:
    label = repr(name) if name else "the array"
    # Read ahead by hand: NumPy would allocate whatever length the header claims before refusing it.
    content = file.read(_HEADER_BYTES)
    if not content.startswith(np.lib.format.MAGIC_PREFIX):
        begins = f"begins with {content[:_SHOWN_BYTES]!r}, not" if content else "is empty, not"
        raise ValueError(f"{label} {begins} as numpy.save writes it")
    version = np.lib.format.read_magic(io.BytesIO(content))
    if version not in _LENGTH_BYTES:
        raise UnreadableArrays(f"has {label} in format version {version}")
    start = np.lib.format.MAGIC_LEN + _LENGTH_BYTES[version]
    length = int.from_bytes(content[np.lib.format.MAGIC_LEN : start], "little")
    text = content[: start + length]
    shape, fortran, dtype = _described(text)
    if dtype.hasobject or dtype.fields is not None or dtype.subdtype is not None:
        raise UnreadableArrays(
            f"has {label} with elements of type {dtype}, which is not read; "
            "save an array of numbers, or of text that is no object"
        )
    if dtype.itemsize == 0:
        raise UnreadableArrays(f"has {label} with elements of type {dtype}, which have no size")
    # NumPy multiplies the other axes even where one of them is 0.
    size_bytes = math.prod(max(1, size) for size in shape) * dtype.itemsize
    impossible = size_bytes > np.iinfo(np.intp).max
    if any(size < 0 for size in shape) or len(shape) > _MAX_RANK or impossible:
        raise UnreadableArrays(f"has {label} of shape {shape}, which no array can have")
    header = ArrayHeader(
        name=name,
        dtype=dtype,
        shape=shape,
        fortran=fortran and len(shape) > 1,
        header=text,
        offset=len(text),
    )
    if header.data_bytes > limits.array_bytes:
        raise UnreadableArrays(
            f"has {label} of {header.data_bytes} bytes; the limit is {limits.array_bytes}"
        )
    if header.data_bytes > total_bytes - len(text):
        raise UnreadableArrays(
            f"is cut short: {label} needs {header.data_bytes} bytes, "
            f"{max(0, total_bytes - len(text))} are there"
        )
    return header


@lru_cache(_KNOWN_HEADERS)
def _described(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran order, and type, of the first bytes of an `.npy` file."""
    buffer = io.BytesIO(header)
    version = np.lib.format.read_magic(buffer)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(buffer, _HEADER_BYTES)
    return np.lib.format.read_array_header_2_0(buffer, _HEADER_BYTES)


class ArrayFile(AbstractContextManager["ArrayFile"]):
    """An open `.npy` or `.npz` file whose arrays are read whole or row by row."""

    def __init__(self, path: str | Path, *, limits: Limits, spool: Path | None = None) -> None:
        """Read the headers; raises `UnreadableArrays`. `spool` is where copies are made of arrays
        that have no random access, without a name; default: /tmp."""
        self._limits = limits
        self._spool = spool
        self._copies: dict[tuple[str, bool], _File | str] = {}
        name = os.fspath(path)
        suffix = os.path.splitext(name)[1]
        with ExitStack() as resources:
            with _reading(f"is no readable {suffix} file"):
                self._file, self._written = _open_file(name)
                resources.enter_context(self._file)
                size = self._written[0]
                if suffix == ".npy":
                    self.headers = {SOLE: _parse_header(SOLE, self._file, size, limits)}
                elif isinstance(self._file, io.BytesIO):
                    self.headers = _small_headers(self._file.getvalue(), limits)
                else:
                    self.headers = archive_headers(self._file, size, limits)
            self._resources = resources.pop_all()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._resources.close()

    @property
    def version(self) -> int | tuple[int, int]:
        """Differs where another file with arrays of the same kinds holds something else: by the
        checksums of an archive; of a large `.npy`, the time of its last change must do."""
        checksums = [header.checksum for header in self.headers.values()]
        if None not in checksums:
            return hash(tuple(checksums))
        if isinstance(self._file, io.BytesIO):
            return zlib.crc32(self._file.getbuffer())
        return self._written

    @property
    def is_current(self) -> bool:
        """Whether nobody has written to the file since it was opened; what is in memory stays."""
        if isinstance(self._file, io.BytesIO):
            return True
        status = os.fstat(self._file.fileno())
        return (status.st_size, status.st_mtime_ns) == self._written

    def digest(self, most_bytes: int) -> str:
        """Of the bytes of the file if they are no more than that; else, how many there are and when
        it was changed."""
        if self._written[0] > most_bytes:
            return ":".join(map(str, self._written))
        with _reading("cannot be read"):
            self._file.seek(0)
            return hashlib.sha256(self._file.read(most_bytes)).hexdigest()

    def read(self, name: str, rows: slice | None = None) -> Array:
        """The array, or the run of its rows, as a fresh little-endian array in C order."""
        header = self.headers[name]
        with _reading("cannot be read"):  # the file may have changed since its headers were read
            if rows is None:
                data = self._read_bytes(header, *self._source(header), header.data_bytes)
                self._check(header, data)
                order: Literal["C", "F"] = "F" if header.fortran else "C"
                array = np.frombuffer(data, header.dtype).reshape(header.shape, order=order)
            else:
                array = self._read_rows(header, *rows.indices(header.shape[0])[:2])
        return truths(little_endian(np.asarray(array, order="C")))

    def _read_rows(self, header: ArrayHeader, first: int, last: int) -> Array:
        file, offset = self._source(header, by_rows=True)
        row_bytes = math.prod(header.shape[1:]) * header.dtype.itemsize
        start, count = offset + first * row_bytes, (last - first) * row_bytes
        data = np.frombuffer(self._read_bytes(header, file, start, count), header.dtype)
        if not header.fortran:
            return data.reshape(last - first, *header.shape[1:])
        # Rows follow one another; within a row the first of the other axes is still the fastest.
        axes = range(len(header.shape) - 1, 0, -1)
        return data.reshape(last - first, *header.shape[:0:-1]).transpose(0, *axes)

    def _read_bytes(self, header: ArrayHeader, file: _File, start: int, count: int) -> bytearray:
        if count > self._limits.item_bytes:
            raise UnreadableArrays(
                f"needs {count} bytes at once for {header.name or 'its array'}; "
                f"the limit is {self._limits.item_bytes}"
            )
        data = bytearray(count)
        file.seek(start)
        if file.readinto(data) < count:
            raise UnreadableArrays("is shorter than it was")
        return data

    def _source(self, header: ArrayHeader, *, by_rows: bool = False) -> tuple[_File, int]:
        """A file with random access to an array, or to its rows, and where it begins there."""
        if by_rows and header.fortran:
            return self._copied(header, by_rows=True), 0
        if header.compressed:
            return self._copied(header, by_rows=False), len(header.header)
        return self._file, header.offset

    def _copied(self, header: ArrayHeader, *, by_rows: bool) -> _File:
        """The copy of an array. One that is damaged is not copied again for each of its items."""
        key = header.name, by_rows
        if key not in self._copies:
            self._require_room(header.data_bytes * (2 if by_rows else 1))
            try:
                with _reading("cannot be read"), ExitStack() as resources:
                    file = resources.enter_context(tempfile.TemporaryFile(dir=self._spool))
                    (self._copy_rows if by_rows else self._copy)(header, file)
                    self._copies[key] = file
                    self._resources.push(resources.pop_all())
            except UnreadableArrays as error:
                self._copies[key] = str(error)
        if isinstance(copied := self._copies[key], str):
            raise UnreadableArrays(copied)
        return copied

    def _copy(self, header: ArrayHeader, target: BinaryIO) -> None:
        """Copy an array as it is in the file, its header included. In an archive, zipfile gives at
        most the size that the directory declares, which was held against the limit, and verifies
        the checksum."""
        with ExitStack() as resources:
            source: IO[bytes] = self._file
            if header.checksum is None:
                self._file.seek(0)
            else:
                opened = open_archive(self._file, self._limits.members)
                archive = resources.enter_context(opened)
                source = resources.enter_context(archive.open(f"{header.name}.npy"))
            try:
                shutil.copyfileobj(source, target, PIECE_BYTES)
            except zipfile.BadZipFile as error:
                raise _damaged(header) from error
            target.flush()

    def _copy_rows(self, header: ArrayHeader, target: BinaryIO) -> None:
        """Copy an array in Fortran order to the start of `target`, row by row."""
        with tempfile.TemporaryFile(dir=self._spool) as source:
            # A file that somebody can cut short must not be mapped: it would be a bus error.
            self._copy(header, source)
            start, element_bytes = len(header.header), header.dtype.itemsize
            sizes = {"rows": header.shape[0], "columns": math.prod(header.shape[1:])}
            copy_in_c_order(source, start, target, **sizes, element_bytes=element_bytes)

    def _require_room(self, need_bytes: int) -> None:
        """Else each item of a file would fill the disk again before it fails."""
        where = self._spool or tempfile.gettempdir()
        if need_bytes > (have_bytes := shutil.disk_usage(where).free):
            need, have = format_apart(need_bytes, have_bytes)
            raise UnreadableArrays(
                f"needs {need} of temporary disk in {where}, have {have}; save it in C order "
                "(numpy.ascontiguousarray) and uncompressed"
            )

    @staticmethod
    def _check(header: ArrayHeader, data: bytearray) -> None:
        """Against the archive's checksum, if there is one; what was copied has been checked."""
        if header.checksum is None or header.compressed:
            return
        if zlib.crc32(data, zlib.crc32(header.header)) != header.checksum:
            raise _damaged(header)


def _damaged(header: ArrayHeader) -> UnreadableArrays:
    return UnreadableArrays(f"is damaged: the checksum of {header.name!r} does not match")
