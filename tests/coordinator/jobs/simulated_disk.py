"""What is outside the machine: runs of jobs, and the disk that a crash leaves."""

from dataclasses import dataclass, field

from shoal_coordinator.jobs import effects as do
from shoal_coordinator.jobs.values import NOTHING, Tally


@dataclass(slots=True)
class Run:
    """A run of a job outside the machine: its folders, and the dispatcher's part."""

    opened: bool = False
    given: bool = False
    dispatched: bool = False
    closing: bool = False
    ending: bool = False
    storing: int = 0
    """Items whose results are durable only when the run is closed."""
    tally: Tally = NOTHING


@dataclass(slots=True)
class Disk:
    """What a crash leaves: records by name, and how many items have results, by work."""

    records: dict[str, do.Record] = field(default_factory=dict)
    results: dict[str, int] = field(default_factory=dict)
    arrived: dict[str, int] = field(default_factory=dict)
    """Items of works that follow."""
