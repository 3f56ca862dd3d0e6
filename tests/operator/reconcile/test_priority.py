"""Jobs with a higher priority start first, and hold up nobody for long."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from reconcile.rules import decide
from reconcile.simulation import started
from reconcile.test_inference_job import PLANNED, SPEC, knows, run, status_of, works
from reconcile.test_walks import check_the_end, look, settle
from reconcile.values import condition, make, word
from shoal_api.kinds import InferenceJob
from shoal_operator.reconcile.job_preparation import PATIENCE_SECONDS
from shoal_operator.reconcile.names import job_id
from shoal_operator.reconcile.snapshot import RunState, WorkerPhase
from shoal_operator.reconcile.times import earlier

NOTHING = dict.fromkeys(("model", "partition", "placement", "document"))
WITH_INPUTS = works(PLANNED, "in", WorkerPhase.SUCCEEDED)


def urgent(age_seconds: float = 5.0, **more: Any) -> InferenceJob:
    """Another job of a high priority, that many seconds old."""
    made = make(InferenceJob, "urgent", {**SPEC, "priority": 500, **more}, uid="dd" * 16)
    born = earlier(PLANNED.now, age_seconds)
    return replace(made, metadata=replace(made.metadata, creation_timestamp=born))


def described(job: InferenceJob, **more: Any) -> InferenceJob:
    """The job with the status that is decided about it."""
    seen = replace(PLANNED, job=job, **more)
    return replace(job, status=status_of(decide(seen)))


@pytest.mark.parametrize("seed", range(6))
def test_of_three_jobs_applied_together_the_one_with_the_highest_priority_starts_first(
    seed: int,
) -> None:
    cluster = started(Random(seed), jobs=3, failures=0.0)  # noqa: S311
    for name, priority in (("job-0", 0), ("job-1", 10), ("job-2", 500)):
        job = cluster.jobs[name]
        cluster.jobs[name] = replace(job, spec=replace(job.spec, priority=priority))
    order: list[str] = []
    for _ in range(400):
        look(cluster)
        order += [name for name in cluster.runs if name not in order]
        if len(order) == 3:
            break
        cluster.pass_time(cluster.chance.choice((1, 3)))
    assert order == [job_id(cluster.jobs[name]) for name in ("job-2", "job-1", "job-0")]
    settle(cluster)
    check_the_end(cluster)


def test_a_job_says_for_which_job_it_waits() -> None:
    decision = decide(replace(WITH_INPUTS, rivals=(urgent(),)))
    assert word(decision.status, "Complete") == "False Queued"
    text = "InferenceJob urgent on DevicePool shelf has priority 500 and starts first"
    assert condition(decision.status, "Complete").message == text
    assert decision.calls == ()
    assert decision.requeue_seconds is not None


def test_nothing_is_transferred_for_a_job_that_waits_for_another() -> None:
    decision = decide(replace(PLANNED, rivals=(urgent(),)))
    assert [child["kind"] for child in decision.children] == ["Partition", "Placement"]


HAS_A_RUN = knows(
    replace(PLANNED, job=urgent()), replace(run(RunState.RUNNING), job=job_id(urgent()))
)


@pytest.mark.parametrize(
    "rival",
    [
        pytest.param(described(urgent(), view=HAS_A_RUN.view), id="runs already"),
        pytest.param(urgent(suspend=True), id="is suspended"),
        pytest.param(described(urgent(), **NOTHING), id="has no model"),
        pytest.param(urgent(age_seconds=PATIENCE_SECONDS + 1), id="takes too long"),
        pytest.param(urgent(priority=0), id="has the same priority"),
    ],
)
def test_a_job_does_not_wait_for_one_that(rival: InferenceJob) -> None:
    decision = decide(replace(WITH_INPUTS, rivals=(rival,)))
    assert word(decision.status, "Complete") == "False Submitting"


def test_a_job_that_runs_is_not_stopped_by_one_that_comes() -> None:
    going = knows(replace(PLANNED, rivals=(urgent(),)), run(RunState.RUNNING, succeeded=8))
    assert word(decide(going).status, "Complete") == "False Running"
