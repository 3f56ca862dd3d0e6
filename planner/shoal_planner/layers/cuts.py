"""The legal cuts of a graph of layers.

Theory. A cut is a set of layers that holds the producers of all its members: what lies before the
cut. A pipeline is a chain of such sets, from the empty one to all layers, and a stage is what one
has more than the one before. So a stage never waits for a later one, and every pipeline of the
graph is such a chain, not only those along one order of the layers. What crosses a cut are all
tensors that are made before it and needed behind it, each once.

A graph with wide branches has too many cuts to try them all. Then layers are joined, the shortest
first, where that cannot close a circle: a layer with the only one that needs it, or with the only
one that it needs. The cuts of the joined graph are cuts of the whole one too, but not all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shoal_planner.layers.graph import LayerGraph

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Cuts:
    """Cuts in an order in which a smaller one comes first: `sets` of layers as bits of an integer.

    `complete`: these are all that the graph has.
    """

    graph: LayerGraph
    sets: tuple[int, ...]
    complete: bool

    def __len__(self) -> int:
        return len(self.sets)

    @cached_property
    def inside(self) -> Flags:
        """[cut, layer]: whether the layer lies before the cut."""
        count = len(self.graph.layers)
        size = (count + 7) // 8
        packed = np.frombuffer(
            b"".join(each.to_bytes(size, "little") for each in self.sets), dtype=np.uint8
        ).reshape(len(self.sets), size)
        return np.unpackbits(packed, axis=1, bitorder="little", count=count).astype(np.bool_)

    @cached_property
    def after(self) -> Flags:
        """[start, end]: whether the second cut has all layers of the first, and more."""
        inside = self.inside.astype(np.float32)
        missing = inside @ (1 - inside).T
        legal: Flags = (missing == 0) & (inside.sum(1)[:, None] < inside.sum(1)[None, :])
        return legal

    def sums(self, amounts: Sequence[float]) -> Floats:
        """[cut]: the sum over the layers before it."""
        return self.inside.astype(np.float64) @ np.array(amounts, dtype=np.float64)

    def between(self, amounts: Sequence[float]) -> Floats:
        """[start, end]: the sum over the layers between two cuts."""
        sums = self.sums(amounts)
        differences: Floats = np.maximum(sums[None, :] - sums[:, None], 0.0)
        return differences

    def largest_between(self, amounts: Sequence[float]) -> Floats:
        """[start, end]: the largest over the layers between two cuts; no matter where illegal.

        The smallest amounts are written first, so that the larger ones overwrite them.
        """
        largest = np.zeros((len(self), len(self)))
        for index in np.argsort(np.array(amounts), kind="stable"):
            has = self.inside[:, index]
            starts, ends = np.flatnonzero(~has), np.flatnonzero(has)
            if starts[-1] < ends[0]:  # along a chain always, and much faster
                largest[: ends[0], ends[0] :] = amounts[index]
            else:
                largest[starts[:, None], ends[None, :]] = amounts[index]
        return largest

    @cached_property
    def crossing(self) -> Floats:
        """[cut]: bytes of the tensors that cross it. The first has the inputs, the last the
        outputs."""
        inside, total = self.inside, np.zeros(len(self))
        for tensor in self.graph.tensors:
            made = True if tensor.producer is None else inside[:, tensor.producer]
            needed = np.zeros(len(self), dtype=np.bool_)
            for consumer in tensor.consumers:
                needed |= True if consumer is None else ~inside[:, consumer]
            total += tensor.bytes * (made & needed)
        return total

    def layers(self, start: int, end: int) -> tuple[int, ...]:
        """The layers between two cuts."""
        return tuple(np.flatnonzero(self.inside[end] & ~self.inside[start]).tolist())


def cuts_of(graph: LayerGraph, weights: Sequence[float], most: int) -> Cuts:
    """All cuts of a graph, or at most so many, where the layers are joined by their weight."""
    joined = _Joined.of(graph, weights)
    complete = True
    while (sets := joined.cuts(most)) is None:
        complete = False
        joined = joined.smaller()
    return Cuts(graph, tuple(sets), complete)


@dataclass(frozen=True)
class _Joined:
    """A graph of joined layers: members as bits, in a topological order, and who needs whom."""

    members: tuple[int, ...]
    weights: tuple[float, ...]
    needs: tuple[frozenset[int], ...]

    @classmethod
    def of(cls, graph: LayerGraph, weights: Sequence[float]) -> "_Joined":
        needs: list[set[int]] = [set() for _ in graph.layers]
        for producer, consumer in graph.edges:
            needs[consumer].add(producer)
        members = tuple(1 << index for index in range(len(graph.layers)))
        return cls(members, tuple(weights), tuple(map(frozenset, needs)))

    @cached_property
    def feeds(self) -> tuple[frozenset[int], ...]:
        found: list[set[int]] = [set() for _ in self.members]
        for index, needs in enumerate(self.needs):
            for each in needs:
                found[each].add(index)
        return tuple(map(frozenset, found))

    def cuts(self, most: int) -> list[int] | None:
        """All cuts as sets of layers, the smaller first; None: there are more than `most`."""
        first = frozenset(index for index, needs in enumerate(self.needs) if not needs)
        level: dict[int, tuple[int, frozenset[int]]] = {0: (0, first)}
        sets: list[int] = []
        while level:
            sets.extend(layers for layers, _ in level.values())
            if len(sets) > most:
                return None
            grown: dict[int, tuple[int, frozenset[int]]] = {}
            for before, (layers, ready) in level.items():
                for index in ready:
                    after = before | 1 << index
                    if after not in grown:
                        freed = (each for each in self.feeds[index] if self._has(after, each))
                        more = ready.difference((index,)).union(freed)
                        grown[after] = (layers | self.members[index], more)
            level = grown
        return sets

    def _has(self, before: int, index: int) -> bool:
        return all(before >> each & 1 for each in self.needs[index])

    def smaller(self) -> "_Joined":
        """With about a tenth of the groups fewer, the lightest pairs joined; two at least."""
        pairs = sorted(
            (self.weights[one] + self.weights[other], one, other)
            for other, needs in enumerate(self.needs)
            for one in needs
            if len(self.feeds[one]) == 1 or len(needs) == 1
        )
        into: dict[int, int] = {}
        for _, one, other in pairs:
            if len(into) > 2 * (len(self.members) // 10):
                break
            if one not in into and other not in into:
                into[one] = into[other] = min(one, other)
        if not into:
            # Neighbours in a topological order can always be joined.
            into = {index: index - index % 2 for index in range(len(self.members))}
        return self._with(into)

    def _with(self, into: Mapping[int, int]) -> "_Joined":
        root = [into.get(index, index) for index in range(len(self.members))]
        needs: dict[int, set[int]] = {each: set() for each in root}
        for index, wanted in enumerate(self.needs):
            needs[root[index]] |= {root[each] for each in wanted} - {root[index]}
        order: list[int] = []
        placed: set[int] = set()
        waiting = list(needs)
        while waiting:
            able = [each for each in waiting if needs[each] <= placed]
            order += able
            placed.update(able)
            waiting = [each for each in waiting if each not in placed]
        place = {each: index for index, each in enumerate(order)}
        members, weights = [0] * len(order), [0.0] * len(order)
        for index, each in enumerate(root):
            members[place[each]] |= self.members[index]
            weights[place[each]] += self.weights[index]
        renamed = tuple(frozenset(place[each] for each in needs[one]) for one in order)
        return _Joined(tuple(members), tuple(weights), renamed)
