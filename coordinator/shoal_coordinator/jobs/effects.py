"""What is to be done about jobs, in the order given: effects for a life that ends come before the
`Record` that begins the next one. `Record`, `Open`, `Close` and `RemoveFiles` are each answered by
exactly one event."""

from dataclasses import dataclass

from shoal_coordinator.jobs.values import NOTHING, End, Refusal, Submission, Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfJob:
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(_OfJob):
    """Make durable what a later coordinator has to know: a job that has not ended by its
    `submission`, one that has by its `end`, a removed one by its `epoch` alone. Answered by
    `Recorded`; records of a job reach the disk in the order given."""

    epoch: int
    submission: Submission | None = None
    end: End | None = None
    submitted_seconds: float = 0.0
    tally: Tally = NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordTally(_OfJob):
    """Make durable the statistics of a job that runs; not answered."""

    tally: Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget(_OfJob):
    """Delete the record of a job that ended long ago; not answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open(_OfJob):
    """Count the inputs and take possession of the outputs: a run begins. Answered by `Opened` or
    `OpenFailed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch(_OfJob):
    """Give the dispatcher an opened job. Answered by `WorkEnded`, in the end."""

    epoch: int
    submission: Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class Amend(_OfJob):
    """Give the dispatcher other terms or a newer plan of a job that it has; nothing, if it has
    ended the job just now."""

    epoch: int
    submission: Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw(_OfJob):
    """Have the dispatcher end a job, which hastens `WorkEnded`."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Close(_OfJob):
    """End the run: store what is pending, complete the results if `complete`, and release the
    folders. Answered by `Closed`."""

    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveFiles(_OfJob):
    """Delete a job's files on the volume. Answered by `FilesRemoved`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accept(_OfJob):
    """Answer a request: it holds, also after a crash."""

    caller: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Answer a request: nothing has changed."""

    caller: int
    refusal: Refusal
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify(_OfJob):
    """Wake those who wait for this job to run or to end."""


Effect = (
    Record
    | RecordTally
    | Forget
    | Open
    | Dispatch
    | Amend
    | Withdraw
    | Close
    | RemoveFiles
    | Accept
    | Refuse
    | Notify
)
