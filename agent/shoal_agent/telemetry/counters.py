"""What the agent counts since it started: an outage costs resolution, not totals."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from shoal_protocol.bulk.link import Traffic

_SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_RATIOS: Final = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0)


@dataclass(slots=True)
class Histogram:
    """Counts of values by upper bound, as Prometheus wants them; durations unless said
    otherwise."""

    bounds: tuple[float, ...] = _SECONDS
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds and cumulative counts."""
        total, found = 0, []
        for bound, number in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += number
            found.append((bound, float(total)))
        return found


@dataclass(slots=True)
class Counters:
    """All of it. The keys of the `Counter`s are from small closed sets."""

    sent_bytes: int = 0
    received_bytes: int = 0
    fetched_bytes: Counter[str] = field(default_factory=Counter)
    tasks: Counter[str] = field(default_factory=Counter)
    loads: Counter[str] = field(default_factory=Counter)
    transfers_refused: Counter[str] = field(default_factory=Counter)
    full_queues: Counter[str] = field(default_factory=Counter)
    traffic: Traffic = field(default_factory=Traffic)
    evictions: int = 0
    sessions: int = 0
    over_budget: int = 0
    grants: int = 0
    compute: Histogram = field(default_factory=Histogram)
    task: Histogram = field(default_factory=Histogram)
    load: Histogram = field(default_factory=Histogram)
    memory_ratio: Histogram = field(default_factory=lambda: Histogram(_RATIOS))

    def activity(self) -> tuple[int, ...]:
        """Numbers of which one grows with whatever the agent does for others."""
        counts = (self.tasks, self.loads, self.fetched_bytes)
        return (
            self.sessions,
            self.evictions,
            self.sent_bytes,
            self.received_bytes,
            *(count.total() for count in counts),
        )
