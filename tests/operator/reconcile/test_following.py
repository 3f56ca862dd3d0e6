"""A job that follows its inputs: what is copied while it runs, and how it ends."""

from dataclasses import replace
from typing import Any

from reconcile.rules import decide, name_of
from reconcile.test_inference_job import (
    LATER,
    job,
    knows,
    planned,
    run,
    status_of,
    works,
    written,
)
from reconcile.values import NOW, SETTINGS, condition, word
from shoal_api.kinds.inference_job import Retry
from shoal_operator.reconcile.decision import CancelJob, Decision, SubmitJob, Terms
from shoal_operator.reconcile.snapshot import InferenceJobSnapshot, RunState, Worker, WorkerPhase
from shoal_operator.reconcile.workers import input_follower, result_follower, worker_job

FOLLOWED: dict[str, Any] = {"inputs": {"uri": "pvc://lines/in", "follow": True}}
FOLLOWING = planned(**FOLLOWED)
ENDING = planned(**FOLLOWED, end=True)
INPUTS, RESULTS = "ocr-aabbccdd-follow-inputs", "ocr-aabbccdd-follow-results"
LAST_INPUTS = "ocr-aabbccdd-transfer-inputs"


def jobs_of(decision: Decision) -> set[str]:
    return {name_of(child) for child in decision.children if child["kind"] == "Job"}


def copied_by(
    snapshot: InferenceJobSnapshot, *names: str, phase: WorkerPhase = WorkerPhase.RUNNING
) -> InferenceJobSnapshot:
    workers = tuple(Worker(name=name, phase=phase, message="", ended_at=NOW) for name in names)
    return replace(snapshot, workers=(*snapshot.workers, *workers))


def removed(decision: Decision) -> set[str]:
    return {key.name for key in decision.removals}


def test_it_is_submitted_without_waiting_for_any_input() -> None:
    decision = decide(FOLLOWING)
    (call,) = decision.calls
    assert isinstance(call, SubmitJob)
    assert (call.follow, call.terms.end) == (True, False)
    assert jobs_of(decision) == set()


def test_while_it_runs_one_worker_copies_inputs_and_another_results() -> None:
    running = knows(FOLLOWING, run(RunState.RUNNING, succeeded=8, following=True))
    assert jobs_of(decide(running)) == {INPUTS, RESULTS}
    assert jobs_of(decide(copied_by(running, INPUTS, RESULTS))) == set()
    failed = decide(copied_by(running, INPUTS, phase=WorkerPhase.FAILED))
    assert "CopyingFailed" in [note.reason for note in failed.notes]
    for follower in (input_follower, result_follower):
        manifest: Any = worker_job(FOLLOWING.job, follower(FOLLOWING.job, "shelf"), SETTINGS)
        assert "activeDeadlineSeconds" not in manifest["spec"], "it works for weeks"
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        assert "--follow" in container["command"] + container.get("args", [])


def test_its_status_says_that_more_is_waited_for() -> None:
    waiting = run(RunState.RUNNING, succeeded=24, active=0, following=True)
    decision = decide(knows(FOLLOWING, waiting))
    assert condition(decision.status, "Complete").message == "24 items succeeded, waiting for more"
    columns = status_of(decision).columns
    assert columns is not None
    assert (columns.items, columns.status) == ("24/24+", "Running")


def test_its_status_says_why_nothing_is_copied() -> None:
    waiting = knows(FOLLOWING, run(RunState.RUNNING, succeeded=24, active=0, following=True))
    said = "24 items succeeded, waiting for more"

    def told(snapshot: InferenceJobSnapshot) -> str:
        return condition(decide(snapshot).status, "Complete").message

    full = "pod in-7: Unschedulable: 0/3 nodes are available: 3 Insufficient memory"
    inputs = Worker(name=INPUTS, phase=WorkerPhase.PENDING, message=full)
    results = Worker(name=RESULTS, phase=WorkerPhase.FAILED, message="the claim is full")
    held_up = replace(waiting, workers=(*waiting.workers, inputs, results))
    whole = f"{said}; inputs are not copied: {full}; results are not copied: the claim is full"
    assert told(held_up) == whole
    assert told(copied_by(waiting, INPUTS, RESULTS)) == said
    last = replace(inputs, name=LAST_INPUTS)
    ending = knows(ENDING, run(RunState.RUNNING, succeeded=24, active=0, following=True))
    assert f"inputs are not copied: {full}" in told(replace(ending, workers=(last,)))


def test_the_end_is_submitted_when_what_has_come_is_transferred() -> None:
    running = knows(ENDING, run(RunState.RUNNING, succeeded=8, following=True))
    first = decide(copied_by(running, INPUTS, RESULTS))
    assert (removed(first), jobs_of(first), first.calls) == ({INPUTS}, set(), ())
    second = decide(copied_by(running, RESULTS))
    assert (jobs_of(second), second.calls) == ({LAST_INPUTS}, ())
    third = decide(works(copied_by(running, RESULTS), "in", WorkerPhase.RUNNING))
    assert third.calls == ()
    (call,) = decide(works(copied_by(running, RESULTS), "in", WorkerPhase.SUCCEEDED)).calls
    assert isinstance(call, SubmitJob)
    assert (call.follow, call.terms.end) == (True, True)


def test_a_job_whose_last_inputs_cannot_be_transferred_says_so_and_finishes_what_has_come() -> None:
    running = knows(ENDING, run(RunState.RUNNING, succeeded=8, following=True))
    lacking = works(copied_by(running, RESULTS), "in", WorkerPhase.FAILED, "no such bucket")
    decision = decide(lacking)
    assert (decision.calls, removed(decision), jobs_of(decision)) == ((), set(), set())
    complete = condition(decision.status, "Complete")
    assert (complete.status, complete.reason) == ("False", "Running")
    assert complete.message == (
        "8 of 24 items succeeded, 2 are active; inputs could not be transferred: no such bucket"
    )
    assert word(decision.status, "Failed") == "False NotFailed"


def test_it_fails_when_nothing_is_left_to_finish_and_can_be_retried() -> None:
    came = knows(ENDING, run(RunState.RUNNING, succeeded=24, active=0, following=True))
    lacking = works(copied_by(came, RESULTS), "in", WorkerPhase.FAILED, "no such bucket")
    stopping = decide(lacking)
    assert [type(call) for call in stopping.calls] == [CancelJob]
    assert removed(stopping) == {RESULTS}
    stopped = run(RunState.CANCELLED, succeeded=24)
    gone = replace(lacking, workers=())  # the worker that failed is no longer needed as a record
    transferring = decide(written(knows(gone, stopped), stopping))
    assert jobs_of(transferring) == {"ocr-aabbccdd-transfer-results"}
    done = works(written(knows(lacking, stopped), transferring), "out", WorkerPhase.SUCCEEDED)
    ended = decide(replace(done, workers=done.workers[1:]))
    assert word(ended.status, "Failed") == "True InputTransferFailed"
    assert condition(ended.status, "Failed").message == "no such bucket"
    assert ended.calls == (), "its run stays for a retry"

    failed = written(done, ended)
    spec = replace(failed.job.spec, retry=Retry(number=1))
    wanted = replace(failed, job=replace(failed.job, spec=spec), now=LATER)
    first = decide(wanted)
    assert removed(first) == {LAST_INPUTS}
    retried = replace(written(wanted, first), workers=())
    (call,) = decide(retried).calls
    assert isinstance(call, SubmitJob)
    assert (call.retry, call.terms.end) == (1, False)
    again = run(RunState.RUNNING, succeeded=24, active=0, following=True, retry=1)
    assert LAST_INPUTS in jobs_of(decide(knows(retried, again)))
    (call,) = decide(works(knows(retried, again), "in", WorkerPhase.SUCCEEDED)).calls
    assert isinstance(call, SubmitJob)
    assert call.terms.end


def test_it_is_suspended_as_any_job_is() -> None:
    suspended = replace(ENDING, job=job(**FOLLOWED, end=True, suspend=True))
    came = knows(suspended, run(RunState.RUNNING, succeeded=24, active=0, following=True))
    decision = decide(works(came, "in", WorkerPhase.FAILED, "no such bucket"))
    assert word(decision.status, "Complete") == "False Suspended"


def test_an_end_that_the_coordinator_has_is_not_submitted_again() -> None:
    """Not when the worker that transferred the last inputs is gone, either."""
    ending = run(RunState.RUNNING, succeeded=8, following=True, terms=Terms(end=True))
    decision = decide(knows(ENDING, ending))
    assert (decision.calls, jobs_of(decision)) == ((), {RESULTS})


def test_a_job_that_is_to_end_before_it_began_transfers_what_is_there() -> None:
    assert jobs_of(decide(ENDING)) == {LAST_INPUTS}
    (call,) = decide(works(ENDING, "in", WorkerPhase.SUCCEEDED)).calls
    assert isinstance(call, SubmitJob)
    assert (call.follow, call.terms.end) == (True, True)


def test_a_retry_of_a_job_that_runs_is_submitted_until_the_coordinator_has_it() -> None:
    running = knows(FOLLOWING, run(RunState.RUNNING, succeeded=8, failed=1, following=True))
    spec = replace(running.job.spec, retry=Retry(number=1, items=(3,)))
    wanted = copied_by(replace(running, job=replace(running.job, spec=spec)), INPUTS, RESULTS)
    decision = decide(wanted)
    (call,) = decision.calls
    assert isinstance(call, SubmitJob)
    assert (call.retry, call.retried_items) == (1, (3,))
    assert word(decision.status, "Complete") == "False Running"
    begun = written(wanted, decision)
    assert decide(begun).calls == decision.calls, "a call that was lost is made once more"
    taken = run(RunState.RUNNING, succeeded=8, following=True)
    assert decide(knows(begun, replace(taken, retry=1))).calls == ()


def test_a_job_that_takes_no_more_is_retried_when_it_has_failed() -> None:
    ending = run(RunState.RUNNING, succeeded=8, failed=1, following=True, terms=Terms(end=True))
    running = knows(ENDING, ending)
    spec = replace(running.job.spec, retry=Retry(number=1))
    decision = decide(copied_by(replace(running, job=replace(running.job, spec=spec)), RESULTS))
    assert decision.calls == ()
    assert status_of(decision).retry is None


def test_results_are_transferred_once_more_at_the_end() -> None:
    complete = run(RunState.COMPLETE, succeeded=24, terms=Terms(end=True))
    ended = knows(ENDING, complete)
    stopping = decide(copied_by(ended, RESULTS))
    assert (removed(stopping), jobs_of(stopping), stopping.calls) == ({RESULTS}, set(), ())
    last = decide(written(ended, stopping))
    assert jobs_of(last) == {"ocr-aabbccdd-transfer-results"}
    done = decide(works(written(ended, last), "out", WorkerPhase.SUCCEEDED))
    assert word(done.status, "Complete") == "True AllItemsSucceeded"


def test_a_run_that_was_lost_is_copied_to_anew() -> None:
    seen = written(FOLLOWING, decide(knows(FOLLOWING, run(RunState.RUNNING, succeeded=8))))
    decision = decide(copied_by(seen, INPUTS))
    assert word(decision.status, "Complete") == "False RunLost"
    assert removed(decision) == {INPUTS}
    (call,) = decide(seen).calls
    assert isinstance(call, SubmitJob)


def test_nothing_is_copied_for_a_job_that_is_suspended() -> None:
    suspended = replace(FOLLOWING, job=job(**FOLLOWED, suspend=True))
    known = knows(suspended, run(RunState.CANCELLED, succeeded=8))
    assert removed(decide(copied_by(known, INPUTS, RESULTS))) == {INPUTS, RESULTS}


def test_a_web_address_is_not_followed() -> None:
    address = {"uri": "https://camera.example.com/frame.npz", "follow": True}
    decision = decide(replace(FOLLOWING, job=job(inputs=address)))
    assert word(decision.status, "Failed") == "True UnsuitableAddress"
    message = condition(decision.status, "Failed").message
    assert "is one file; what is followed is a folder" in message
