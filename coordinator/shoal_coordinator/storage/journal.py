"""An append-only file of JSON lines that survives a crash at any moment, and damage.

A line counts when it is whole, newline included, and its checksum `crc` is right. What a crash tore
off is removed when the journal is opened; what a full disk tore off, at once. A damaged line is
passed over: it costs what it said, and nothing else.
"""

import contextlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from typing import Final

from shoal_coordinator.storage.folders import Folder

Line = Mapping[str, int]

_CHECKSUM: Final = "crc"
_encoder: Final = json.JSONEncoder(separators=(",", ":"))
_MOST_BYTES: Final = 64 << 20
"""More than a line for each file that a job may have."""


class Journal:
    """An open journal. `lines` are those that it held when it was opened, `damaged` says whether
    there were others."""

    def __init__(self, folder: Folder, name: str) -> None:
        """Raises `OSError`, like every method."""
        self._folder, self._name = folder, name
        self._descriptor = folder.open(name, os.O_RDWR | os.O_CREAT)
        with open(self._descriptor, "rb", closefd=False) as file:
            content = file.read(_MOST_BYTES)
        self._end = content.rfind(b"\n") + 1
        os.ftruncate(self._descriptor, self._end)
        found = [_decode(text) for text in content[: self._end].splitlines()]
        self.lines = [line for line in found if line is not None]
        self.damaged = len(self.lines) < len(found)

    def append(self, lines: Iterable[Line]) -> None:
        """Add lines; they are on the disk on return. On `OSError` none of them is there."""
        data = b"".join(map(_encode, lines))
        try:
            write_at(self._descriptor, data, self._end)
            os.fdatasync(self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(data)

    def rewrite(self, lines: Iterable[Line]) -> None:
        """Put other lines in the place of all, at once."""
        data = b"".join(map(_encode, lines))
        self._folder.replace(self._name, data)
        # Opened first: if that fails, what is closed is not closed once more.
        before, self._descriptor = self._descriptor, self._folder.open(self._name, os.O_RDWR)
        os.close(before)
        self._end = len(data)

    def close(self) -> None:
        os.close(self._descriptor)


def write_at(descriptor: int, data: bytes | bytearray | memoryview, position: int) -> int:
    """Write all of `data`; where it ends. Raises `OSError`."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, position)
        view, position = view[count:], position + count
    return position


def _text(line: Line) -> bytes:
    return _encoder.encode(line).encode()


def _encode(line: Line) -> bytes:
    return _text({**line, _CHECKSUM: zlib.crc32(_text(line))}) + b"\n"


def _decode(text: bytes) -> Line | None:
    """The line without its checksum; None if it is damaged."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    checksum = line.pop(_CHECKSUM, None)
    return line if checksum == zlib.crc32(_text(line)) else None
