"""When the tasks of an item ran: for the slowest items of a job, and no others."""

from collections.abc import Sequence
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


class Phases(NamedTuple):
    """When a task was ready, was given to a device, and had ended; None: it has not yet."""

    ready_at: Nanoseconds
    given_at: Nanoseconds
    ended_at: Nanoseconds | None


def phases(timing: ItemTiming, predecessors: Sequence[Sequence[int]]) -> dict[int, Phases]:
    """Of each task of an item, by its stage: no task is ready before those before it have ended.

    A task that was given ahead may have ended before the device of its predecessor has reported
    the end there, and a predecessor may have run once more since: so a task counts as ended when
    the first of its consumers had ended. `predecessors` are those of each stage, all smaller.
    """
    tasks = {task.stage: task for task in timing.tasks}
    ends = {stage: task.ended_at for stage, task in tasks.items()}
    for stage in sorted(ends, reverse=True):
        if (end := ends[stage]) is not None:
            for before in predecessors[stage]:
                known = ends.get(before)
                ends[before] = end if known is None else min(known, end)
    found = {}
    for stage, task in tasks.items():
        end = ends[stage]
        befores = (ends.get(before) or timing.started_at for before in predecessors[stage])
        ready = max(befores, default=timing.started_at)
        given = max(ready, task.given_at)
        found[stage] = Phases(ready, given if end is None else min(given, end), end)
    return found


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
