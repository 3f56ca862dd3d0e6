"""What the agent counts since it started: an outage costs resolution, not totals."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from shoal_agent.telemetry.handling import Moved
from shoal_protocol.bulk.link import Traffic
from shoal_protocol.histograms import Histogram

_RATIOS: Final = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0)


@dataclass(slots=True)
class Counters:
    """All of it. The keys of the `Counter`s are from small closed sets."""

    sent_bytes: int = 0
    received_bytes: int = 0
    transfers: int = 0
    fetched_bytes: Counter[str] = field(default_factory=Counter)
    tasks: Counter[str] = field(default_factory=Counter)
    loads: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
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

    @property
    def moved(self) -> Moved:
        """Activations, inputs and results so far."""
        return Moved(self.transfers, self.sent_bytes + self.received_bytes)

    def failed(self, part: str) -> None:
        """A background task of that name."""
        self.failures[part] += 1

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
