"""Runs of nodes with large activations, computed in bands of rows.

Neither a fragment nor a block can be smaller than a node. The first layers of an image model give
and take much more than goes into the first of them and comes out of the last: of MobileNetV2, 9.2
MiB between images of 0.6 MiB and of 0.3. So such a run is computed in bands: some rows of what it
gives, one after the other, each with the rows that it needs of what goes in. A `Concat` joins them.
What lies between is never there as a whole. Each row is computed as in the whole; rows at the
border of two bands are computed twice, so a run is no longer than it has to be.

(In papers: patch-by-patch inference, MCUNetV2, section 3; FlexPie divides layers so over devices.)

Where the model alone says how many rows an image has, a band has exactly those that it needs. Where
an input says it, or nodes give several rows for one, the model computes where bands begin
(`aligned_bands`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import prod
from typing import Final

import onnx
from onnx import helper

from shoal_compiler.aligned_bands import Grid, Step, aligned, grid_of
from shoal_compiler.graph import Graph
from shoal_compiler.order import file_order
from shoal_compiler.parting import KnownShapes, Parting
from shoal_compiler.rows import ROW_AXIS, Images, Rows, set_pads
from shoal_compiler.shapes import Shapes
from shoal_compiler.tensor_types import bits_of

_MOST_NODES: Final = 32
"""Of a run."""
_BANDS: Final = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_MOST_REPEATED: Final = 2.0
"""As many times as the rows of a run may be computed, all bands together."""
_WORTH: Final = 0.75
"""Of what the neediest node works in, for a run in bands."""
_MOST_ADDED: Final = 1000
"""Nodes of aligned bands in a graph, the neediest nodes' first: a cut weighs each."""
_MANY: Final = 400
"""Of those nodes: cuts go between bands then, as far as these are light."""
_LIGHT: Final = 8
"""Weights of a run take that many times less than what it works in, where a band stays whole."""
_NEAR: Final = 1.1
"""Of the least that a node's runs work in: as good as that, with fewer bands. Aligned ones have
more nodes, and each is weighed where a model is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Nodes of which the last one alone gives what others need. `edge_bytes` go in and come out."""

    places: Sequence[int]
    output: str
    edge_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Banded:
    """A run in so many bands, which are aligned to a grid or, without one, exact."""

    run: _Run
    grid: Grid | None
    bands: int
    peak_bytes: int

    @property
    def added(self) -> int:
        """Nodes of aligned bands."""
        return 0 if self.grid is None else self.bands * len(self.run.places)


def in_bands(graph: Graph, most_bytes: int, shapes: KnownShapes) -> Graph:
    """The graph with the nodes that work in more than `most_bytes` in runs that are computed in
    bands, as far as `shapes` are known, and that takes less."""
    parting = Parting(graph, Counter(), shapes)
    finding = _Finding(graph, shapes(), can_align=parting.can_slice_between)
    found = finding.runs(most_bytes)
    if not found:
        return graph
    ends = {each.run.places[-1]: each for each in found}
    inside = {place for each in found for place in each.run.places}
    nodes: list[onnx.NodeProto] = []
    together: set[str] = set()
    are_many = sum(each.added for each in found) > _MANY
    for place in finding.order:
        if place in ends:
            band = list(finding.banded(parting, ends[place]))
            nodes.extend(band)
            if are_many and finding.is_light(ends[place]):
                together.update(_within_bands(band))
        elif place not in inside:
            nodes.append(graph.nodes[place])
    return replace(graph, nodes=tuple(nodes), weights=parting.weights, together=frozenset(together))


def _within_bands(nodes: Sequence[onnx.NodeProto]) -> Iterator[str]:
    """What the nodes of aligned bands give, but those that a band begins with."""
    whole = nodes[-1]
    ends = {*whole.input, *whole.output}
    return (
        node.output[0]
        for before, node in pairwise(nodes)
        if before.output[0] not in ends and node.output[0] not in whole.output
    )


class _Finding:
    """Which runs are worth it."""

    def __init__(self, graph: Graph, shapes: Shapes, *, can_align: bool) -> None:
        self._graph = graph
        self._shapes = shapes
        self._can_align = can_align
        self._images = Images(graph.weights, shapes.sizes, shapes.axes)
        self.order = file_order(graph)
        learnt = {place: self._images.learn(graph.nodes[place]) for place in self.order}
        self._how = [learnt[place] for place in range(len(graph.nodes))]
        self._row_wise = [self._names(place) for place in range(len(graph.nodes))]
        known = {name for names in self._row_wise for name in names}
        self._heights = {name: self._height(name) for name in known}
        self._sizes = {name: self._bytes(name) for name in known}
        self._row_bytes = {name: self._sizes[name] / self._heights[name] for name in known}
        self._readers: defaultdict[str, set[int]] = defaultdict(set)
        for place, names in enumerate(graph.reads):
            for name in names:
                self._readers[name].add(place)
        self._given = {each.name for each in graph.outputs}
        self._makers = {
            name: place for place, node in enumerate(graph.nodes) for name in node.output
        }
        self._position = {place: position for position, place in enumerate(self.order)}
        self._cones = {end: self._cone(end) for end in self.order if self._may_be_in_bands(end)}
        self._known: dict[tuple[int, int], list[_Banded]] = {}
        self._ends: defaultdict[int, list[int]] = defaultdict(list)
        for end, cone in self._cones.items():
            for place in cone:
                self._ends[place].append(end)

    def runs(self, most_bytes: int) -> list[_Banded]:
        """Those that work in more, the neediest node's first; none has nodes of another."""
        found: list[_Banded] = []
        inside: set[int] = set()
        added = 0
        works = {place: self._works_in(place) for place in self._cones}
        for place in sorted(works, key=works.__getitem__, reverse=True):
            if place in inside or works[place] <= most_bytes:
                continue
            best = self._best(place, inside, most_bytes, works[place])
            if best is None or (best.added and added > _MOST_ADDED):
                continue
            found.append(best)
            inside.update(best.run.places)
            added += best.added
        return found

    def _best(self, place: int, inside: Set[int], most_bytes: int, works: int) -> _Banded | None:
        enough_bytes = works * _WORTH
        runs = (each for each in self._with(place, inside) if each.edge_bytes < enough_bytes)
        banded = chain.from_iterable(map(self._all_bands, runs))
        bands = [each for each in banded if each.peak_bytes < enough_bytes]
        enough = [each for each in bands if each.peak_bytes <= most_bytes]
        if enough:
            return min(enough, key=lambda each: (each.bands, len(each.run.places)))
        least = min((each.peak_bytes for each in bands), default=0)
        near = (each for each in bands if each.peak_bytes <= _near(each) * least)
        return min(near, key=lambda each: each.bands, default=None)

    def _with(self, place: int, others: Set[int]) -> Iterator[_Run]:
        """Runs with a node, and with none that are in others."""
        for end in self._ends[place]:
            cone = self._cones[end]
            position = cone.index(place)
            if not others.isdisjoint(cone[position:]):
                continue
            most = next((each + 1 for each in range(position, -1, -1) if cone[each] in others), 0)
            for start in range(most, position + 1):
                yield self._run(cone[start:])

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
        for name in self._reads_rows(place):
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

    def _run(self, places: Sequence[int]) -> _Run:
        output = self._graph.nodes[places[-1]].output[0]
        made = {self._graph.nodes[place].output[0] for place in places}
        taken = {name for place in places for name in self._reads_rows(place) if name not in made}
        edge = sum(self._sizes[name] for name in taken) + self._sizes[output]
        return _Run(places=places, output=output, edge_bytes=edge)

    def is_light(self, found: _Banded) -> bool:
        """Whether aligned bands are so small, with the weights of all nodes, that no cut need go
        through one."""
        read = {name for place in found.run.places for name in self._graph.reads[place]}
        weights = (self._graph.weights[name].bytes for name in read & self._graph.weights.keys())
        return found.grid is not None and sum(weights) * _LIGHT <= found.peak_bytes

    def _is_aligned(self, run: _Run) -> bool:
        """Whether an input says how many rows there are, or nodes give several for one."""
        spread = any(self.step(place).how.spreads > 1 for place in run.places)
        return spread or bool(self._images.source(run.output))

    def _all_bands(self, run: _Run) -> Sequence[_Banded]:
        """The same run may be one of several nodes'."""
        key = run.places[0], run.places[-1]
        if key not in self._known:
            self._known[key] = list(self._bands(run))
        return self._known[key]

    def _bands(self, run: _Run) -> Iterator[_Banded]:
        """In how many it may be computed, and what that takes."""
        grid = None
        if self._is_aligned(run):
            grid = grid_of(self._steps(run)) if self._can_align else None
            if grid is None:
                return
        height = self._heights[run.output]
        whole = sum(self._sizes[self._graph.nodes[place].output[0]] for place in run.places)
        joined = 2 * self._sizes[run.output]
        for bands in _BANDS:
            if 2 * bands > height:
                return
            repeated = most = 0.0
            for times, rows in self._band_rows(run, grid, bands):
                sizes = {name: self._row_bytes[name] * each for name, each in rows.items()}
                repeated += times * sum(sizes.values())
                works = (sum(sizes[name] for name in self._row_wise[place]) for place in run.places)
                most = max(most, *works)
            if repeated > _MOST_REPEATED * whole + run.edge_bytes:
                return
            peak = max(run.edge_bytes + most, joined)
            yield _Banded(run=run, grid=grid, bands=bands, peak_bytes=int(peak))

    def _band_rows(
        self, run: _Run, grid: Grid | None, bands: int
    ) -> Iterator[tuple[int, dict[str, int]]]:
        """How many rows bands have of all in a run and of what goes in, and how many bands have
        so many."""
        if grid is not None:
            yield bands, {name: grid.rows(name, self._heights, bands) for name in grid.scales}
            return
        for given in parts(self._heights[run.output], bands):
            yield 1, {name: rows.number for name, rows in self.needed(run, given).items()}

    def needed(self, run: _Run, rows: Rows) -> dict[str, Rows]:
        """The rows of all in a run, and of what goes in, that some rows of its output need."""
        needed = {run.output: rows}
        for place in reversed(run.places):
            how = self._how[place]
            assert how is not None
            given = needed[self._graph.nodes[place].output[0]]
            for name in self._reads_rows(place):
                some = how.needs(given, self._heights[name])
                needed[name] = some.joined(needed.get(name, some))
        return needed

    def banded(self, parting: Parting, found: _Banded) -> Iterator[onnx.NodeProto]:
        """The nodes that replace a run."""
        run, height = found.run, self._heights[found.run.output]
        if found.grid is not None:
            yield from aligned(parting, self._steps(run), found.grid, found.bands)
            return
        joined = []
        for number, rows in enumerate(parts(height, found.bands)):
            band = _Band(self, parting, run, number, rows)
            yield from band.nodes()
            joined.append(band.output)
        last = self._graph.nodes[run.places[-1]]
        name = parting.name(last, found.bands)
        yield helper.make_node("Concat", joined, [run.output], name=name, axis=ROW_AXIS)

    def step(self, place: int) -> Step:
        how = self._how[place]
        assert how is not None
        return Step(self._graph.nodes[place], how)

    def _steps(self, run: _Run) -> list[Step]:
        return [self.step(place) for place in run.places]

    def height(self, name: str) -> int:
        return self._heights[name]

    # ---- inside ------------------------------------------------------------------------------

    def _names(self, place: int) -> tuple[str, ...]:
        """What a node works on row by row, its output last."""
        if (how := self._how[place]) is None:
            return ()
        node = self._graph.nodes[place]
        return tuple(dict.fromkeys([*(node.input[each] for each in how.places), node.output[0]]))

    def _reads_rows(self, place: int) -> tuple[str, ...]:
        return self._row_wise[place][:-1]

    def _reads_whole(self, place: int) -> list[str]:
        node, how = self.step(place)
        return [name for each, name in enumerate(node.input) if each not in how.places]

    def _height(self, name: str) -> int:
        height = self._images.height(name)
        assert height is not None, "its nodes work row by row"
        return height

    def _bytes(self, name: str) -> int:
        kind = self._shapes.types.get(name)
        bits = None if kind is None else bits_of(kind.tensor_type.elem_type)
        return prod(self._shapes.sizes[name]) * (bits or 32) // 8

    def _works_in(self, place: int) -> int:
        return sum(self._sizes[name] for name in self._row_wise[place])


class _Band:
    """The nodes of one band, as they are written."""

    def __init__(
        self, finding: _Finding, parting: Parting, run: _Run, number: int, rows: Rows
    ) -> None:
        self._finding = finding
        self._parting = parting
        self._run = run
        self._number = number
        self._needed = finding.needed(run, rows)
        self._names: dict[str, str] = {}
        self._slices: dict[tuple[str, Rows], str] = {}

    @property
    def output(self) -> str:
        return self._names[self._run.output]

    def nodes(self) -> Iterator[onnx.NodeProto]:
        for place in self._run.places:
            source, how = self._finding.step(place)
            node = deepcopy(source)
            node.name = self._parting.name(source, self._number)
            rows = self._needed[source.output[0]]
            for each in how.places:
                name = source.input[each]
                height = self._finding.height(name)
                node.input[each], slices = self._taken(name, how.needs(rows, height), height)
                yield from slices
            if how.kernel > 1 or any(how.pads):
                set_pads(node, how.padded(rows, self._finding.height(source.input[how.places[0]])))
            made = self._parting.fresh(f"{source.output[0]}.{self._number}")
            node.output[0] = self._names[source.output[0]] = made
            yield node

    def _taken(self, name: str, rows: Rows, height: int) -> tuple[str, list[onnx.NodeProto]]:
        """Some rows of what the run takes, or of what the band has made; and the node that takes
        them, if there is one."""
        made = self._names.get(name)
        there = Rows(0, height) if made is None else self._needed[name]
        own = name if made is None else made
        if rows == there:
            return own, []
        if (known := self._slices.get((name, rows))) is not None:
            return known, []
        start, end = rows.start - there.start, rows.end - there.start
        node = self._parting.slice(own, start, end, ROW_AXIS)
        self._slices[name, rows] = node.output[0]
        return node.output[0], [node]


def _near(found: _Banded) -> float:
    return 1 if found.grid is None else _NEAR


def parts(height: int, bands: int) -> list[Rows]:
    """So many rows in bands that are about as high."""
    ends = [height * band // bands for band in range(bands + 1)]
    return [Rows(*each) for each in pairwise(ends)]
