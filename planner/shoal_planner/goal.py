"""What a plan makes small."""

from dataclasses import dataclass
from typing import Final, TypeVar, assert_never

from shoal_protocol.choices import Objective

Number = TypeVar("Number", int, float)

ASSUMED_ITEMS: Final = 100
"""Of a job of which nobody knows how many it has."""


@dataclass(frozen=True, slots=True)
class Goal:
    """An objective, and how many items a job has, which matters to a makespan only; None: that is
    not known, and `ASSUMED_ITEMS` are reckoned with."""

    objective: Objective
    known_items: int | None = None

    @property
    def items(self) -> int:
        """What is reckoned with; a job without any is as one of one item."""
        return ASSUMED_ITEMS if self.known_items is None else max(1, self.known_items)

    @property
    def cold(self) -> bool:
        """Whether loading counts: the devices have nothing in memory yet."""
        return self.objective is Objective.MAKESPAN

    @property
    def loading_items(self) -> int:
        """Of a job of so many items loads count; 0: they do not."""
        return self.items if self.cold else 0

    def value(self, period: Number, latency: Number) -> Number:
        """In the unit of the times; less is better."""
        match self.objective:
            case Objective.THROUGHPUT:
                return period
            case Objective.LATENCY:
                return latency
            case Objective.MAKESPAN:
                return latency + (self.items - 1) * period
            case _:
                assert_never(self.objective)

    def sparing(self, enough: float) -> "Sparing":
        """Penalties count alone where a value is below `enough`."""
        return Sparing(self.objective, self.known_items, enough)

    def order(self, period: int, latency: int, penalty: int = 0) -> tuple[int, int, int]:
        """What is compared: of equal values fewer penalties win, then the other time."""
        other = period if self.objective is Objective.LATENCY else latency
        return self.value(period, latency), penalty, other


@dataclass(frozen=True, slots=True)
class Sparing(Goal):
    """A goal that is good enough below a value: of what is, that with the least penalty is best."""

    enough: float = 0.0

    def order(self, period: int, latency: int, penalty: int = 0) -> tuple[int, int, int]:
        value = self.value(period, latency)
        return (0, penalty, value) if value < self.enough else (1, value, penalty)
