"""Conditions: whether one holds, and the one word that is printed of a job."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from shoal_api.fields import Condition, ConditionStatus

COMPLETING: Final = "Completing"
"""Reason of Complete: every item has ended, and the coordinator has not ended the run yet."""
TRANSFERRING_RESULTS: Final = "TransferringResults"
"""Reason of Complete: the run has ended, and a worker brings the results to their place."""


class JobWord(StrEnum):
    """The STATUS column of an InferenceJob."""

    PENDING = "Pending"
    PLANNED = "Planned"
    RUNNING = "Running"
    COMPLETING = "Completing"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


def holds(conditions: Sequence[Condition], type_: str) -> bool:
    """Whether the condition exists and is True; an absent one does not hold."""
    return any(
        condition.type == type_ and condition.status is ConditionStatus.TRUE
        for condition in conditions
    )


_WAITING: Final = ("Planned", "Suspended", "Complete", "Failed")


def waits_since(conditions: Sequence[Condition], created: str) -> str:
    """Since when an InferenceJob that is Pending or Planned is so, at most: since it was made, or
    one of these conditions became what it is, as where it was resumed or is tried again."""
    turned = (each.last_transition_time for each in conditions if each.type in _WAITING)
    return max((created, *turned))


def job_word(conditions: Sequence[Condition], *, started: bool) -> JobWord:
    """An InferenceJob's state as one word; an end takes precedence over progress.

    `started`: the job's status has a startTime.
    """
    if holds(conditions, "Failed"):
        return JobWord.FAILED
    if holds(conditions, "Complete"):
        return JobWord.COMPLETE
    if holds(conditions, "Suspended"):
        return JobWord.SUSPENDED
    reasons = {each.reason for each in conditions if each.type == "Complete"}
    if reasons & {COMPLETING, TRANSFERRING_RESULTS}:
        return JobWord.COMPLETING
    if not holds(conditions, "Planned"):
        return JobWord.PENDING
    return JobWord.RUNNING if started else JobWord.PLANNED
