"""Small result files: durable in a log first, made in groups.

To sync a file of a few KiB costs more than to write it. So small files are written under temporary
names, and appended to a log as well, whole; one sync of the log makes all that have come durable. A
*group* is what one log holds. The files of a group are synced together, and get their names;
meanwhile the next group takes what comes. The log is removed when the journal notes its
files. So a name in the outputs never refers to half a file, also after a loss of power, and what
was logged is made by whoever opens the outputs next.

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
                lengths = _lengths(wanted)
                failed = _write_files(wanted, self._folder) or self._name_files(lengths)
                for error in failed.values():
                    raise error
                sizes |= lengths
        return sizes

    def forget_recovered(self) -> None:
        for sequence in self._found:
            Group(self._folder, sequence).remove()
        self._found = []

    def store(self, contents: Contents) -> dict[int, OSError]:
        """Add files; they are durable on return. Of those that cannot be written: why. Raises
        `OSError`: none of them is there."""
        if self._group.is_full:
            self.settle()
            self.publish()
        failed = _write_files(contents, self._folder)
        written = {n: content for n, content in contents.items() if n not in failed}
        if written:
            try:
                self._group.append(written)
            except OSError:
                self._remove_files(written)
                raise
        self.numbers |= written.keys()
        return failed

    def publish(self) -> None:
        """Begin to make the files, unless others are being made."""
        if self._made is not None and not self._made.done():
            return
        self.settle()
        if self._making is None and self._group.sizes:
            self._making, self._group = self._group, Group(self._folder, self._group.sequence + 1)
        if self._making is not None:
            self._made = self._maker.submit(self._name_files, self._making.sizes)

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
            sizes = {n: size for n, size in group.sizes.items() if n not in failed}
            self._note(sizes)
            self.numbers -= sizes.keys()
            if not failed:
                group.remove()
        except OSError as error:
            if is_transient(error):
                raise  # the group is tried again
            failed = dict.fromkeys(group.sizes, error)
        self._making = None
        self.problem = self.problem or next(iter(failed.values()), None)

    def publish_all(self) -> None:
        """Make all files. `problem` reports what went wrong."""
        while self._making is not None or self._group.sizes:
            self.publish()
            self.settle()

    def close(self) -> None:
        """Make what can be made. The rest is in its log."""
        with contextlib.suppress(OSError):
            self.publish_all()
        self._maker.shutdown()

    def _remove_files(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            with contextlib.suppress(OSError):
                self._folder.remove(_temporary(number))

    def _name_files(self, sizes: Mapping[int, int]) -> dict[int, OSError]:
        """Give files their names, durably; of those that cannot be named: why. Raises `OSError` if
        nothing is known of any of them."""
        failed: dict[int, OSError] = {}
        self._folder.sync_files([_temporary(number) for number in sizes])
        for number, size in sizes.items():
            name = self._names[number]
            try:
                self._folder.move(_temporary(number), self._outputs, name)
            except FileNotFoundError as error:
                if self._outputs.size(name) != size:  # otherwise an earlier try has named it
                    failed[number] = error
            except OSError as error:
                failed[number] = error
        self._outputs.sync()
        return failed


class Group:
    """A log, and the files that it holds. Every method may raise `OSError`."""

    def __init__(self, folder: Folder, sequence: int) -> None:
        self._folder = folder
        self.name = log_name(sequence)
        self._end = 0
        self.sequence = sequence
        self.sizes: dict[int, int] = {}

    @property
    def is_full(self) -> bool:
        return self._end >= _GROUP_BYTES or len(self.sizes) >= _GROUP_FILES

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
                if not self._end:
                    self.remove()
            raise
        finally:
            os.close(descriptor)
        self._end += len(data)
        self.sizes |= _lengths(contents)

    def remove(self) -> None:
        self._folder.remove(self.name)


def log_name(sequence: int) -> str:
    return f"{sequence}{_SUFFIX}"


def log_sequences(folder: Folder) -> list[int]:
    """Of the logs that are there, in order."""
    stems = [name.removesuffix(_SUFFIX) for name in folder.names() if name.endswith(_SUFFIX)]
    return sorted(int(stem) for stem in stems if stem.isdecimal() and stem.isascii())


def read_log(folder: Folder, sequence: int) -> Iterator[dict[int, bytes]]:
    """The files of a log, as many at once as a group has. A damaged file is passed over; what
    follows a damaged head cannot be parsed, and is passed over as well. Raises `OSError`."""
    contents: dict[int, bytes] = {}
    size = 0
    with os.fdopen(folder.open(Group(folder, sequence).name, os.O_RDONLY), "rb") as file:
        while len(head := file.read(_HEAD_BYTES)) == _HEAD_BYTES:
            number, length, checksum = _HEAD.unpack_from(head)
            if head[_HEAD.size :] != _checksum(head[: _HEAD.size]) or length > LARGEST_BYTES:
                break
            content = file.read(length)
            if len(content) == length and zlib.crc32(content) == checksum:
                contents[number] = content
                size += length
            if size >= _GROUP_BYTES or len(contents) >= _GROUP_FILES:
                yield contents
                contents, size = {}, 0
    if contents:
        yield contents


def _write_files(contents: Contents, folder: Folder) -> dict[int, OSError]:
    """Write files under their temporary names; of those that cannot be written: why."""
    failed: dict[int, OSError] = {}
    for number, content in contents.items():
        try:
            descriptor = folder.create(_temporary(number))
            try:
                write_at(descriptor, content, 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            failed[number] = error
            with contextlib.suppress(OSError):
                folder.remove(_temporary(number))
    return failed


def _lengths(contents: Contents) -> dict[int, int]:
    return {number: len(content) for number, content in contents.items()}


def _temporary(number: int) -> str:
    return f"{number}.part.tmp"


def _encoded(number: int, content: bytes) -> Iterable[bytes]:
    head = _HEAD.pack(number, len(content), zlib.crc32(content))
    return head, _checksum(head), content


def _checksum(head: bytes) -> bytes:
    return _CHECKSUM.pack(zlib.crc32(head))
