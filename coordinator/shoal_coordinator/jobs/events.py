"""What happens to jobs. `job` is a name. `caller` numbers a request: it is answered exactly once,
by `Accept` or `Refuse`. The wall clock's seconds count since 1970."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal_coordinator.jobs.values import NOTHING, End, Submission, Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """At the start of the process: a record that an earlier coordinator left. `submission` is set
    while the job had not ended, `end` when it had; neither when it was removed. `missing` says
    which fragments the store lacks."""

    job: str
    epoch: int
    submission: Submission | None = None
    work: str | None = None
    end: End | None = None
    submitted_seconds: float
    tally: Tally = NOTHING
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A client submits a job: a new one, or one that runs, with other terms or a newer plan."""

    job: str
    caller: int
    at_seconds: float
    submission: Submission
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    job: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalRequested:
    job: str
    caller: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Answers `Record`: the record is durable, or `problem` says why not."""

    job: str
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Answers `Open`: the inputs are counted, the outputs belong to this run. `completed` items
    have results already."""

    job: str
    items: int
    completed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFailed:
    """Answers `Open`: the folders cannot serve."""

    job: str
    end: End


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkEnded:
    """The dispatcher has ended the job. `whole`: every item has ended, so that its results can be
    completed; otherwise they stay as they are, for another run."""

    job: str
    end: End
    whole: bool
    tally: Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Answers `Close`; `problem` says why the results could not be completed."""

    job: str
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Broke:
    """An error inside the coordinator while it processed this job: the job is quarantined."""

    job: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesRemoved:
    """Answers `RemoveFiles`."""

    job: str
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Elapsed:
    """Some time has passed. `tallies` are the statistics of the runs under way, by job."""

    tallies: Mapping[str, Tally] = field(default_factory=dict)


Request = Submitted | RemovalRequested
JobEvent = (
    Found
    | Submitted
    | CancelRequested
    | RemovalRequested
    | Recorded
    | Opened
    | OpenFailed
    | WorkEnded
    | Closed
    | Broke
    | FilesRemoved
)
Event = JobEvent | Elapsed
