"""Which groups of devices may follow one another: the search walks these arcs.

A state is how many devices of each class are used, an arc takes a group from what is left. All
subsets are exact, and as many as 3^m arcs for m unequal devices. Where that is too much, a row of
devices is divided into consecutive groups: m^2 / 2 arcs (Asteroid, "Dynamic Programming HPP
Planning", does so in the order of memory).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, product
from math import prod
from operator import add, sub
from typing import Final

Group = tuple[int, ...]
"""How many devices of each class."""

_ARRIVAL: Final = 4000
"""Numbers that could be looked at in the time that one arrival of an arc at another takes."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What lies between two cuts or borders (their indices), on a group of devices."""

    start: int
    end: int
    group: Group


Stages = tuple[Stage, ...]


@dataclass(frozen=True)
class Arcs:
    """Arcs `(before, group, after)` between numbered states, in an order in which each arc comes
    after all that lead to it. State 0 has nothing used."""

    arcs: tuple[tuple[int, Group, int], ...]
    complete: bool = False

    def steps(self, cuts: int) -> int:
        """What the search takes, in numbers that it looks at."""
        into: dict[int, int] = {0: 1}
        for _, _, after in self.arcs:
            into[after] = into.get(after, 0) + 1
        return sum(cuts * cuts + into[before] * (cuts + _ARRIVAL) for before, _, _ in self.arcs)


def number_of_subsets(sizes: Sequence[int]) -> int:
    """Arcs of `subsets`, without making them."""
    return prod((size + 1) * (size + 2) // 2 for size in sizes)


def subsets(sizes: Sequence[int]) -> Arcs:
    """Every group from what is left."""
    return _from_rest(sizes, lambda left: filter(any, product(*(range(n + 1) for n in left))))


def row(order: Sequence[int], classes: int) -> Arcs:
    """Consecutive groups of a row of devices, each given by its class."""
    return Arcs(
        tuple(
            (start, _group(order[start:end], classes), end)
            for start in range(len(order))
            for end in range(start + 1, len(order) + 1)
        )
    )


def singles(sizes: Sequence[int]) -> Arcs:
    """Every group of one device: no replicas."""
    return _from_rest(sizes, lambda left: compress(units(len(sizes)), left))


def units(classes: int) -> list[Group]:
    """Of each class, the group of one device."""
    return [tuple(int(each == place) for each in range(classes)) for place in range(classes)]


def _from_rest(sizes: Sequence[int], groups: Callable[[Sequence[int]], Iterable[Group]]) -> Arcs:
    """From every state the groups that are made of what is left there."""
    states = sorted(product(*(range(size + 1) for size in sizes)), key=sum)
    number = {state: index for index, state in enumerate(states)}
    arcs = [
        (number[state], group, number[tuple(map(add, state, group))])
        for state in states
        for group in groups(list(map(sub, sizes, state)))
    ]
    return Arcs(tuple(arcs), complete=True)


def fixed(groups: Sequence[Group]) -> Arcs:
    """These groups in this order, or the first few of them."""
    return Arcs(tuple((place, group, place + 1) for place, group in enumerate(groups)))


def _group(members: Sequence[int], classes: int) -> Group:
    counts = [0] * classes
    for each in members:
        counts[each] += 1
    return tuple(counts)
