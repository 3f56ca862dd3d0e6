"""Where to cut a fragment into blocks: nearly the least memory, with as few blocks as that takes.

A device that swaps has every block open, and in memory the weights of the one that runs. So blocks
need `held + max(weights) + max(working)`, and what is chosen is a balance: a block more makes the
largest smaller, and costs a session. Fewer are better where it hardly matters: each costs time.

Weights and working memory are two maxima, which different blocks may reach; a sum of maxima has no
optimal substructure. But under a limit of working memory, the smallest largest weight for each
number of blocks is found by dynamic programming, and lowering the limit step by step visits every
pair worth having (FlexNN, section 4.2, searches such a plan for layers). Steps are at least one
part in `STEP`, so what is found is within that part of the working memory of the best there is.

These are estimates of each block by itself. What blocks leave in the one arena that they share is
known of a whole cut only (`block_costs`), and decides among the cuts that come close.

In image models the first layers work with the most and the last have the most weights. There the
arena is emptied on the way, which makes one maximum of two: `max(weights + working)`, of which the
best chain for each number of blocks is found by dynamic programming at once. To empty it costs
time, so that is done where it saves one part in `GAIN`, and as seldom as that takes.

A cut before a node that works in the place of the only value it takes (an activation after its
convolution) is worse than the one behind it: the block after it could not work in place. None is
tried.

What nodes hold (`BLOCK_NODE_BYTES`) is left out of the choice: together it is the same for every
cut, but for the few nodes that are made again. Of a long fragment only `MOST_POSITIONS` positions
are tried.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

from shoal_planner.arena import Arena, Tensors, arena_bytes
from shoal_planner.counting import Counting
from shoal_planner.cuts import thinned
from shoal_planner.pieces import Piece
from shoal_planner.segments import Growing, Layout
from shoal_planner.shares import share

MOST_BLOCKS: Final = 40
GAIN: Final = 10
"""The arena is emptied where that saves one part in so many of the need."""
NEAR: Final = 40
"""Need within one part in so many of the least is near enough for fewer blocks."""
CLOSE: Final = 8
"""Cuts whose estimate is within one part in so many of the least are compared by the replay."""
SESSION_BYTES: Final = 144 << 10
"""What an open session holds besides its nodes. Measured with two threads, once it has run: 97 KiB
with convolutions, 128 with matrix products; each thread more takes 100."""
BLOCK_NODE_BYTES: Final = 14 << 10
"""What each of its nodes holds: 14 KiB with convolutions, 9 with matrix products. With both, what
the blocks of image and text models held came out at 0.71 to 0.99 of what is reckoned."""
FIXED_BYTES: Final = 11 << 18
"""What all blocks of a fragment take together besides: more than it takes as a whole."""
STEP: Final = 32
MOST_POSITIONS: Final = 96
LEAST_POSITIONS: Final = 32
MOST_STEPS: Final = 100_000
"""Nodes that are visited at most, once per position: about half a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """What a block takes: see `shoal_protocol.blocks.Block`."""

    end: int
    held_bytes: int
    weight_bytes: int
    working_bytes: int
    beside_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Blocking:
    """Positions to cut a fragment's profile at, none where no blocks gain anything, and the indices
    of the blocks before which the arena is emptied."""

    cuts: tuple[int, ...]
    emptied: frozenset[int] = frozenset()


Table = Sequence[Sequence[BlockCost]]
"""For each start (an index of the positions), the blocks that begin there, by end (an index)."""

_Chain = tuple[int, "tuple[BlockCost, _Chain] | None"]
"""The largest size of some blocks, the first of them, and the others."""

_WEIGHT: Final[Callable[[BlockCost], int]] = attrgetter("weight_bytes")
_WORKING: Final[Callable[[BlockCost], int]] = attrgetter("working_bytes")


def _both(block: BlockCost) -> int:
    return block.weight_bytes + block.working_bytes


def choose_blocks(layout: Layout, first: int = 0) -> Blocking:
    """Where to cut a fragment, and where to empty the arena. The `first` nodes are a block of their
    own, if that is not 0."""
    nodes = len(layout.profile.nodes)
    if not first and not layout.legal:
        return Blocking(())
    tried = max(LEAST_POSITIONS, min(MOST_POSITIONS, MOST_STEPS // max(1, nodes)))
    thin = thinned(Counting(layout, 0), share(layout.profile), tried)
    inner = {_behind_in_place(layout, each) for each in thin if each > first}
    positions = (0, *sorted({first, *inner} - {0}), nodes)
    table = estimates(layout, positions)
    if first:
        table = [table[0][:1], *table[1:]]
    one = [(chain, frozenset[int]()) for chain in least_by_number(table).values()]
    several = [(chain, emptied(chain)) for chain in least_by_number_emptied(table).values()]
    need, blocking = _best(layout, positions, one)
    least, other = _best(layout, positions, several)
    return other if least * GAIN <= need * (GAIN - 1) else blocking


def _behind_in_place(layout: Layout, position: int) -> int:
    """The position, or the one behind nodes there that work in the place of the only value they
    take, which the node before has made and nobody else needs."""
    nodes, legal = layout.profile.nodes, frozenset(layout.legal)
    while position + 1 in legal:
        node, before = nodes[position], nodes[position - 1]
        if not node.in_place or node.weights or node.inputs != before.outputs:
            break
        if layout.last_uses.get(node.inputs[0]) != position:
            break
        position += 1
    return position


def _best(
    layout: Layout,
    positions: Sequence[int],
    options: Sequence[tuple[Sequence[BlockCost], frozenset[int]]],
) -> tuple[int, Blocking]:
    """What the fewest blocks need that come near the least, by the replay, and how they are."""
    estimated = [need_bytes(chain, emptied=bool(places)) for chain, places in options]
    close = min(estimated) * (CLOSE + 1) // CLOSE
    needs, found = dict[int, int](), dict[int, Blocking]()
    for (chain, places), estimate in zip(options, estimated, strict=True):
        if estimate <= close:
            cuts = tuple(positions[each.end] for each in chain[:-1])
            costs = _with_working(layout, chain, layout.pieces(cuts), places)
            needs[len(chain)] = need_bytes(costs, emptied=bool(places))
            found[len(chain)] = Blocking(cuts, places)
    number = fewest_near_least(needs)
    return needs[number], found[number]


def estimates(layout: Layout, positions: Sequence[int]) -> Table:
    """What every block that could be takes, by itself among the tensors that cross: those are there
    until it has run, whether it takes them or they only pass by."""
    crossing = layout.crossing_bytes
    return [
        list(_blocks_from(layout, positions, start, crossing[position]))
        for start, position in enumerate(positions[:-1])
    ]


def block_costs(
    layout: Layout, pieces: Sequence[Piece], emptied: Collection[int] = ()
) -> list[BlockCost]:
    """What blocks take, run in order, with an arena that is emptied before some of them."""
    alone = [
        cost
        for piece in pieces
        for cost in _blocks_from(layout, (piece.segment.start, piece.segment.end), 0, 0)
    ]
    return _with_working(layout, alone, pieces, emptied)


def _with_working(
    layout: Layout,
    blocks: Sequence[BlockCost],
    pieces: Sequence[Piece],
    emptied: Collection[int],
) -> list[BlockCost]:
    """What blocks take, with what they work in as they run one after the other.

    Working memory is that of all of them up to each, since the arena was emptied that they share:
    tensors that outlive their block leave holes, which the estimates for single blocks do not know
    of. Those that are alive when it is emptied are moved, and there twice for a moment.
    """
    fixed = _fixed_bytes(layout)
    replayed = list(_replayed(layout, pieces, emptied))
    kept = [each for each, _ in replayed]
    if emptied:  # a device with more room keeps it: the neediest block counts for all then
        neediest = kept.index(max(kept))
        unemptied = [each for each, _ in _replayed(layout, pieces, ())]
        kept[neediest] = max(kept[neediest], *unemptied)
    needed = zip(blocks, kept, replayed, _rows_bytes(layout, pieces), strict=True)
    return [
        replace(each, working_bytes=fixed + size + beside + rows, beside_bytes=beside)
        for each, size, (_, beside), rows in needed
    ]


def _rows_bytes(layout: Layout, pieces: Sequence[Piece]) -> Iterator[int]:
    """What rows of tables take while each block runs that the device has read."""
    results = {each.name for each in layout.profile.outputs}
    alive = set[str]()
    for index, piece in enumerate(pieces):
        alive |= layout.rows.keys() & set(piece.takes)
        yield sum(layout.rows[name] for name in alive)
        later = results.union(*(each.takes for each in pieces[index + 1 :]))
        alive &= later


def _fixed_bytes(layout: Layout) -> int:
    """The fragment's inputs are held and its outputs copied, whatever runs."""
    profile = layout.profile
    own = {each.name for each in profile.inputs} - layout.rows.keys()
    own |= {each.name for each in profile.outputs}
    return FIXED_BYTES + sum(
        profile.tensors[name].bytes or 0 for name in own if name in profile.tensors
    )


def _blocks_from(
    layout: Layout, positions: Sequence[int], start: int, crossing: int
) -> Iterator[BlockCost]:
    """The blocks that begin at a position, one for each later position as the end."""
    fixed = _fixed_bytes(layout)
    growing = Growing(layout, positions[start])
    for end in range(start + 1, len(positions)):
        growing.grow_to(positions[end])
        yield BlockCost(
            end=end,
            held_bytes=SESSION_BYTES + BLOCK_NODE_BYTES * growing.node_count + growing.inside_bytes,
            weight_bytes=growing.weight_bytes - growing.inside_bytes,
            working_bytes=fixed
            + arena_bytes(crossing + growing.touched_bytes, growing.beside_bytes),
        )


def _replayed(
    layout: Layout, pieces: Sequence[Piece], emptied: Collection[int]
) -> Iterator[tuple[int, int]]:
    """What each block works in, and those before it: how far up the arena was touched once it has
    run, with what was moved out of it; and what it takes beside that."""
    profile = layout.profile
    last_taken = {name: index for index, piece in enumerate(pieces) for name in piece.takes}
    results = {each.name for each in profile.outputs} - layout.leaving
    given, moved = Tensors(Arena()), dict[str, int]()
    for index, piece in enumerate(pieces):
        if index in emptied:
            moved |= {name: size for name, (_, size) in given.held.items()}
            given = Tensors(Arena())
        inside = layout.tensors(given.arena)
        uses = {
            name: position for position in piece.nodes for name in profile.nodes[position].inputs
        }
        needed = uses.keys() | set(piece.gives)
        for name in filter(uses.__contains__, piece.takes):  # in an order that no process changes
            if (computed := profile.tensors[name].computed_bytes or 0) > (
                profile.tensors[name].bytes or 0
            ):
                inside.hold(name, computed)
        for position in piece.nodes:
            node = profile.nodes[position]
            ends = [name for name in node.inputs if uses[name] == position]
            inside.run(
                node,
                [(name, profile.tensors[name].computed_bytes or 0) for name in node.outputs],
                [name for name in ends if name not in piece.gives],
                needed,
            )
        given.held.update(inside.settled())
        touched = inside.touched_bytes + sum(moved.values())
        for name in [*given.held, *moved]:
            is_spent = last_taken.get(name, -1) <= index and name not in results
            if is_spent and moved.pop(name, None) is None:
                given.release(name)
        if index + 1 in emptied:
            touched += sum(size for _, size in given.held.values())
        yield arena_bytes(touched), inside.beside_bytes


def fewest_near_least(needs: Mapping[int, int]) -> int:
    """Of numbers of blocks with what they need: the smallest whose need is near the least."""
    enough = min(needs.values()) * (NEAR + 1) // NEAR
    return min(number for number, need in needs.items() if need <= enough)


def least_by_number(table: Table) -> dict[int, list[BlockCost]]:
    """For each number of blocks, those from the first position to the last whose need is the
    least, or nearly so."""
    least_working = min(working for working, _ in _by_number(table, _WORKING).values())
    limit = max(each.working_bytes for row in table for each in row)
    found: dict[int, list[BlockCost]] = {}
    while limit >= least_working:
        allowed = [[each for each in row if each.working_bytes <= limit] for row in table]
        hopeful = False
        reached = 0
        for number, (weight, chain) in _by_number(allowed, _WEIGHT).items():
            if number not in found or need_bytes(chain) < need_bytes(found[number]):
                found[number] = chain
            least = number * SESSION_BYTES + weight + least_working
            hopeful |= least < need_bytes(found[number])
            reached = max(reached, *map(_WORKING, chain))
        if not hopeful:
            break
        limit = min(reached - 1, limit - limit // STEP)
    return found


def least_by_number_emptied(table: Table) -> dict[int, list[BlockCost]]:
    """The same where the arena is emptied before each block."""
    return {number: chain for number, (_, chain) in _by_number(table, _both).items()}


def emptied(chain: Sequence[BlockCost]) -> frozenset[int]:
    """Before which blocks to empty the arena, so few that it takes one part in `CLOSE` more than
    before all: before the first, and wherever what earlier blocks have left would be too much."""
    enough = max(map(_both, chain)) * (CLOSE + 1) // CLOSE
    found, working = {0}, 0
    for index, block in enumerate(chain):
        working = max(working, block.working_bytes)
        if working + block.weight_bytes > enough:
            found.add(index)
            working = block.working_bytes
    return frozenset(found) if len(found) > 1 else frozenset()


def need_bytes(chain: Sequence[BlockCost], *, emptied: bool = False) -> int:
    """What is minimised: sessions, the largest weights with what a node takes beside the arena, and
    most of the arena; where that is `emptied` on the way, the largest of both together."""
    sessions = len(chain) * SESSION_BYTES
    if emptied:
        return sessions + max(map(_both, chain))
    kept = max(each.working_bytes - each.beside_bytes for each in chain)
    return sessions + max(each.weight_bytes + each.beside_bytes for each in chain) + kept


def _by_number(
    table: Table, size: Callable[[BlockCost], int]
) -> dict[int, tuple[int, list[BlockCost]]]:
    """For each number of blocks, up to `MOST_BLOCKS`, the cut whose largest size is smallest, after
    that size. Sizes grow with the end of a block."""
    sized = [[(size(block), block) for block in row] for row in table]
    rests: dict[int, _Chain] = {len(table): (0, None)}
    found = {}
    for number in range(1, MOST_BLOCKS + 1):
        longer: dict[int, _Chain] = {}
        for start, row in enumerate(sized):
            best: _Chain | None = None
            for own, block in row:
                if best is not None and own >= best[0]:
                    break
                if (rest := rests.get(block.end)) is not None:
                    largest = max(own, rest[0])
                    if best is None or largest < best[0]:
                        best = (largest, (block, rest))
            if best is not None:
                longer[start] = best
        rests = longer
        if (chain := rests.get(0)) is not None:
            found[number] = (chain[0], list(_blocks_of(chain)))
    return found


def _blocks_of(chain: _Chain) -> Iterator[BlockCost]:
    while (first := chain[1]) is not None:
        block, chain = first
        yield block
