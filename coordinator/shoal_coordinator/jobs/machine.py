"""The jobs' state machine: one event in, the effects that follow out.

    effects = step(state, event)

A job begins when its submission is durable, and has ended when its end is. In between, each phase
waits for one answer; the table says which, and what follows:

    phase        waits for    then
    ------------ ------------ ---------------------------------------------------------------------
    RECORDING    Recorded     OPENING     Accept, Open
    OPENING      Opened       RUNNING     Dispatch;     CLOSING if it was cancelled meanwhile
                 OpenFailed   ENDING      Record
    RUNNING      WorkEnded    COMPLETING  Close(complete) if every item has ended
                              CLOSING     Close           otherwise (cancelled, deadline, no device)
                 a stop       WITHDRAWING Withdraw
    WITHDRAWING  WorkEnded    as RUNNING  (the last item may have ended before the stop came)
    COMPLETING   Closed       ENDING      Record
    CLOSING      Closed       ENDING      Record
    ENDING       Recorded     ENDED       Notify
    ENDED        -            a new submission of the name begins another life, and so does a retry
                              of a job that is not complete; a removal forgets it

A *stop* is a user's cancellation, or what fails the job: an error inside the coordinator (`Broke`),
or outputs that take no more results (`ResultsUnwritable`). Requests about one name are served one
at a time, in their order; they wait while a record is being written, and while the job is stopping:
a submission after a cancellation begins the next life, one before it is cancelled as well. A
submission of the same work amends a job that is OPENING or RUNNING: the new terms are recorded,
then dispatched (`Amend`). So does the end of following: it is one of the terms, and a later
submission without it does not take it back. A request for nothing but the end begins no other life.
One that completes is only joined: nothing is left to dispatch, and to dispatch it would start the
job again. A retry waits for its end; one of a job that takes inputs as they come amends it, and
what failed is tried again in the same run.

Invariants, which the simulation checks at every step:

- A life has one end; the end is durable before ENDED, or its record is tried again until it is.
- Between `Open` and `Closed` a job has one run, dispatched at most once, amended while RUNNING.
- No effect names a job that is gone. Each caller receives exactly one answer.
- A job that follows its inputs completes only when its end is one of its terms, on the disk.
- Statistics add up over runs and lives, as long as the results exist.

The parts: `requests` (what clients ask), `records` (what is durable), and here a run's own course.
"""

from dataclasses import replace
from typing import assert_never

from shoal_coordinator.jobs import effects as do
from shoal_coordinator.jobs import events as ev
from shoal_coordinator.jobs.records import elapsed, end_removal, found, record, recorded
from shoal_coordinator.jobs.requests import cancel, enqueue, serve_requests, stop
from shoal_coordinator.jobs.state import Job, Phase, State
from shoal_coordinator.jobs.values import NOTHING, End, Outcome

__all__ = ["State", "step"]


def step(state: State, event: ev.Event) -> tuple[do.Effect, ...]:
    """Take one event; the state is changed in place."""
    _apply(state, event)
    if not isinstance(event, ev.Elapsed):
        serve_requests(state, event.job)
    out = tuple(state.out)
    state.out.clear()
    return out


def _apply(state: State, event: ev.Event) -> None:
    match event:
        case ev.Elapsed():
            elapsed(state, event)
        case ev.Found():
            found(state, event)
        case ev.Submitted() | ev.RemovalRequested() | ev.EndRequested() | ev.RetryRequested():
            enqueue(state, event)
        case ev.CancelRequested():
            cancel(state, event)
        case ev.Recorded():
            recorded(state, event)
        case ev.FilesRemoved():
            end_removal(state, event)
        case ev.Broke():
            message = f"the coordinator failed while it processed this job: {event.message}"
            _fail(state, event.job, _failed("CoordinatorFailed", message))
        case ev.ResultsUnwritable():
            _fail(state, event.job, _failed("ResultsUnwritten", event.message))
        case ev.Opened() | ev.OpenFailed() | ev.WorkEnded() | ev.Closed():
            _advance(state, state.jobs[event.job], event)
        case _:
            assert_never(event)


def _fail(state: State, name: str, end: End) -> None:
    if (job := state.jobs.get(name)) is not None:
        stop(state, job, end)


def _advance(
    state: State, job: Job, event: ev.Opened | ev.OpenFailed | ev.WorkEnded | ev.Closed
) -> None:
    match event:
        case ev.Opened():
            _opened(state, job, event)
        case ev.OpenFailed():
            _end(state, job, job.stop or event.end)
        case ev.WorkEnded():
            _work_ended(state, job, event)
        case ev.Closed():
            _closed(state, job, event)
        case _:
            assert_never(event)


def _opened(state: State, job: Job, event: ev.Opened) -> None:
    if job.after_completion and event.completed < event.items:
        job.past = NOTHING  # the results are gone: the work is done anew
    if job.stop is None:
        job.move(Phase.RUNNING)
        submission = job.submission
        state.out.append(do.Dispatch(job=job.name, epoch=job.epoch, submission=submission))
        state.out.append(do.Notify(job=job.name))
    else:
        job.end = job.stop
        job.move(Phase.CLOSING)
        state.out.append(do.Close(job=job.name, complete=False))


def _work_ended(state: State, job: Job, event: ev.WorkEnded) -> None:
    job.run = event.tally
    job.end = event.end
    broke = job.stop is not None and job.stop.outcome is Outcome.FAILED
    complete = event.whole and not broke
    if complete:
        job.stop = None  # a cancellation that came too late
    job.move(Phase.COMPLETING if complete else Phase.CLOSING)
    state.out.append(do.Close(job=job.name, complete=complete))


def _closed(state: State, job: Job, event: ev.Closed) -> None:
    assert job.end is not None, "it was decided when the run began to close"
    job.run = replace(job.run, stored=event.stored)
    end = job.end
    if event.problem is not None and job.phase is Phase.COMPLETING:
        end = _failed("ResultsUnwritten", event.problem)
    _end(state, job, job.stop or end)


def _end(state: State, job: Job, end: End) -> None:
    job.end = end
    job.move(Phase.ENDING)
    if not job.recording:  # otherwise when the amendment is recorded
        record(state, job)


def _failed(reason: str, message: str) -> End:
    return End(outcome=Outcome.FAILED, reason=reason, message=message)
