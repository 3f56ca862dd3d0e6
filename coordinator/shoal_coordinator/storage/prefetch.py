"""The input prefetch: small inputs are read before they are asked for.

To hand one read to another thread costs more than to read an item of a few KiB, and an item that is
not in memory goes to its device alone, not in a frame with others. So batches of items are read
ahead of those that are asked for in order: more than what is admitted at once. Other items (a
retry, a large one, one that cannot be read) are read when they are asked for, and refused with
their reason where that fails.
"""

import contextlib
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from typing import Final

from shoal_coordinator.storage.inputs import InputSet
from shoal_coordinator.storage.job_records import CrashCount
from shoal_protocol.tensors import Array

_BATCH: Final = 64
"""Items that one read takes."""
_AHEAD: Final = 4 * _BATCH
"""Items that are read before they are asked for: more than travel at once."""
_CACHED: Final = 2 * _AHEAD
"""Items in memory, at most; those that were read first go first."""


class InputPrefetch:
    """The small items that a job needs next. For one thread, which is not the reader's."""

    def __init__(
        self, inputs: InputSet, reader: Executor, limit_bytes: int, crashes: CrashCount
    ) -> None:
        """Items above `limit_bytes` are not prefetched. `reader` runs the reads."""
        self._inputs = inputs
        self._reader = reader
        self._limit_bytes = limit_bytes
        self._crashes = crashes
        self._cached: OrderedDict[int, dict[str, Array]] = OrderedDict()
        self._scheduled = 0
        self._reading: deque[Future[dict[int, dict[str, Array]]]] = deque()

    def cached(self, item: int, names: Iterable[str]) -> dict[str, Array] | None:
        """Some of an item's inputs if they are in memory; schedules the next batches."""
        self._collect()
        self.look_ahead(item)
        arrays = self._cached.get(item)
        return None if arrays is None else {name: arrays[name] for name in names}

    def look_ahead(self, item: int) -> None:
        """Schedule what follows an item, and the item if it is the first."""
        while item + _AHEAD > self._scheduled < len(self._inputs):
            first = max(self._scheduled, item)
            self._scheduled = min(first + _BATCH, len(self._inputs))
            batch = range(first, self._scheduled)
            self._reading.append(self._reader.submit(self._read, batch))

    def forget(self, item: int) -> None:
        self._cached.pop(item, None)

    def _collect(self) -> None:
        while self._reading and self._reading[0].done():
            self._cached.update(self._reading.popleft().result())
        while len(self._cached) > _CACHED:
            self._cached.popitem(last=False)

    def _read(self, items: Iterable[int]) -> dict[int, dict[str, Array]]:
        """In the reader's thread. Whatever goes wrong with an item, the ordinary way meets it again
        and refuses the item with its reason."""
        found: dict[int, dict[str, Array]] = {}
        with self._crashes.processing():
            for item in items:
                with contextlib.suppress(Exception):
                    if self._inputs.item_bytes(item) <= self._limit_bytes:
                        found[item] = self._inputs.read(item)
        return found
