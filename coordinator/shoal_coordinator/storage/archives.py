"""`.npz` files, written piece by piece, or at once where they are small.

The same arrays give the same bytes: no time of day, no order but the one given.
"""

import io
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO, Final

import numpy as np

from shoal_coordinator.storage.archive_forms import LARGEST_BYTES, ArchiveForm
from shoal_coordinator.storage.array_limits import Limits, UnreadableArrays
from shoal_coordinator.storage.arrays import (
    ArrayKind,
    archive_headers,
    form_of,
)

_KNOWN_FORMS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayStream:
    """An array to be written: its data comes in pieces, in C order."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: Iterable[bytes | memoryview]


def write_archive(file: BinaryIO, arrays: Iterable[ArrayStream]) -> None:
    """Write an uncompressed `.npz` without holding an array in memory."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for array in arrays:
            info = zipfile.ZipInfo(f"{array.name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            with archive.open(info, "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(
                    member,
                    {
                        "descr": np.lib.format.dtype_to_descr(array.dtype),
                        "fortran_order": False,
                        "shape": array.shape,
                    },
                )
                for piece in array.pieces:
                    member.write(piece)


def archive_of(kinds: tuple[ArrayKind, ...], data: Sequence[bytes | memoryview]) -> bytes:
    """The archive of arrays of which all bytes are there."""
    if sum(map(len, data)) < LARGEST_BYTES and (form := _form(kinds)) is not None:
        return form.filled(data)
    return _written(kinds, data)


def _written(kinds: Iterable[ArrayKind], data: Iterable[bytes | memoryview]) -> bytes:
    file = io.BytesIO()
    arrays = zip(kinds, data, strict=True)
    write_archive(
        file,
        (
            ArrayStream(name=kind.name, dtype=kind.dtype, shape=kind.shape, pieces=[piece])
            for kind, piece in arrays
        ),
    )
    return file.getvalue()


@lru_cache(_KNOWN_FORMS)
def _form(kinds: tuple[ArrayKind, ...]) -> ArchiveForm | None:
    """That of an archive of arrays of these kinds; None where they cannot be read again."""
    content = _written(kinds, [bytes(kind.data_bytes) for kind in kinds])
    try:
        headers = archive_headers(io.BytesIO(content), len(content), Limits())
    except UnreadableArrays:
        return None
    return form_of(content, headers)
