"""How much of each block's weights stays in memory while a fragment runs block after block.

All blocks are open, and the arena of activations keeps what the neediest block took: both always
count, and leave the rest of the grant as *room* for weights. While a block runs, all of its weights
are in memory; after it, its *kept* bytes stay, and the others, its *streamed* bytes, are dropped:

    peak = held + working + kept bytes of all blocks + most that one block streams  <=  granted

A streamed byte is read again for the next input, at the same cost in whichever block it is, so the
best plan keeps the most bytes. Pages are what is dropped, not whole blocks; hence no knapsack: if
no block may stream more than `level`, then each has to keep what it has beyond that. The lower the
level, the more is kept in all, until it no longer fits. The lowest level that fits is the best.

Weights that come from a slow disk are prefetched: those of the next block while one runs. Then two
blocks stream at once, and less is kept.

A block that reads rows of a table keeps nothing: it is reckoned with the rows of one item, and the
rows of further items would gather beside them.

(FlexNN, section 4, plans the same trade per layer; SwapNet, section 5, per block.)
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shoal_protocol.blocks import Block


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
) -> SwapPlan | None:
    """The plan that keeps the most within the grant; None: there is none that fits.

    `rows` are the blocks that read rows of tables.
    """
    streams = 2 if prefetch else 1
    weights = [block.weight_bytes for block in blocks]
    room = granted_bytes - sum(block.held_bytes for block in blocks)
    room -= max(block.working_bytes for block in blocks)

    def wanted(level: int) -> int:
        return sum(max(0, size - level) for size in weights) + streams * level

    # What is wanted falls with the level, for as long as more blocks exceed it than stream at once.
    low = max((weights[index] for index in rows), default=0)
    high = max(low, *sorted(weights, reverse=True)[streams:], 0)
    if wanted(high) > room:
        return None
    while low < high:
        middle = (low + high) // 2
        if wanted(middle) <= room:
            high = middle
        else:
            low = middle + 1
    return SwapPlan(
        kept_bytes=tuple(max(0, size - low) for size in weights),
        peak_bytes=granted_bytes - room + wanted(low),
        prefetches=prefetch,
    )
