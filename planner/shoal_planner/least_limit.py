"""The smallest limit of resident bytes that some cut of a model keeps. Pure.

The finest cut does not show it. What a fragment sends counts besides the arena, so a node by itself
may need more than a longer fragment that uses its outputs and sends less. But that is worth it only
for the pieces of the finest cut that need the most: of the fragments around such a piece, one of
which is in every cut, that one is sought which needs the least. Then around the next one that is in
none of those found, until no other piece needs more. Where these fragments do not overlap, they and
the other pieces are a cut, and no cut needs less.

Where they do, every fragment that could matter is tried, as in the search for a shortest path, with
the maximum in place of the sum. Two bounds keep that short. Above is the best cut known so far:
estimates grow with the fragment, so none is followed beyond it. Below is what was found around the
pieces. A start is passed over if every end within these bounds is reached already in a way that
cannot limit the result, and left as soon as that holds of all ends that are still to come.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from shoal_planner.arena import ARENA_MARGIN, arena_bytes
from shoal_planner.profile import Halves, Role
from shoal_planner.segments import FIXED_BYTES, LARGER_BYTES, LITTLE_BYTES, Growing, Layout
from shoal_planner.steps import NODE_BYTES, Step, has_known_shape
from shoal_protocol.frame_sizes import frame_bytes

NEAR: Final = 32
"""At so many positions before a piece a fragment around it is tried, wherever they are."""
FAR: Final = 8
"""Of positions whose distance differs by less than one part in so many, one is tried."""
_CONVERSIONS: Final = (Halves.WIDENED, Halves.NARROWED)


class _Fragment(NamedTuple):
    """What a fragment needs, and between which positions it is, by their indices."""

    need_bytes: int
    start: int
    end: int


def smallest_limit(layout: Layout) -> int:
    """Resident bytes of the largest fragment, in the cut where that is the smallest."""
    pieces, around, lower = _pieces(layout), list[_Fragment](), 0
    for piece in sorted(pieces, reverse=True):
        if piece.need_bytes <= lower:
            break
        if not _is_in(piece, around):
            around.append(_around(layout, piece, lower))
            lower = max(lower, around[-1].need_bytes)
    return _search(layout, sorted([*pieces, *around], key=_start), lower)


def _ends(layout: Layout) -> tuple[int, ...]:
    return (0, *layout.legal, len(layout.profile.nodes))


def _pieces(layout: Layout) -> list[_Fragment]:
    needs = enumerate(layout.finest_needs)
    return [_Fragment(need, start, start + 1) for start, need in needs]


def _start(fragment: _Fragment) -> int:
    return fragment.start


def _is_in(piece: _Fragment, found: Iterable[_Fragment]) -> bool:
    return any(each.start <= piece.start < each.end for each in found)


def _search(layout: Layout, known: Sequence[_Fragment], lower: int) -> int:
    """What `smallest_limit` asks for, where that is `lower` at least and these fragments are known,
    by their starts."""
    positions, nodes = _ends(layout), len(layout.profile.nodes)
    best, rest = _best_before(known), _best_behind(known)
    smallest = best[-1]
    if smallest == lower:
        return smallest
    needs = tuple(least_needs(layout))
    before = tuple(accumulate(added_bytes(layout), initial=0))
    for index, start in enumerate(positions[:-1]):
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


def _best_before(known: Sequence[_Fragment]) -> list[int]:
    """For each position, the least that the largest of the fragments before it can need."""
    return _best(0, ((need, start, end) for need, start, end in known))


def _best_behind(known: Sequence[_Fragment]) -> list[int]:
    """For each position, the same of those from there to the end."""
    last = max(each.end for each in known)
    return _best(last, ((need, end, start) for need, start, end in reversed(known)))


def _best(first: int, known: Iterable[tuple[int, int, int]]) -> list[int]:
    best = {first: 0}
    for need, near, far in known:
        through = max(best[near], need)
        best[far] = min(best.get(far, through), through)
    return [best[each] for each in sorted(best)]


def _around(layout: Layout, piece: _Fragment, enough: int) -> _Fragment:
    """Of the fragments that have this piece, that which needs the least, or one that needs no more
    than is `enough`."""
    positions, found = _ends(layout), piece
    own = range(positions[piece.start], positions[piece.end])
    if not own:  # what is handed through needs room as well
        return piece
    least = least_around(layout, own)
    for start in _starts(layout, piece):
        if found.need_bytes <= enough or least[positions[start]] >= found.need_bytes:
            break
        growing = Growing(layout, positions[start])
        for end in range(start + 1, len(positions)):
            if growing.grow_to(positions[end]).least_bytes >= found.need_bytes:
                break
            if end >= piece.end and (need := growing.resident_bytes) < found.need_bytes:
                found = _Fragment(need, start, end)
    return found


def _starts(layout: Layout, piece: _Fragment) -> Iterator[int]:
    """Where a fragment may begin that has this piece: everywhere nearby. Farther away where the
    fewest bytes cross, of positions that are about as far: what else it has changes little."""
    crossing = [layout.crossing_bytes[each] for each in _ends(layout)]
    near = max(0, piece.start - NEAR)
    yield from reversed(range(near, piece.end))
    while near:
        far = max(0, near - max(1, (piece.start - near) // FAR))
        yield min(range(far, near), key=crossing.__getitem__)
        near = far


def least_around(layout: Layout, own: range) -> Sequence[int]:
    """For each position up to these nodes, a lower bound of what a fragment needs that begins there
    or before, and has them."""
    needs = tuple(least_needs(layout))
    node = max(own, key=needs.__getitem__)
    given = tuple(_given_bytes(layout, node))
    need = needs[node] + min(given[each - node - 1] for each in _ends(layout) if each > node)
    more = map(sum, zip(added_bytes(layout), _kept_bytes(layout, node), strict=False))
    before = tuple(accumulate(more, initial=0))
    return [need + before[-1] - each for each in before]


def _kept_bytes(layout: Layout, node: int) -> Iterator[int]:
    """For each node before this one, what it makes that is there while this one runs, and is no
    input of it. Of halves that are there as single precision, too, one of both."""
    inputs = layout.profile.nodes[node].inputs
    for step in layout.steps[:node]:
        made = step.node.outputs if step.node.role is Role.COMPUTE else ()
        if layout.has_halves and (step.node.is_view or step.node.halves in _CONVERSIONS):
            made = ()  # it may be the same as another tensor
        kept = [each for each in made if layout.last_uses.get(each, 0) > node]
        tensors = [layout.profile.tensors[each] for each in kept if each not in inputs]
        yield sum(each.model_bytes or 0 for each in tensors)


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
