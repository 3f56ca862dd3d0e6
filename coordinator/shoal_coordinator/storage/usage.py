"""What the files of a volume take on its disk, without looking at all of them each time.

A volume is counted by *places*: a fragment, the files that fragments share, uploads of one owner,
a folder of a job, and whatever else lies beside these. All of them are looked at once, by whoever
asks first; so what a crash has left behind counts. From then on whoever changes a place says by how
much, or has that place looked at again, and no write makes anybody look at all of them.

What is counted are the blocks that the file system has given: a million files of some bytes each
take gigabytes. A file that several fragments share counts once (`shared_files`).
"""

import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Final

from shoal_protocol.manifest import is_shared

_BLOCK_BYTES: Final = 512
"""The unit of `st_blocks`, whatever the file system's own is."""
_DEPTHS: Final[Mapping[str, int]] = {"fragments": 2, "incoming": 3, "jobs": 3}
"""How many names say which place it is, of folders that have several."""
_GONE: Final = (FileNotFoundError, NotADirectoryError, PermissionError)
"""What a volume's own files are beside (`lost+found`) is nobody's; what has just gone takes
nothing."""


class Usage:
    """The bytes of a volume, for several threads. Methods block on the disk, and may raise
    `OSError`, except `add` and `total_bytes`."""

    def __init__(self, root: Path, passed_over: Callable[[], Collection[str]] = tuple) -> None:
        """`passed_over` gives the paths of files that somebody else counts."""
        self._root = root
        self._passed_over = passed_over
        self._lock = Lock()
        self._bytes: Counter[str] = Counter()
        self._total = 0
        self._grown: Counter[str] = Counter()
        """By how much places have grown while they are looked at."""
        self.is_known = False
        """Whether all places have been looked at."""

    @property
    def total_bytes(self) -> int:
        """Of all places."""
        return self._total

    def places(self, folder: Path) -> list[str]:
        """The places that a folder (from the root) has had, and itself."""
        name = folder.as_posix()
        with self._lock:
            return [name, *(each for each in self._bytes if each.startswith(f"{name}/"))]

    def add(self, place: str, size: int) -> None:
        """A place has grown by so many bytes, or has become smaller."""
        with self._lock:
            self._set(place, self._bytes[place] + size)
            if place in self._grown:
                self._grown[place] += max(0, size)

    def look_at(self, place: str) -> None:
        """Count a place anew. What is added meanwhile may count twice, until the next time."""
        with self._lock:
            self._grown.setdefault(place, 0)
        found = taken_bytes(self._root / place, self._passed_over())
        with self._lock:
            self._set(place, found + self._grown.pop(place, 0))

    def look_at_all(self) -> None:
        """Count everything anew."""
        with self._lock:
            known = set(self._bytes)
        for place in sorted(known.union(_places(self._root, "", 1))):
            self.look_at(place)
        self.is_known = True

    def _set(self, place: str, size: int) -> None:
        size = max(0, size)
        self._total += size - self._bytes[place]
        self._bytes[place] = size
        if not size:
            del self._bytes[place]


def _places(folder: Path, before: str, depth: int) -> Iterator[str]:
    """The places in a folder, of names with so many parts more."""
    with suppress(*_GONE):
        for name in os.listdir(folder):
            below = _DEPTHS.get(name, 1) if not before else depth
            if below > 1 and (folder / name).is_dir():
                yield from _places(folder / name, f"{before}{name}/", below - 1)
            else:
                yield f"{before}{name}"


def taken_bytes(path: Path, passed_over: Collection[str] = ()) -> int:
    """What a file, or a folder with all that is in it, takes on the disk; 0: it is not there.
    Without links of shared files, which count where they are kept, and those `passed_over`."""
    try:
        status = path.lstat()
    except _GONE:
        return 0
    total = status.st_blocks * _BLOCK_BYTES
    pending = [str(path)] if stat.S_ISDIR(status.st_mode) else []
    while pending:
        with suppress(*_GONE), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with suppress(*_GONE):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        pending.append(entry.path)
                    elif entry.path in passed_over or _is_link(entry.name, status):
                        continue
                    total += status.st_blocks * _BLOCK_BYTES
    return total


def _is_link(name: str, status: os.stat_result) -> bool:
    return status.st_nlink > 1 and is_shared(name)
