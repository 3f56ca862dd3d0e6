"""The tensors that wait on this device, and those that come and go: in memory while the budget has
room, else on disk.

What the ledger grants stays in memory. What it does not, and what a load needs the room of, is
written to a file and mapped back when it is wanted, so that a full device slows down instead of
failing or deadlocking. The disk's share is bounded too; beyond it a sender is told to come again
(BUSY). What has memory counts there as well, since it may have to leave for a fragment.

What is received goes where it will be: into memory that was granted before the first byte, or into
a mapped file whose pages are let go after every frame (`ReceiveBuffer`). What is sent is lent
(`ActivationStore.lend`): it counts as moving, and is not spilled meanwhile.

Text cannot be mapped: tensors of strings stay in memory, and count.
"""

import mmap
import os
import shutil
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal_agent.execution.queue import Key
from shoal_protocol.frames import MAXIMUM_PAYLOAD_BYTES
from shoal_protocol.tensors import Array
from shoal_protocol.units import Bytes, format_bytes

_ALIGNMENT: Final = 64
_NUMBERS: Final = count(1)
"""Names of files: no two stores of a process have the same, since one outlives the next's start."""


def frame_bytes(size: int) -> int:
    """What the frames that carry an activation take on their way: the one that is made or taken
    apart, and its copy in gRPC."""
    return 2 * min(size, MAXIMUM_PAYLOAD_BYTES)


class Space(Protocol):
    """The ledger's share for activations (`Fragments`)."""

    def request_space(self, size: int) -> bool: ...
    def return_space(self, size: int) -> None: ...
    def request_move(self, size: int) -> bool: ...
    def end_move(self, size: int) -> None: ...
    def begin_move(self, size: int) -> None: ...
    def arrive(self, size: int) -> None: ...


@dataclass(slots=True)
class _Stored:
    """Tensors under one key.

    `granted` are the ledger's bytes, `file` where they are on disk and `mapping` that file's;
    `lent` counts who sends them now, `dropped` says that they go when nobody does any more.
    """

    tensors: dict[str, Array]
    size: int
    granted: int
    file: Path | None = None
    mapping: mmap.mmap | None = None
    lent: int = 0
    dropped: bool = False


class ReceiveBuffer:
    """Where one activation that is being received goes."""

    def __init__(
        self, store: "ActivationStore", space: Space, size: int, granted: int, file: Path | None
    ) -> None:
        self.store = store
        self._space = space
        self.size = size
        self.granted = granted
        self.file = file
        self.mapping: mmap.mmap | None = None

    def allocate(self, size: int) -> NDArray[np.uint8]:
        """The buffer; raises `OSError` where the disk has no room."""
        if self.file is None:
            return np.empty(size, np.uint8)
        with self.file.open("w+b") as file:
            # Writing to a mapping that the disk has no room for would end the process.
            os.posix_fallocate(file.fileno(), 0, size)
            self.mapping = mmap.mmap(file.fileno(), size)
        return np.frombuffer(self.mapping, np.uint8)

    def settle(self) -> None:
        """A frame has come: what went to the file needs no memory any more."""
        _let_go(self.mapping)

    def arrive(self) -> None:
        """All has come, and waits from now on."""
        reserved = min(self.size, self.granted)
        self._space.end_move(self.granted - reserved)
        self._space.arrive(reserved)
        self.granted = 0
        self.settle()

    def abandon(self) -> None:
        """It will not come whole."""
        self._space.end_move(self.granted)
        self.granted = 0
        self.store.held_bytes -= self.size
        if self.file is not None:
            self.file.unlink(missing_ok=True)
            self.store.spilled_bytes -= self.size


class SpillFull(Exception):
    """Neither memory nor the disk has room for activations; carries how much is wanted and how much
    there is, in bytes."""

    def __init__(self, need_bytes: int, have_bytes: int, reason: str = "") -> None:
        text = f"activations would need {format_bytes(Bytes(need_bytes))} on disk, have "
        text += format_bytes(Bytes(have_bytes))
        super().__init__(f"{text}: {reason or 'raise --cache-size'}")
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes


class ActivationStore:
    """Keeps tensors by key. Used from the event loop's thread: spilling is quick writes."""

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        space: Space,
    ) -> None:
        """`space` is the memory, `limit_bytes` the disk."""
        self._folder = folder / "activations"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, mode=0o700)
        self._limit_bytes = limit_bytes
        self._space = space
        self._stored: OrderedDict[Key, _Stored] = OrderedDict()
        self.held_bytes = 0
        self.spilled_bytes = 0
        self.spilled_total_bytes = 0

    def has_room(self, size: int) -> bool:
        """Whether tensors of that size have a place, and keep one when memory is wanted back."""
        return self.held_bytes + size <= self._limit_bytes

    def land(self, decoded_bytes: int, encoded_bytes: int) -> ReceiveBuffer:
        """A place for an activation that is to be received; raises `SpillFull`.

        `encoded_bytes` are those of what is to be decoded beside it.
        """
        # Frames there must be, wherever their contents go: a full device takes them without.
        for beside in (encoded_bytes + frame_bytes(decoded_bytes), 0):
            if self._space.request_move(decoded_bytes + beside):
                self.held_bytes += decoded_bytes
                return ReceiveBuffer(self, self._space, decoded_bytes, decoded_bytes + beside, None)
        self._check_disk(decoded_bytes)
        self.held_bytes += decoded_bytes
        self.spilled_bytes += decoded_bytes
        return ReceiveBuffer(self, self._space, decoded_bytes, 0, self._path())

    def receive(self, key: Key, tensors: Mapping[str, Array], landing: ReceiveBuffer) -> None:
        """Keep what has come."""
        self.drop([key])
        granted = min(landing.size, landing.granted)
        stored = _Stored(dict(tensors), landing.size, granted, landing.file, landing.mapping)
        self._stored[key] = stored
        if stored.file is not None:
            self.spilled_total_bytes += stored.size
        landing.arrive()

    def put(self, key: Key, tensors: Mapping[str, Array]) -> None:
        """Keep tensors; those under the key before are replaced. Raises `SpillFull`, `OSError`.

        They are here already, so memory is enough for them: `has_room` is not asked.
        """
        self.drop([key])
        size = sum(tensor.nbytes for tensor in tensors.values())
        granted = size if self._space.request_space(size) else 0
        stored = _Stored(dict(tensors), size, granted)
        if not granted and size:
            self._spill(stored)
        self._stored[key] = stored
        self.held_bytes += size

    def get(self, key: Key) -> Mapping[str, Array] | None:
        """The tensors under a key, mapped back where they are on disk; None if there are none."""
        stored = self._stored.get(key)
        return None if stored is None else stored.tensors

    @contextmanager
    def lend(self, key: Key) -> Iterator[Mapping[str, Array] | None]:
        """The tensors under a key, to be sent: they stay as they are until that has ended."""
        stored = self._stored.get(key)
        if stored is None:
            yield None
            return
        if not stored.lent:
            self._space.begin_move(stored.granted)
        stored.lent += 1
        try:
            yield stored.tensors
        finally:
            stored.lent -= 1
            if not stored.lent:
                self._space.arrive(stored.granted)
                _let_go(stored.mapping)
                if stored.dropped:
                    self._discard(stored)

    def in_memory(self, key: Key) -> bool:
        """Whether the tensors under a key are in memory that was granted."""
        stored = self._stored.get(key)
        return stored is not None and stored.file is None

    def cover(self, key: Key) -> None:
        """A task uses these tensors: its fragment's own share of the budget has them now."""
        stored = self._stored.get(key)
        if stored is not None and stored.granted and not stored.lent:
            self._space.return_space(stored.granted)
            stored.granted = 0

    def uncover(self, key: Key) -> None:
        """The task has ended: what is still wanted of its inputs has a place of its own again.

        Raises `SpillFull`, `OSError` where it has not; it is not kept any longer then.
        """
        stored = self._stored.get(key)
        if stored is None:
            return
        if stored.file is not None:
            _let_go(stored.mapping)
        elif not stored.granted and stored.size:
            if self._space.request_space(stored.size):
                stored.granted = stored.size
                return
            try:
                self._spill(stored)
            except (SpillFull, OSError):
                self.drop([key])
                raise

    def drop(self, keys: Iterable[Key]) -> None:
        """Forget tensors."""
        for key in keys:
            if (stored := self._stored.pop(key, None)) is not None:
                stored.dropped = True
                if not stored.lent:
                    self._discard(stored)

    def clear(self) -> None:
        """Forget all."""
        self.drop(list(self._stored))

    def spill(self, size: int) -> None:
        """Bring at least that many granted bytes to disk, and return them to the ledger.

        Raises `SpillFull` where only a part of them, or none, could be: that part is returned.
        """
        freed, why = 0, "what is left in memory is text, or on its way"
        for stored in self._stored.values():
            if freed >= size:
                return
            if not stored.granted or stored.lent or stored.file is not None:
                continue
            try:
                self._spill(stored)
            except SpillFull:
                why = "raise --cache-size"  # a smaller one may have a place
                continue
            except OSError as error:
                raise SpillFull(size, freed, str(error)) from error
            text = sum(array.nbytes for array in stored.tensors.values() if array.dtype == object)
            gone = max(0, stored.granted - text)
            stored.granted -= gone
            self._space.return_space(gone)
            freed += gone
        if freed < size:
            raise SpillFull(size, freed, why)

    def _spill(self, stored: _Stored) -> None:
        """Write to a file and replace the arrays by views of its mapping; nothing has changed where
        that fails."""
        arrays = {name: array for name, array in stored.tensors.items() if array.dtype != object}
        if not arrays:
            return
        self._check_disk(stored.size)
        path = self._path()
        starts: dict[str, int] = {}
        try:
            with path.open("w+b") as file:
                for name, array in arrays.items():
                    file.write(bytes(-file.tell() % _ALIGNMENT))
                    starts[name] = file.tell()
                    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                length = file.tell()
                file.flush()
                if length:
                    stored.mapping = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        stored.file = path
        self.spilled_bytes += stored.size
        self.spilled_total_bytes += stored.size
        if stored.mapping is None:
            return
        mapped = np.frombuffer(stored.mapping, np.uint8)
        for name, array in arrays.items():
            start = starts[name]
            view = mapped[start : start + array.nbytes].view(array.dtype)
            stored.tensors[name] = view.reshape(array.shape)

    def _check_disk(self, size: int) -> None:
        have = self._limit_bytes - self.spilled_bytes
        if size > have:
            raise SpillFull(size, max(0, have))

    def _path(self) -> Path:
        return self._folder / str(next(_NUMBERS))

    def _discard(self, stored: _Stored) -> None:
        if stored.granted:
            self._space.return_space(stored.granted)
        self.held_bytes -= stored.size
        if stored.file is not None:
            self.spilled_bytes -= stored.size
            # Who uses the mapping still may go on: the pages live as long as it does.
            stored.file.unlink(missing_ok=True)


def _let_go(mapping: mmap.mmap | None) -> None:
    """Take a mapped file's pages out of this process; what was written is in the file."""
    if mapping is not None:
        mapping.madvise(mmap.MADV_DONTNEED)
