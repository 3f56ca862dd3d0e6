"""What small `.npz` files have in common whose arrays have the same names, types and shapes.

An archive consists of local headers, `.npy` headers and data, and a directory at its end. In
another one of the same *form* only the data differs, and with it the checksums, and the times of
change. So an archive whose other bytes are all known needs no parser, and one of a known form is
made by filling in its data.

    local header    [4] [times 10:14] [CRC-32 14:18] ... name, extra, `.npy` header, data
    directory       [6] [times 12:16] [CRC-32 16:20] ... name, extra, comment     per member
"""

import io
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, Self

LARGEST_BYTES: Final = 64 * 1024
"""Of an archive whose form is of use: what is larger takes its time for its data."""
_LOCAL_BYTES: Final = 30
_LOCAL_NAME: Final = 26
_LOCAL_CHECKSUM: Final = 14
_ENTRY_BYTES: Final = 46
_ENTRY_NAME: Final = 28
_CHECKSUM: Final = 16
_CHECKSUM_BYTES: Final = 4
_TIME_BYTES: Final = 4
"""Of the time of change, before each checksum."""


class _Member(NamedTuple):
    """An array: where the member lies, and its data in it; where its checksum stands, twice."""

    start: int
    data: slice
    end: int
    local_checksum: slice
    checksum: slice
    header_checksum: int


class ArchiveForm:
    """The form of an archive."""

    def __init__(self, content: bytes, members: Iterable[_Member]) -> None:
        self._content = content
        self._members = tuple(members)
        self._fixed = tuple((part, content[part]) for part in self._fixed_parts())

    @classmethod
    def of(cls, content: bytes, data: Mapping[str, slice]) -> Self | None:
        """That of an archive which is known to be sound; None if its parts overlap. `data` says
        where the data of its arrays lies, by the names of the members, none of which may be
        compressed."""
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            infos, entry = archive.infolist(), archive.start_dir
        members: list[_Member] = []
        parts = [(entry, len(content))]
        for info in infos:
            at = info.header_offset
            start = at + _LOCAL_BYTES + _lengths(content, at + _LOCAL_NAME, 2)
            parts.append((at, start))
            if (place := data.get(info.filename)) is not None:
                members.append(
                    _Member(
                        start,
                        place,
                        start + info.file_size,
                        slice(at + _LOCAL_CHECKSUM, at + _LOCAL_CHECKSUM + _CHECKSUM_BYTES),
                        slice(entry + _CHECKSUM, entry + _CHECKSUM + _CHECKSUM_BYTES),
                        zlib.crc32(content[start : place.start]),
                    )
                )
                parts.append((start, start + info.file_size))
            entry += _ENTRY_BYTES + _lengths(content, entry + _ENTRY_NAME, 3)
        parts.sort()
        bounds = [edge for part in parts for edge in part]
        # Where nothing overlaps, no byte that says how to read the archive counts as data.
        return cls(content, members) if bounds == sorted(bounds) else None

    def _fixed_parts(self) -> Iterable[slice]:
        """All but data, checksums and times."""
        at = 0
        variable = [member.data for member in self._members]
        for member in self._members:
            for checksum in (member.local_checksum, member.checksum):
                variable.append(slice(checksum.start - _TIME_BYTES, checksum.stop))
        for part in sorted(variable, key=lambda part: part.start):
            yield slice(at, part.start)
            at = part.stop
        yield slice(at, len(self._content))

    def checksums(self, content: bytes) -> tuple[int, ...] | None:
        """Those of the members of an archive as long as this one; None if it is of another form,
        or damaged."""
        for part, fixed in self._fixed:
            if content[part] != fixed:
                return None
        found: list[int] = []
        for member in self._members:
            checksum = zlib.crc32(content[member.start : member.end])
            if checksum != int.from_bytes(content[member.checksum], "little"):
                return None
            found.append(checksum)
        return tuple(found)

    def filled(self, data: Iterable[bytes | memoryview]) -> bytes:
        """The archive of this form whose members have this data to their ends."""
        content = bytearray(self._content)
        for member, piece in zip(self._members, data, strict=True):
            checksum = zlib.crc32(piece, member.header_checksum).to_bytes(_CHECKSUM_BYTES, "little")
            content[member.data] = piece
            content[member.checksum] = content[member.local_checksum] = checksum
        return bytes(content)


def _lengths(content: bytes, at: int, count: int) -> int:
    """The sum of so many numbers of two bytes."""
    return sum(
        int.from_bytes(content[each : each + 2], "little") for each in range(at, at + 2 * count, 2)
    )
