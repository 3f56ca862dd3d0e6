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

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Final

import onnx

from shoal_compiler.aligned_bands import Grid, aligned, grid_of
from shoal_compiler.exact_bands import exact, parts
from shoal_compiler.graph import Graph
from shoal_compiler.parting import KnownShapes, Parting
from shoal_compiler.runs import Run, Runs

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
class _Banded:
    """A run in so many bands, which are aligned to a grid or, without one, exact."""

    run: Run
    grid: Grid | None
    bands: int
    peak_bytes: int

    @property
    def added(self) -> int:
        """Nodes of aligned bands."""
        return 0 if self.grid is None else self.bands * len(self.run.places)


class Bands:
    """A graph whose nodes may work in less, in runs that are computed in bands, as far as its
    `shapes` are known. What is found out about runs serves for all that they may work in."""

    def __init__(self, graph: Graph, shapes: KnownShapes) -> None:
        self._graph = graph
        self._shapes = shapes
        self._known: dict[tuple[int, int], Sequence[_Banded]] = {}

    def within(self, most_bytes: int) -> Graph:
        """The graph with the nodes that work in more in bands, where that takes less."""
        graph, found = self._graph, self._found(most_bytes)
        if not found:
            return graph
        parting = self._parting()
        ends = {each.run.places[-1]: each for each in found}
        inside = {place for each in found for place in each.run.places}
        nodes: list[onnx.NodeProto] = []
        together: set[str] = set()
        are_many = sum(each.added for each in found) > _MANY
        for place in self._runs.order:
            if place in ends:
                band = self._banded(parting, ends[place])
                nodes.extend(band)
                if are_many and self._is_light(ends[place]):
                    together.update(_within_bands(band))
            elif place not in inside:
                nodes.append(graph.nodes[place])
        made = replace(graph, nodes=tuple(nodes), weights=parting.weights)
        return replace(made, together=frozenset(together))

    @cached_property
    def _runs(self) -> Runs:
        return Runs(self._graph, self._shapes())

    @cached_property
    def _can_align(self) -> bool:
        return self._parting().can_slice_between

    def _parting(self) -> Parting:
        return Parting(self._graph, Counter(), self._shapes)

    def _found(self, most_bytes: int) -> list[_Banded]:
        """Runs of nodes that work in more, the neediest node's first; none has nodes of another."""
        found: list[_Banded] = []
        inside: set[int] = set()
        added = 0
        works = self._runs.works_in
        for place in sorted(works, key=works.__getitem__, reverse=True):
            if place in inside or works[place] <= most_bytes:
                continue
            best = self._best(place, inside, most_bytes)
            if best is None or (best.added and added > _MOST_ADDED):
                continue
            found.append(best)
            inside.update(best.run.places)
            added += best.added
        return found

    def _best(self, place: int, inside: Set[int], most_bytes: int) -> _Banded | None:
        enough_bytes = self._runs.works_in[place] * _WORTH
        runs = (each for each in self._runs.around(place, inside) if each.edge_bytes < enough_bytes)
        banded = chain.from_iterable(map(self._all_bands, runs))
        bands = [each for each in banded if each.peak_bytes < enough_bytes]
        enough = [each for each in bands if each.peak_bytes <= most_bytes]
        if enough:
            return min(enough, key=lambda each: (each.bands, len(each.run.places)))
        least = min((each.peak_bytes for each in bands), default=0)
        near = (each for each in bands if each.peak_bytes <= _near(each) * least)
        return min(near, key=lambda each: each.bands, default=None)

    def _all_bands(self, run: Run) -> Sequence[_Banded]:
        """The same run may be one of several nodes'."""
        key = run.places[0], run.places[-1]
        if key not in self._known:
            self._known[key] = list(self._bands(run))
        return self._known[key]

    def _bands(self, run: Run) -> Iterator[_Banded]:
        """In how many it may be computed, and what that takes."""
        runs, grid = self._runs, None
        if runs.is_aligned(run):
            grid = grid_of(runs.steps(run)) if self._can_align else None
            if grid is None:
                return
        works = [runs.row_wise[place] for place in run.places]
        whole = sum(runs.sizes[names[-1]] for names in works)
        joined = 2 * runs.sizes[run.output]
        for bands in _BANDS:
            if 2 * bands > runs.heights[run.output]:
                return
            repeated = most = 0.0
            for times, rows in self._band_rows(run, grid, bands):
                sizes = {
                    name: runs.sizes[name] / runs.heights[name] * each
                    for name, each in rows.items()
                }
                repeated += times * sum(sizes.values())
                most = max(most, *(sum(map(sizes.__getitem__, names)) for names in works))
            if repeated > _MOST_REPEATED * whole + run.edge_bytes:
                return
            peak = max(run.edge_bytes + most, joined)
            yield _Banded(run=run, grid=grid, bands=bands, peak_bytes=int(peak))

    def _band_rows(
        self, run: Run, grid: Grid | None, bands: int
    ) -> Iterator[tuple[int, dict[str, int]]]:
        """How many rows bands have of all in a run and of what goes in, and how many bands have
        so many."""
        heights = self._runs.heights
        if grid is not None:
            yield bands, {name: grid.rows(name, heights, bands) for name in grid.scales}
            return
        for given in parts(heights[run.output], bands):
            yield 1, {name: rows.number for name, rows in self._runs.needed(run, given).items()}

    def _banded(self, parting: Parting, found: _Banded) -> list[onnx.NodeProto]:
        """The nodes that replace a run."""
        if found.grid is None:
            return exact(parting, self._runs, found.run, found.bands)
        return aligned(parting, self._runs.steps(found.run), found.grid, found.bands)

    def _is_light(self, found: _Banded) -> bool:
        """Whether aligned bands are so small, with the weights of all nodes, that no cut need go
        through one."""
        read = {name for place in found.run.places for name in self._graph.reads[place]}
        weights = (self._graph.weights[name].bytes for name in read & self._graph.weights.keys())
        return found.grid is not None and sum(weights) * _LIGHT <= found.peak_bytes


def _near(found: _Banded) -> float:
    return 1 if found.grid is None else _NEAR


def _within_bands(nodes: Sequence[onnx.NodeProto]) -> Iterator[str]:
    """What the nodes of aligned bands give, but those that a band begins with."""
    whole = nodes[-1]
    ends = {*whole.input, *whole.output}
    return (
        node.output[0]
        for before, node in pairwise(nodes)
        if before.output[0] not in ends and node.output[0] not in whole.output
    )
