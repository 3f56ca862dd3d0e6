"""Conditions, and the one word that is printed of a job."""

import pytest

from shoal_api.conditions import JobWord, holds, job_word
from shoal_api.fields import Condition, ConditionStatus


def condition(kind: str, status: ConditionStatus) -> Condition:
    at = "2026-01-01T00:00:00Z"
    return Condition(type=kind, status=status, reason="Because", last_transition_time=at)


TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


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
