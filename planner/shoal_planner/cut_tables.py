"""A profile -> the table of all fragments that a plan may choose from (`shoal_protocol.cut_table`).

Of a long model only `MOST_CUTS` cuts are in the table, chosen as for any search: of those that part
FLOPs and weights alike, the one over which the fewest bytes cross.

The blocks of a fragment are not chosen here, which would take half a second for each. What they
need at least is estimated from the table's own cuts: blocks that hold no more weights than a limit,
one after the other, under several limits. A fragment's own blocks are chosen among more cuts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from shoal_planner.arena import arena_bytes, more_of_table_bytes
from shoal_planner.blocks import BLOCK_NODE_BYTES, FIXED_BYTES, SESSION_BYTES
from shoal_planner.counting import Counting
from shoal_planner.cuts import thinned
from shoal_planner.profile import Profile, Role
from shoal_planner.segments import Growing, Layout
from shoal_planner.shares import share
from shoal_protocol.cut_table import Candidate, CutTable
from shoal_protocol.partition import Work

MOST_CUTS: Final = 48
_LEAST_CUTS: Final = 16
_MOST_STEPS: Final = 150_000
"""Nodes that are visited at most, once per cut: about two seconds."""
_MOST_NAME: Final = 512
_LIMITS: Final = (100, 125, 160, 200, 300, 500, 800)
"""Of the weights of a block, in hundredths of the largest part that cannot be smaller."""
BLOCKS_SAVE: Final = 10
"""As in `shoal_compiler.blocks`: blocks are to save at least one part in so many."""


def table_of(profile: Profile) -> CutTable:
    """The fragments that cuts of this profile could make."""
    layout = Layout(profile)
    nodes = len(profile.nodes)
    most = max(_LEAST_CUTS, min(MOST_CUTS, _MOST_STEPS // max(1, nodes)))
    names = _names(layout)
    cuts = [each for each in thinned(Counting(layout, 0), share(profile), most) if each in names]
    ends = (0, *cuts, nodes)
    parts = _parts(layout, ends)
    blocks = parts
    if any(node.gathers for node in profile.nodes):
        blocks = _parts(Layout(profile, row_items=1, gathered=True), ends)
    work = _work_before(profile, ends)
    rows = []
    for start, row in enumerate(parts):
        candidates = [
            replace(part.candidate, work=_between(work[start], work[start + 1 + place]))
            for place, part in enumerate(row)
        ]
        rows.append(
            tuple(
                replace(each, least_bytes=_least(each, blocks, start, start + 1 + place))
                for place, each in enumerate(candidates)
            )
        )
    tensors = tuple(names[each] for each in cuts)
    return CutTable(model_digest=profile.digest, tensors=tensors, rows=tuple(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A fragment that could be, with what it would take as a block."""

    candidate: Candidate
    nodes: int
    touched_bytes: int
    beside_bytes: int
    outgoing_bytes: int
    known: bool


def _names(layout: Layout) -> dict[int, str]:
    """For each position, a tensor behind whose node a cut is at that position."""
    compute = [
        position for position, node in enumerate(layout.profile.nodes) if node.role is Role.COMPUTE
    ]
    names = {}
    for maker, position in pairwise(compute):
        usable = [each for each in layout.profile.nodes[maker].outputs if _usable(each)]
        if usable:
            names[position] = usable[0]
    return names


def _usable(name: str) -> bool:
    """Whether a name can be given as an argument and in a Partition."""
    return 0 < len(name) <= _MOST_NAME and "," not in name


def _parts(layout: Layout, ends: Sequence[int]) -> list[list[_Part]]:
    """For each end but the last, what begins there."""
    return [list(_parts_from(layout, ends, start)) for start in range(len(ends) - 1)]


def _parts_from(layout: Layout, ends: Sequence[int], start: int) -> Iterator[_Part]:
    growing = Growing(layout, ends[start])
    for end in ends[start + 1 :]:
        growing.grow_to(end)
        known = not growing.unknown_sizes
        candidate = Candidate(
            weight_bytes=growing.weight_bytes,
            resident_bytes=growing.resident_bytes,
            least_bytes=growing.resident_bytes,
            flops=None if growing.unknown_flops else growing.flops,
            work=None,
            received_bytes=growing.incoming_bytes if known else None,
            sent_bytes=growing.outgoing_bytes if known else None,
        )
        yield _Part(
            candidate=candidate,
            nodes=growing.node_count,
            touched_bytes=growing.touched_bytes,
            beside_bytes=growing.beside_bytes,
            outgoing_bytes=growing.outgoing_bytes,
            known=known,
        )


def _work_before(profile: Profile, ends: Sequence[int]) -> list[Work | None]:
    """For each end, the work of all nodes before it; None from where one is unknown."""
    sums: list[Work | None] = [Work()]
    for node in profile.nodes:
        before = sums[-1]
        sums.append(None if before is None or node.work is None else before + node.work)
    return [sums[end] for end in ends]


def _between(before: Work | None, after: Work | None) -> Work | None:
    if before is None or after is None:
        return None
    return Work(
        convolution=after.convolution - before.convolution,
        matrix=after.matrix - before.matrix,
        memory=after.memory - before.memory,
    )


def _least(whole: Candidate, parts: Sequence[Sequence[_Part]], start: int, end: int) -> int:
    """An estimate of what a fragment needs in blocks; its resident bytes where they gain little.
    `parts` are what it is made of, with what each would take as a block."""
    resident = whole.resident_bytes
    if not parts[start][end - start - 1].known or whole.weight_bytes * BLOCKS_SAVE < resident:
        return resident
    single = [parts[each][0].candidate.weight_bytes for each in range(start, end)]
    limits = dict.fromkeys(max(single) * each // 100 for each in _LIMITS)
    least = min(_in_blocks(parts, start, end, limit) for limit in limits)
    return resident if least * BLOCKS_SAVE > resident * (BLOCKS_SAVE - 1) else least


def _in_blocks(parts: Sequence[Sequence[_Part]], start: int, end: int, limit: int) -> int:
    """What blocks need of which none has more weights than the limit."""
    whole = parts[start][end - start - 1]
    fixed = FIXED_BYTES + (whole.candidate.received_bytes or 0) + whole.outgoing_bytes
    count, weights, working, first = 0, 0, 0, start
    while first < end:
        last = first + 1
        while last < end and parts[first][last - first].candidate.weight_bytes <= limit:
            last += 1
        block = parts[first][last - first - 1]
        alive = parts[start][first - start - 1].outgoing_bytes if first > start else 0
        arena = arena_bytes(alive + block.touched_bytes, block.beside_bytes)
        working = max(working, fixed + arena)
        weights = max(weights, block.candidate.weight_bytes)
        count, first = count + 1, last
    need = count * SESSION_BYTES + BLOCK_NODE_BYTES * whole.nodes + weights + working
    return need + more_of_table_bytes(need)
