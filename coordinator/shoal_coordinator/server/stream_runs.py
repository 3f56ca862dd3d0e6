"""The run of a job whose items arrive over a call, and whose results leave over it: all of it is in
memory, and nothing is durable.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.server.task_results import Feed, Result, Run
from shoal_protocol.assembly import ReceivedActivation
from shoal_protocol.called_items import CalledItem
from shoal_protocol.frame_sizes import INLINE_BYTES
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.tensors import Array
from shoal_protocol.units import Nanoseconds

Arrays = Mapping[str, Array]


@dataclass(slots=True)
class Item:
    """An item from its arrival to its answer. `number` is the client's, `whole` as in `CalledItem`;
    `failure` is why it has no results."""

    number: int
    inputs: Arrays
    input_bytes: int = 0
    whole: bool = False
    results: dict[str, Array] = field(default_factory=dict)
    failure: ev.Failure | None = None
    answered: bool = False


class StreamRun(Run):
    """`on_end` receives each item that has its results, or has failed for good, once."""

    def __init__(
        self,
        name: str,
        document: PartitionDocument,
        feed: Feed,
        on_end: Callable[[Item], None],
        *,
        batch: int,
    ) -> None:
        super().__init__(name, document, epoch=1, lossy=False, batch=batch)
        self._feed = feed
        self._on_end = on_end
        self._items: dict[int, Item] = {}
        self._stored: list[int] = []
        """Items that have ended, of which the dispatcher does not know yet."""
        self._arrived = 0

    def add(self, called: CalledItem) -> None:
        """An item has arrived: let the dispatcher have it."""
        number, tensors, size, whole = called
        self._items[self._arrived] = Item(number, tensors, size, whole)
        self._arrived += 1
        now = Nanoseconds(monotonic_ns())
        self._feed(ev.ItemsArrived(at=now, job=self.name, items=self._arrived))

    def place(self, item: int) -> str:
        return f"item {self._items[item].number}" if item in self._items else f"item {item}"

    def item_bytes(self, item: int) -> int:
        return self._items[item].input_bytes

    def look_ahead(self) -> None:
        """All items are in memory."""

    def cached(self, item: int, names: Iterable[str]) -> dict[str, Array] | None:
        if self._items[item].input_bytes > INLINE_BYTES:
            return None
        return self._inputs(item, names)

    async def read(self, item: int, names: Iterable[str]) -> dict[str, Array]:
        return self._inputs(item, names)

    def finish(self, item: int, attempts: int) -> None:
        self._answer(self._end(item))
        self._stored.append(item)
        if len(self._stored) == 1:  # the dispatcher has time until the answers have left
            asyncio.get_running_loop().call_soon(self._report_stored)

    def _report_stored(self) -> None:
        stored, self._stored = tuple(self._stored), []
        now = Nanoseconds(monotonic_ns())
        self._feed(ev.ItemsStored(at=now, job=self.name, items=stored))

    def fail(self, item: int, failure: ev.Failure, attempts: int) -> None:
        ended = self._end(item)
        ended.failure = failure
        self._answer(ended)

    def take_travelled(self, results: Sequence[Result]) -> None:
        """The program has them before the dispatcher: nothing else can come of such an item."""
        self.take_small(results)
        for item, _ in results:
            self._answer(self._items[item])

    def _answer(self, item: Item) -> None:
        if not item.answered:
            item.answered = True
            item.results |= {name: item.inputs[name] for name in self.untouched}
            self._on_end(item)

    async def _take_in(self, received: ReceivedActivation) -> None:
        copies = {name: array.copy() for name, array in received.tensors.items()}
        self._items[received.key.item].results |= copies

    def take_small(self, results: Sequence[Result]) -> None:
        for item, arrays in results:
            self._items[item].results |= arrays

    def _inputs(self, item: int, names: Iterable[str]) -> dict[str, Array]:
        inputs = self._items[item].inputs
        return {name: inputs[name] for name in names}

    def _end(self, item: int) -> Item:
        self._forget(item)
        return self._items.pop(item)
