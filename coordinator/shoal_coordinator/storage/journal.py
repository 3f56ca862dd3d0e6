"""An append-only file of JSON lines that survives a crash at any moment.

A line counts when it is whole, newline included. What a crash tore off is cut away when the journal
is opened; what a full disk tore off, at once.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from shoal_protocol.durable_files import replace_file

Line = Mapping[str, int]

_READ_BYTES: Final = 1024 * 1024


class Journal:
    """An open journal. `lines` are those that it held when it was opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.lines, self._end = _read(self._descriptor)
        os.ftruncate(self._descriptor, self._end)

    def append(self, lines: Iterable[Line]) -> None:
        """Add lines; they are on the disk on return. On `OSError` none of them is there."""
        data = b"".join(_encode(line) for line in lines)
        if not data:
            return
        try:
            _write(self._descriptor, data, self._end)
            os.fdatasync(self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(data)

    def rewrite(self, lines: Iterable[Line]) -> None:
        """Put other lines in the place of all, at once."""
        data = b"".join(_encode(line) for line in lines)
        replace_file(self._path, data)
        os.close(self._descriptor)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        self._end = len(data)

    def close(self) -> None:
        os.close(self._descriptor)


def _encode(line: Line) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _write(descriptor: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, position)
        view, position = view[written:], position + written


def _read(descriptor: int) -> tuple[list[dict[str, int]], int]:
    """The whole lines from the start, and where the last of them ends."""
    lines: list[dict[str, int]] = []
    end = position = 0
    rest = b""
    while block := os.pread(descriptor, _READ_BYTES, position):
        position += len(block)
        *whole, rest = (rest + block).split(b"\n")
        for text in whole:
            try:
                line = json.loads(text)
            except ValueError:
                return lines, end
            if not isinstance(line, dict):
                return lines, end
            end += len(text) + 1
            lines.append(line)
    return lines, end
