"""Conditions: setting one, and the one word that is printed of a job.

A condition's `last_transition_time` moves only when its status flips; a new reason or message
with the same status keeps it, so that "since when" stays true.
"""

from collections.abc import Sequence
from dataclasses import replace
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


def set_condition(conditions: Sequence[Condition], new: Condition) -> tuple[Condition, ...]:
    """The conditions with `new` in the place of the one of its type, or at the end.

    `new.last_transition_time` says what time it is; where the status stays, the old time stays.
    """
    known = {condition.type: condition for condition in conditions}
    old = known.get(new.type)
    if old is not None and old.status == new.status:
        new = replace(new, last_transition_time=old.last_transition_time)
    known[new.type] = new
    return tuple(known.values())


def holds(conditions: Sequence[Condition], type_: str) -> bool:
    """Whether the condition is there and True; an absent one does not hold."""
    return any(
        condition.type == type_ and condition.status is ConditionStatus.TRUE
        for condition in conditions
    )


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
