"""The conditions that a reconciler reports."""

from dataclasses import replace

from reconcile.values import NOW, model
from shoal_api.kinds import Model
from shoal_api.kinds.model import ModelStatus
from shoal_operator.reconcile.conditions import FALSE, TRUE, ConditionUpdate, reported

LATER = "2026-03-02T12:00:00Z"
READY = ConditionUpdate("Ready", FALSE, "Because")


def after(about: Model, *updates: ConditionUpdate, now: str = NOW) -> Model:
    return replace(about, status=reported(ModelStatus(), about, updates, now))


def test_the_time_moves_only_when_the_status_flips() -> None:
    about = after(model(), READY)
    same = after(about, replace(READY, reason="Other"), now=LATER)
    assert same.status is not None
    assert (same.status.conditions[0].last_transition_time, same.status.conditions[0].reason) == (
        NOW,
        "Other",
    )
    flipped = after(about, replace(READY, status=TRUE), now=LATER)
    assert flipped.status is not None
    assert flipped.status.conditions[0].last_transition_time == LATER


def test_conditions_are_in_the_order_of_their_updates() -> None:
    both = after(after(model(), READY), replace(READY, type="Fetched"), READY)
    assert both.status is not None
    assert [each.type for each in both.status.conditions] == ["Fetched", "Ready"]
    assert both.status.observed_generation == 1
