"""When the tasks of an item ran: for the slowest items of a job, and no others."""

from dataclasses import dataclass, field
from typing import NamedTuple

from shoal_protocol.units import Nanoseconds

_SHOWN = 8


class TaskTiming(NamedTuple):
    """A task: given to a device and ended there, with so much time in the runtime. While it runs
    `ended_at` is None."""

    stage: int
    device: str
    given_at: Nanoseconds
    ended_at: Nanoseconds | None
    compute: Nanoseconds


class ItemTiming(NamedTuple):
    """An item from its first task's start to its result."""

    item: int
    started_at: Nanoseconds
    ended_at: Nanoseconds
    retries: int
    tasks: tuple[TaskTiming, ...]

    @property
    def took(self) -> int:
        return self.ended_at - self.started_at


@dataclass(slots=True)
class Slowest:
    """The slowest items so far, slowest first."""

    items: list[ItemTiming] = field(default_factory=list)

    def belongs(self, took: int) -> bool:
        """Whether an item that took so long is one of them."""
        return len(self.items) < _SHOWN or took > self.items[-1].took

    def add(self, item: ItemTiming) -> None:
        self.items.append(item)
        self.items.sort(key=lambda each: (-each.took, each.item))
        del self.items[_SHOWN:]
