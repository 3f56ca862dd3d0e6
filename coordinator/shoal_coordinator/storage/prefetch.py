"""Small inputs, read before they are asked for.

A visit to the reading thread costs more than reading an item of a few KiB. So the first ask reads
a row of items, and from then on the next row is begun when half of the last one is used up: what
is asked for in order is at hand. What is not (a retry, a large item, one that cannot be read) goes
the ordinary way, which waits for the disk and knows what to say about it.
"""

from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from typing import Final

from shoal_coordinator.storage.inputs import InputSet, InputUnsuitable
from shoal_protocol.tensors import Array

_ROW: Final = 64
"""Items that are read together."""
_KEPT: Final = 8 * _ROW
"""Items in memory, at most; those that were read first go first."""


class InputPrefetch:
    """The small items of a job around the place where it is. For one thread, which is not the
    reader's."""

    def __init__(self, inputs: InputSet, reader: Executor, limit_bytes: int) -> None:
        """Items above `limit_bytes` are left alone. `reader` runs what waits for the disk."""
        self._inputs = inputs
        self._reader = reader
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[int, dict[str, Array]] = OrderedDict()
        self._begun = 0
        self._reading: Future[dict[int, dict[str, Array]]] | None = None

    def at_hand(self, item: int, names: Iterable[str]) -> dict[str, Array] | None:
        """Some of an item's inputs if they are in memory; if not, they may be the next time."""
        self._collect()
        if self._reading is None and item + _ROW // 2 >= self._begun < len(self._inputs):
            first = max(self._begun, item)
            self._begun = min(first + _ROW, len(self._inputs))
            self._reading = self._reader.submit(self._read, range(first, self._begun))
        arrays = self._kept.get(item)
        return None if arrays is None else {name: arrays[name] for name in names}

    def forget(self, item: int) -> None:
        """Nobody will ask for it any more."""
        self._kept.pop(item, None)

    def _collect(self) -> None:
        if self._reading is None or not self._reading.done():
            return
        self._kept.update(self._reading.result())
        self._reading = None
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)

    def _read(self, items: Iterable[int]) -> dict[int, dict[str, Array]]:
        """In the reader's thread."""
        found: dict[int, dict[str, Array]] = {}
        for item in items:
            if self._inputs.item_bytes(item) <= self._limit_bytes:
                try:
                    found[item] = self._inputs.read(item)
                except InputUnsuitable:
                    continue
        return found
