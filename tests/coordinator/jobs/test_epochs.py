"""A new life of a name has an epoch above all that devices may have heard of."""

from shoal_coordinator.jobs import effects as do
from shoal_coordinator.jobs import events as ev
from shoal_coordinator.jobs.machine import State, step
from shoal_coordinator.jobs.values import End, Outcome, Submission

SUBMISSION = Submission(work="work", results="results")


def submitted(state: State, job: str) -> tuple[do.Effect, ...]:
    return step(state, ev.Submitted(job=job, caller=1, at_seconds=0.0, submission=SUBMISSION))


def test_a_name_that_was_forgotten_begins_above_its_last_epoch() -> None:
    state = State(maximum_jobs=10, shown_ended=1)
    for name, epoch in (("nightly", 7), ("other", 1)):
        step(state, ev.Found(job=name, epoch=epoch, submitted_seconds=0.0))
    for name in ("third", "fourth"):
        submitted(state, name)
        step(state, ev.Recorded(job=name))
        step(state, ev.OpenFailed(job=name, end=End(outcome=Outcome.FAILED, message="it is gone")))
        step(state, ev.Recorded(job=name))
    assert "nightly" not in state.epochs, "it is too long ago"
    (record,) = submitted(state, "nightly")
    assert isinstance(record, do.Record)
    assert record.epoch > 7
