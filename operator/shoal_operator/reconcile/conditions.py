"""What a reconciler reports of an object, and how that becomes conditions. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeVar

from shoal_api.fields import Condition, ConditionStatus, Resource, Status

MAX_MESSAGE: Final = 4096
TRUE: Final = ConditionStatus.TRUE
FALSE: Final = ConditionStatus.FALSE
UNKNOWN: Final = ConditionStatus.UNKNOWN

S = TypeVar("S", bound=Status)


class Cause(NamedTuple):
    """Why something is as it is: one word in CamelCase, and a message for people."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class ConditionUpdate:
    """One condition, without its times."""

    type: str
    status: ConditionStatus
    reason: str
    message: str = ""


def not_ready(about: Resource) -> Cause | None:
    """What an object says itself of why it is not Ready; None: it is."""
    if about.holds("Ready"):
        return None
    kind, said = type(about).__name__, about.message("Ready") or "waiting"
    return Cause(f"{kind}NotReady", f"{kind} {about.metadata.name} is not ready: {said}")


def as_before(about: Resource, type_: str) -> ConditionUpdate | None:
    """A condition as it was written last; None if it never was."""
    known = about.condition(type_)
    if known is None:
        return None
    return ConditionUpdate(type_, known.status, known.reason, known.message)


def next_condition(about: Resource, update: ConditionUpdate, now: str) -> Condition:
    """A condition of the newest spec; its time moves only where its status flips."""
    before = about.condition(update.type)
    same = before is not None and before.status is update.status
    return Condition(
        type=update.type,
        status=update.status,
        reason=update.reason,
        message=shortened(update.message, MAX_MESSAGE),
        observed_generation=about.generation,
        last_transition_time=before.last_transition_time if before is not None and same else now,
    )


def with_conditions(status: S, about: Resource, updates: Sequence[ConditionUpdate], now: str) -> S:
    """A status of an object's newest spec, with these conditions in this order."""
    known = tuple(next_condition(about, each, now) for each in updates)
    return replace(status, observed_generation=about.generation, conditions=known)


def shortened(text: str, most: int) -> str:
    """The text, cut where it is too long for its field."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
