"""A failed job that is retried is in progress again, and ends again, whatever happens meanwhile."""

from dataclasses import replace
from random import Random

import pytest

from reconcile.rules import decide, name_of
from reconcile.simulation import Cluster, all_over, started
from reconcile.test_inference_job import LATER, PLANNED, job, knows, run, status_of, works, written
from reconcile.test_walks import check_the_end, disturb, heal, reconcile_all, settle
from reconcile.values import word
from shoal_api.conditions import holds
from shoal_api.kinds.inference_job import Retry
from shoal_operator.reconcile.decision import RemoveJob, SubmitJob
from shoal_operator.reconcile.snapshot import InferenceJobSnapshot, RunState, WorkerPhase

FAILED = replace(run(RunState.FAILED, succeeded=21, failed=3), reason="ItemsFailed")


def failed() -> InferenceJobSnapshot:
    """A job whose results are transferred, and of which three items have failed."""
    ended = knows(PLANNED, FAILED)
    done = works(written(ended, decide(ended)), "out", WorkerPhase.SUCCEEDED)
    decision = decide(done)
    assert word(decision.status, "Failed") == "True ItemsFailed"
    assert decision.calls == (), "the run stays, so that it can be retried"
    return written(done, decision)


def retried(snapshot: InferenceJobSnapshot, *items: int, number: int = 1) -> InferenceJobSnapshot:
    spec = replace(snapshot.job.spec, retry=Retry(number=number, items=items))
    return replace(snapshot, job=replace(snapshot.job, spec=spec), now=LATER)


def test_a_failed_job_is_submitted_again_with_the_items_that_are_named() -> None:
    before = retried(failed(), 2, 7)
    decision = decide(before)
    status = status_of(decision)
    assert word(status, "Failed") == "False NotFailed"
    assert word(status, "Complete") == "False Submitting"
    assert (status.completion_time, status.retry and status.retry.number) == (None, 1)
    assert status.items is not None
    assert status.items.succeeded == 21, "results that exist stay"
    (call,) = decision.calls
    assert isinstance(call, SubmitJob)
    assert (call.retry, call.retried_items) == (1, (2, 7))
    again = decide(written(before, decision))
    assert again.calls == decision.calls, "a call that was lost is made once more"


def test_a_retried_job_runs_and_completes_and_transfers_its_results_anew() -> None:
    before = retried(failed())
    before = written(before, decide(before))
    going = knows(before, replace(run(RunState.RUNNING, succeeded=22), retry=1))
    assert word(decide(going).status, "Complete") == "False Running"
    assert decide(going).calls == ()
    ended = knows(going, replace(run(RunState.COMPLETE, succeeded=24), retry=1))
    decision = decide(ended)
    assert name_of(decision.children[0]) == "ocr-aabbccdd-transfer-results-1"
    transferred = works(written(ended, decision), "out", WorkerPhase.SUCCEEDED)
    done = decide(transferred)
    assert word(done.status, "Complete") == "True AllItemsSucceeded"
    assert done.calls == (RemoveJob(pool="shelf", job="ocr-aabbccdd"),)


def test_a_retry_that_was_carried_out_is_not_carried_out_again() -> None:
    before = retried(failed())
    before = written(before, decide(before))
    ended = knows(before, replace(FAILED, retry=1))
    done = works(written(ended, decide(ended)), "out", WorkerPhase.SUCCEEDED)
    decision = decide(done)
    assert word(decision.status, "Failed") == "True ItemsFailed"
    assert word(decide(written(done, decision)).status, "Failed") == "True ItemsFailed"
    third = retried(written(done, decision), number=2)
    assert word(decide(third).status, "Failed") == "False NotFailed"


def test_a_complete_job_is_not_retried() -> None:
    ended = knows(PLANNED, run(RunState.COMPLETE, succeeded=24))
    done = works(written(ended, decide(ended)), "out", WorkerPhase.SUCCEEDED)
    complete = written(done, decide(done))
    decision = decide(retried(complete))
    assert word(decision.status, "Complete") == "True AllItemsSucceeded"
    assert status_of(decision).retry is None


def test_the_deadline_of_a_retry_counts_from_its_beginning() -> None:
    limited = replace(PLANNED, job=job(activeDeadlineSeconds=600))
    limited = written(limited, decide(limited))
    late = replace(knows(limited, replace(FAILED, reason="DeadlineExceeded")), now=LATER)
    done = works(written(late, decide(late)), "out", WorkerPhase.SUCCEEDED)
    ended = written(done, decide(done))
    assert ended.job.status is not None
    assert word(ended.job.status, "Failed") == "True DeadlineExceeded"
    decision = decide(retried(ended))
    assert word(decision.status, "Failed") == "False NotFailed"
    assert decision.requeue_seconds is not None


def test_a_transfer_that_failed_is_made_again_by_a_retry() -> None:
    lost = replace(PLANNED, job=job())
    broken = works(written(lost, decide(lost)), "in", WorkerPhase.FAILED, "the store is away")
    broken = replace(
        broken, workers=tuple(replace(each, ended_at=broken.now) for each in broken.workers)
    )
    ended = written(broken, decide(broken))
    assert ended.job.status is not None
    assert word(ended.job.status, "Failed") == "True InputTransferFailed"
    decision = decide(retried(ended))
    assert word(decision.status, "Complete") == "False Retrying"
    assert [key.name for key in decision.removals] == ["ocr-aabbccdd-transfer-inputs"]


def raise_retries(cluster: Cluster) -> None:
    """Every job is to be retried once more than it was."""
    for name, known in cluster.jobs.items():
        number = 1 if known.spec.retry is None else known.spec.retry.number + 1
        generation = (known.metadata.generation or 0) + 1
        cluster.jobs[name] = replace(
            known,
            metadata=replace(known.metadata, generation=generation),
            spec=replace(known.spec, retry=Retry(number=number)),
        )


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.minutes) for seed in range(3, 6))]
)
def test_retried_jobs_become_complete_and_compute_no_result_twice(seed: int) -> None:
    cluster = started(Random(seed), jobs=3, failures=0.0, bad_items=frozenset({1, 4}))  # noqa: S311
    settle(cluster)
    assert all(
        holds(each.status.conditions, "Failed") for each in cluster.jobs.values() if each.status
    )
    cluster.bad_items = frozenset()
    raise_retries(cluster)
    for _ in range(40):
        if cluster.chance.random() < 0.3:
            disturb(cluster)
        if cluster.chance.random() < 0.1:
            raise_retries(cluster)
        reconcile_all(cluster, dies=0.3)
        cluster.pass_time(cluster.chance.choice((1, 5, 20)))
    heal(cluster)
    raise_retries(cluster)
    settle(cluster)
    assert all_over(cluster)
    check_the_end(cluster)
    for each in cluster.jobs.values():
        assert each.status is not None
        assert holds(each.status.conditions, "Complete"), word(each.status, "Failed")
