"""The world of the simulation: what a scenario draws, the effects that are simulated, and what is
checked at every step. What happened is written into a transcript, which a failure carries.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shoal_coordinator.jobs import effects as do
from shoal_coordinator.jobs import events as ev
from shoal_coordinator.jobs.machine import State, step
from shoal_coordinator.jobs.state import Job, Phase
from shoal_coordinator.jobs.values import (
    NOTHING,
    End,
    Outcome,
    Plan,
    Retry,
    Submission,
    Tally,
    Terms,
)

NAMES = ("a", "b")
ITEMS = 4
COMPLETE = End(outcome=Outcome.COMPLETE)
ITEMS_FAILED = End(outcome=Outcome.FAILED, reason="ItemsFailed")


class Wrong(AssertionError):
    """What the simulation found; the message ends with the transcript."""


@dataclass(slots=True)
class Run:
    """A run of a job outside the machine: its folders, and the dispatcher's part."""

    opened: bool = False
    given: bool = False
    dispatched: bool = False
    closing: bool = False
    tally: Tally = NOTHING


@dataclass(slots=True)
class Disk:
    """What a crash leaves: records by name, and how many items have results, by work."""

    records: dict[str, do.Record] = field(default_factory=dict)
    results: dict[str, int] = field(default_factory=dict)


class World:
    """A scenario while it runs."""

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
        self._callers = 0
        self._epochs: dict[str, int] = {}
        self._start()

    def _start(self) -> None:
        self.state = State(maximum_jobs=2, shown_ended=2)
        self.runs: dict[str, Run] = {}
        self.waiting: dict[int, str] = {}
        self._retries: dict[int, Job | None] = {}
        """Retries, and the life of the job when they were requested."""
        self.lives: dict[Job, End | None] = {}
        self.ended_at: dict[Job, int] = {}
        self.present: dict[str, Job] = {}
        self.notified: dict[Job, End | None] = {}
        self._answers: list[Callable[[], None]] = []
        self._writes: dict[str, deque[Callable[[], None]]] = {}

    # ---- what happens ------------------------------------------------------------------------

    def unlucky(self, probability: float) -> bool:
        quiet = self.calm or self.crash_after is not None
        return not quiet and self.chance.random() < probability

    def take_a_step(self) -> None:
        """One thing happens: a request, an answer, a write, progress, trouble."""
        self.steps += 1
        if self.steps == self.crash_after or self.unlucky(0.02):
            self.crash()
        elif not self.calm and self.chance.random() < 0.3:
            self._request()
        elif self.unlucky(0.03):
            self.feed(ev.Broke(job=self.chance.choice(NAMES), message="a bug"))
        else:
            self.chance.choice([self._answer, self._write, self._work, self._elapse])()

    def _request(self) -> None:
        name = self.chance.choice(NAMES)
        kind = self.chance.random()
        if kind < 0.2:
            self.feed(ev.CancelRequested(job=name, reason="no need"))
        elif kind < 0.3:
            self.feed(ev.RemovalRequested(job=name, caller=self._caller("removal")))
        elif kind < 0.5:
            self._retry(name)
        else:
            self.feed(
                ev.Submitted(
                    job=name,
                    caller=self._caller("submission"),
                    at_seconds=float(self.steps),
                    submission=self._submission(name),
                    missing="fragment 1" if self.unlucky(0.1) else "",
                )
            )

    def _retry(self, name: str) -> None:
        caller = self._caller("retry")
        self._retries[caller] = self.state.jobs.get(name)
        now, missing = float(self.steps), "fragment 1" if self.unlucky(0.1) else ""
        self.feed(ev.RetryRequested(job=name, caller=caller, at_seconds=now, missing=missing))

    def _submission(self, name: str) -> Submission:
        other = self.unlucky(0.1)
        operator = self.chance.choice(("x", "y"))
        return Submission(
            work=f"{name} {other}",
            plan=Plan(number=self.chance.randrange(1, 5), stages=((operator,),)),
            terms=Terms(priority=self.chance.randrange(2)),
            retry=Retry(number=self.chance.randrange(2)),
        )

    def _caller(self, asks: str) -> int:
        self._callers += 1
        self.waiting[self._callers] = asks
        return self._callers

    def _answer(self) -> None:
        if self._answers:
            self._answers.pop(self.chance.randrange(len(self._answers)))()

    def _write(self) -> None:
        """The disk takes the next write of some job."""
        if names := sorted(name for name, writes in self._writes.items() if writes):
            self._writes[self.chance.choice(names)].popleft()()

    def _work(self) -> None:
        """The dispatcher gets on with some job."""
        busy = sorted(name for name, run in self.runs.items() if run.dispatched)
        if not busy:
            return
        name = self.chance.choice(busy)
        run = self.runs[name]
        if self.unlucky(0.05):
            self._work_ends(name, End(outcome=Outcome.FAILED, reason="DeadlineExceeded"))
        elif self.results(name) < ITEMS and self.unlucky(0.05):
            self._find_no_room(name)
        elif self.results(name) < ITEMS and self.unlucky(0.1):
            self._work_ends(name, ITEMS_FAILED)
        elif self.results(name) < ITEMS:
            self.disk.results[self.work(name)] = self.results(name) + 1
            run.tally = run.tally.plus(Tally(stored=1, seconds=1.0, tier_hits=(1, 0)))
        else:
            self._work_ends(name, COMPLETE)

    def _find_no_room(self, name: str) -> None:
        """A result of a job cannot be stored: nothing more of it may be computed."""
        self.feed(ev.ResultsUnwritable(job=name, message="disk full"))
        job = self.state.jobs[name]
        if self.runs[name].dispatched:
            raise self.wrong(f"{name} computes what cannot be stored")
        if job.stop is None or job.stop.reason != "ResultsUnwritten":
            raise self.wrong(f"{name} does not end for its outputs, but for {job.stop}")

    def work(self, name: str) -> str:
        """The work of the job's present life."""
        return self.state.jobs[name].submission.work

    def _works(self, name: str) -> set[str]:
        return {work for work in self.disk.results if work.startswith(name)}

    def results(self, name: str) -> int:
        return self.disk.results.get(self.work(name), 0)

    def _work_ends(self, name: str, end: End) -> None:
        run = self.runs[name]
        run.dispatched = False
        whole = end in (COMPLETE, ITEMS_FAILED)
        self._later(ev.WorkEnded(job=name, end=end, whole=whole, tally=run.tally))

    def _elapse(self) -> None:
        busy = {name: run.tally for name, run in self.runs.items() if run.dispatched}
        self.feed(ev.Elapsed(tallies=busy))

    def crash(self) -> None:
        """The process dies, and the next one begins with what is on the disk. Of the writes under
        way, some have reached it."""
        self.note("CRASH")
        self.calm, calm = True, self.calm
        for writes in self._writes.values():
            for write in list(writes)[: self.chance.randrange(len(writes) + 1)]:
                write()
        self.calm = calm
        unrecorded = (job for job in self.state.jobs.values() if not self._is_recorded(job))
        self.cut_short |= {job.submission.work for job in unrecorded}
        self.cut_short |= {self.work(name) for name in self.runs}
        for name in self.state.removing:
            self.cut_short |= self._works(name)
        self._start()
        for name, record in sorted(self.disk.records.items()):
            ended = record.end is not None
            self.feed(
                ev.Found(
                    job=name,
                    epoch=record.epoch,
                    submission=record.submission,
                    work=None if record.submission is None else record.submission.work,
                    end=record.end,
                    submitted_seconds=record.submitted_seconds,
                    tally=record.tally,
                )
            )
            if record.submission is not None and not ended and name not in self.state.jobs:
                raise self.wrong(f"{name} was accepted, and does not go on")

    # ---- one step, and what it has done ------------------------------------------------------

    def feed(self, event: ev.Event) -> None:
        """One step of the machine, checked, and what follows from it."""
        self.note(str(event))
        given = step(self.state, event)
        for effect in given:
            self.note(f"    {effect}")
        self.check()
        for effect in given:
            self._perform(effect)

    def note(self, text: str) -> None:
        self.transcript.append(text)

    def wrong(self, text: str) -> Wrong:
        lines = "\n".join(self.transcript[-200:])
        return Wrong(f"seed {self.seed}, crash after {self.crash_after}: {text}\n{lines}")

    def _later(self, event: ev.Event) -> None:
        self._answers.append(lambda: self.feed(event))

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
        for name in self.runs:
            if name not in self.state.jobs or self.state.jobs[name].has_ended:
                raise self.wrong(f"{name} has a run, and no job")

    def _begin_life(self, job: Job) -> None:
        self.lives[job] = None
        if job.has_ended:  # under an earlier coordinator
            self.lives[job] = self.notified[job] = job.end
            self.ended_at[job] = self.steps
        earlier = job.earlier
        if earlier is not None and earlier.submission.work != job.submission.work:
            self.cut_short.add(job.submission.work)
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
            self.disk.results.get(job.submission.work, 0),
        )
        if job.recorded_end and (record is None or record.end != job.end):
            raise self.wrong(f"the end of {job.name} is not on the disk")
        if job.end.outcome is Outcome.COMPLETE and there < ITEMS:
            raise self.wrong(f"{job.name} is complete without all its results")
        stored = job.tally.stored
        exact = job.submission.work not in self.cut_short
        if stored > there or (stored < there and exact):
            raise self.wrong(f"{job.name} counts {stored} of {there} items")

    # ---- effects, simulated ------------------------------------------------------------------

    def _perform(self, effect: do.Effect) -> None:  # noqa: C901 - one for each kind
        match effect:
            case do.Accept(caller=caller) | do.Refuse(caller=caller):
                if caller not in self.waiting:
                    raise self.wrong(f"caller {caller} is answered twice")
                asked = self.waiting.pop(caller)
                if asked in ("submission", "retry") and isinstance(effect, do.Accept):
                    self._check_durable(self.state.jobs[effect.job])
                if asked == "retry":
                    self._check_retry(effect)
            case do.Record():
                if effect.submission is not None:
                    self.present[effect.job] = self.state.jobs[effect.job]
                self._writes.setdefault(effect.job, deque()).append(lambda: self._record(effect))
            case do.RecordTally():
                self._check_known(effect.job)
                self._writes.setdefault(effect.job, deque()).append(
                    lambda: self._record_tally(effect)
                )
            case do.Forget():
                self.disk.records.pop(effect.job, None)
            case do.Notify():
                self._check_known(effect.job)
                self.notified[self.present[effect.job]] = self.present[effect.job].end
            case do.RemoveFiles():
                self._check_alone(effect.job)
                self._answers.append(lambda: self._remove(effect.job))
            case do.Open() | do.Dispatch() | do.Amend() | do.Withdraw() | do.Close():
                self._check_known(effect.job)
                self._perform_on_run(effect)

    def _perform_on_run(
        self, effect: do.Open | do.Dispatch | do.Amend | do.Withdraw | do.Close
    ) -> None:
        name = effect.job
        match effect:
            case do.Open():
                self._check_alone(name)
                self.runs[name] = Run()
                self._answers.append(lambda: self._open(name))
            case do.Dispatch(epoch=epoch) | do.Amend(epoch=epoch):
                self._dispatch(name, epoch, first=isinstance(effect, do.Dispatch))
            case do.Withdraw():
                if not self.runs[name].opened:
                    raise self.wrong(f"{name} is withdrawn before it was dispatched")
                if self.runs[name].dispatched:
                    cancelled = End(outcome=Outcome.CANCELLED, message=effect.reason)
                    self._work_ends(name, cancelled)
            case do.Close(complete=complete):
                run = self.runs[name]
                if run.dispatched or run.closing or not run.opened:
                    raise self.wrong(f"{name} is closed while it is {run}")
                run.closing = True
                self._answers.append(lambda: self._close(name, complete=complete))

    def _dispatch(self, name: str, epoch: int, *, first: bool) -> None:
        run = self.runs[name]
        if run.closing or not run.opened or run.given is first:
            raise self.wrong(f"{name} is dispatched while it is {run}")
        known = self._epochs.get(name, 0)
        if epoch < known or (first and epoch == known):
            raise self.wrong(f"{name} is dispatched in epoch {epoch}, after {known}")
        self._epochs[name] = epoch
        if first:
            run.given = run.dispatched = True

    def _check_retry(self, effect: do.Accept | do.Refuse) -> None:
        """A retry that is accepted begins another life of a job that is not complete."""
        asked_of = self._retries.pop(effect.caller)
        if isinstance(effect, do.Refuse):
            return
        job = self.state.jobs[effect.job]
        cancelled = job.stop is not None or job.end is not None
        if not cancelled and (job is asked_of or job.submission.retry.number == 0):
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

    def _check_durable(self, job: Job) -> None:
        record = self.disk.records.get(job.name)
        if record is None or record.epoch < job.epoch:
            raise self.wrong(f"{job.name} is accepted, and not on the disk")

    def _record(self, effect: do.Record) -> None:
        if self.unlucky(0.1):
            self._later(ev.Recorded(job=effect.job, problem="disk full"))
            return
        self.disk.records[effect.job] = effect
        self._later(ev.Recorded(job=effect.job))

    def _record_tally(self, effect: do.RecordTally) -> None:
        if (record := self.disk.records.get(effect.job)) is not None:
            self.disk.records[effect.job] = replace(record, tally=effect.tally)

    def _open(self, name: str) -> None:
        if self.unlucky(0.1):
            del self.runs[name]
            self.feed(ev.OpenFailed(job=name, end=End(outcome=Outcome.FAILED, reason="Folder")))
            return
        self.runs[name].opened = True
        self.feed(ev.Opened(job=name, items=ITEMS, completed=self.results(name)))

    def _close(self, name: str, *, complete: bool) -> None:
        del self.runs[name]
        problem = "disk full" if complete and self.unlucky(0.1) else None
        self.feed(ev.Closed(job=name, problem=problem))

    def _remove(self, name: str) -> None:
        works = self._works(name)
        if self.unlucky(0.2):
            self.cut_short |= works
            self.feed(ev.FilesRemoved(job=name, problem="busy"))
            return
        for work in works:
            del self.disk.results[work]
        self.cut_short -= works
        self.feed(ev.FilesRemoved(job=name))

    # ---- the end -----------------------------------------------------------------------------

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
