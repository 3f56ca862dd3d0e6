"""What a reconciler reports of one aspect, and how that becomes the object's conditions. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shoal_api.conditions import set_condition
from shoal_api.fields import Condition, ConditionStatus

MAX_MESSAGE: Final = 4096
TRUE: Final = ConditionStatus.TRUE
FALSE: Final = ConditionStatus.FALSE
UNKNOWN: Final = ConditionStatus.UNKNOWN


@dataclass(frozen=True, slots=True)
class ConditionUpdate:
    """One condition, without its times. `reason` is one word in CamelCase."""

    type: str
    status: ConditionStatus
    reason: str
    message: str = ""


def conditions(
    before: Sequence[Condition], updates: Sequence[ConditionUpdate], *, generation: int, now: str
) -> tuple[Condition, ...]:
    """The updated conditions, in the order of `updates`; a time moves only where a status flips."""
    known: Sequence[Condition] = before
    for each in updates:
        known = set_condition(
            known,
            Condition(
                type=each.type,
                status=each.status,
                reason=each.reason,
                message=shortened(each.message, MAX_MESSAGE),
                observed_generation=generation,
                last_transition_time=now,
            ),
        )
    by_type = {condition.type: condition for condition in known}
    return tuple(by_type[each.type] for each in updates)


def find(known: Sequence[Condition], type_: str) -> Condition | None:
    """The condition of a type; None if it was never set."""
    return next((condition for condition in known if condition.type == type_), None)


def holds_for(known: Sequence[Condition], type_: str, generation: int) -> bool:
    """Whether a condition is True of the newest spec."""
    condition = find(known, type_)
    return (
        condition is not None
        and condition.status is TRUE
        and condition.observed_generation == generation
    )


def message_of(known: Sequence[Condition], type_: str) -> str:
    """What a condition says; empty if it was never set."""
    condition = find(known, type_)
    return "" if condition is None else condition.message


def shortened(text: str, most: int) -> str:
    """The text, cut where it is too long for its field."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
