"""Small result files: durable in a log first, made in groups.

To sync a file of a few KiB costs more than to write it. So small files are appended to a log,
whole, and one sync makes all that have come durable. A *group* is what one log holds. Its files are
written under temporary names, the file system is synced once, and the files get their names;
meanwhile the next group takes what comes. The log is removed when the journal notes its files. So a
name in the outputs never refers to half a file, also after a loss of power, and what was logged is
made by whoever opens the outputs next.

    7.log    per file: its number (4 bytes), length of the content (4), CRC-32 of the content (4),
             CRC-32 of these (4), content
"""

import contextlib
import os
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from shoal_coordinator.storage.folders import Folder
from shoal_coordinator.storage.journal import write_at
from shoal_protocol.durable_files import is_transient

LARGEST_BYTES: Final = 1 << 20
"""The longest file that is logged."""
_GROUP_BYTES: Final = 8 << 20
_GROUP_FILES: Final = 1024
_SUFFIX: Final = ".log"
_HEAD: Final = struct.Struct("<III")
_CHECKSUM: Final = struct.Struct("<I")
_HEAD_BYTES: Final = _HEAD.size + _CHECKSUM.size

Contents = Mapping[int, bytes]
"""Of result files, by number."""


class ResultLog:
    """The logs of a job. Not for several threads at once; any method may wait for the disk, and
    raise an `OSError` that says nothing of the files (`is_transient`): call it again."""

    def __init__(
        self,
        folder: Folder,
        outputs: Folder,
        names: Mapping[int, str],
        note: Callable[[Mapping[int, int]], None],
    ) -> None:
        """`names` are those of the files that may be logged. `note` makes durable that files are
        made, with their sizes, or raises `OSError`."""
        self._folder, self._outputs, self._names, self._note = folder, outputs, names, note
        self._found = log_sequences(folder)
        self._group = Group(folder, max(self._found, default=0) + 1)
        self._making: Group | None = None
        self._made: Future[dict[int, OSError]] | None = None
        self._maker = ThreadPoolExecutor(1, "groups of results")
        self.numbers: set[int] = set()
        """Of the files that are durable, and not made yet."""
        self.problem: OSError | None = None
        """Why files in a log cannot be made; the log stays, so that the next run makes them."""

    def recover(self, made: Collection[int]) -> dict[int, int]:
        """Make the files that the logs of an earlier run hold, except those that are `made`; their
        sizes. Call `forget_recovered` once they are noted. Raises `OSError`."""
        sizes: dict[int, int] = {}
        for sequence in self._found:
            for contents in read_log(self._folder, sequence):
                wanted = {
                    number: content
                    for number, content in contents.items()
                    if number in self._names and number not in made
                }
                for error in self._make(wanted).values():
                    raise error
                sizes |= {number: len(content) for number, content in wanted.items()}
        return sizes

    def forget_recovered(self) -> None:
        for sequence in self._found:
            Group(self._folder, sequence).remove()
        self._found = []

    def store(self, contents: Contents) -> None:
        """Add files; they are durable on return. Raises `OSError`: none of them is there."""
        if self._group.is_full:
            self.settle()
            self.publish()
        self._group.append(contents)
        self.numbers |= contents.keys()

    def publish(self) -> None:
        """Begin to make the files, unless others are being made."""
        if self._made is not None and not self._made.done():
            return
        self.settle()
        if self._making is None and self._group.contents:
            self._making, self._group = self._group, Group(self._folder, self._group.sequence + 1)
        if self._making is not None:
            self._made = self._maker.submit(self._make, self._making.contents)

    def settle(self) -> None:
        """Wait for the files that are being made, and note them."""
        if self._made is None or self._making is None:
            return
        made, self._made = self._made, None
        group = self._making
        try:
            failed = made.result()
            for error in filter(is_transient, failed.values()):
                raise error
            sizes = {n: len(content) for n, content in group.contents.items() if n not in failed}
            self._note(sizes)
            self.numbers -= sizes.keys()
            if not failed:
                group.remove()
        except OSError as error:
            if is_transient(error):
                raise  # the group is made again
            failed = dict.fromkeys(group.contents, error)
        self._making = None
        self.problem = self.problem or next(iter(failed.values()), None)

    def publish_all(self) -> None:
        """Make all files. `problem` reports what went wrong."""
        while self._making is not None or self._group.contents:
            self.publish()
            self.settle()

    def close(self) -> None:
        """Make what can be made. The rest is in its log."""
        with contextlib.suppress(OSError):
            self.publish_all()
        self._maker.shutdown()

    def _make(self, contents: Contents) -> dict[int, OSError]:
        return make_files(contents, self._names, beside=self._folder, outputs=self._outputs)


class Group:
    """A log, and the files that it holds. Every method may raise `OSError`."""

    def __init__(self, folder: Folder, sequence: int) -> None:
        self._folder = folder
        self.name = f"{sequence}{_SUFFIX}"
        self._end = 0
        self.sequence = sequence
        self.contents: dict[int, bytes] = {}

    @property
    def is_full(self) -> bool:
        return self._end >= _GROUP_BYTES or len(self.contents) >= _GROUP_FILES

    def append(self, contents: Contents) -> None:
        """Add files; they are on the disk on return. On `OSError` none of them is there."""
        data = b"".join(
            piece for number, content in contents.items() for piece in _encoded(number, content)
        )
        descriptor = self._folder.open(self.name, os.O_WRONLY | os.O_CREAT)
        try:
            write_at(descriptor, data, self._end)
            os.fdatasync(descriptor)
            if not self._end:
                self._folder.sync()
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, self._end)
            raise
        finally:
            os.close(descriptor)
        self._end += len(data)
        self.contents |= contents

    def remove(self) -> None:
        self._folder.remove(self.name)


def log_sequences(folder: Folder) -> list[int]:
    """Of the logs that are there, in order."""
    stems = [name.removesuffix(_SUFFIX) for name in folder.names() if name.endswith(_SUFFIX)]
    return sorted(int(stem) for stem in stems if stem.isdecimal() and stem.isascii())


def read_log(folder: Folder, sequence: int) -> Iterator[dict[int, bytes]]:
    """The files of a log, as many at once as a group has. A damaged file is passed over; what
    follows a damaged head cannot be parsed, and is passed over as well. Raises `OSError`."""
    group = Group(folder, sequence)
    size = 0
    with os.fdopen(folder.open(group.name, os.O_RDONLY), "rb") as file:
        while len(head := file.read(_HEAD_BYTES)) == _HEAD_BYTES:
            number, length, checksum = _HEAD.unpack_from(head)
            if head[_HEAD.size :] != _checksum(head[: _HEAD.size]) or length > LARGEST_BYTES:
                break
            content = file.read(length)
            if len(content) == length and zlib.crc32(content) == checksum:
                group.contents[number] = content
                size += length
            if size >= _GROUP_BYTES or group.is_full:
                yield group.contents
                group.contents, size = {}, 0
    if group.contents:
        yield group.contents


def make_files(
    contents: Contents, names: Mapping[int, str], *, beside: Folder, outputs: Folder
) -> dict[int, OSError]:
    """Make files in `outputs`, durably; of those that cannot be made: why. They are written
    `beside` first. Raises `OSError` if nothing is known of any of them."""
    failed: dict[int, OSError] = {}
    for number, content in contents.items():
        with _noting(failed, number):
            descriptor = beside.create(_temporary(number))
            try:
                write_at(descriptor, content, 0)
            finally:
                os.close(descriptor)
    beside.sync_file_system()
    for number in contents:
        if number not in failed:
            with _noting(failed, number):
                beside.move(_temporary(number), outputs, names[number])
    outputs.sync()
    for number in failed:
        beside.remove(_temporary(number))
    return failed


def _temporary(number: int) -> str:
    return f"{number}.part.tmp"


@contextlib.contextmanager
def _noting(failed: dict[int, OSError], number: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        failed[number] = error


def _encoded(number: int, content: bytes) -> Iterable[bytes]:
    head = _HEAD.pack(number, len(content), zlib.crc32(content))
    return head, _checksum(head), content


def _checksum(head: bytes) -> bytes:
    return _CHECKSUM.pack(zlib.crc32(head))
