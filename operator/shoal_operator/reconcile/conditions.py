"""An object's conditions: what they say, and what a reconciler makes of them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeVar

from shoal_api.fields import Condition, ConditionStatus, Status
from shoal_api.kinds import AnyKind

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


# ---- what an object says -------------------------------------------------------------------------


def generation_of(about: AnyKind) -> int:
    """The generation of an object's spec."""
    return about.metadata.generation or 0


def conditions_of(about: AnyKind) -> tuple[Condition, ...]:
    """The conditions that were written last."""
    return () if about.status is None else about.status.conditions


def find(known: Sequence[Condition], type_: str) -> Condition | None:
    """The condition of a type; None if it was never set."""
    return next((condition for condition in known if condition.type == type_), None)


def holds_now(about: AnyKind, type_: str) -> bool:
    """Whether a condition is True of the newest spec."""
    known = find(conditions_of(about), type_)
    return (
        known is not None
        and known.status is TRUE
        and known.observed_generation == generation_of(about)
    )


def message_of(about: AnyKind, type_: str) -> str:
    """What a condition says; empty if it was never set."""
    known = find(conditions_of(about), type_)
    return "" if known is None else known.message


def not_ready(about: AnyKind) -> Cause | None:
    """What an object says itself of why it is not Ready; None: it is."""
    if holds_now(about, "Ready"):
        return None
    kind, said = type(about).__name__, message_of(about, "Ready") or "waiting"
    return Cause(f"{kind}NotReady", f"{kind} {about.metadata.name} is not ready: {said}")


# ---- what is reported ----------------------------------------------------------------------------


def renewed(about: AnyKind, update: ConditionUpdate, now: str) -> Condition:
    """A condition of the newest spec; its time moves only where its status flips."""
    before = find(conditions_of(about), update.type)
    same = before is not None and before.status is update.status
    return Condition(
        type=update.type,
        status=update.status,
        reason=update.reason,
        message=shortened(update.message, MAX_MESSAGE),
        observed_generation=generation_of(about),
        last_transition_time=before.last_transition_time if before is not None and same else now,
    )


def reported(status: S, about: AnyKind, updates: Sequence[ConditionUpdate], now: str) -> S:
    """A status of an object's newest spec, with these conditions in this order."""
    known = tuple(renewed(about, each, now) for each in updates)
    return replace(status, observed_generation=generation_of(about), conditions=known)


def shortened(text: str, most: int) -> str:
    """The text, cut where it is too long for its field."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
