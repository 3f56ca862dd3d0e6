"""Where to cut a fragment into blocks: nearly the least memory, with as few blocks as that takes.

A device that swaps has every block open, and in memory the weights of the one that runs. So blocks
need `held + max(weights) + max(working)`, and what is chosen is a balance: a block more makes the
largest smaller, and costs a session. Fewer are better where it hardly matters: each costs time.

Weights and working memory are two maxima, which different blocks may reach; a sum of maxima has no
optimal substructure. But under a limit of working memory, the smallest largest weight for each
number of blocks is found by dynamic programming, and lowering the limit step by step visits every
pair worth having (FlexNN, section 4.2, searches such a plan for layers). Steps are at least one
part in `STEP`, so what is found is within that part of the working memory of the best there is.

What nodes hold (`NODE_BYTES`) is left out of the choice: together it is the same for every cut, but
for the few nodes that are made again. Of a long fragment only `MOST_POSITIONS` positions are tried.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from shoal_planner.cuts import share, thinned
from shoal_planner.segments import FIXED_BYTES, NODE_BYTES, Growing, Layout

MOST_BLOCKS: Final = 24
NEAR: Final = 10
"""Need within one part in so many of the least is near enough for fewer blocks."""
SESSION_BYTES: Final = 256 << 10
"""What an open session holds besides its nodes. Measured without weights: 75 to 130 KiB opened, and
as much again once it has run."""
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


Table = Sequence[Sequence[BlockCost]]
"""For each start (an index of the positions), the blocks that begin there, by end (an index)."""

_WEIGHT: Final[Callable[[BlockCost], int]] = attrgetter("weight_bytes")
_WORKING: Final[Callable[[BlockCost], int]] = attrgetter("working_bytes")


def choose_blocks(layout: Layout) -> tuple[int, ...]:
    """The positions to cut a fragment's profile at; (), where no blocks gain anything."""
    nodes = len(layout.profile.nodes)
    tried = max(LEAST_POSITIONS, min(MOST_POSITIONS, MOST_STEPS // max(1, nodes)))
    positions = (0, *thinned(layout, share(layout.profile), tried), nodes)
    chain = fewest_near_least(
        [_blocks_from(layout, positions, start) for start in range(len(positions) - 1)]
    )
    return tuple(positions[each.end] for each in chain[:-1])


def block_costs(layout: Layout, cuts: Sequence[int]) -> list[BlockCost]:
    """What the blocks that `cuts` make take, in order."""
    positions = (0, *cuts, len(layout.profile.nodes))
    return [
        next(iter(_blocks_from(layout, positions[start : start + 2], 0)))
        for start in range(len(positions) - 1)
    ]


def _blocks_from(layout: Layout, positions: Sequence[int], start: int) -> list[BlockCost]:
    """The blocks that begin at a position, one for each later position as the end.

    The fragment's inputs are held and its outputs copied, whatever runs. What crosses the start is
    there until the block has run, whether the block takes it or it only passes by.
    """
    profile = layout.profile
    own = {each.name for each in (*profile.inputs, *profile.outputs)}
    sizes = [profile.tensors[name].bytes or 0 for name in own if name in profile.tensors]
    fixed = FIXED_BYTES + sum(sizes)
    growing = Growing(layout, positions[start])
    blocks = []
    for end in range(start + 1, len(positions)):
        while growing.end < positions[end]:
            growing.grow()
        blocks.append(
            BlockCost(
                end=end,
                held_bytes=SESSION_BYTES + NODE_BYTES * growing.node_count + growing.inside_bytes,
                weight_bytes=growing.weight_bytes - growing.inside_bytes,
                working_bytes=fixed + growing.arena_bytes(layout.crossing_bytes[positions[start]]),
            )
        )
    return blocks


def fewest_near_least(table: Table) -> list[BlockCost]:
    """The blocks to make, from the first position to the last: the fewest whose need is near the
    least need."""
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
    needs = {number: need_bytes(chain) for number, chain in found.items()}
    enough = min(needs.values()) * (NEAR + 1) // NEAR
    return found[min(number for number, need in needs.items() if need <= enough)]


def need_bytes(chain: Sequence[BlockCost]) -> int:
    """What is minimised: sessions, the largest weights, the largest working memory."""
    return len(chain) * SESSION_BYTES + max(map(_WEIGHT, chain)) + max(map(_WORKING, chain))


def _by_number(
    table: Table, size: Callable[[BlockCost], int]
) -> dict[int, tuple[int, list[BlockCost]]]:
    """For each number of blocks, up to `MOST_BLOCKS`, the cut whose largest size is smallest, after
    that size. Sizes grow with the end of a block."""
    rests: dict[int, tuple[int, list[BlockCost]]] = {len(table): (0, [])}
    found = {}
    for number in range(1, MOST_BLOCKS + 1):
        longer = {}
        for start, row in enumerate(table):
            best: tuple[int, list[BlockCost]] | None = None
            for block in row:
                own = size(block)
                if best is not None and own >= best[0]:
                    break
                if (rest := rests.get(block.end)) is not None:
                    largest = max(own, rest[0])
                    if best is None or largest < best[0]:
                        best = (largest, [block, *rest[1]])
            if best is not None:
                longer[start] = best
        rests = longer
        if 0 in rests:
            found[number] = rests[0]
    return found
