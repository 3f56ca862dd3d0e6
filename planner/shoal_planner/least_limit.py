"""The smallest limit of resident bytes that some cut of a model keeps. Pure.

The finest cut does not show it. What a fragment sends counts besides the arena, so a node by itself
may need more than a longer fragment that uses its outputs and sends less. So every fragment that
could matter is tried, as in the search for a shortest path, with the maximum in place of the sum.

Two bounds keep that short. Above is the best cut known so far, at first the finest: estimates grow
with the fragment, so none is followed beyond it. Below is what a node needs in any fragment, with
the nodes and weights before it in the same one; and what the fragment needs that has the neediest
of them, whichever that is. A start is passed over if every end within these bounds is reached
already in a way that cannot limit the result, and left as soon as that holds of all ends that are
still to come.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

from shoal_planner.arena import ARENA_MARGIN, arena_bytes
from shoal_planner.profile import Halves, Role
from shoal_planner.segments import FIXED_BYTES, LARGER_BYTES, LITTLE_BYTES, Growing, Layout
from shoal_planner.steps import NODE_BYTES, Step, has_known_shape
from shoal_protocol.frame_sizes import frame_bytes


class _Around(NamedTuple):
    """What a fragment needs, and between which positions it is, by their indices."""

    need_bytes: int
    start: int
    end: int


def smallest_limit(layout: Layout) -> int:
    """Resident bytes of the largest fragment, in the cut where that is the smallest."""
    nodes = len(layout.profile.nodes)
    positions = (0, *layout.legal, nodes)
    finest = finest_needs(layout)
    rest = [*reversed(list(accumulate(reversed(finest), max))), 0]
    best = list(accumulate(finest, max, initial=0))  # before each position
    smallest = best[-1]
    needs = tuple(least_needs(layout))
    before = tuple(accumulate(added_bytes(layout), initial=0))
    lower, first, last = _around_neediest(layout)
    for index, start in enumerate(positions[:-1]):
        smallest = min(smallest, max(best[first], lower, rest[last]))
        if smallest == lower:
            break
        if best[index] >= smallest:
            continue
        most = smallest + before[start]
        reach = next((at for at in range(start, nodes) if needs[at] + before[at] >= most), nodes)
        ends = best[index + 1 : bisect_right(positions, reach)]
        if max(ends, default=0) <= max(lower, best[index]):
            continue
        later = reversed(list(accumulate(reversed(ends), max)))
        growing = Growing(layout, start)
        for end, worst in enumerate(later, index + 1):
            growing.grow_to(positions[end])
            least = max(best[index], growing.least_bytes)
            if least >= min(smallest, worst):
                break
            if least < best[end]:
                best[end] = min(best[end], max(least, growing.resident_bytes))
                smallest = min(smallest, max(best[end], rest[end]))
    return smallest


def is_hopeless(layout: Layout, limit: int) -> bool:
    """Whether every fragment that has the neediest node is over the limit: it takes a small part of
    a search to find out that no cut keeps it."""
    return _around_neediest(layout, limit).need_bytes > limit


def finest_needs(layout: Layout) -> list[int]:
    """Resident bytes of each fragment in the finest cut: a quick upper bound."""
    positions = (0, *layout.legal, len(layout.profile.nodes))
    return [layout.segment(start, end).resident_bytes for start, end in pairwise(positions)]


def _around_neediest(layout: Layout, limit: int | None = None) -> _Around:
    """Of the fragments that have the neediest node, one of which is in every cut, that which needs
    the least; with a limit, any that keeps it, else one that does not."""
    needs = tuple(least_needs(layout))
    if not needs:  # what is handed through needs room as well
        return _Around(layout.segment(0, 0).resident_bytes, 0, 1)
    node = needs.index(max(needs))
    before = tuple(accumulate(added_bytes(layout), initial=0))
    positions = (0, *layout.legal, len(needs))
    after = bisect_right(positions, node)
    alone = layout.segment(*positions[after - 1 : after + 1]).resident_bytes
    found = _Around(alone, after - 1, after)
    given = tuple(_given_bytes(layout, node))
    need = needs[node] + before[node] + min(given[each - node - 1] for each in positions[after:])
    for start in reversed(range(after)):
        most = found.need_bytes if limit is None else min(found.need_bytes, limit + 1)
        if most <= (limit or 0) or need - before[positions[start]] >= most:
            break
        growing = Growing(layout, positions[start])
        for end in range(start + 1, len(positions)):
            if growing.grow_to(positions[end]).least_bytes >= most:
                break
            if end >= after and (resident := growing.resident_bytes) < found.need_bytes:
                found = _Around(resident, start, end)
                most = min(most, resident)
    return found


def _given_bytes(layout: Layout, node: int) -> Iterator[int]:
    """For each end behind a node, a lower bound of what a fragment needs besides for what it gives,
    as a search reckons: with halves that are made for that where none were, in the arena."""
    profile, given, made = layout.profile, dict[str, int](), dict[str, int]()
    for position in range(node, len(profile.nodes)):
        step = layout.steps[position]
        for name in step.dying:
            given.pop(name, None)
            made.pop(name, None)
        # What the node itself makes outside of the arena is part of its own need.
        for name in () if position == node and step.axes_outside is not None else step.node.outputs:
            if name in layout.sent and name in layout.last_uses:
                given[name], tensor = layout.sent[name], profile.tensors[name]
                if step.node.halves is Halves.CONVERTED and not has_known_shape(tensor):
                    made[name] = (tensor.computed_bytes or 0) - given[name]
        size, copied = sum(given.values()), sum(made.values())
        yield size + layout.moving * frame_bytes(size) + copied + copied // ARENA_MARGIN


def least_needs(layout: Layout) -> Iterator[int]:
    """For each node, a lower bound of what a fragment needs that runs it."""
    profile = layout.profile
    for step in layout.steps:
        node = step.node
        if node.role is Role.CONSTANT:
            yield 0
            continue
        weights = {name: step.touched.get(name, profile.weights[name]) for name in node.weights}
        held = FIXED_BYTES + NODE_BYTES * step.runtime_nodes + sum(weights.values())
        taken = [profile.tensors[name] for name in set(node.inputs) - weights.keys()]
        converts = node.halves is Halves.CONVERTED and not node.is_view
        # Where it is single precision that a node takes in place of halves, it is there, whoever
        # has made it so.
        read = sum((each.computed_bytes if converts else each.model_bytes) or 0 for each in taken)
        made = _made_bytes(layout, step) if converts or not layout.has_halves else 0
        if step.axes_outside is None:
            arena = arena_bytes(made + sum(node.works_in), node.beside_bytes)
        else:  # it may be the last one, and what it makes outside
            arena = made + node.beside_bytes
        both = max(read, made) if node.in_place else read + made
        held += layout.frames_bytes + LARGER_BYTES * (both > LITTLE_BYTES)
        yield held + (max(read, arena) if node.in_place else read + arena)


def _made_bytes(layout: Layout, step: Step) -> int:
    return sum(size for name, size in step.made if name in layout.last_uses)


def added_bytes(layout: Layout) -> Iterator[int]:
    """For each node, what it adds to any fragment: of its weights, those that it alone uses."""
    profile = layout.profile
    uses = Counter(name for node in profile.nodes for name in set(node.weights))
    for step in layout.steps:
        own = {name for name in step.node.weights if uses[name] == 1}
        weights = sum(step.touched.get(name, profile.weights[name]) for name in own)
        constant = step.node.role is Role.CONSTANT
        yield 0 if constant else NODE_BYTES * step.runtime_nodes + weights
