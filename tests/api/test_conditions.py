"""Conditions, and the one word that is printed of a job."""

import pytest

from shoal_api.conditions import JobWord, holds, job_word, set_condition
from shoal_api.fields import Condition, ConditionStatus


def condition(
    kind: str, status: ConditionStatus, at: str = "2026-01-01T00:00:00Z", reason: str = "Because"
) -> Condition:
    return Condition(type=kind, status=status, reason=reason, last_transition_time=at)


TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN
EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"


def test_the_time_moves_only_when_the_status_flips() -> None:
    start = set_condition((), condition("Ready", FALSE, EARLY))
    same = set_condition(start, condition("Ready", FALSE, LATE, reason="Other"))
    assert (same[0].last_transition_time, same[0].reason) == (EARLY, "Other")
    flipped = set_condition(same, condition("Ready", TRUE, LATE))
    assert flipped[0].last_transition_time == LATE


def test_a_condition_keeps_its_place_and_the_others() -> None:
    conditions = (condition("A", TRUE), condition("B", FALSE))
    assert [each.type for each in set_condition(conditions, condition("A", FALSE))] == ["A", "B"]
    assert [each.type for each in set_condition(conditions, condition("C", TRUE))] == list("ABC")


def test_unknown_does_not_hold() -> None:
    assert not holds((condition("Ready", UNKNOWN),), "Ready")
    assert not holds((), "Ready")


@pytest.mark.parametrize(
    ("true", "started", "word"),
    [
        ((), False, JobWord.PENDING),
        (("Planned",), False, JobWord.PLANNED),
        (("Planned",), True, JobWord.RUNNING),
        (("Planned", "Suspended"), True, JobWord.SUSPENDED),
        (("Suspended",), False, JobWord.SUSPENDED),
        (("Planned", "Complete"), True, JobWord.COMPLETE),
        (("Planned", "Suspended", "Failed"), True, JobWord.FAILED),
    ],
)
def test_a_job_is_printed_as_one_word(true: tuple[str, ...], started: bool, word: JobWord) -> None:
    kinds = ("Planned", "Suspended", "Complete", "Failed")
    conditions = [condition(kind, TRUE if kind in true else FALSE) for kind in kinds]
    assert job_word(conditions, started=started) is word
