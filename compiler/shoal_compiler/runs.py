"""Runs of nodes that work row by row, of which the last one alone gives what others need: which
there are in a graph, and which rows their nodes need of one another."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final

from shoal_compiler.aligned_bands import Step
from shoal_compiler.graph import Graph
from shoal_compiler.order import file_order
from shoal_compiler.rows import Images, Rows
from shoal_compiler.shapes import Shapes
from shoal_compiler.tensor_types import bits_of

_MOST_NODES: Final = 32
"""Of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Nodes of which the last one alone gives what others need. `edge_bytes` go in and come out."""

    places: Sequence[int]
    output: str
    edge_bytes: int


class Runs:
    """Those of a graph whose images have these sizes."""

    def __init__(self, graph: Graph, shapes: Shapes) -> None:
        self._graph = graph
        self._images = Images(graph.weights, shapes.sizes, shapes.axes)
        self.order = file_order(graph)
        learnt = {place: self._images.learn(graph.nodes[place]) for place in self.order}
        self._how = [learnt[place] for place in range(len(graph.nodes))]
        self.row_wise = [self._names(place) for place in range(len(graph.nodes))]
        known = {name for names in self.row_wise for name in names}
        self.heights: Mapping[str, int] = {name: self._height(name) for name in known}
        self.sizes: Mapping[str, int] = {name: _bytes(shapes, name) for name in known}
        self._position = {place: position for position, place in enumerate(self.order)}
        self._known: dict[int, list[Run]] = {}

    @cached_property
    def works_in(self) -> Mapping[int, int]:
        """The bytes that a node works on row by row, of each that may be in bands."""
        return {
            place: sum(map(self.sizes.__getitem__, self.row_wise[place])) for place in self._cones
        }

    def around(self, place: int, others: Set[int]) -> Iterator[Run]:
        """Runs with a node, and with none that are in others."""
        for end in self._ends[place]:
            cone = self._cones[end]
            position = cone.index(place)
            if not others.isdisjoint(cone[position:]):
                continue
            most = next((each + 1 for each in range(position, -1, -1) if cone[each] in others), 0)
            yield from self._of(end)[most : position + 1]

    def steps(self, run: Run) -> list[Step]:
        return [self.step(place) for place in run.places]

    def step(self, place: int) -> Step:
        how = self._how[place]
        assert how is not None
        return Step(self._graph.nodes[place], how)

    def is_aligned(self, run: Run) -> bool:
        """Whether an input says how many rows there are, or nodes give several for one."""
        spread = any(self.step(place).how.spreads > 1 for place in run.places)
        return spread or bool(self._images.source(run.output))

    def needed(self, run: Run, rows: Rows) -> dict[str, Rows]:
        """The rows of all in a run, and of what goes in, that some rows of its output need."""
        needed = {run.output: rows}
        for place in reversed(run.places):
            how = self.step(place).how
            given = needed[self.row_wise[place][-1]]
            for name in self.row_wise[place][:-1]:
                some = how.needs(given, self.heights[name])
                needed[name] = some.joined(needed.get(name, some))
        return needed

    # ---- which there are ---------------------------------------------------------------------

    def _of(self, end: int) -> list[Run]:
        """Those that end with a node, the longest first."""
        if end not in self._known:
            cone, output = self._cones[end], self.row_wise[end][-1]
            made, taken, found = set[str](), set[str](), list[Run]()
            edge = self.sizes[output]
            for start in range(len(cone) - 1, -1, -1):
                *reads, given = self.row_wise[cone[start]]
                made.add(given)
                edge -= self.sizes[given] * (given in taken)
                edge += sum(self.sizes[name] for name in set(reads) - taken - made)
                taken.update(reads)
                found.append(Run(places=cone[start:], output=output, edge_bytes=edge))
            self._known[end] = found[::-1]
        return self._known[end]

    @cached_property
    def _cones(self) -> dict[int, list[int]]:
        return {end: self._cone(end) for end in self.order if self._may_be_in_bands(end)}

    @cached_property
    def _ends(self) -> Mapping[int, Sequence[int]]:
        """The last nodes of the cones that a node is in."""
        ends: defaultdict[int, list[int]] = defaultdict(list)
        for end, cone in self._cones.items():
            for place in cone:
                ends[place].append(end)
        return ends

    def _cone(self, end: int) -> list[int]:
        """Nodes that nothing reads but others of them, by rows, and of which one is the last: that
        one alone gives what others need. In their order, so are the last ones of them by
        themselves."""
        cone = {end}
        ahead = set(self._made_by(end))
        while ahead and len(cone) < _MOST_NODES:
            last = max(ahead, key=self._position.__getitem__)
            ahead.remove(last)
            if self._is_within(last, cone):
                cone.add(last)
                ahead.update(self._made_by(last))
        return sorted(cone, key=self._position.__getitem__)

    def _made_by(self, place: int) -> Iterator[int]:
        """The nodes that make what one reads by rows."""
        for name in self.row_wise[place][:-1]:
            if (maker := self._makers.get(name)) is not None:
                yield maker

    def _may_be_in_bands(self, place: int) -> bool:
        """Whether it works row by row, in no branch."""
        name = next(filter(None, self._graph.nodes[place].output), "")
        return self._how[place] is not None and not self._graph.guards.get(name)

    def _is_within(self, place: int, cone: Set[int]) -> bool:
        name = self._graph.nodes[place].output[0]
        if name in self._given or not self._may_be_in_bands(place):
            return False
        readers = self._readers[name]
        return readers <= cone and all(name not in self._reads_whole(each) for each in readers)

    # ---- the graph ---------------------------------------------------------------------------

    @cached_property
    def _given(self) -> Set[str]:
        return {each.name for each in self._graph.outputs}

    @cached_property
    def _makers(self) -> Mapping[str, int]:
        nodes = enumerate(self._graph.nodes)
        return {name: place for place, node in nodes for name in node.output}

    @cached_property
    def _readers(self) -> Mapping[str, Set[int]]:
        readers: defaultdict[str, set[int]] = defaultdict(set)
        for place, names in enumerate(self._graph.reads):
            for name in names:
                readers[name].add(place)
        return readers

    def _names(self, place: int) -> tuple[str, ...]:
        """What a node works on row by row, its output last."""
        if (how := self._how[place]) is None:
            return ()
        node = self._graph.nodes[place]
        return tuple(dict.fromkeys([*(node.input[each] for each in how.places), node.output[0]]))

    def _reads_whole(self, place: int) -> list[str]:
        node, how = self.step(place)
        return [name for each, name in enumerate(node.input) if each not in how.places]

    def _height(self, name: str) -> int:
        height = self._images.height(name)
        assert height is not None, "its nodes work row by row"
        return height


def _bytes(shapes: Shapes, name: str) -> int:
    kind = shapes.types.get(name)
    bits = None if kind is None else bits_of(kind.tensor_type.elem_type)
    return prod(shapes.sizes[name]) * (bits or 32) // 8
