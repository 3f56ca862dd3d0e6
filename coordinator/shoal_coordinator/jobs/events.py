"""What happens to jobs. `job` is a name. `caller` numbers a request: it is answered exactly once,
by `Accept` or `Refuse`. The wall clock's seconds count since 1970."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal_coordinator.jobs.values import NOTHING, End, Submission, Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfJob:
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found(_OfJob):
    """At the start of the process: a record that an earlier coordinator left. `submission` is set
    while the job had not ended, `end` when it had; neither when it was removed. `missing` says
    which fragments the store lacks."""

    epoch: int
    submission: Submission | None = None
    work: str | None = None
    results: str = ""
    end: End | None = None
    submitted_seconds: float
    tally: Tally = NOTHING
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted(_OfJob):
    """A client submits a job: a new one, or one that runs, with other terms or a newer plan."""

    caller: int
    at_seconds: float
    submission: Submission
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested(_OfJob):
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalRequested(_OfJob):
    caller: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRequested(_OfJob):
    """A client wants a job that follows its inputs to take no further ones."""

    caller: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRequested(_OfJob):
    """A client wants a job that has ended to run once more: what failed is tried again, or of that
    only `items`. `missing` says which fragments the store lacks."""

    caller: int
    at_seconds: float
    items: tuple[int, ...] = ()
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded(_OfJob):
    """Answers `Record`: the record is durable, or `problem` says why not."""

    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(_OfJob):
    """Answers `Open`: the inputs are counted, the outputs belong to this run. `completed` items
    have results already."""

    items: int
    completed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFailed(_OfJob):
    """Answers `Open`: the folders cannot serve."""

    end: End


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkEnded(_OfJob):
    """The dispatcher has ended the job. `whole`: every item has ended, so that its results can be
    completed; otherwise they stay as they are, for another run."""

    end: End
    whole: bool
    tally: Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed(_OfJob):
    """Answers `Close`: the run has `stored` so many items, some perhaps after its work had ended.
    `problem` says why the results could not be completed."""

    stored: int
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Broke(_OfJob):
    """An error inside the coordinator while it processed this job: the job is quarantined."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsUnwritable(_OfJob):
    """The outputs take no more results of any item: their disk is full, or read-only."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesRemoved(_OfJob):
    """Answers `RemoveFiles`."""

    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Elapsed:
    """Some time has passed. `tallies` are the statistics of the runs under way, by job."""

    tallies: Mapping[str, Tally] = field(default_factory=dict)


Request = Submitted | RemovalRequested | EndRequested | RetryRequested
Event = (
    Found
    | Submitted
    | CancelRequested
    | RemovalRequested
    | EndRequested
    | RetryRequested
    | Recorded
    | Opened
    | OpenFailed
    | WorkEnded
    | Closed
    | Broke
    | ResultsUnwritable
    | FilesRemoved
    | Elapsed
)
