"""What is known of a scenario of the simulation, and what is checked at every step. What happened
is written into a transcript, which a failure carries.
"""

import random
from collections import deque
from collections.abc import Callable

from coordinator.jobs.simulated_disk import Disk, Run
from shoal_coordinator.jobs import effects as do
from shoal_coordinator.jobs.machine import State
from shoal_coordinator.jobs.state import Job, Phase
from shoal_coordinator.jobs.values import (
    End,
    Outcome,
    Refusal,
)

NAMES = ("a", "b")
FOLLOWS = "b"
"""A job whose items arrive while it runs, until somebody ends that."""
ITEMS = 4
COMPLETE = End(outcome=Outcome.COMPLETE)
ITEMS_FAILED = End(outcome=Outcome.FAILED, reason="ItemsFailed")


class Wrong(AssertionError):
    """What the simulation found; the message ends with the transcript."""


class CheckedWorld:
    """A scenario as it is, and what must hold of it."""

    def __init__(self, seed: int, crash_after: int | None = None) -> None:
        """`crash_after`: crash once, after this step, and have no other trouble."""
        self.seed = seed
        self.crash_after = crash_after
        self.chance = random.Random(seed)  # noqa: S311 (not for secrets)
        self.disk = Disk()
        self.calm = False
        self.steps = 0
        self.transcript: list[str] = []
        self.cut_short: set[str] = set()
        """Works whose statistics a crash, or another work of the name, may have cut short."""
        self.to_end: set[Job] = set()
        """Those of which somebody knows that their following ends: that was accepted."""
        self._callers = 0
        self._epochs: dict[str, int] = {}
        self._start()

    def _start(self) -> None:
        self.state = State(maximum_jobs=2, shown_ended=2)
        self.runs: dict[str, Run] = {}
        self.waiting: dict[int, str] = {}
        self.enders: set[int] = set()
        self._retries: dict[int, Job | None] = {}
        """Retries, and the life of the job when they were requested."""
        self.lives: dict[Job, End | None] = {}
        self.ended_at: dict[Job, int] = {}
        self.present: dict[str, Job] = {}
        self.notified: dict[Job, End | None] = {}
        self._answers: list[Callable[[], None]] = []
        self._writes: dict[str, deque[Callable[[], None]]] = {}

    def items(self, work: str) -> int:
        """How many items a work has; one that follows gets more."""
        return self.disk.arrived.get(work, 0) if work.startswith(FOLLOWS) else ITEMS

    def work(self, name: str) -> str:
        """The work of the job's present life, however its model is cut."""
        return self.state.jobs[name].submission.results

    def _works(self, name: str) -> set[str]:
        return {work for work in self.disk.results if work.startswith(name)}

    def results(self, name: str) -> int:
        return self.disk.results.get(self.work(name), 0)

    def note(self, text: str) -> None:
        self.transcript.append(text)

    def wrong(self, text: str) -> Wrong:
        lines = "\n".join(self.transcript[-200:])
        return Wrong(f"seed {self.seed}, crash after {self.crash_after}: {text}\n{lines}")

    def check(self) -> None:
        """What holds after every step: a life ends once, for good, and its end is on the disk."""
        for job in self.state.jobs.values():
            if job not in self.lives:
                self._begin_life(job)
        for job, end in list(self.lives.items()):
            if end is not None and (job.end, job.phase) != (end, Phase.ENDED):
                raise self.wrong(f"{job.name} ended as {end}, and is {job.phase} as {job.end}")
            if end is None and job.has_ended:
                self._check_end(job)
                self.ended_at[job] = self.steps
                self.lives[job] = job.end
        self.to_end = {job for job in self.to_end if not job.has_ended}
        for job in self.to_end:
            if not job.submission.terms.end:
                raise self.wrong(f"{job.name} follows on, though its end was accepted")
        for name in self.runs:
            if name not in self.state.jobs or self.state.jobs[name].has_ended:
                raise self.wrong(f"{name} has a run, and no job")

    def _begin_life(self, job: Job) -> None:
        self.lives[job] = None
        if job.has_ended:  # under an earlier coordinator
            self.lives[job] = self.notified[job] = job.end
            self.ended_at[job] = self.steps
        earlier = job.earlier
        if earlier is not None and earlier.submission.results != job.submission.results:
            self.cut_short.add(job.submission.results)
        elif earlier is not None and earlier.end == COMPLETE:
            ended_at = self.ended_at.get(earlier, self.steps)
            if job.submitted_seconds < ended_at:
                raise self.wrong(f"{job.name} runs again, for a request made before it completed")

    def _is_recorded(self, job: Job) -> bool:
        record = self.disk.records.get(job.name)
        return record is not None and record.end == job.end and record.tally == job.tally

    def _check_end(self, job: Job) -> None:
        if job.end is None:
            raise self.wrong(f"{job.name} has ended without an end")
        record, there = (
            self.disk.records.get(job.name),
            self.disk.results.get(job.submission.results, 0),
        )
        if job.recorded_end and (record is None or record.end != job.end):
            raise self.wrong(f"the end of {job.name} is not on the disk")
        if job.end.outcome is Outcome.COMPLETE and there < self.items(job.submission.results):
            raise self.wrong(f"{job.name} is complete without all its results")
        followed = job.name == FOLLOWS and not job.submission.terms.end
        if job.end.outcome is Outcome.COMPLETE and followed:
            raise self.wrong(f"{job.name} is complete, and nobody has ended its following")
        stored = job.tally.stored
        exact = job.submission.results not in self.cut_short
        if stored > there or (stored < there and exact):
            raise self.wrong(f"{job.name} counts {stored} of {there} items")

    def _check_retry(self, effect: do.Accept | do.Refuse) -> None:
        """A retry that is accepted begins another life of a job that is not complete, or amends the
        life of one that follows, durably."""
        asked_of = self._retries.pop(effect.caller)
        if isinstance(effect, do.Refuse):
            if effect.refusal is Refusal.RUNS and asked_of is not None and asked_of.completes:
                raise self.wrong("a retry does not wait for the end of its job")
            return
        job = self.state.jobs[effect.job]
        if job.submission.takes_more and not (job.stop or job.end):
            recorded = self.disk.records[effect.job].submission
            if recorded is None or recorded.retry.number < job.submission.retry.number:
                raise self.wrong(f"a retry of {job.name} is accepted, and not recorded")
            return
        if (job.stop or job.end) is None and (job is asked_of or job.submission.retry.number == 0):
            raise self.wrong(f"a retry of {job.name} is accepted, and begins no other run")
        if asked_of is not None and asked_of.end == COMPLETE and job is not asked_of:
            raise self.wrong(f"{job.name} was complete, and runs again for a retry")

    def _check_known(self, name: str) -> None:
        job = self.state.jobs.get(name)
        if job is None:
            raise self.wrong(f"an effect for {name}, which is gone")

    def _check_alone(self, name: str) -> None:
        if name in self.runs:
            raise self.wrong(f"{name} has a run already")

    def _check_durable(self, job: Job, caller: int) -> None:
        record = self.disk.records.get(job.name)
        if record is None or record.epoch < job.epoch:
            raise self.wrong(f"{job.name} is accepted, and not on the disk")
        active = job.phase in {Phase.RECORDING, Phase.OPENING, Phase.RUNNING}
        if caller in self.enders and active and job.stop is None:
            if record.submission is None or not record.submission.terms.end:
                raise self.wrong(f"the end of {job.name}'s following is accepted, and not recorded")
            self.to_end.add(job)

    @property
    def at_rest(self) -> bool:
        """Nothing is under way any more."""
        ended = all(job.has_ended and job.recorded_end for job in self.state.jobs.values())
        return ended and not (self._answers or any(self._writes.values()))

    def check_rest(self) -> None:
        """What holds at the end."""
        state = self.state
        if self.waiting or state.requests or state.removing or self.runs:
            raise self.wrong(f"left: {self.waiting} {state.requests} {state.removing} {self.runs}")
        for job, end in self.lives.items():
            if end is not None and self.notified.get(job) != end:
                raise self.wrong(f"who waits for the end of {job.name} is not notified")
        for name, record in self.disk.records.items():
            if record.submission is not None and record.end is None:
                raise self.wrong(f"{name} would run again after a restart")
