"""The state of all jobs, and the phases of one. Written by `machine` alone."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from shoal_coordinator.jobs import effects as do
from shoal_coordinator.jobs import events as ev
from shoal_coordinator.jobs.values import NOTHING, End, Outcome, Refusal, Submission, Tally


class Phase(StrEnum):
    """Where a job is in its life; the theory is in `machine`."""

    RECORDING = "Recording"
    OPENING = "Opening"
    RUNNING = "Running"
    WITHDRAWING = "Withdrawing"
    COMPLETING = "Completing"
    CLOSING = "Closing"
    ENDING = "Ending"
    ENDED = "Ended"


NEXT: Final[Mapping[Phase, frozenset[Phase]]] = {
    Phase.RECORDING: frozenset({Phase.OPENING}),
    Phase.OPENING: frozenset({Phase.RUNNING, Phase.CLOSING, Phase.ENDING}),
    Phase.RUNNING: frozenset({Phase.WITHDRAWING, Phase.COMPLETING, Phase.CLOSING}),
    Phase.WITHDRAWING: frozenset({Phase.COMPLETING, Phase.CLOSING}),
    Phase.COMPLETING: frozenset({Phase.ENDING}),
    Phase.CLOSING: frozenset({Phase.ENDING}),
    Phase.ENDING: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
"""The phases that may follow each phase."""


@dataclass(frozen=True, slots=True)
class Amendment:
    """Other terms or a newer plan, while they are being recorded for `caller`."""

    caller: int
    submission: Submission
    epoch: int


@dataclass(slots=True, eq=False, kw_only=True, weakref_slot=True)
class Job:
    """One life of a job: a name that is submitted again after its end begins another.

    `callers` wait for the first record. `recording`: a `Record` is unanswered. `stop` is how a
    user or an error wants it to end, `end` how it does. `past` are the statistics of earlier runs,
    `run` those of this one. `earlier` is the life before, until this one is recorded.
    `after_completion`: that one had completed.
    `resumed`: an earlier coordinator had recorded it.
    """

    name: str
    epoch: int
    submission: Submission
    submitted_seconds: float
    phase: Phase = Phase.RECORDING
    callers: list[int] = field(default_factory=list)
    recording: bool = False
    amendment: Amendment | None = None
    stop: End | None = None
    end: End | None = None
    past: Tally = NOTHING
    run: Tally = NOTHING
    earlier: "Job | None" = None
    after_completion: bool = False
    resumed: bool = False
    recorded_end: bool = True

    def move(self, phase: Phase) -> None:
        """Enter a phase that may follow this one."""
        assert phase in NEXT[self.phase], f"{self.name}: {self.phase} -> {phase}"
        self.phase = phase

    @property
    def tally(self) -> Tally:
        return self.past.plus(self.run)

    @property
    def has_ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def completes(self) -> bool:
        """Every item has ended, and the results are certain to be completed, or to fail at it."""
        complete = self.end is not None and self.end.outcome is Outcome.COMPLETE
        return self.phase is Phase.COMPLETING or (self.phase is Phase.ENDING and complete)


@dataclass(slots=True, kw_only=True)
class State:
    """`epochs` are the newest by name, also of jobs that were removed; `forgotten` is the highest
    of those that are not known any more; `requests` wait for their turn; `removing` maps names to
    the callers who wait for the removal of their files.
    """

    maximum_jobs: int
    shown_ended: int
    jobs: dict[str, Job] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    forgotten: int = 0
    requests: dict[str, deque[ev.Request]] = field(default_factory=dict)
    removing: dict[str, int] = field(default_factory=dict)
    out: list[do.Effect] = field(default_factory=list)

    def accept(self, caller: int, job: str) -> None:
        self.out.append(do.Accept(caller=caller, job=job))

    def refuse(self, caller: int, refusal: Refusal, reason: str) -> None:
        self.out.append(do.Refuse(caller=caller, refusal=refusal, reason=reason))
