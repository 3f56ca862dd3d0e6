"""What clients ask: submissions, cancellations, removals, served one at a time for each name."""

from collections import deque
from dataclasses import replace
from typing import assert_never

from shoal_coordinator.jobs import effects as do
from shoal_coordinator.jobs import events as ev
from shoal_coordinator.jobs.records import record
from shoal_coordinator.jobs.state import Amendment, Job, Phase, State
from shoal_coordinator.jobs.values import End, Outcome, Refusal, Retry


def enqueue(state: State, request: ev.Request) -> None:
    """Let a request wait for its turn. To remove a job that has not ended is refused at once, and
    to retry an active one, unless it follows its inputs; a retry waits for a job that ends just
    now."""
    job = state.jobs.get(request.job)
    match request:
        case ev.RemovalRequested() if job is not None and not job.has_ended:
            _removal_requested(state, request)
        case ev.RetryRequested() if job is not None and _is_active(job):
            if job.submission.takes_more:
                state.requests.setdefault(request.job, deque()).append(request)
            else:
                _refuse_to_retry(state, request)
        case _:
            state.requests.setdefault(request.job, deque()).append(request)


def serve_requests(state: State, name: str) -> None:
    waiting = state.requests.get(name, deque())
    while request := next((each for each in waiting if _may_serve(state, each)), None):
        waiting.remove(request)
        match request:
            case ev.Submitted():
                _submitted(state, request)
            case ev.RemovalRequested():
                _removal_requested(state, request)
            case ev.EndRequested():
                _end_requested(state, request)
            case ev.RetryRequested():
                _retry_requested(state, request)
            case _:
                assert_never(request)
    if not waiting:
        state.requests.pop(name, None)


def _may_serve(state: State, request: ev.Request) -> bool:
    job = state.jobs.get(request.job)
    if request.job in state.removing:
        return False
    if job is None:
        return True
    if job.completes:
        return not isinstance(request, ev.RetryRequested)
    active = _is_active(job) and job.phase is not Phase.RECORDING
    return not job.recording and (job.has_ended or active)


def _is_active(job: Job) -> bool:
    """Whether a job is to run, or runs, and nothing has stopped it."""
    return job.phase in {Phase.RECORDING, Phase.OPENING, Phase.RUNNING} and job.stop is None


def _submitted(state: State, request: ev.Submitted) -> None:
    job = state.jobs.get(request.job)
    if job is None or job.has_ended:
        _begin(state, request, job)
        return
    wanted = job.submission.amended_by(request.submission)
    moves = wanted.plan.stages != job.submission.plan.stages
    if job.submission.work != request.submission.work:
        _refuse_other_work(state, request, job)
    elif wanted == job.submission or job.completes:
        job.submission = wanted
        state.accept(request.caller, job.name)
    elif moves and request.missing:
        state.refuse(request.caller, Refusal.LACKING, request.missing)
    else:
        # Devices may know of a higher epoch than the plan's: each restart has one of its own.
        epoch = max(wanted.plan.number, job.epoch + 1) if moves else job.epoch
        job.amendment = Amendment(request.caller, wanted, epoch)
        record(state, job)


def _begin(state: State, request: ev.Submitted, known: Job | None) -> None:
    """A new life; its epoch is above all that devices may have heard of."""
    if request.missing:
        state.refuse(request.caller, Refusal.LACKING, request.missing)
        return
    if sum(not job.has_ended for job in state.jobs.values()) >= state.maximum_jobs:
        state.refuse(request.caller, Refusal.FULL, f"{state.maximum_jobs} jobs run already")
        return
    name, submission = request.job, request.submission
    job = Job(
        name=name,
        epoch=max(submission.plan.number, state.epochs.get(name, state.forgotten) + 1),
        submission=submission,
        submitted_seconds=request.at_seconds,
        callers=[request.caller],
        earlier=known,
    )
    if known is not None and submission.continues(known.submission):
        same_stages = submission.work == known.submission.work
        job.past = known.tally if same_stages else replace(known.tally, finished=())
        job.after_completion = known.end is not None and known.end.outcome is Outcome.COMPLETE
    state.jobs.pop(name, None)
    state.jobs[name] = job
    record(state, job)


def _end_requested(state: State, request: ev.EndRequested) -> None:
    """End the following of a job that runs; one that has ended meanwhile stays as it is."""
    job = state.jobs.get(request.job)
    if job is None:
        state.refuse(request.caller, Refusal.UNKNOWN, f"there is no job {request.job} here")
    elif job.has_ended:
        state.accept(request.caller, job.name)
    else:
        terms = replace(job.submission.terms, end=True)
        ending = ev.Submitted(
            job=job.name,
            caller=request.caller,
            at_seconds=job.submitted_seconds,
            submission=replace(job.submission, terms=terms),
        )
        _submitted(state, ending)


def _retry_requested(state: State, request: ev.RetryRequested) -> None:
    """Submit a job that has ended once more, as it was submitted last, for its next run. One that
    follows its inputs takes failed files again while it runs."""
    job = state.jobs.get(request.job)
    if job is None:
        state.refuse(request.caller, Refusal.UNKNOWN, f"there is no job {request.job} here")
    elif not job.has_ended and job.submission.takes_more:
        retry = Retry(number=job.submission.retry.number + 1, items=request.items)
        wanted = replace(job.submission, retry=retry)
        job.amendment = Amendment(request.caller, wanted, job.epoch)
        record(state, job)
    elif not job.has_ended:
        _refuse_to_retry(state, request)
    elif job.end is not None and job.end.outcome is Outcome.COMPLETE:
        reason = f"job {job.name} is complete: no item of it has failed"
        state.refuse(request.caller, Refusal.COMPLETE, reason)
    else:
        retry = Retry(number=job.submission.retry.number + 1, items=request.items)
        again = ev.Submitted(
            job=job.name,
            caller=request.caller,
            at_seconds=request.at_seconds,
            submission=replace(job.submission, retry=retry),
            missing=request.missing,
        )
        _begin(state, again, job)


def _refuse_to_retry(state: State, request: ev.RetryRequested) -> None:
    reason = f"job {request.job} runs; what failed can be tried again when it has ended"
    state.refuse(request.caller, Refusal.RUNS, reason)


def _removal_requested(state: State, request: ev.RemovalRequested) -> None:
    """The record goes first, so that no record ever speaks of files that are gone."""
    name = request.job
    job = state.jobs.get(name)
    if job is not None and not job.has_ended:
        state.refuse(request.caller, Refusal.RUNS, f"job {name} runs; cancel it first")
        return
    state.removing[name] = request.caller
    if name in state.epochs:
        state.out.append(do.Record(job=name, epoch=state.epochs[name]))
    else:
        state.out.append(do.RemoveFiles(job=name))


def _refuse_other_work(state: State, request: ev.Submitted, job: Job) -> None:
    """A run goes on as it began. When it was cancelled, it may go on in another way to the same
    results, such as with other fragments."""
    reason = (
        f"job {request.job} runs already, with another content; "
        f"wait for it, cancel it, or choose another name"
    )
    same_results = request.submission.continues(job.submission)
    refusal = Refusal.OTHER_WAY if same_results else Refusal.KNOWN
    state.refuse(request.caller, refusal, reason)


def cancel(state: State, event: ev.CancelRequested) -> None:
    """End the job, and whatever waits for its turn but removals: it came before."""
    job = state.jobs.get(event.job)
    if job is None:
        return
    for request in state.requests.pop(event.job, ()):
        match request:
            case ev.Submitted() if request.submission.work != job.submission.work:
                _refuse_other_work(state, request, job)
            case ev.RemovalRequested():
                state.requests.setdefault(event.job, deque()).append(request)
            case _ if job.phase is Phase.RECORDING:
                job.callers.append(request.caller)
            case _:
                state.accept(request.caller, job.name)
    reason = event.reason[:1000] or "cancelled"
    stop(state, job, End(outcome=Outcome.CANCELLED, reason="Cancelled", message=reason))


def stop(state: State, job: Job, end: End) -> None:
    """Have a job end like this, unless it has ended or ends already; an error overrides a user's
    wish, and the completion of results."""
    broke = end.outcome is Outcome.FAILED
    match job.phase:
        case Phase.RECORDING | Phase.OPENING:
            job.stop = end if broke else job.stop or end
        case Phase.RUNNING:
            job.stop = end
            job.move(Phase.WITHDRAWING)
            state.out.append(do.Withdraw(job=job.name, reason=end.message))
        case Phase.WITHDRAWING | Phase.COMPLETING | Phase.CLOSING:
            job.stop = end if broke else job.stop
        case Phase.ENDING | Phase.ENDED:
            pass
        case _:
            assert_never(job.phase)
