"""The world of the simulation: what a scenario draws, and the effects that are simulated."""

from collections import deque
from dataclasses import replace

from coordinator.jobs.simulated_checks import (
    COMPLETE,
    FOLLOWS,
    ITEMS_FAILED,
    NAMES,
    CheckedWorld,
)
from coordinator.jobs.simulated_disk import Run
from shoal_coordinator.jobs import effects as do
from shoal_coordinator.jobs import events as ev
from shoal_coordinator.jobs.machine import step
from shoal_coordinator.jobs.state import Phase
from shoal_coordinator.jobs.values import (
    End,
    Outcome,
    Plan,
    Retry,
    Submission,
    Tally,
    Terms,
)


class World(CheckedWorld):
    """A scenario while it runs."""

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
        elif kind < 0.35:
            self._end(FOLLOWS)
        elif kind < 0.5:
            self._retry(name)
        else:
            self._submit(name, self._submission(name))

    def _submit(self, name: str, submission: Submission) -> None:
        caller = self._caller("submission")
        if submission.terms.end:
            self.enders.add(caller)
        self.feed(
            ev.Submitted(
                job=name,
                caller=caller,
                at_seconds=float(self.steps),
                submission=submission,
                missing="fragment 1" if self.unlucky(0.1) else "",
            )
        )

    def _end(self, name: str) -> None:
        caller = self._caller("end")
        self.enders.add(caller)
        self.feed(ev.EndRequested(job=name, caller=caller))

    def _retry(self, name: str) -> None:
        caller = self._caller("retry")
        self._retries[caller] = self.state.jobs.get(name)
        self.feed(ev.RetryRequested(job=name, caller=caller, at_seconds=float(self.steps)))

    def _submission(self, name: str) -> Submission:
        other = self.unlucky(0.1)
        work, cut = f"{name} {other}", self.chance.random() < 0.2
        operator = self.chance.choice(("x", "y"))
        return Submission(
            work=f"{work} {cut}",
            results=work,
            follows=name == FOLLOWS,
            plan=Plan(number=self.chance.randrange(1, 5), stages=((operator,),)),
            terms=Terms(
                priority=self.chance.randrange(2),
                end=name == FOLLOWS and self.chance.random() < 0.2,
            ),
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
        left = self.results(name) < self.items(self.work(name))
        if self.unlucky(0.05):
            self._work_ends(name, End(outcome=Outcome.FAILED, reason="DeadlineExceeded"))
        elif left and self.unlucky(0.05):
            self._find_no_room(name)
        elif left and self.unlucky(0.1):
            self._work_ends(name, ITEMS_FAILED)
        elif left:
            self.disk.results[self.work(name)] = self.results(name) + 1
            run.tally = run.tally.plus(Tally(stored=1, seconds=1.0, tier_hits=(1, 0)))
        elif name != FOLLOWS or run.ending:
            self._work_ends(name, COMPLETE)
        elif not self.calm:
            self.disk.arrived[self.work(name)] = self.items(self.work(name)) + 1
        elif not self.state.jobs[name].submission.terms.end and not self.enders:
            present = self.state.jobs[name].submission
            self._submit(name, replace(present, terms=Terms(end=True)))

    def _find_no_room(self, name: str) -> None:
        """A result of a job cannot be stored: nothing more of it may be computed."""
        self.feed(ev.ResultsUnwritable(job=name, message="disk full"))
        job = self.state.jobs[name]
        if self.runs[name].dispatched:
            raise self.wrong(f"{name} computes what cannot be stored")
        if job.stop is None or job.stop.reason != "ResultsUnwritten":
            raise self.wrong(f"{name} does not end for its outputs, but for {job.stop}")

    def _work_ends(self, name: str, end: End) -> None:
        run = self.runs[name]
        run.dispatched = False
        whole = end in (COMPLETE, ITEMS_FAILED)
        if not whole and self.results(name) < self.items(self.work(name)):
            run.storing = self.chance.randrange(2)
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
        self.cut_short |= {job.submission.results for job in unrecorded}
        self.cut_short |= {self.work(name) for name in self.runs}
        for name in self.state.removing:
            self.cut_short |= self._works(name)
        to_end, self.to_end = {job.name for job in self.to_end}, set()
        self._start()
        for name, record in sorted(self.disk.records.items()):
            ended = record.end is not None
            self.feed(
                ev.Found(
                    job=name,
                    epoch=record.epoch,
                    submission=record.submission,
                    work=None if record.submission is None else record.submission.work,
                    results="" if record.submission is None else record.submission.results,
                    end=record.end,
                    submitted_seconds=record.submitted_seconds,
                    tally=record.tally,
                )
            )
            if record.submission is not None and not ended and name not in self.state.jobs:
                raise self.wrong(f"{name} was accepted, and does not go on")
            if name in to_end and not ended:
                self.to_end.add(self.state.jobs[name])
        self.check()

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

    def _later(self, event: ev.Event) -> None:
        self._answers.append(lambda: self.feed(event))

    # ---- effects, simulated ------------------------------------------------------------------

    def _perform(self, effect: do.Effect) -> None:  # noqa: C901 - one for each kind
        match effect:
            case do.Accept(caller=caller) | do.Refuse(caller=caller):
                if caller not in self.waiting:
                    raise self.wrong(f"caller {caller} is answered twice")
                asked = self.waiting.pop(caller)
                if asked != "removal" and isinstance(effect, do.Accept):
                    job = self.state.jobs[effect.job]
                    if asked != "end" or job.phase is not Phase.RECORDING:  # else another life
                        self._check_durable(job, caller)
                self.enders.discard(caller)
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
                self.runs[name].ending |= effect.submission.terms.end
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
        items = self.items(self.work(name))
        self.feed(ev.Opened(job=name, items=items, completed=self.results(name)))

    def _close(self, name: str, *, complete: bool) -> None:
        run = self.runs.pop(name)
        if run.storing:
            self.disk.results[self.work(name)] = self.results(name) + run.storing
        stored = run.tally.stored + run.storing
        problem = "disk full" if complete and self.unlucky(0.1) else None
        self.feed(ev.Closed(job=name, stored=stored, problem=problem))

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
