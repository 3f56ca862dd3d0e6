"""What to do about a fragment that fits on no device: advice that is true when it is followed.

A number of fragments is cut for balance of time and memory together, so one more fragment need not
make the largest smaller. So a number is only named after the cut that it would give was looked at:
it is more than there are, and its largest fragment fits. Where no such number is found, a cut for
size alone may fit; where none does, one node is too large by itself.
"""

from dataclasses import dataclass
from typing import Final, assert_never

from shoal_planner.cuts import CutRequest, Frames, Refusal, choose_cuts
from shoal_planner.profile import Profile
from shoal_planner.segments import Layout
from shoal_protocol.units import format_bytes

MOST_FRAGMENTS: Final = 256
_TRIES: Final = 8


@dataclass(frozen=True, slots=True)
class CutAdvice:
    """So many fragments fit; the largest needs `need_bytes`."""

    fragments: int
    need_bytes: int


@dataclass(frozen=True, slots=True)
class CutForSize:
    """No number of fragments was found that fits, but this is what a cut for size alone gives."""

    fragments: int
    need_bytes: int


Advice = CutAdvice | CutForSize | Refusal


def advise(profile: Profile, cuts: tuple[int, ...], budget_bytes: int) -> Advice | None:
    """What would fit a device of that budget; None if the cut does. A `Refusal` names the node."""
    if largest(profile, cuts) <= budget_bytes:
        return None
    for_size = choose_cuts(profile, CutRequest(max_bytes=budget_bytes))
    if isinstance(for_size, Refusal):
        return _while_others_wait(profile, budget_bytes)
    fewest, now = len(for_size) + 1, len(cuts) + 1
    first = max(fewest, now + 1)  # fewer than the fewest cannot fit
    for count in range(first, min(first + _TRIES, MOST_FRAGMENTS + 1)):
        counted = choose_cuts(profile, CutRequest(fragments=count))
        if isinstance(counted, Refusal):
            break
        if (need := largest(profile, counted)) <= budget_bytes:
            return CutAdvice(count, need)
    return CutForSize(fewest, largest(profile, for_size))


def _while_others_wait(profile: Profile, budget_bytes: int) -> CutForSize | Refusal:
    """What fits without room for other items. Budgets alone lead to such a cut."""
    cuts = choose_cuts(profile, CutRequest(max_bytes=budget_bytes, frames=Frames.NONE))
    if isinstance(cuts, Refusal):
        return cuts
    pieces = Layout(profile).pieces(cuts)
    need = max(piece.segment.resident_bytes for piece in pieces)
    return CutForSize(len(cuts) + 1, need)


def largest(profile: Profile, cuts: tuple[int, ...]) -> int:
    """What a device needs for the neediest fragment, the frames of other items included."""
    layout = Layout(profile, moving=True)
    return max(piece.segment.resident_bytes for piece in layout.pieces(cuts))


def in_words(advice: Advice) -> str:
    """`cut finer (fragments: 5 would need 22.8 MiB) or raise the budget`."""
    match advice:
        case CutAdvice(fragments, need):
            return (
                f"cut finer (fragments: {fragments} would need {format_bytes(need)}) "
                "or raise the budget"
            )
        case CutForSize(fragments, need):
            return (
                "let the budgets decide how it is cut (without fragments, maxFragmentSize and "
                f"cuts: {fragments} fragment{'s' * (fragments > 1)}, the largest needs "
                f"{format_bytes(need)}) "
                "or raise the budget"
            )
        case Refusal(reason=reason):
            return f"cutting finer does not help: {reason}; raise the budget"
        case _:
            assert_never(advice)
