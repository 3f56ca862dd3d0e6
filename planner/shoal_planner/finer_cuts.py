"""What follows when devices have measured that a fragment takes more than was planned, and it fits
on none of them: the model is cut again, as if each device had less.

By how much an estimate is wrong is often not known: a trial is stopped where it exceeds the budget.
So each further cut is for three quarters of what the one before was for, or of its largest
fragment: that one is in no cut for less.
"""

from collections.abc import Collection
from typing import Final

from shoal_planner.costs import Costs, Span
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import Bytes, format_bytes

MOST_CUTS: Final = 4
"""Of one model for one job: the last is for two fifths of the budgets."""
_TOO_LARGE: Final = "Budget"
"""The coordinator's reason of a job that failed because a fragment fits on no device."""


def is_too_large(reason: str) -> bool:
    """Whether a job that failed for this reason has a fragment that fits on no device."""
    return reason == _TOO_LARGE


def finer(limit: Bytes) -> Bytes:
    """What the next cut is for, where the one before was for this."""
    return Bytes(limit * 3 // 4)


def kept_limit(document: PartitionDocument, limit: Bytes) -> Bytes:
    """The smallest limit that a cut keeps which was made for this one, with the frames that carry
    other items meanwhile."""
    costs = Costs(document)
    spans = [Span(each.index, each.index + 1) for each in document.fragments]
    return min(limit, max(map(costs.resident, spans)))


def in_words(failure: str, limits: Collection[Bytes]) -> str:
    """What happened, and what is done about it: the model is cut for these limits."""
    least, most = format_bytes(min(limits)), format_bytes(max(limits))
    shown = least if least == most else f"{least} to {most}"
    return f"{failure}; now it is cut for {shown} on each device"
