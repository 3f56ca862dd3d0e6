"""The tensors that wait on this device: in memory while the budget has room, else on disk.

What the ledger grants stays in memory. What it does not, and what a load needs the room of, is
written to a file and mapped back when it is wanted, so that a full device slows down instead of
failing or deadlocking. The disk's share is bounded too; beyond it a sender is told to come again
(BUSY).

Text cannot be mapped: tensors of strings stay in memory, and count.
"""

import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np

from shoal_agent.execution import Key
from shoal_protocol.tensors import Array

_ALIGNMENT: Final = 64


@dataclass(slots=True)
class _Stored:
    """Tensors under one key; `granted` are the ledger's bytes, `file` where they were spilled."""

    tensors: dict[str, Array]
    size: int
    granted: int
    file: Path | None = None


class SpillFull(Exception):
    """Neither memory nor the disk's share has room."""


class ActivationStore:
    """Keeps tensors by key. Used from the event loop's thread: spilling is quick writes."""

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        request: Callable[[int], bool],
        give_back: Callable[[int], None],
    ) -> None:
        """`request` asks the ledger for memory, `give_back` returns it; `limit_bytes` of disk."""
        self._folder = folder / "activations"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, mode=0o700)
        self._limit_bytes = limit_bytes
        self._request = request
        self._give_back = give_back
        self._stored: OrderedDict[Key, _Stored] = OrderedDict()
        self._numbers = count(1)
        self.spilled_bytes = 0
        self.spilled_total_bytes = 0

    def has_room(self, size: int) -> bool:
        """Whether tensors of that size have a place, in memory or on disk."""
        return self.spilled_bytes + size <= self._limit_bytes

    def put(self, key: Key, tensors: Mapping[str, Array]) -> None:
        """Keep tensors; those under the key before are replaced. Raises `SpillFull`, `OSError`."""
        self.drop([key])
        size = sum(tensor.nbytes for tensor in tensors.values())
        granted = size if self._request(size) else 0
        stored = _Stored(dict(tensors), size, granted)
        if not granted and size:
            self._spill(stored)
        self._stored[key] = stored

    def get(self, key: Key) -> Mapping[str, Array] | None:
        """The tensors under a key, mapped back where they are on disk; None if there are none."""
        stored = self._stored.get(key)
        return None if stored is None else stored.tensors

    def cover(self, key: Key) -> None:
        """A task uses these tensors: its fragment's own share of the budget has them now."""
        if (stored := self._stored.get(key)) is not None and stored.granted:
            self._give_back(stored.granted)
            stored.granted = 0

    def drop(self, keys: Iterable[Key]) -> None:
        """Forget tensors."""
        for key in keys:
            if (stored := self._stored.pop(key, None)) is not None:
                self._discard(stored)

    def clear(self) -> None:
        """Forget all."""
        self.drop(list(self._stored))

    def spill(self, size: int) -> int:
        """Bring at least that many granted bytes to disk; how many it was.

        The ledger has subtracted `size` already; what is beyond it is given back here.
        """
        freed = 0
        for stored in self._stored.values():
            if freed >= size:
                break
            if stored.granted:
                freed += stored.granted
                stored.granted = 0
                self._spill(stored)
        if freed > size:
            self._give_back(freed - size)
        return freed

    def _spill(self, stored: _Stored) -> None:
        """Write to a file and replace the arrays by views of its mapping."""
        arrays = {name: array for name, array in stored.tensors.items() if array.dtype != object}
        if not arrays:
            return
        if not self.has_room(stored.size):
            raise SpillFull(f"no room for {stored.size} bytes of activations on disk")
        path = self._folder / str(next(self._numbers))
        starts: dict[str, int] = {}
        try:
            with path.open("wb") as file:
                for name, array in arrays.items():
                    file.write(bytes(-file.tell() % _ALIGNMENT))
                    starts[name] = file.tell()
                    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                length = file.tell()
        except OSError:
            path.unlink(missing_ok=True)
            raise
        stored.file = path
        self.spilled_bytes += stored.size
        self.spilled_total_bytes += stored.size
        if not length:
            return
        mapping = np.memmap(path, np.uint8, mode="r", shape=(length,))
        for name, array in arrays.items():
            start = starts[name]
            view = mapping[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            stored.tensors[name] = view.view(np.ndarray)

    def _discard(self, stored: _Stored) -> None:
        if stored.granted:
            self._give_back(stored.granted)
        if stored.file is not None:
            self.spilled_bytes -= stored.size
            # Who uses the mapping still may go on: the pages live as long as it does.
            os.unlink(stored.file)
