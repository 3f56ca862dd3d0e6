"""Where to cut a model: dynamic programming over the positions where a cut can be.

Every pair of positions is a fragment that could be, with an integer cost (`Layout` computes it; it
grows with the fragment, so a search from one start ends at the first that is too dear):

- under a limit (`max_bytes`): its resident bytes, and the frames that carry other items meanwhile.
  As few fragments as possible.
- for a number of fragments: its share of all FLOPs plus its share of all weights, in millionths, so
  that neither time nor memory piles up on one device. FLOPs that are unknown count as none.

Then, exactly: first the smallest value that the largest cost can have. Then, among the cuts whose
largest cost is at most one part in `SLACK` above it, the smallest sum of two things: how uneven
they are (the squares of the costs, in units of the mean's) and what they send (bytes over the
borders, in units of the fewest that such cuts can send). So no fragment is nearly empty because
another cannot be made smaller, and no border runs through a wide place for a per cent of balance.
Then the leftmost. `chains` has these passes.

Time grows with the number of positions times the number of nodes. So of a long model only
`MOST_POSITIONS` positions are tried, fewer where that would be more than `MOST_STEPS` steps: of
those that part the cost alike to within that fraction of the whole, the one over which the fewest
bytes cross. If no cut at these satisfies the request, eight times as many are tried, up to all. If
one does, whose fragments reach over few of them each, so that it may have more fragments than need
be, as many are tried as it takes. The limit is so low then that each search ends after a small part
of the model.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeVar

from shoal_planner.borders import frames_beside
from shoal_planner.chains import (
    Table,
    cheapest,
    least_to_end,
    smallest_largest,
    starts_of,
)
from shoal_planner.counting import Counting
from shoal_planner.least_limit import smallest_limit
from shoal_planner.limited import Limited
from shoal_planner.profile import Profile, Role
from shoal_planner.segments import Growing, Layout
from shoal_planner.shares import SLACK, even_table, share
from shoal_protocol.units import format_downwards, format_upwards

FINE: Final = 8
"""A fragment reaches over so many of the positions tried, or more of them are tried: of a fragment
over eight, an eighth at most is lost to where it could not end."""
MOST_POSITIONS: Final = 500
_FINER: Final = 8
LEAST_POSITIONS: Final = 32
MOST_STEPS: Final = 600_000
"""Nodes that the search visits at most, at its first try; it visits a node once per position."""
_MILLION: Final = 1_000_000

G = TypeVar("G", bound=Counting)


class Frames(Enum):
    """In what other items come and go while a device runs a fragment, as far as it has room."""

    FRAGMENT = auto()
    """What enters the fragment and leaves it: another device may have what is next to it."""
    MODEL = auto()
    """What enters the model and leaves it: one device has all fragments."""
    NONE = auto()
    """They wait on the device's disk meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRequest:
    """What is asked for: a number of fragments, or a limit of what a device needs for each fragment
    (then as few fragments as possible), or tensors that are to be the last of a fragment each.
    `fragments` with `max_bytes` asks for that many, none over the limit. Nothing: one fragment.
    Under a limit there is room for `frames` besides.
    `nearest`: what no cut parts may be over the limit.
    """

    fragments: int | None = None
    max_bytes: int | None = None
    frames: Frames = Frames.FRAGMENT
    nearest: bool = False
    tensors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert not self.tensors or (self.fragments, self.max_bytes) == (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why there is no such cut. `need_bytes` and `have_bytes` are set where a limit is too low."""

    reason: str
    node: str | None = None
    need_bytes: int | None = None
    have_bytes: int | None = None


def choose_cuts(profile: Profile, request: CutRequest) -> tuple[int, ...] | Refusal:
    """The positions of `profile.nodes` to cut at, in order; () leaves the model whole."""
    return choose_in(laid_out(profile, request), request)


def choose_in(layout: Layout, request: CutRequest) -> tuple[int, ...] | Refusal:
    """The same, where it is `laid_out` already: several limits have what is known of it in
    common."""
    if request.tensors:
        return _named(layout, request.tensors)
    if request.max_bytes is None and request.fragments in (None, 1):
        return ()
    most = len(layout.legal) + 1
    if request.fragments is not None and not 1 <= request.fragments <= most:
        return _too_many(layout, request.fragments)
    if request.fragments is None and _fits(layout, request.max_bytes):
        return ()
    found = _search(layout, request)
    return found if isinstance(found, Refusal) else _best(found)


@dataclass(frozen=True, slots=True)
class _Found:
    """The fragments that could be between these positions. `starts` are those of so many fragments
    as there will be, of which the largest costs `largest` at least."""

    positions: tuple[int, ...]
    table: Table
    starts: list[list[int]]
    largest: int


def _search(layout: Layout, request: CutRequest) -> _Found | Refusal:
    limit = request.max_bytes
    if limit is not None and not request.nearest and (need := _need(layout, limit)) > limit:
        return refuse(layout, limit, need)
    over = _over(layout, request)
    excused = over | _within(layout, request)
    tried = len(layout.legal) if over else _first_tried(layout, request)
    while True:
        inner = _tried(layout, request.fragments, tried)
        is_finest = len(inner) == len(layout.legal)
        positions = (0, *inner, len(layout.profile.nodes))
        table = _table(layout, positions, request, excused)
        found = _shortest(positions, table, request.fragments)
        if found is not None and (is_finest or not _is_coarse(found, request)):
            return found
        if is_finest:
            return _over_limit(layout, table, request)
        tried = tried * _FINER if found is None else _finer(tried, found)


def _need(layout: Layout, limit: int) -> int:
    """A limit that some cut keeps, the smallest one unless that is within this limit. It takes a
    small part of a search to know it."""
    finest = max(layout.finest_needs)
    return finest if finest <= limit else smallest_limit(layout)


def _shortest(positions: tuple[int, ...], table: Table, fragments: int | None) -> _Found | None:
    """So many fragments, else the fewest that lead to the end; None: none do."""
    count = fragments or least_to_end(table)[0]
    if count is None:
        return None
    starts = starts_of(table, count)
    largest = smallest_largest(table, starts)
    return None if largest is None else _Found(positions, table, starts, largest)


def _is_coarse(found: _Found, request: CutRequest) -> bool:
    """Whether the positions tried may be why there are so many fragments: each reaches over a few
    of them only, and ends well before the limit. Then a search in more of them is short, too."""
    few = len(found.positions) < FINE * (len(found.starts) - 1)
    return few and request.fragments is None


def _finer(tried: int, found: _Found) -> int:
    """How many positions to try in place of so many, with which too few were found."""
    enough = FINE * (len(found.starts) - 1)
    return max(2 * tried, tried * enough // len(found.positions) * (_FINER + 1) // _FINER)


def _best(found: _Found) -> tuple[int, ...]:
    """Of the fragments that could be, the most even ones that send the least."""
    positions, starts, count = found.positions, found.starts, len(found.starts) - 1
    most = found.largest + found.largest // SLACK
    table = [[each for each in row if each.cost <= most] for row in found.table]
    fewest = cheapest(table, starts, lambda each: each.incoming_bytes)
    sent = max(1, sum(each.incoming_bytes for each in fewest))
    mean = max(1, sum(each.cost for each in fewest) // count)
    chosen = cheapest(
        table,
        starts,
        lambda each: each.cost**2 * _MILLION // mean**2 + each.incoming_bytes * _MILLION // sent,
    )
    return tuple(positions[each.end] for each in chosen[:-1])


def laid_out(profile: Profile, request: CutRequest) -> Layout:
    """With what is beside a fragment under a limit."""
    if request.max_bytes is None or request.frames is Frames.NONE:
        return Layout(profile)
    if request.frames is Frames.MODEL:
        return Layout(profile, frames_bytes=_frames_of_all(profile))
    return Layout(profile, moving=True)


def _frames_of_all(profile: Profile) -> int:
    """What is beside any fragment on a device that has all of them."""
    coming, going = (
        sum(_bytes(profile, each.name) for each in specs)
        for specs in (profile.inputs, profile.outputs)
    )
    return frames_beside(coming, going)


def _bytes(profile: Profile, name: str) -> int:
    """Of a tensor, or of a weight that is an output of the model."""
    tensor = profile.tensors.get(name)
    return profile.weights.get(name, 0) if tensor is None else tensor.bytes or 0


def _first_tried(layout: Layout, request: CutRequest) -> int:
    """How many positions are tried at first."""
    by_steps = MOST_STEPS // max(1, len(layout.profile.nodes))
    return max(LEAST_POSITIONS, min(MOST_POSITIONS, by_steps), 8 * (request.fragments or 1))


def _fits(layout: Layout, limit: int | None) -> bool:
    """Whether the whole model is within the limit."""
    growing = Growing(layout, 0)
    while growing.end < len(layout.profile.nodes) and (
        limit is None or growing.least_bytes <= limit
    ):
        growing.grow()
    return limit is None or growing.resident_bytes <= limit


def _tried(layout: Layout, fragments: int | None, most: int) -> tuple[int, ...]:
    """At most about `most` of the legal positions, where fragments of one cost would end."""
    if fragments is None:
        return thinned(Growing(layout, 0), _resident, most)
    return thinned(Counting(layout, 0), share(layout.profile), most)


def _resident(growing: Growing) -> int:
    return growing.resident_bytes


def thinned(growing: G, cost: Callable[[G], int], most: int) -> tuple[int, ...]:
    """At most about `most` of the legal positions (see the module's text), by what a segment costs
    that grows from the first."""
    layout, costs = growing.layout, dict[int, int]()
    if len(layout.legal) <= most:
        return layout.legal
    crossing = layout.crossing_bytes
    for position in (*layout.legal, len(layout.profile.nodes)):
        costs[position] = cost(growing.grow_to(position))
    total = max(1, cost(growing))
    kept: dict[int, int] = {}
    for position in layout.legal:
        part = costs[position] * most // total
        if part not in kept or crossing[position] < crossing[kept[part]]:
            kept[part] = position
    return tuple(sorted(kept.values()))


def _table(
    layout: Layout,
    positions: Sequence[int],
    request: CutRequest,
    excused: Collection[tuple[int, int]],
) -> Table:
    """The fragments that a cut can have that satisfies the request."""
    limit, fragments = request.max_bytes, request.fragments
    if limit is None:
        assert fragments is not None
        return even_table(layout, positions, fragments)
    if fragments is None:
        return Limited(layout, positions, limit, excused=excused).shortest()
    return Limited(layout, positions, limit, share(layout.profile), excused).table()


def _over(layout: Layout, request: CutRequest) -> frozenset[tuple[int, int]]:
    """From where to where no cut parts what is over the limit, where that may be."""
    if not request.nearest or request.max_bytes is None:
        return frozenset()
    found = zip(layout.finest, layout.finest_needs, strict=True)
    return frozenset(each for each, need in found if need > request.max_bytes)


def _within(layout: Layout, request: CutRequest) -> frozenset[tuple[int, int]]:
    """From where to where no cut parts what keeps the limit, though a search counts more of it:
    `smallest_limit` knows them, too."""
    if request.max_bytes is None or not layout.has_halves:
        return frozenset()
    found = zip(layout.finest, layout.finest_needs, strict=True)
    return frozenset(each for each, need in found if need <= request.max_bytes)


def _named(layout: Layout, tensors: Sequence[str]) -> tuple[int, ...] | Refusal:
    """Cuts directly behind the nodes that make the named tensors."""
    cuts = set()
    for name in tensors:
        maker = layout.makers.get(name)
        if maker is None:
            return Refusal(reason=f"cannot cut at {name}: {_not_made(layout.profile, name)}")
        node = layout.profile.nodes[maker]
        index = bisect_left(layout.positions, maker + 1)
        if node.role is Role.CONSTANT:
            return Refusal(
                reason=f"cannot cut at {name}: it is constant, so never sent", node=node.label
            )
        if index == len(layout.positions):
            return Refusal(reason=f"cannot cut at {name}: nothing comes after it", node=node.label)
        position = layout.positions[index]
        if position in layout.obstacles:
            return Refusal(
                reason=f"cannot cut at {name}: {layout.obstacles[position]}", node=node.label
            )
        cuts.add(position)
    return tuple(sorted(cuts))


def _not_made(profile: Profile, name: str) -> str:
    """What a tensor is that no node makes."""
    if name in profile.weights:
        return "that is a weight, not what a node makes"
    if name in profile.tensors:
        return "that tensor is an input of the model"
    return "no node makes a tensor of that name; shoal partition lists those between fragments"


def _too_many(layout: Layout, fragments: int) -> Refusal:
    reason = (
        f"cannot make {fragments} fragments: the finest possible cut gives {len(layout.legal) + 1}"
    )
    if layout.obstacles:
        position, why = next(iter(layout.obstacles.items()))
        reason += (
            f" ({len(layout.obstacles)} of {len(layout.positions)} positions are impossible; "
            f"before {layout.profile.nodes[position].label}: {why})"
        )
        return Refusal(reason=reason, node=layout.profile.nodes[position].label)
    return Refusal(reason=reason)


def _over_limit(layout: Layout, table: Table, request: CutRequest) -> Refusal:
    """No cut keeps the limit with the number of fragments asked for: say what would."""
    assert request.max_bytes is not None
    assert request.fragments is not None, "some cut keeps the limit, so it was to be found"
    fewest = least_to_end(table)[0]
    need = smallest_limit_of(layout, request.fragments)
    return Refusal(
        reason=(
            f"{request.fragments} fragments would need {format_upwards(need)}, the limit is "
            f"{format_downwards(request.max_bytes)}; {fewest} fragments would do"
        ),
        need_bytes=need,
        have_bytes=request.max_bytes,
    )


def smallest_limit_of(layout: Layout, fragments: int) -> int:
    """The smallest limit that so many fragments keep, cut where a search tries at first."""
    balanced = choose_cuts(layout.profile, CutRequest(fragments=fragments))
    assert not isinstance(balanced, Refusal)
    need = max(piece.segment.resident_bytes for piece in layout.pieces(balanced))
    request = CutRequest(fragments=fragments, max_bytes=need)
    inner = thinned(Growing(layout, 0), _resident, _first_tried(layout, request))
    positions = (0, *inner, len(layout.profile.nodes))
    table = Limited(layout, positions, need).table()
    least = smallest_largest(table, starts_of(table, fragments))
    return need if least is None else least


def refuse(layout: Layout, limit: int, need: int) -> Refusal:
    """No cut keeps the limit, but `need`, the smallest that one keeps: say which node is the
    heaviest."""
    needs = layout.finest_needs
    place = max(range(len(needs)), key=needs.__getitem__)
    worst = layout.segment(*layout.finest[place])
    node = _heaviest(layout, worst.start, worst.end)
    between = [each for each in layout.obstacles if worst.start < each < worst.end]
    why = f"; it cannot be parted ({layout.obstacles[between[0]]})" if between else " by itself"
    if worst.resident_bytes > need:  # in a larger fragment it takes the place of its input
        why = " where it is cut off"
    what = "what is handed through" if node is None else f"node {node}"
    return Refusal(
        reason=(
            f"{what} needs {format_upwards(worst.resident_bytes)}{why}, the limit is "
            f"{format_downwards(limit)}; the smallest limit that some cut keeps is "
            f"{format_upwards(need)}"
        ),
        node=node,
        need_bytes=need,
        have_bytes=limit,
    )


def _heaviest(layout: Layout, start: int, end: int) -> str | None:
    """The label of a node; None: there is none."""
    own = layout.profile.nodes[start:end]
    nodes = [each for each in own if each.role is not Role.CONSTANT] or own
    weighed = [(each.parameter_bytes + (each.activation_bytes or 0), each.label) for each in nodes]
    return max(weighed)[1] if weighed else None
