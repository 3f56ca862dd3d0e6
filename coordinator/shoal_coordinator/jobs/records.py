"""What a later coordinator has to know: records, written one at a time for each name."""

from shoal_coordinator.jobs import effects as do
from shoal_coordinator.jobs import events as ev
from shoal_coordinator.jobs.state import Amendment, Job, Phase, State
from shoal_coordinator.jobs.values import Refusal, Submission


def found(state: State, event: ev.Found) -> None:
    """Resume what an earlier coordinator recorded. A job whose fragments are missing stays on disk,
    until a client submits it again, is refused for them, and uploads them."""
    state.epochs[event.job] = event.epoch
    if event.end is not None:
        job = _life(event)
        job.phase, job.end = Phase.ENDED, event.end
        state.jobs[event.job] = job
    elif event.submission is not None and not event.missing:
        job = _life(event)
        job.epoch += 1
        job.resumed = True
        state.jobs[event.job] = job
        record(state, job)


def _life(event: ev.Found) -> Job:
    return Job(
        name=event.job,
        epoch=event.epoch,
        submission=event.submission or Submission(work=event.work or "", results=event.results),
        submitted_seconds=event.submitted_seconds,
        past=event.tally,
    )


def record(state: State, job: Job) -> None:
    job.recording = True
    amended = job.amendment
    state.out.append(
        do.Record(
            job=job.name,
            epoch=job.epoch if amended is None else amended.epoch,
            submission=job.submission if amended is None else amended.submission,
            end=job.end if job.phase in {Phase.ENDING, Phase.ENDED} else None,
            submitted_seconds=job.submitted_seconds,
            tally=job.tally,
        )
    )


def recorded(state: State, event: ev.Recorded) -> None:
    if event.job in state.removing:
        _removed(state, event)
        return
    job = state.jobs[event.job]
    job.recording = False
    if event.problem is None:
        state.epochs[job.name] = job.epoch
    if job.amendment is not None:
        _amended(state, job, job.amendment, event.problem)
        return
    match job.phase:
        case Phase.RECORDING:
            _begun(state, job, event.problem)
        case Phase.ENDING:
            job.move(Phase.ENDED)
            job.recorded_end = event.problem is None
            state.out.append(do.Notify(job=job.name))
            _forget_old(state)
        case Phase.ENDED:
            job.recorded_end = event.problem is None
        case _:
            raise AssertionError(f"{job.name} records nothing while it is {job.phase}")


def _begun(state: State, job: Job, problem: str | None) -> None:
    """The submission is durable; or it is not, and there is no job (an earlier coordinator's is
    tried again)."""
    callers = job.callers
    if problem is not None:
        if not job.resumed:
            del state.jobs[job.name]
            if job.earlier is not None:
                state.jobs[job.name] = job.earlier
            reason = f"the job cannot be recorded: {problem}"
            for caller in callers:
                state.refuse(caller, Refusal.FULL, reason)
        return
    job.earlier, job.callers = None, []
    for caller in callers:
        state.accept(caller, job.name)
    job.move(Phase.OPENING)
    state.out.append(do.Open(job=job.name))


def _amended(state: State, job: Job, amendment: Amendment, problem: str | None) -> None:
    job.amendment = None
    if problem is not None:
        reason = f"the change cannot be recorded: {problem}"
        state.refuse(amendment.caller, Refusal.FULL, reason)
    else:
        job.submission, job.epoch = amendment.submission, amendment.epoch
        state.epochs[job.name] = job.epoch
        state.accept(amendment.caller, job.name)
        if job.phase is Phase.RUNNING:
            submission = job.submission
            state.out.append(do.Amend(job=job.name, epoch=job.epoch, submission=submission))
    if job.phase is Phase.ENDING:
        record(state, job)


def _removed(state: State, event: ev.Recorded) -> None:
    """The record is gone but for the epoch; the files follow."""
    if event.problem is None:
        state.jobs.pop(event.job, None)
        state.out.append(do.RemoveFiles(job=event.job))
    else:
        end_removal(state, event)


def end_removal(state: State, event: ev.Recorded | ev.FilesRemoved) -> None:
    """The files are gone, or could not be removed."""
    caller = state.removing.pop(event.job)
    if event.problem is None:
        state.accept(caller, event.job)
    else:
        reason = f"job {event.job} cannot be removed: {event.problem}"
        state.refuse(caller, Refusal.FULL, reason)


def _forget_old(state: State) -> None:
    """Keep the newest ended jobs, and as many epochs of those that are gone."""
    ended = [job for job in state.jobs.values() if job.has_ended and job.name not in state.removing]
    for job in ended[: -state.shown_ended]:
        if job.recorded_end and not job.recording:
            del state.jobs[job.name]
    gone = [name for name in state.epochs if name not in state.jobs and name not in state.removing]
    for name in gone[: -state.shown_ended]:
        state.forgotten = max(state.forgotten, state.epochs.pop(name))
        state.out.append(do.Forget(job=name))


def elapsed(state: State, event: ev.Elapsed) -> None:
    """Record the statistics that have changed, and try records again that failed."""
    for job in list(state.jobs.values()):
        tally = event.tallies.get(job.name)
        if job.phase is Phase.RUNNING and tally is not None and tally != job.run:
            job.run = tally
            state.out.append(do.RecordTally(job=job.name, tally=job.tally))
        failed = job.phase is Phase.RECORDING or (job.has_ended and not job.recorded_end)
        if failed and not job.recording and job.name not in state.removing:
            record(state, job)
