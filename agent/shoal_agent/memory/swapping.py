"""How much of each block's weights stays in memory while a fragment runs block after block.

All blocks are open; what they hold always counts, and leaves the rest of the grant as *room*.
While a block runs, all of its weights are in memory, and the arena of activations, *working*, as it
is then (`shoal_protocol.blocks.arena_beside`). After it, its *kept* bytes stay, and the others, its
*streamed* bytes, are dropped:

    peak = held + kept bytes of all blocks + most that one block streams and works with  <=  granted

A streamed byte is read again for the next input, at the same cost in whichever block it is, so the
best plan keeps the most bytes. A part of a block can stay; hence no knapsack: if no block may
stream and work with more than `level`, then each has to keep what it has beyond that. The lower the
level, the more is kept in all, until it no longer fits. The lowest level that fits is the best;
what is left of the room then keeps what blocks stream, those first that stream the most.

A level is a number of huge pages beside what works, or one block, and what is kept of the rest are
huge pages or all of a block: of a huge page, either all stays or nothing.

Weights that come from a slow disk are prefetched: those of the next block while one runs. Then two
blocks stream at once, beside the neediest's activations, and less is kept.

A block that reads rows of a table keeps nothing: it is reckoned with the rows of one item, and the
rows of further items would gather beside them.

(FlexNN, section 4, plans the same trade per layer; SwapNet, section 5, per block.)
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shoal_agent.memory.allocation import Point
from shoal_protocol.blocks import Block, arena_beside, least_bytes

HUGE_PAGE_BYTES: Final = 2 << 20
"""Where files are cached in such pages, the kernel maps and drops them as a whole."""


_POINTS: Final = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapPlan:
    """`kept_bytes` of each block stay in memory when it has run; `peak_bytes` is the promise.

    `prefetches`: the weights of the next block may come into memory while a block runs.
    """

    kept_bytes: tuple[int, ...]
    peak_bytes: int
    prefetches: bool


def plan_swapping(
    blocks: Sequence[Block],
    granted_bytes: int,
    *,
    rows: Collection[int] = (),
    prefetch: bool = False,
    huge_page_bytes: int = HUGE_PAGE_BYTES,
) -> SwapPlan | None:
    """The plan that keeps the most within the grant; None: there is none that fits.

    `rows` are the blocks that read rows of tables.
    """
    streams, beside = 1, arena_beside(blocks)
    room = granted_bytes - sum(block.held_bytes for block in blocks)
    if prefetch:
        streams, room, beside = 2, room - max(beside), (0,) * len(blocks)
    lowest = max(beside)
    tables = max((blocks[index].weight_bytes + beside[index] for index in rows), default=0)
    weights = [0 if i in rows else block.weight_bytes for i, block in enumerate(blocks)]
    sizes = [weight + working for weight, working in zip(weights, beside, strict=True)]

    def left(level: int) -> int:
        return room - sum(max(0, size - level) for size in sizes) - streams * max(level, tables)

    # What is left grows with the level, for as long as more blocks exceed it than stream at once.
    highest = max(tables, lowest, *sorted(sizes, reverse=True)[streams:])
    levels = sorted({*range(lowest, highest, huge_page_bytes), *sizes, highest})
    levels = levels[bisect_left(levels, lowest) : levels.index(highest) + 1]
    found = bisect_left(levels, 0, key=left)
    if found == len(levels):
        return None
    level = levels[found]
    kept, unused = [max(0, size - level) for size in sizes], left(level)
    for index in sorted(range(len(blocks)), key=lambda index: kept[index] - weights[index]):
        if (more := weights[index] - kept[index]) > unused:
            more = unused // huge_page_bytes * huge_page_bytes
        kept[index], unused = kept[index] + more, unused - more
    return SwapPlan(kept_bytes=tuple(kept), peak_bytes=granted_bytes - unused, prefetches=prefetch)


def keeping_nothing(blocks: int) -> SwapPlan:
    """For a run of which nobody knows what it takes."""
    return SwapPlan(kept_bytes=(0,) * blocks, peak_bytes=0, prefetches=False)


def as_granted(blocks: Sequence[Block], granted_bytes: int) -> Sequence[Block]:
    """The blocks with an arena that is kept, which saves time, if the grant has room for it."""
    kept = [replace(block, empties_arena=False) for block in blocks]
    return blocks if least_bytes(kept) > granted_bytes else kept


def grant_curve(blocks: Sequence[Block], resident_bytes: int) -> tuple[Point, ...]:
    """What a fragment streams for an item at several grants, the last of it all in one.

    The borders between blocks cost about as much time as it takes to stream all weights once.
    """
    weights = sum(block.weight_bytes for block in blocks)
    least, most = least_bytes(blocks), weights + max(arena_beside(blocks))
    most += sum(block.held_bytes for block in blocks)
    points: list[Point] = []
    for step in range(_POINTS):
        granted = least + (most - least) * step // (_POINTS - 1)
        plan = plan_swapping(as_granted(blocks, granted), granted)
        assert plan is not None, "it is at least the least that it needs"
        streamed = weights - sum(plan.kept_bytes)
        if granted < resident_bytes and (not points or weights + streamed < points[-1].cost):
            points.append(Point(granted, float(weights + streamed)))
    return (*points, Point(resident_bytes, 0.0))
