"""The smallest limit of resident bytes that some cut of a model keeps. Pure.

The finest cut does not show it. What a fragment sends counts besides the arena, so a node by itself
may need more than a longer fragment that uses its outputs and sends less. So every fragment that
could matter is tried, as in the search for a shortest path, with the maximum in place of the sum.

Two bounds keep that short. Above is the best cut known so far, at first the finest: estimates grow
with the fragment, so none is followed beyond it. Below is what a node needs in any fragment, with
the nodes and weights before it in the same one. A start is passed over if every end within these
bounds is reached already in a way that cannot limit the result, and left as soon as that holds of
all ends that are still to come.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, pairwise

from shoal_planner.arena import arena_bytes
from shoal_planner.profile import Role
from shoal_planner.segments import FIXED_BYTES, Growing, Layout
from shoal_planner.steps import NODE_BYTES


def smallest_limit(layout: Layout) -> int:
    """Resident bytes of the largest fragment, in the cut where that is the smallest."""
    nodes = len(layout.profile.nodes)
    positions = (0, *layout.legal, nodes)
    finest = finest_needs(layout)
    rest = [*reversed(list(accumulate(reversed(finest), max))), 0]
    best = list(accumulate(finest, max, initial=0))  # before each position
    smallest = best[-1]
    needs = tuple(least_needs(layout))
    lower = max(needs, default=0)
    before = tuple(accumulate(_added_bytes(layout), initial=0))
    for index, start in enumerate(positions[:-1]):
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


def finest_needs(layout: Layout) -> list[int]:
    """Resident bytes of each fragment in the finest cut: a quick upper bound."""
    positions = (0, *layout.legal, len(layout.profile.nodes))
    return [layout.segment(start, end).resident_bytes for start, end in pairwise(positions)]


def least_needs(layout: Layout) -> Iterator[int]:
    """For each node, a lower bound of what a fragment needs that runs it."""
    profile = layout.profile
    for step in layout.steps:
        node = step.node
        if node.role is Role.CONSTANT:
            yield 0
            continue
        weights = {name: step.touched.get(name, profile.weights[name]) for name in node.weights}
        read = sum(profile.tensors[name].bytes or 0 for name in set(node.inputs) - weights.keys())
        made = sum(size for name, size in step.made if name in layout.last_uses)
        if step.axes_outside is None:
            arena = arena_bytes(made + sum(node.works_in), node.beside_bytes)
        else:  # it may be the last one, and what it makes outside
            arena = made + node.beside_bytes
        activations = max(read, arena) if node.in_place else read + arena
        yield FIXED_BYTES + NODE_BYTES * step.runtime_nodes + sum(weights.values()) + activations


def _added_bytes(layout: Layout) -> Iterator[int]:
    """For each node, what it adds to any fragment: of its weights, those that it alone uses."""
    profile = layout.profile
    uses = Counter(name for node in profile.nodes for name in set(node.weights))
    for step in layout.steps:
        own = {name for name in step.node.weights if uses[name] == 1}
        weights = sum(step.touched.get(name, profile.weights[name]) for name in own)
        constant = step.node.role is Role.CONSTANT
        yield 0 if constant else NODE_BYTES * step.runtime_nodes + weights
