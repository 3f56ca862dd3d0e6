"""What a number of fragments is worth, where budgets decide how a model is cut. Pure.

A search under a limit gives the fewest fragments that keep it, but not whether another limit is
worth having. Each fragment has a price, however small it is: it is tried once, and loaded anew for
every few items where it has no room beside the others. Against that stands room: a limit that
leaves some of the budget free (`comfortable`) spares fragments that take more than was
estimated. Up to `FEW` fragments are loaded in a second, and room is worth more. Of more, room is
given up where that halves their number: little is left under the limit then beside what every
fragment takes, and each bit of it holds many nodes.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from shoal_planner.cuts import (
    CutRequest,
    Frames,
    Refusal,
    choose_cuts,
    choose_in,
    laid_out,
    refuse,
    smallest_limit_of,
)
from shoal_planner.devices import LOADING_NANOSECONDS
from shoal_planner.loads import TRYING_NANOSECONDS
from shoal_planner.outcome import duration
from shoal_planner.profile import Profile
from shoal_planner.segments import Layout
from shoal_protocol.units import format_upwards

_NOISE: Final = 64
_NOISE_BYTES: Final = 640 << 10
FEW: Final = 16
MANY: Final = 100
"""More than so many are worth a word: to try and load them takes half a minute."""


def comfortable(budget_bytes: int) -> int:
    """A limit below a budget: what a process takes beside its fragments varies under load, by 0.6
    MiB where fragments are small, and by one part in a hundred where they are large."""
    return budget_bytes - max(_NOISE_BYTES, budget_bytes // _NOISE)


def cut_for_budgets(
    profile: Profile, budgets: Iterable[int], *, one_device: bool, waiting: bool = False
) -> tuple[int, ...] | Refusal:
    """Where to cut so that every device holds each fragment, else those with larger budgets, else
    so that one of these has them all. `waiting`: so that one of these holds each while other items
    wait."""
    known = sorted(set(budgets))
    assert known, "there is no budget"
    if waiting:
        return _cut_for_first(_laid_out(profile, Frames.NONE), known[-1:])
    cuts = _cut_for_first(_laid_out(profile, _frames(one_device=one_device)), known)
    if one_device or not isinstance(cuts, Refusal):
        return cuts
    return _cut_for_first(_laid_out(profile, Frames.MODEL), known[-1:])


def _frames(*, one_device: bool) -> Frames:
    return Frames.MODEL if one_device else Frames.FRAGMENT


def _laid_out(profile: Profile, frames: Frames) -> Layout:
    return laid_out(profile, CutRequest(max_bytes=1, frames=frames))


def _cut_for_first(layout: Layout, budgets: Sequence[int]) -> tuple[int, ...] | Refusal:
    """For the first of these budgets, in order, that some cut keeps. What the first refusal says
    is needed holds for all of them."""
    cuts = _cut_for(layout, budgets[0])
    if not isinstance(cuts, Refusal):
        return cuts
    assert cuts.need_bytes is not None
    enough = next((each for each in budgets if each >= cuts.need_bytes), None)
    if enough is not None:
        return _cut_for(layout, enough)
    return refuse(layout, budgets[-1], cuts.need_bytes)


def cut_within(profile: Profile, limit: int, *, waiting: bool = False) -> tuple[int, ...] | Refusal:
    """Where to cut so that no fragment needs more than the limit, with the frames in which other
    items come and go meanwhile; else with those of the model: what crosses a cut needs none where
    one device has both sides. `waiting`: without any."""
    if waiting:
        return choose_cuts(profile, CutRequest(max_bytes=limit, frames=Frames.NONE))
    cuts = choose_cuts(profile, CutRequest(max_bytes=limit))
    alone = CutRequest(max_bytes=limit, frames=Frames.MODEL)
    return choose_cuts(profile, alone) if isinstance(cuts, Refusal) else cuts


def _cut_for(layout: Layout, budget: int) -> tuple[int, ...] | Refusal:
    cuts = choose_in(layout, CutRequest(max_bytes=comfortable(budget)))
    if not isinstance(cuts, Refusal) and len(cuts) < FEW:
        return cuts
    if isinstance(cuts, Refusal) and cuts.need_bytes is not None and cuts.need_bytes > budget:
        return refuse(layout, budget, cuts.need_bytes)
    fewer = choose_in(layout, CutRequest(max_bytes=budget))
    if isinstance(cuts, Refusal) or isinstance(fewer, Refusal):
        return fewer
    return fewer if 2 * (len(fewer) + 1) <= len(cuts) + 1 else cuts


def many_in_words(profile: Profile, fragments: int, *, one_device: bool) -> str:
    """That a cut for budgets has many fragments, what that takes, and what would give few; empty:
    it has not."""
    if fragments <= MANY:
        return ""
    layout = _laid_out(profile, _frames(one_device=one_device))
    enough = smallest_limit_of(layout, FEW)
    cuts = cut_for_budgets(profile, [enough], one_device=one_device)
    assert not isinstance(cuts, Refusal), "some cut keeps this limit"
    took = duration(fragments * (TRYING_NANOSECONDS + LOADING_NANOSECONDS))
    return (
        f"these budgets take {fragments} fragments, and devices try and load each by itself, which "
        f"is {took} in all by estimate before an item is through; budgets of "
        f"{format_upwards(enough)} take {len(cuts) + 1}"
    )
