"""An InferenceJob has the semantics of `batch/v1` Job."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from reconcile.rules import decide, name_of
from reconcile.simulation import Cluster, started
from reconcile.values import MIB, NOW, SETTINGS, condition, make, word
from shoal_api.kinds import InferenceJob, Partition
from shoal_api.kinds.inference_job import InferenceJobStatus
from shoal_operator.reconcile.decision import CancelJob, Decision, RemoveJob, SubmitJob, Terms
from shoal_operator.reconcile.names import job_id
from shoal_operator.reconcile.snapshot import (
    CoordinatorView,
    InferenceJobSnapshot,
    Refusal,
    Run,
    RunState,
    Unreachable,
    Worker,
    WorkerPhase,
)
from shoal_operator.reconcile.times import instant
from shoal_operator.reconcile.workers import (
    input_transfer_worker,
    result_transfer_worker,
    worker_job,
)
from shoal_protocol.units import Bytes

LATER = "2026-03-01T12:20:00Z"
SPEC = {
    "modelRef": {"name": "rec"},
    "poolRef": {"name": "shelf"},
    "inputs": {"uri": "pvc://lines/in"},
    "outputs": {"uri": "pvc://lines/out"},
}


def job(generation: int = 1, **more: object) -> InferenceJob:
    uid = "aabbccdd-0000-4000-8000-000000000000"
    return make(InferenceJob, "ocr", {**SPEC, **more}, uid=uid, generation=generation)


def planned(**more: Any) -> InferenceJobSnapshot:
    """A job whose model, partition and placement are ready, fragments in the store."""
    cluster = started(Random(1), jobs=0, failures=0.0)  # noqa: S311
    cluster.jobs["ocr"] = job(**more)
    while not cluster.placements or not cluster.fragments:
        _look(cluster)
    return replace(cluster.see_job(cluster.jobs["ocr"]), job=job(**more), workers=(), now=NOW)


def _look(cluster: Cluster) -> None:
    for snapshot in cluster.snapshots():
        cluster.reconcile(snapshot)
    cluster.pass_time(1)


PLANNED = planned()


def run(state: RunState, succeeded: int = 0, failed: int = 0, **more: object) -> Run:
    base = Run(
        job=job_id(job()),
        state=state,
        message="",
        plan=1,
        terms=Terms(),
        items=24,
        active=2 if state is RunState.RUNNING else 0,
        succeeded=succeeded,
        failed=failed,
        seconds=4.0 if succeeded + failed else 0.0,
        items_per_second=succeeded / 4,
        latency_p50_seconds=0.2,
        tier_hits=(1, 2, 3, 4),
        failures=tuple((item, f"{item:02}.npz", "no such shape") for item in range(failed)),
        started_seconds=instant(NOW) - 4 if succeeded + failed else 0.0,
    )
    return replace(base, **more)  # type: ignore[arg-type]


def knows(snapshot: InferenceJobSnapshot, *runs: Run) -> InferenceJobSnapshot:
    """The coordinator knows these runs and no others."""
    assert isinstance(snapshot.view, CoordinatorView)
    return replace(snapshot, view=replace(snapshot.view, runs={each.job: each for each in runs}))


def silent(snapshot: InferenceJobSnapshot) -> InferenceJobSnapshot:
    return replace(snapshot, view=Unreachable(reason="connection refused"))


def works(
    snapshot: InferenceJobSnapshot, which: str, phase: WorkerPhase, message: str = ""
) -> InferenceJobSnapshot:
    """A worker is in this phase."""
    worker_spec = {"in": input_transfer_worker, "out": result_transfer_worker}[which](
        snapshot.job, "shelf"
    )
    others = tuple(worker for worker in snapshot.workers if worker.name != worker_spec.name)
    worker = Worker(name=worker_spec.name, phase=phase, message=message, ended_at=NOW)
    return replace(snapshot, workers=(*others, worker))


def written(snapshot: InferenceJobSnapshot, decision: Decision) -> InferenceJobSnapshot:
    assert isinstance(decision.status, InferenceJobStatus)
    return replace(snapshot, job=replace(snapshot.job, status=decision.status))


def status_of(decision: Decision) -> InferenceJobStatus:
    assert isinstance(decision.status, InferenceJobStatus)
    return decision.status


def kinds(decision: Decision) -> list[str]:
    return [str(child["kind"]) for child in decision.children]


def test_each_worker_gets_the_secret_of_the_place_that_it_opens() -> None:
    places = {
        "inputs": {"uri": "s3://lines/in", "secretRef": {"name": "bucket"}},
        "outputs": {"uri": "https://results.example.com/ocr", "secretRef": {"name": "web"}},
    }
    wanted = planned(**places).job
    transferred = (input_transfer_worker(wanted, "shelf"), result_transfer_worker(wanted, "shelf"))
    assert [worker_spec.secret for worker_spec in transferred] == ["bucket", "web"]
    manifest: Any = worker_job(wanted, transferred[0], SETTINGS)
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "bucket"}}]
    assert input_transfer_worker(job(), "shelf").secret is None


def test_inputs_are_carried_in_before_the_job_is_submitted() -> None:
    decision = decide(PLANNED)
    assert kinds(decision) == ["Partition", "Placement", "Job"]
    assert name_of(decision.children[-1]) == "ocr-aabbccdd-transfer-inputs"
    assert decision.calls == ()
    assert word(decision.status, "Planned") == "True Planned"
    waiting = decide(works(PLANNED, "in", WorkerPhase.PENDING, "0/3 nodes are available"))
    assert word(waiting.status, "Complete") == "False TransferringInputs"
    assert condition(waiting.status, "Complete").message == "0/3 nodes are available"
    done = decide(works(PLANNED, "in", WorkerPhase.SUCCEEDED))
    (call,) = done.calls
    assert isinstance(call, SubmitJob)
    assert (call.job, call.plan, len(call.stages)) == ("ocr-aabbccdd", 1, 3)
    assert PLANNED.placement is not None
    assert PLANNED.placement.status is not None
    for stage in PLANNED.placement.status.stages:
        parts = [call.predicted_seconds[index] for index in stage.fragments]
        assert [sum(each) for each in zip(*parts, strict=True)] == pytest.approx(
            stage.device_seconds
        )
    other = planned(transferPrecision="Half", batching={"maxItems": 8})
    more = decide(works(other, "in", WorkerPhase.SUCCEEDED)).calls
    assert (call.lossy, call.batch, more) == (False, 0, (replace(call, lossy=True, batch=8),))


def test_counts_are_what_the_coordinator_says() -> None:
    decision = decide(knows(PLANNED, run(RunState.RUNNING, succeeded=8)))
    status = status_of(decision)
    assert status.items is not None
    assert (status.items.total, status.items.succeeded, status.items.active) == (24, 8, 2)
    assert status.start_time == "2026-03-01T11:59:56Z"
    assert status.columns is not None
    assert (status.columns.items, status.columns.status) == ("8/24", "Running")
    assert [note.reason for note in decision.notes] == ["StartedJob"]


def test_a_silent_coordinator_is_told_nothing_and_the_counts_stay() -> None:
    before = written(PLANNED, first := decide(knows(PLANNED, run(RunState.RUNNING, succeeded=8))))
    decision = decide(silent(before))
    assert decision.calls == ()
    assert status_of(decision).items == status_of(first).items
    assert word(decision.status, "Complete") == "False CoordinatorUnreachable"
    assert word(decision.status, "Planned") == "True Planned"


def test_results_are_carried_out_before_it_is_complete() -> None:
    ended = knows(PLANNED, run(RunState.COMPLETE, succeeded=24))
    decision = decide(ended)
    assert word(decision.status, "Complete") == "False TransferringResults"
    assert name_of(decision.children[0]) == "ocr-aabbccdd-transfer-results"
    done = decide(works(written(ended, decision), "out", WorkerPhase.SUCCEEDED))
    assert word(done.status, "Complete") == "True AllItemsSucceeded"
    assert condition(done.status, "Complete").message == "24 items in 4 s; 6/s"
    assert status_of(done).completion_time is not None
    assert done.calls == (RemoveJob(pool="shelf", job="ocr-aabbccdd"),)
    assert [note.reason for note in done.notes] == ["FinishedJob"]


def test_the_verdict_stands_even_if_the_coordinator_goes_away_meanwhile() -> None:
    ended = knows(PLANNED, run(RunState.FAILED, succeeded=21, failed=3, reason="ItemsFailed"))
    before = works(written(ended, decide(ended)), "out", WorkerPhase.RUNNING)
    assert word(decide(silent(before)).status, "Complete") == "False TransferringResults"
    decision = decide(silent(works(before, "out", WorkerPhase.SUCCEEDED)))
    assert word(decision.status, "Failed") == "True ItemsFailed"
    text = "3 of 24 items failed; first: 00.npz: no such shape"
    assert condition(decision.status, "Failed").message == text
    assert decision.calls == ()


def test_a_failure_that_names_its_item_is_not_named_twice() -> None:
    failure = (2, "02.npz[0]", "02.npz[0]: has 48 where axis 1 is 3 in x")
    failed = run(RunState.FAILED, succeeded=23, failed=1, failures=(failure,))
    ended = knows(PLANNED, replace(failed, reason="ItemsFailed"))
    decision = decide(works(written(ended, decide(ended)), "out", WorkerPhase.SUCCEEDED))
    text = "1 of 24 items failed; first: 02.npz[0]: has 48 where axis 1 is 3 in x"
    assert condition(decision.status, "Failed").message == text


def test_results_that_cannot_be_carried_out_stay_until_the_job_is_deleted() -> None:
    ended = knows(PLANNED, run(RunState.COMPLETE, succeeded=24))
    failed = works(written(ended, decide(ended)), "out", WorkerPhase.FAILED, "claim is full")
    decision = decide(failed)
    assert word(decision.status, "Failed") == "True ResultTransferFailed"
    assert "jobs/ocr-aabbccdd/out" in condition(decision.status, "Failed").message
    after = decide(written(failed, decision))
    assert after.calls == ()


def test_a_run_that_failed_before_any_item_has_nothing_to_carry() -> None:
    said = "inputs /var/lib/shoal/jobs/ocr-aabbccdd/in: is empty: it has no .npz or .npy"
    failed = run(RunState.FAILED, reason="FolderRefused", message=said)
    decision = decide(knows(PLANNED, failed))
    assert word(decision.status, "Failed") == "True FolderRefused"
    assert decision.children == ()
    told = condition(decision.status, "Failed").message
    assert told == "inputs pvc://lines/in: is empty: it has no .npz or .npy", "as the user calls it"


@pytest.mark.parametrize("state", [RunState.PENDING, RunState.RUNNING])
def test_the_deadline_stops_the_run_and_carries_out_what_is_finished(state: RunState) -> None:
    limited = replace(PLANNED, job=job(activeDeadlineSeconds=600))
    limited = written(limited, first := decide(limited))
    assert first.requeue_seconds is not None
    late = replace(knows(limited, run(state, succeeded=8)), now=LATER)
    decision = decide(late)
    assert [type(call) for call in decision.calls] == [CancelJob]
    assert word(decision.status, "Complete") == "False Stopping"
    stopped = knows(written(late, decision), run(RunState.CANCELLED, succeeded=8))
    decision = decide(stopped)
    assert kinds(decision) == ["Job"]
    decision = decide(works(written(stopped, decision), "out", WorkerPhase.SUCCEEDED))
    assert word(decision.status, "Failed") == "True DeadlineExceeded"


def test_the_deadline_holds_while_nothing_runs_and_nobody_answers() -> None:
    limited = replace(PLANNED, job=job(activeDeadlineSeconds=600))
    limited = written(limited, decide(silent(limited)))
    decision = decide(replace(silent(limited), now=LATER))
    assert word(decision.status, "Failed") == "True DeadlineExceeded"
    assert decision.calls == ()


def test_what_is_finished_at_the_deadline_waits_for_a_coordinator_that_is_away() -> None:
    limited = knows(
        replace(PLANNED, job=job(activeDeadlineSeconds=600)), run(RunState.RUNNING, succeeded=8)
    )
    late = replace(written(limited, decide(limited)), now=LATER)
    away = silent(late)
    decision = decide(away)
    assert word(decision.status, "Failed") == "False DeadlineExceeded"
    assert word(decision.status, "Complete") == "False TransferringResults"
    back = written(replace(away, view=late.view), decision)
    decision = decide(back)
    assert [type(call) for call in decision.calls] == [CancelJob]
    assert decision.children == (), "nothing is transferred of a run that continues"
    stopped = knows(written(back, decision), run(RunState.CANCELLED, succeeded=11))
    decision = decide(stopped)
    assert kinds(decision) == ["Job"]
    decision = decide(works(written(stopped, decision), "out", WorkerPhase.SUCCEEDED))
    assert word(decision.status, "Failed") == "True DeadlineExceeded"


def test_a_deadline_does_not_count_while_the_job_is_suspended() -> None:
    limited = replace(PLANNED, job=job(activeDeadlineSeconds=600, suspend=True))
    limited = written(limited, decide(limited))
    resumed = replace(job(generation=2, activeDeadlineSeconds=600), status=limited.job.status)
    decision = decide(replace(limited, job=resumed, now=LATER))
    assert word(decision.status, "Failed") == "False NotFailed"
    assert word(decision.status, "Suspended") == "False Resumed"
    assert condition(decision.status, "Suspended").last_transition_time == LATER


def test_a_suspended_job_starts_nothing() -> None:
    decision = decide(replace(PLANNED, job=job(suspend=True)))
    assert (decision.children, decision.calls) == ((), ())
    assert word(decision.status, "Suspended") == "True Suspended"
    assert status_of(decision).columns.status == "Suspended"  # type: ignore[union-attr]


def test_a_run_is_suspended_only_when_it_has_stopped() -> None:
    going = knows(replace(PLANNED, job=job(suspend=True)), run(RunState.RUNNING, succeeded=8))
    decision = decide(going)
    assert decision.calls == (CancelJob(pool="shelf", job="ocr-aabbccdd", reason="suspended"),)
    assert word(decision.status, "Suspended") == "False Suspending"
    stopped = decide(knows(written(going, decision), run(RunState.CANCELLED, succeeded=8)))
    assert word(stopped.status, "Suspended") == "True Suspended"
    resumed = knows(
        replace(PLANNED, job=replace(job(generation=2), status=status_of(stopped))),
        run(RunState.CANCELLED, succeeded=8),
    )
    again = decide(resumed)
    assert [type(call) for call in again.calls] == [SubmitJob]
    assert "Job" not in kinds(again), "its inputs are there"


def test_a_newer_plan_is_given_to_a_run_and_a_refusal_of_it_is_not_asked_again() -> None:
    assert PLANNED.placement is not None
    assert PLANNED.placement.status is not None
    status = replace(PLANNED.placement.status, epoch=2)
    replanned = replace(PLANNED, placement=replace(PLANNED.placement, status=status))
    going = knows(replanned, run(RunState.RUNNING, succeeded=8))
    (call,) = decide(going).calls
    assert isinstance(call, SubmitJob)
    assert call.plan == 2
    refused = replace(going, refusal=Refusal(plan=2, terms=Terms(), message="another content"))
    decision = decide(refused)
    assert decision.calls == ()
    assert word(decision.status, "Complete") == "False Running"
    assert "another content" in condition(decision.status, "Complete").message


@pytest.mark.parametrize(
    ("edit", "terms"),
    [
        ({"priority": 7}, Terms(priority=7)),
        ({"parallelism": 2}, Terms(parallelism=2)),
        ({"activeDeadlineSeconds": 9000}, Terms(active_deadline_seconds=9000.0)),
    ],
)
def test_an_edit_of_a_running_job_reaches_the_coordinator_once(
    edit: dict[str, Any], terms: Terms
) -> None:
    running = run(RunState.RUNNING, succeeded=8)
    edited = knows(replace(PLANNED, job=job(generation=2, **edit)), running)
    (call,) = decide(edited).calls
    assert isinstance(call, SubmitJob)
    assert (call.plan, call.terms) == (1, terms)
    taken = knows(edited, replace(running, terms=terms))
    assert decide(taken).calls == ()
    refused = replace(edited, refusal=Refusal(plan=1, terms=terms, message="busy"))
    assert decide(refused).calls == ()
    other = replace(refused, job=job(generation=3, priority=-1))
    assert [type(call) for call in decide(other).calls] == [SubmitJob]


def test_a_deadline_that_was_raised_is_not_failed_by_the_bound_that_the_coordinator_had() -> None:
    bound = Terms(active_deadline_seconds=60.0)
    failed = run(RunState.FAILED, succeeded=8, reason="DeadlineExceeded", terms=bound)
    raised = knows(replace(PLANNED, job=job(generation=2, activeDeadlineSeconds=9000)), failed)
    decision = decide(raised)
    assert word(decision.status, "Complete") == "False Submitting"
    assert [type(call) for call in decision.calls] == [SubmitJob]
    same = knows(replace(PLANNED, job=job(activeDeadlineSeconds=60)), failed)
    decision = decide(same)
    assert word(decision.status, "Failed") == "False DeadlineExceeded"
    assert kinds(decision) == ["Job"], "what is finished is transferred"


def test_a_refused_submission_fails_the_job() -> None:
    ready = works(PLANNED, "in", WorkerPhase.SUCCEEDED)
    for message, shown in (("stage 1 has no device",) * 2, ("", "gave no reason")):
        refusal = Refusal(plan=1, terms=Terms(), message=message)
        decision = decide(replace(ready, refusal=refusal))
        assert word(decision.status, "Failed") == "True SubmissionRefused"
        assert shown in condition(decision.status, "Failed").message


def test_the_job_deletes_itself_when_its_time_is_up() -> None:
    ended = knows(
        replace(PLANNED, job=job(ttlSecondsAfterFinished=600)),
        run(RunState.COMPLETE, succeeded=24),
    )
    done = decide(works(written(ended, decide(ended)), "out", WorkerPhase.SUCCEEDED))
    assert done.requeue_seconds == 600
    after = knows(written(ended, done))
    assert (decide(after).delete_self, decide(after).requeue_seconds) == (False, 600)
    assert decide(replace(after, now=LATER)).delete_self


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"inputs": {"uri": "lines/in"}}, "a file of one machine"),
        ({"outputs": {"uri": "file:///tmp/out"}}, "a file of one machine"),
        ({"outputs": {"uri": "pvc://lines/in/"}}, "over the inputs"),
    ],
)
def test_addresses_that_mean_nothing_here_fail_the_job(more: dict[str, Any], text: str) -> None:
    decision = decide(replace(PLANNED, job=job(**more)))
    assert word(decision.status, "Failed") == "True UnsuitableAddress"
    assert text in condition(decision.status, "Failed").message


def test_offline_nothing_is_carried_from_outside() -> None:
    remote = replace(PLANNED, job=job(inputs={"uri": "s3://lines/in"}))
    decision = decide(replace(remote, settings=replace(SETTINGS, offline=True)))
    assert word(decision.status, "Planned") == "False Offline"


def test_an_object_of_the_jobs_name_that_is_not_its_own_is_left_alone() -> None:
    theirs = make(Partition, "ocr", {"modelRef": {"name": "rec"}, "fragments": 2})
    decision = decide(replace(PLANNED, partition=theirs))
    assert word(decision.status, "Planned") == "False NameTaken"
    assert "Partition" not in kinds(decision)


def test_what_a_job_of_the_same_name_left_is_waited_for_until_it_is_removed() -> None:
    again = job()
    again = replace(again, metadata=replace(again.metadata, uid="another"))
    decision = decide(replace(PLANNED, job=again))
    planned = condition(decision.status, "Planned")
    assert (planned.status, planned.reason) == ("False", "Waiting")
    assert planned.message == "the Partition ocr of the job before is still being removed"
    assert "Partition" not in kinds(decision)


@pytest.mark.parametrize(
    ("missing", "reason"), [("model", "ModelNotFound"), ("pool", "PoolNotFound")]
)
def test_it_waits_for_what_it_refers_to(missing: str, reason: str) -> None:
    nothing = replace(PLANNED, partition=None, placement=None, document=None)
    decision = decide(replace(nothing, **{missing: None}))  # type: ignore[arg-type]
    assert word(decision.status, "Planned") == f"False {reason}"


def test_its_own_partition_is_cut_for_the_smallest_device_of_the_pool() -> None:
    nothing = replace(PLANNED, partition=None, placement=None, document=None)
    partition = decide(nothing).children[0]
    assert partition["spec"] == {
        "modelRef": {"name": "rec"},
        "maxFragmentSize": Bytes(64 * MIB),
    }
