"""The best chains of fragments, of all fragments that a model could be cut into.

A table has, for each position where a fragment can start, those that begin there; a chain leads
through it from the first position to the last. What is best by the largest cost, and by a sum of
weights, is looked for separately, because the pair (largest, sum) has no optimal substructure: the
best prefix may have a largest cost that does not matter in the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A fragment that could be: ends at `positions[end]`."""

    end: int
    cost: int
    incoming_bytes: int


Table = list[list[Candidate]]
"""For each start (an index of `positions`), the fragments that begin there, by end."""


def least_to_end(table: Table) -> list[int | None]:
    """For each start, the smallest number of fragments that lead to the last position."""
    least: list[int | None] = [None] * len(table) + [0]
    for start in range(len(table) - 1, -1, -1):
        rests = [rest for each in table[start] if (rest := least[each.end]) is not None]
        least[start] = min(rests) + 1 if rests else None
    return least


def starts_of(table: Table, count: int) -> list[list[int]]:
    """For each number of fragments that are left, of `count`, where the next one can start: the
    first position and the last can be reached from there with fragments enough."""
    before: list[int | None] = [0] + [None] * len(table)
    for start, row in enumerate(table):
        if (made := before[start]) is not None:
            for each in row:
                known = before[each.end]
                before[each.end] = made + 1 if known is None else min(known, made + 1)
    starts: list[list[int]] = [[] for _ in range(count + 1)]
    for start, (made, left) in enumerate(zip(before, least_to_end(table), strict=True)):
        if made is not None and left is not None:
            for number in range(left, count - made + 1):
                starts[number].append(start)
    return starts


def smallest_largest(table: Table, starts: Sequence[Sequence[int]]) -> int | None:
    """The smallest value that the largest cost of `len(starts) - 1` fragments can have."""
    best = {len(table): 0}
    for allowed in starts[1:]:
        step: dict[int, int] = {}
        for start in allowed:
            row = table[start] if start < len(table) else ()
            values = [max(each.cost, best[each.end]) for each in row if each.end in best]
            if values:
                step[start] = min(values)
        best = step
    return best.get(0)


def cheapest(
    table: Table, starts: Sequence[Sequence[int]], weigh: Callable[[Candidate], int]
) -> list[Candidate]:
    """The fragments whose weights have the smallest sum; of equal ones the leftmost."""
    rests: list[dict[int, int]] = [{len(table): 0}]
    for allowed in starts[1:]:
        before, step = rests[-1], dict[int, int]()
        for start in allowed:
            row = table[start] if start < len(table) else ()
            sums = [weigh(each) + before[each.end] for each in row if each.end in before]
            if sums:
                step[start] = min(sums)
        rests.append(step)
    chosen: list[Candidate] = []
    for left in range(len(starts) - 1, 0, -1):
        at = chosen[-1].end if chosen else 0
        wanted, before = rests[left][at], rests[left - 1]
        chosen.append(
            next(
                each
                for each in table[at]
                if each.end in before and weigh(each) + before[each.end] == wanted
            )
        )
    return chosen
