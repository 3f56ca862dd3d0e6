"""The fragments that a cut into a number of even ones could have. Pure.

What a fragment costs is its share of all FLOPs plus its share of all weights, so there is no arena
to be replayed (`Counting`). Some split into so many shows a largest cost that suffices. Then only
those are looked at that are part of a cut into so many: to where one begins, fragments lead that
are few enough, and what is left behind it is no more than the others may take.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from shoal_planner.chains import Candidate, Table
from shoal_planner.counting import Counting
from shoal_planner.indexes import Index
from shoal_planner.profile import Profile

SLACK: Final = 20
"""One part in so many of the largest cost is given for fewer bytes over the borders."""
_MILLION: Final = 1_000_000
_ROUNDED: Final = 2
"""A cost is less by less than this than what it would be if it were not rounded."""


def share(profile: Profile) -> Callable[[Counting], int]:
    """FLOPs and weights as shares of the whole, added; nodes count where there is neither."""
    flops = sum(node.flops or 0 for node in profile.nodes)
    weights = profile.weight_bytes
    nodes = len(profile.nodes)

    def cost(growing: Counting) -> int:
        if not flops and not weights:
            return growing.node_count * _MILLION // nodes
        of_flops = growing.flops * _MILLION // flops if flops else 0
        return of_flops + (growing.weight_bytes * _MILLION // weights if weights else 0)

    return cost


def even_table(layout: Index, positions: Sequence[int], count: int) -> Table:
    """The fragments that can be one of so many, up to the cost of an even split and a little."""
    cost, whole = share(layout.profile), Counting(layout, 0)
    before = [cost(whole.grow_to(position)) for position in positions]
    largest = _largest_of_some(layout, positions, count, before[-1] // count)
    most = largest + largest // SLACK
    fewest = {0: 0}  # fragments that lead to a position
    table: Table = []
    for start, costs in enumerate(before[:-1]):
        left = count - fewest.get(start, count)
        is_hopeful = left and before[-1] - costs < _ROUNDED + left * (most + _ROUNDED)
        table.append(list(_from(layout, positions, start, most)) if is_hopeful else [])
        for each in table[-1]:
            fewest[each.end] = min(fewest.get(each.end, count), count - left + 1)
    return table


def _from(layout: Index, positions: Sequence[int], start: int, most: int) -> Iterator[Candidate]:
    """The fragments that begin at a position and cost no more than so much."""
    cost, growing = share(layout.profile), Counting(layout, positions[start])
    for end in range(start + 1, len(positions)):
        value = cost(growing.grow_to(positions[end]))
        if value > most:
            break
        yield Candidate(end, value, growing.incoming_bytes)


def _largest_of_some(layout: Index, positions: Sequence[int], count: int, target: int) -> int:
    """The largest cost of some split into `count`, of which each costs the `target` or more, as
    long as there is more: nothing dearer needs to be looked at."""
    cost, largest, start = share(layout.profile), 0, 0
    for left in reversed(range(count)):
        growing = Counting(layout, positions[start])
        end = start
        while end < len(positions) - 1 - left:
            if end > start and left and cost(growing) >= target:
                break
            end += 1
            growing.grow_to(positions[end])
        largest = max(largest, cost(growing))
        start = end
    return largest
