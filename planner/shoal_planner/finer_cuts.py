"""What follows when devices have measured that a fragment takes more than was planned, and it fits
on none of them: that fragment is divided, and the others stay as they are.

It is divided in two (`parts`). A part of it that is too large still is divided in four, and so are
its parts: a run is stopped where it takes more than there is, so nobody knows how much more it
needs. That leads down to nodes that no cut parts: then nothing helps. A fragment that was tried in
blocks took less than it does whole, so a part of it may by estimate take more than it did. Where
blocks would not make that part smaller, it is divided before it is tried.

Where sizes are unknown, the item that took too much has shown some: those of what the fragment
takes. From these, others behind it follow. So the model is cut anew with what was seen, and nothing
is divided before a run has nothing new to show.

Where a run shows no sizes, it shows one fragment that is too large, and those behind it have not
run. So those of them that have no fewer nodes are divided with it.

The divisions of a cut are a list that grows: each entry counts in the cut that those before it
have made. So the same model, cut in the same way, with the same list, gives the same fragments.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import chain, pairwise
from typing import Final, NamedTuple

from shoal_planner.cut_tables import BLOCKS_SAVE
from shoal_planner.cuts import Refusal
from shoal_planner.parts import Parts
from shoal_planner.profile import Profile, Role
from shoal_planner.segments import Growing, Layout
from shoal_protocol.partition import Fragment, Outgrown, PartitionDocument
from shoal_protocol.seen_sizes import Sizes, larger
from shoal_protocol.units import format_bytes

TOO_LARGE: Final = "Budget"
"""The coordinator's reason of a job that failed because a fragment fits on no device, and of an
item for which there is too little memory."""


class Run(NamedTuple):
    """Nodes that follow one another, by their positions."""

    start: int
    end: int


def is_too_large(reason: str) -> bool:
    """Whether a job that failed for this reason has a fragment that fits on no device."""
    return reason == TOO_LARGE


def learned(known: Sizes, found: Sizes) -> Sizes | None:
    """What is known of sizes after a run has failed; None: nothing new, so that a cut for them
    would be the same."""
    both = larger(known, found)
    return None if both == known else both


def to_divide(
    document: PartitionDocument, found: Iterable[Outgrown], seen: Sizes
) -> tuple[Outgrown, ...]:
    """What is divided where these fragments of a cut fit on no device; the last fragment first, so
    that the numbers of the others stay. Nothing is expected of others in a cut for sizes that were
    `seen`."""
    fragments = document.fragments
    known = [each for each in found if each.fragment < len(fragments)]
    needs = {each.fragment: each.need_bytes for each in known}
    for each in known if not seen else ():
        alike = (other.index for other in fragments if _is_larger(other, fragments[each.fragment]))
        needs = {**dict.fromkeys(alike, each.need_bytes), **needs}
    return tuple(
        Outgrown(fragment=fragment, need_bytes=need)
        for fragment, need in sorted(needs.items(), reverse=True)
    )


def _is_larger(other: Fragment, outgrown: Fragment) -> bool:
    """Whether a fragment behind one that is too large must be expected to be so, too: where sizes
    are unknown in both, and it has no fewer nodes."""
    unknown = other.activation_bytes is None and outgrown.activation_bytes is None
    return unknown and other.index > outgrown.index and other.nodes >= outgrown.nodes


def has_unknown_sizes(document: PartitionDocument) -> bool:
    """Whether some sizes follow from what inputs hold. Then an item may fit where others do not."""
    return any(each.activation_bytes is None for each in document.fragments)


def in_words(failure: str, found: Collection[Outgrown]) -> str:
    """What happened, and what is done about it: these are divided, or, where there are none, the
    model is cut for what was seen."""
    if not found:
        return f"{failure}; now it is cut for the sizes that items were seen to have"
    numbers = sorted(each.fragment for each in found)
    *others, last = map(str, numbers)
    named = f"fragments {', '.join(others)} and {last} are" if others else f"fragment {last} is"
    return f"{failure}; now {named} divided"


def divide(
    profile: Profile, cuts: tuple[int, ...], outgrown: Sequence[Outgrown]
) -> tuple[int, ...] | Refusal:
    """The positions to cut at where a cut's fragments are divided, one after the other. The last of
    them must be: `to_divide` begins with those that have not run."""
    layout = Layout(profile)
    crossing = layout.crossing_bytes
    times = [1] * (len(cuts) + 1)  # that each fragment is to be halved
    for number, each in enumerate(outgrown, 1):
        borders = list(pairwise((0, *cuts, len(profile.nodes))))
        if each.fragment >= len(borders):
            return Refusal(reason=f"there is no fragment {each.fragment} to be divided")
        run = Run(*borders[each.fragment])
        found = _divided(layout, crossing, run, each.need_bytes, times[each.fragment])
        if not found and number == len(outgrown):
            return _indivisible(layout, each, *borders[each.fragment])
        times[each.fragment : each.fragment + 1] = [2] * (len(found) + 1)
        cuts = tuple(sorted((*cuts, *found)))
    return cuts


def _divided(
    layout: Layout, crossing: Sequence[int], run: Run, need_bytes: int, times: int
) -> tuple[int, ...]:
    """Where nodes are divided that take more than there is, and so are parts of them that would, as
    far as they can be; empty: they cannot be."""
    found = Parts(layout, crossing, *run, need_bytes).divide(times)
    parts = map(Run._make, pairwise((run.start, *found, run.end)))
    large = [each for each in parts if found and _takes_at_least(layout, each) > need_bytes]
    further = (_divided(layout, crossing, each, need_bytes, 1) for each in large)
    return tuple(sorted(chain(found, *further)))


def _takes_at_least(layout: Layout, run: Run) -> int:
    """What nodes take by estimate, also in blocks: those have only weights to save, and are not
    made where they save little."""
    whole, growing = layout.segment(*run).resident_bytes, Growing(layout, run.start)
    growing.grow_to(run.end)
    weights = growing.weight_bytes
    return whole if weights * BLOCKS_SAVE < whole else whole - weights


def _indivisible(layout: Layout, each: Outgrown, start: int, end: int) -> Refusal:
    nodes = [node for node in layout.profile.nodes[start:end] if node.role is not Role.CONSTANT]
    obstacle = next((layout.obstacles[at] for at in layout.obstacles if start < at < end), None)
    node = nodes[-1].label
    why = f" ({obstacle})" if obstacle else ""
    estimate = layout.segment(start, end).resident_bytes
    would = f"; by estimate it needs {format_bytes(estimate)}" if estimate > each.need_bytes else ""
    return Refusal(
        reason=(
            f"fragment {each.fragment} took {format_bytes(each.need_bytes)}, and it cannot be "
            f"divided: no cut parts its nodes, of which {node} is the last{why}{would}"
        ),
        node=node,
        need_bytes=max(each.need_bytes, estimate),
    )
