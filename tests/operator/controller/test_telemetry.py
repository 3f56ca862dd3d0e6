"""What the operator counts of jobs and plans."""

from dataclasses import replace

import pytest

from reconcile.values import make
from shoal_api.conditions import JobWord
from shoal_api.fields import Condition, ConditionStatus
from shoal_api.kinds import InferenceJob
from shoal_api.kinds.inference_job import InferenceJobColumns, InferenceJobStatus
from shoal_api.kinds.placement import Cost, PlacementStatus
from shoal_operator.controller.telemetry import OperatorMetrics


def job_status(*held: str) -> InferenceJobStatus:
    conditions = tuple(
        Condition(
            type=each,
            status=ConditionStatus.TRUE,
            reason="Because",
            message="",
            last_transition_time="2026-01-31T12:00:00Z",
        )
        for each in held
    )
    return InferenceJobStatus(conditions=conditions)


def value(metrics: OperatorMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"shoal_operator_{name}", labels)


@pytest.mark.parametrize("end", ["Complete", "Failed"])
def test_the_end_of_a_job_is_counted_once(end: str) -> None:
    metrics, running, ended = OperatorMetrics(), job_status("Planned"), job_status("Planned", end)
    assert value(metrics, "jobs_ended_total", outcome=end.lower()) == 0
    for before, after in ((None, running), (running, running), (running, ended), (ended, ended)):
        metrics.status_written(before, after)
    assert value(metrics, "jobs_ended_total", outcome=end.lower()) == 1
    other = "failed" if end == "Complete" else "complete"
    assert value(metrics, "jobs_ended_total", outcome=other) == 0


def test_a_measured_rate_is_compared_with_the_plan_when_it_changes() -> None:
    metrics = OperatorMetrics()
    planned = PlacementStatus(predicted=Cost(items_per_second=40.0))
    measured = replace(planned, measured=Cost(items_per_second=20.0))
    for before, after in ((None, planned), (planned, measured), (measured, measured)):
        metrics.status_written(before, after)
    assert value(metrics, "plan_rate_ratio_count") == 1
    assert value(metrics, "plan_rate_ratio_sum") == 0.5


def test_where_nothing_was_predicted_nothing_is_compared() -> None:
    metrics = OperatorMetrics()
    metrics.status_written(None, PlacementStatus(measured=Cost(items_per_second=20.0)))
    assert value(metrics, "plan_rate_ratio_count") == 0


def waiting(word: JobWord, *turned: str, created: str, follow: bool = False) -> InferenceJob:
    """A job of this status, whose condition Planned became False at these times."""
    spec = {
        "modelRef": {"name": "rec"},
        "poolRef": {"name": "shelf"},
        "inputs": {"uri": "pvc://lines/in", "follow": follow},
        "outputs": {"uri": "pvc://lines/out"},
    }
    job = make(InferenceJob, "ocr", spec)
    planned = Condition(
        type="Planned", status=ConditionStatus.FALSE, reason="Waiting", last_transition_time=created
    )
    conditions = tuple(replace(planned, last_transition_time=each) for each in turned)
    columns = InferenceJobColumns(status=word)
    return replace(
        job,
        metadata=replace(job.metadata, creation_timestamp=created),
        status=InferenceJobStatus(conditions=conditions, columns=columns),
    )


def test_the_job_that_has_waited_for_longest_is_told_by_status() -> None:
    metrics, now = OperatorMetrics(), "2026-03-01T12:00:00Z"
    jobs = [
        waiting(JobWord.PENDING, created="2026-03-01T11:59:00Z"),
        waiting(JobWord.PENDING, "2026-03-01T11:50:00Z", created="2026-02-01T00:00:00Z"),
        waiting(JobWord.PLANNED, created="2026-02-01T00:00:00Z", follow=True),
        waiting(JobWord.RUNNING, created="2026-02-01T00:00:00Z"),
    ]
    metrics.count_jobs(jobs, now)
    name = "longest_wait_seconds"
    assert value(metrics, name, status="Pending") == 600
    assert value(metrics, name, status="Planned") == 0
    metrics.count_jobs([], now)
    assert value(metrics, name, status="Pending") == 0
