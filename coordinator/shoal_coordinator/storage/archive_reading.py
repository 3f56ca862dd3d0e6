"""Archives that others have written, opened for reading.

`zipfile` reads the whole directory of an archive, as large as it says that it is, and makes an
object for each member, before anybody can ask how many there are: of a file of 48 MiB that is half
a GiB of memory. Here an archive that asks for so much at once is refused.
"""

import zipfile
from typing import BinaryIO, Final

PIECE_BYTES: Final = 1 << 20
"""The most that is read of a member at once; and no directory is too large that takes no more."""
_ENTRY_BYTES: Final = 4096
"""The most of a directory that each of its members takes."""


class DirectoryTooLarge(Exception):
    """An archive with more names than any that is read; the text says so."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(f"its directory takes more than {most_bytes >> 20} MiB")


class _InPieces:
    """A file of which no more than `most_bytes` are read at once."""

    def __init__(self, file: BinaryIO, most_bytes: int) -> None:
        self._file = file
        self._most_bytes = most_bytes
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, count: int = -1, /) -> bytes:
        most = self._most_bytes + 1
        content = self._file.read(most if count < 0 else min(count, most))
        if len(content) == most:
            raise DirectoryTooLarge(self._most_bytes)
        return content


def open_archive(file: BinaryIO, members: int) -> zipfile.ZipFile:
    """To be closed; the file stays open. Who has more than so many `members` may be refused. Raises
    `DirectoryTooLarge`, and whatever `zipfile` does of damaged bytes. Who reads members asks for at
    most `PIECE_BYTES` at once."""
    return zipfile.ZipFile(_InPieces(file, max(PIECE_BYTES, members * _ENTRY_BYTES)))
