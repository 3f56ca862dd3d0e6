"""The tensors that wait on this device, and those that come and go: in memory while the budget has
room, else on disk.

What the ledger grants stays in memory. What it does not, and what a load needs the room of, is
written to a file and mapped back when it is needed, so that a full device slows down instead of
failing or deadlocking. The disk's share is bounded too; beyond it a sender is answered BUSY. What
has memory counts there as well, since it may have to leave for a fragment.

What is received goes where it will be: into memory that was granted before the first byte, or into
a mapped file whose pages are released after every frame (`StoreBuffer`). Memory of what is dropped
may wait for what comes next (`transport.buffers`). What is sent is lent
(`ActivationStore.lend`): it counts as moving, and is not spilled meanwhile.

All methods belong to the event loop's thread; files are written, allocated and removed in other
threads. So tensors may be used, lent or dropped while they are being written; then the file is of
no use and is removed.

Text cannot be mapped: tensors of strings stay in memory, and count. Where the ledger has nothing
left for them, `_TEXT_BYTES` in all are kept without, so that a full device works.
"""

import asyncio
import mmap
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal_agent.execution.values import Key
from shoal_agent.memory.demands import NoRoom
from shoal_agent.transport.buffers import Buffers, Lease
from shoal_protocol.disk_shares import MORE_DISK
from shoal_protocol.frame_sizes import DISK_PIECE_BYTES, received_frame_bytes
from shoal_protocol.frames import TransferError
from shoal_protocol.tensors import Array, memory_bytes
from shoal_protocol.threads import in_thread
from shoal_protocol.units import format_bytes
from shoal_protocol.v1.tensors_pb2 import Acknowledgement

_ALIGNMENT: Final = 64
_TEXT_BYTES: Final = 1 << 20
_NUMBERS: Final = count(1)
"""Names of files: no two stores of a process have the same, since one outlives the next's start."""


class Space(Protocol):
    """The ledger's share for activations (`Fragments`)."""

    def request_space(self, size: int, *, text: bool = False) -> bool: ...
    def return_space(self, size: int) -> None: ...
    def request_move(self, size: int, *, text: bool = False) -> bool: ...
    def end_move(self, size: int) -> None: ...
    def begin_move(self, size: int) -> None: ...
    def arrive(self, size: int) -> None: ...


@dataclass(slots=True, eq=False)
class _Stored:
    """Tensors under one key.

    `granted` are the ledger's bytes, `file` where they are on disk and `mapping` that file's;
    `writing` says that they are being written there; `lent` counts who sends them now, `dropped`
    says that they go when nobody does any more. `lease` is the memory that they were received into.
    """

    tensors: dict[str, Array]
    size: int
    granted: int
    file: Path | None = None
    mapping: mmap.mmap | None = None
    lease: Lease | None = None
    writing: bool = False
    lent: int = 0
    dropped: bool = False

    @property
    def waiting_bytes(self) -> int:
        """What of the granted bytes is there to wait: that may be spilled."""
        return 0 if self.dropped or self.lent else self.granted


class StoreBuffer:
    """Where one activation that is being received goes (a `ReceiveBuffer`)."""

    def __init__(
        self, store: "ActivationStore", space: Space, size: int, granted: int, file: Path | None
    ) -> None:
        self.store = store
        self._space = space
        self.size = size
        self.granted = granted
        self.file = file
        self.mapping: mmap.mmap | None = None
        self.lease: Lease | None = None
        self.blocks = file is not None
        self.waiting_bytes = 0 if self.blocks else min(size, granted)
        """What of the granted bytes it has in memory while it waits."""

    def allocate(self, size: int) -> NDArray[np.uint8]:
        if self.file is None:
            array, self.lease = self.store.buffers.take(size)
            return array
        try:
            with _new_file(self.file) as file:
                # Writing to a mapping that the disk has no room for would end the process.
                os.posix_fallocate(file.fileno(), 0, size)
                self.mapping = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise TransferError(f"no room: {error}", outcome=Acknowledgement.BUSY) from error
        return np.frombuffer(self.mapping, np.uint8)

    def settle(self) -> None:
        """What went to the file needs no memory any more."""
        _release_pages(self.mapping)

    def arrive(self) -> None:
        """All has come, and waits from now on."""
        self._space.end_move(self.granted - self.waiting_bytes)
        self._space.arrive(self.waiting_bytes)
        self.granted = 0
        if self.mapping is not None:
            self.settle()

    def abandon(self) -> None:
        self._space.end_move(self.granted)
        self.granted = 0
        self.store.held_bytes -= self.size
        if self.file is not None:
            self.store.spilled_bytes -= self.size
            _remove(self.file)


class SpillFull(NoRoom):
    """Neither memory nor the disk has room for activations."""

    def __init__(
        self,
        need_bytes: int,
        have_bytes: int,
        reason: str = MORE_DISK,
        where: str = "on disk",
    ) -> None:
        text = f"activations would need {format_bytes(need_bytes)} {where}, have "
        super().__init__(need_bytes, have_bytes, f"{text}{format_bytes(have_bytes)}: {reason}")


class ActivationStore:
    """Keeps tensors by key."""

    def __init__(self, folder: Path, limit_bytes: int, space: Space, buffers: Buffers) -> None:
        """`space` is the memory, `limit_bytes` the disk; `buffers` has what waits to be received
        into."""
        self._folder = folder / "activations"
        shutil.rmtree(self._folder, ignore_errors=True)
        # What is still written for the session before may keep the folder: names differ anyway.
        self._folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        self._limit_bytes = limit_bytes
        self._space = space
        self.buffers = buffers
        self._stored: OrderedDict[Key, _Stored] = OrderedDict()
        self.held_bytes = 0
        self.spilled_bytes = 0

    def has_room(self, size: int) -> bool:
        """Whether tensors of that size have a place, and keep one when memory is wanted back."""
        return self.held_bytes + size <= self._limit_bytes

    def open_buffer(
        self, decoded_bytes: int, scratch_bytes: int, text_bytes: int = 0
    ) -> StoreBuffer:
        """A buffer for an activation that is to be received; raises `SpillFull`.

        `scratch_bytes` is what decoding takes beside it, `text_bytes` what of it is text.
        """
        beside = scratch_bytes + received_frame_bytes(decoded_bytes)
        # Text cannot leave memory, so it may have what there is without its frames.
        for granted in (decoded_bytes + beside, decoded_bytes)[: 2 if text_bytes else 1]:
            if self._space.request_move(granted, text=text_bytes > 0):
                self.held_bytes += decoded_bytes
                return StoreBuffer(self, self._space, decoded_bytes, granted, None)
        self._check_text(text_bytes)
        self._check_disk(decoded_bytes)
        # Frames there must be, wherever their contents go: a full device takes them without.
        granted = beside if self._space.request_move(beside) else 0
        self.held_bytes += decoded_bytes
        self.spilled_bytes += decoded_bytes
        return StoreBuffer(self, self._space, decoded_bytes, granted, self._path())

    def receive(self, key: Key, tensors: Mapping[str, Array], buffer: StoreBuffer) -> None:
        self.drop([key])
        granted = buffer.waiting_bytes
        stored = _Stored(
            dict(tensors), buffer.size, granted, buffer.file, buffer.mapping, buffer.lease
        )
        self._stored[key] = stored
        buffer.arrive()

    async def put(self, key: Key, tensors: Mapping[str, Array]) -> None:
        """Keep tensors; those under the key before are replaced. Raises `SpillFull`, `OSError`.

        They are here already, so memory is enough for them: `has_room` is not asked.
        """
        self.drop([key])
        size = sum(map(memory_bytes, tensors.values()))
        granted = size if self._space.request_space(size) else 0
        stored = self._stored[key] = _Stored(dict(tensors), size, granted)
        self.held_bytes += size
        if not granted and size:
            await self._spill_or_drop(key, stored)

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
                _release_pages(stored.mapping)
                if stored.dropped:
                    self._discard(stored)

    def in_memory(self, key: Key) -> bool:
        """Whether the tensors under a key are in memory that was granted."""
        stored = self._stored.get(key)
        return stored is not None and stored.file is None

    def settling(self, key: Key) -> Callable[[], None] | None:
        """What lets go of the pages of tensors that are on disk, while they are lent; None: they
        are in memory."""
        stored = self._stored.get(key)
        if stored is None or stored.file is None:
            return None
        return partial(_release_pages, stored.mapping)

    def cover(self, key: Key) -> None:
        """A task uses these tensors: its fragment's own share of the budget has them now. What is
        being written keeps its own until that has ended: it may fail."""
        stored = self._stored.get(key)
        if stored is not None and stored.granted and not (stored.lent or stored.writing):
            self._space.return_space(stored.granted)
            stored.granted = 0

    async def uncover(self, key: Key) -> None:
        """The task has ended: what is still wanted of its inputs has a place of its own again.

        Raises `SpillFull`, `OSError` where it has not; it is dropped then.
        """
        stored = self._stored.get(key)
        if stored is None:
            return
        if stored.file is not None:
            _release_pages(stored.mapping)
        elif not stored.granted and stored.size and not stored.writing:
            if self._request_for(stored)(stored.size):
                stored.granted = stored.size
            else:
                await self._spill_or_drop(key, stored)

    def drop(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if (stored := self._stored.pop(key, None)) is not None:
                stored.dropped = True
                if not stored.lent:
                    self._discard(stored)

    def clear(self) -> None:
        self.drop(list(self._stored))

    async def spill(self, size: int) -> None:
        """Bring at least that many granted bytes to disk, and return them to the ledger.

        Raises `SpillFull` where only a part of them, or none, could be: that part is returned.
        """
        freed, why = 0, "what is left in memory is text, or on its way"
        waiting = [(each, each.granted) for each in self._stored.values() if not each.lent]
        for stored, granted in waiting:
            if freed >= size:
                return
            try:
                if stored.waiting_bytes and stored.file is None and not stored.writing:
                    await self._spill(stored)
            except SpillFull:
                why = MORE_DISK  # a smaller one may have a place
            except OSError as error:
                raise SpillFull(size, freed, str(error)) from error
            # While this or another was written, a task may have begun with it, or it was dropped.
            freed += granted - stored.waiting_bytes
        if freed < size:
            raise SpillFull(size, freed, why)

    async def _spill_or_drop(self, key: Key, stored: _Stored) -> None:
        """Find a place outside of memory for tensors that were not granted any."""
        text = _text_bytes(stored.tensors)
        try:
            if text and self._request_for(stored)(text, text=True):
                stored.granted = text
            else:
                self._check_text(text, stored)
            await self._spill(stored)
        except (SpillFull, OSError):
            if self._stored.get(key) is stored:
                self.drop([key])
            raise

    async def _spill(self, stored: _Stored) -> None:
        """Write to a file and replace the arrays by views of its mapping; the ledger gets back what
        these had. Nothing has changed where that fails."""
        arrays = {name: array for name, array in stored.tensors.items() if array.dtype != object}
        if not arrays:
            return
        self._check_disk(stored.size)
        text, path = _text_bytes(stored.tensors), self._path()
        self.spilled_bytes += stored.size
        stored.writing = True
        written = False
        try:
            mapping, views = await in_thread(_write, path, arrays)
            # What was granted moves while it is lent, so it is not the ledger's to have back.
            written = not stored.dropped and not (stored.lent and stored.granted > text)
        finally:
            stored.writing = False
            if not written:
                self.spilled_bytes -= stored.size
                _remove(path)
        if not written:
            return
        stored.file, stored.mapping, stored.lease = path, mapping, None
        stored.tensors.update(views)
        gone = max(0, stored.granted - text)
        stored.granted -= gone
        self._space.return_space(gone)
        self.buffers.give_back()  # of the heap as well: its room was wanted

    def _request_for(self, stored: _Stored) -> Callable[..., bool]:
        """How to ask for room for what is here without."""
        return self._space.request_move if stored.lent else self._space.request_space

    def _check_text(self, size: int, own: _Stored | None = None) -> None:
        """Raise `SpillFull` for more text than may be kept without a share of the budget."""
        stored = (each for each in self._stored.values() if each is not own and not each.granted)
        have = max(0, _TEXT_BYTES - sum(_text_bytes(each.tensors) for each in stored))
        if size > have:
            raise SpillFull(size, have, "raise --budget", where="in memory, being text")

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
            # Whoever still uses the mapping may: its pages live as long as it does.
            _remove(stored.file)
        elif stored.lease is not None:
            self.buffers.keep(stored.lease)
        else:
            self.buffers.leave(stored.size)


def _text_bytes(tensors: Mapping[str, Array]) -> int:
    return sum(memory_bytes(each) for each in tensors.values() if each.dtype == object)


def _write(path: Path, arrays: Mapping[str, Array]) -> tuple[mmap.mmap | None, dict[str, Array]]:
    """Write arrays to a file; its mapping, and the arrays as views of that."""
    starts: dict[str, int] = {}
    with _new_file(path) as file:
        for name, array in arrays.items():
            file.write(bytes(-file.tell() % _ALIGNMENT))
            starts[name] = file.tell()
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            # A page that is read brings as much into memory as the kernel has cached in one piece.
            for start in range(0, len(content), DISK_PIECE_BYTES):
                file.write(content[start : start + DISK_PIECE_BYTES])
        length = file.tell()
        file.flush()
        if not length:
            return None, {}
        mapping = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ)
    mapped = np.frombuffer(mapping, np.uint8)
    views: dict[str, Array] = {}
    for name, array in arrays.items():
        view = mapped[starts[name] : starts[name] + array.nbytes].view(array.dtype)
        views[name] = view.reshape(array.shape)
    return mapping, views


def _new_file(path: Path) -> BinaryIO:
    """Somebody may have removed its folder, to make room."""
    try:
        return path.open("w+b")
    except FileNotFoundError:
        path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        return path.open("w+b")


def _remove(path: Path) -> None:
    """Remove a file, some time."""
    asyncio.get_running_loop().run_in_executor(None, _unlink, path)


def _unlink(path: Path) -> None:
    # An OSError leaves the file to the next session, which begins with an empty folder.
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _release_pages(mapping: mmap.mmap | None) -> None:
    """Take a mapped file's pages out of this process; what was written is in the file."""
    if mapping is not None:
        mapping.madvise(mmap.MADV_DONTNEED)
