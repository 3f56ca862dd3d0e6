"""What is to be reconciled: the queue, fed by the cache, coordinators and time.

An object is enqueued when it or a part of its last snapshot has changed, when its decision or
snapshot has asked for it, after a failure, and once in every resync.

The snapshot of a DevicePool or a Model has hundreds of parts: their changes are gathered for a
second, so that a thousand of them cost one reconciliation. A change of the object itself does not
wait.
"""

import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from shoal_api.kinds import KINDS, DevicePool, Model
from shoal_operator.controller.cache import Cache, Dependents, ObjectName, Reader, Topic
from shoal_operator.controller.queue import WorkQueue

GATHERED_SECONDS: Final = {DevicePool.__name__: 1.0, Model.__name__: 1.0}
# Nothing is ever decided about a Device by itself.
DECIDED: Final = tuple(kind for kind, names in KINDS.items() if names.written)


class EventRouter:
    """`changed` receives the name of every object that changed."""

    def __init__(self, changed: Callable[[ObjectName], None] = lambda name: None) -> None:
        self._dependents = Dependents()
        self.queue: WorkQueue[ObjectName] = WorkQueue(random.random)
        self.cache = Cache(self._object_changed)
        self._changed = changed

    def topics_changed(self, topics: Iterable[Topic], *, but: ObjectName | None = None) -> None:
        """Enqueue whatever was made of these, but this one."""
        for topic in topics:
            for reader in self._dependents.readers(topic):
                if reader != but:
                    self.queue.add(reader, GATHERED_SECONDS.get(reader[0], 0.0))

    def add_all(self) -> None:
        """Enqueue every object."""
        for kind in DECIDED:
            for state in self.cache.states(kind):
                self.queue.add((kind, state.identity.namespace, state.identity.name))

    def reader(self, name: ObjectName) -> Reader:
        """A reader for an object's snapshot; the object subscribes to what it reads."""
        return Reader(self.cache, partial(self._dependents.add, name))

    def has_read(self, name: ObjectName, reader: Reader) -> None:
        """A snapshot is complete: the object subscribes to its parts only."""
        self._dependents.subscribe(name, reader.topics)

    def forget(self, name: ObjectName) -> None:
        """An object is gone, and was not seen again."""
        self._dependents.subscribe(name, frozenset())
        self.queue.drop(name)

    def _object_changed(self, name: ObjectName, topics: tuple[Topic, ...], by_us: bool) -> None:
        self.topics_changed(topics, but=name if by_us else None)
        if name[0] in DECIDED and not by_us:
            self.queue.add(name)
        self._changed(name)
