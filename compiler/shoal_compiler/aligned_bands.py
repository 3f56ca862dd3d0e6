"""Bands of rows whose edges a model computes, for images of any size.

Each node of a run works in a band as it does in the whole, with its own edges. Where a band is not
at an edge of the image, the first and the last rows that it gives are wrong therefore: a band has
some more rows at either end, fewer from node to node. So all that must be known of a band is at
which rows it begins and ends, of the coarsest image of a run; those of the others are a multiple
of that.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, NamedTuple

import onnx
from onnx import helper

from shoal_compiler.nodes import text_of
from shoal_compiler.parting import Parting
from shoal_compiler.rows import ROW_AXIS, RowWise, set_pads

_NOTHING: Final = (("Add", 0), ("Sub", 0), ("Mul", 1), ("Div", 1))
"""What changes no number."""


class Step(NamedTuple):
    """A node of a run: what it reads by rows, and what it gives."""

    node: onnx.NodeProto
    how: RowWise

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.node.input[each] for each in self.how.places))

    @property
    def output(self) -> str:
        return self.node.output[0]


class Margin(NamedTuple):
    """Rows beyond a band, at either end."""

    before: int
    behind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Where bands of a run can begin: at each row of its `coarsest` image. For one row of that any
    other image of the run has as many as its scale. `margins`: with how many rows more of the
    coarsest image a step computes a band, by what it gives."""

    scales: Mapping[str, int]
    coarsest: str
    margins: Mapping[str, Margin]

    def rows(self, name: str, heights: Mapping[str, int], bands: int) -> int:
        """The most that one of so many bands has of an image."""
        if (margin := self.margins.get(name)) is None:
            margin = Margin(*map(max, zip(*self.margins.values(), strict=True)))
        of_band = -(-heights[self.coarsest] // bands) + sum(margin)
        return min(heights[name], of_band * self.scales[name])


def grid_of(steps: Sequence[Step]) -> Grid | None:
    """That of a run whose last step gives all it gives; None: its images have none in common."""
    if not _are_alike(steps):
        return None
    output = steps[-1].output
    scales = {output: Fraction(1)}
    for step in reversed(steps):
        scale = scales[step.output] * step.how.stride / step.how.spreads
        if any(scales.setdefault(name, scale) != scale for name in step.reads):
            return None
    coarsest = min(scales, key=lambda name: scales[name])
    whole = {name: scale / scales[coarsest] for name, scale in scales.items()}
    if any(scale.denominator > 1 for scale in whole.values()):
        return None
    times = {name: int(scale) for name, scale in whole.items()}
    return Grid(scales=times, coarsest=coarsest, margins=_margins(steps, times))


def _are_alike(steps: Sequence[Step]) -> bool:
    """Whether all that a step reads has as many rows in a band that is not the last one. What gives
    no row where its kernel goes beyond an image has fewer than there are strides."""
    lacking: dict[str, int] = {}
    for step in steps:
        there = {lacking.get(name, 0) for name in step.reads}
        if len(there) > 1:
            return False
        lacking[step.output] = step.how.lacking(there.pop())
    return min(lacking.values()) >= 0


def _margins(steps: Sequence[Step], scales: Mapping[str, int]) -> Mapping[str, Margin]:
    needed = {steps[-1].output: Margin(0, 0)}
    margins = {}
    for step in reversed(steps):
        rows = Margin(*step.how.around(*needed[step.output]))
        for name in step.reads:
            needed[name] = Margin(*map(max, rows, needed.get(name, rows)))
        margins[step.output] = Margin(*(-(-each // scales[step.reads[0]]) for each in rows))
    return margins


def aligned(
    parting: Parting, steps: Sequence[Step], grid: Grid, bands: int
) -> list[onnx.NodeProto]:
    """The nodes that compute a run in so many bands."""
    edges = _Edges(parting, steps, grid, bands)
    nodes: list[onnx.NodeProto] = []
    joined = []
    for number in range(bands):
        nodes.extend(_Band(parting, grid, edges, number).nodes(steps))
        joined.append(nodes[-1].output[0])
    last = steps[-1].node
    name = parting.name(last, bands)
    whole = helper.make_node("Concat", joined, [last.output[0]], name=name, axis=ROW_AXIS)
    return [*edges.nodes, *nodes, whole]


class _Band:
    """The nodes of one band, as they are written."""

    def __init__(self, parting: Parting, grid: Grid, edges: "_Edges", number: int) -> None:
        self._parting = parting
        self._grid = grid
        self._edges = edges
        self._number = number
        self._made: dict[tuple[str, Margin | None], str] = {}

    def nodes(self, steps: Sequence[Step]) -> Iterator[onnx.NodeProto]:
        """The last one gives the rows of the band, and no others."""
        for step in steps:
            margin = self._grid.margins[step.output]
            for name in step.reads:
                yield from self._taken(name, margin)
            node = deepcopy(step.node)
            node.name = self._parting.name(step.node, self._number)
            for place in step.how.places:
                node.input[place] = self._made[step.node.input[place], margin]
            if text_of(node, "auto_pad"):
                set_pads(node, step.how.pads)
            node.output[0] = self._parting.fresh(f"{step.output}.{self._number}")
            self._made[step.output, margin] = node.output[0]
            yield node
        yield from self._taken(steps[-1].output, None)

    def _taken(self, name: str, margin: Margin | None) -> Iterator[onnx.NodeProto]:
        """The node that takes an image's rows with a margin (None: those of the band alone), unless
        they are there."""
        if (name, margin) in self._made:
            return
        there = self._grid.margins.get(name)
        whole = name if there is None else self._made[name, there]
        places = self._edges.between(there, margin, self._grid.scales[name], self._number)
        node = self._parting.slice_between(whole, *places, ROW_AXIS)
        self._made[name, margin] = node.output[0]
        yield node


class _Edges:
    """Where bands begin and end: the nodes that compute it, for all bands at once."""

    def __init__(self, parting: Parting, steps: Sequence[Step], grid: Grid, bands: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._parting = parting
        self._bands = bands
        self._label = f"{steps[-1].output}.rows"
        self._known: dict[tuple[str, ...], str] = {}
        self._split: dict[str, Sequence[str]] = {}
        # Of what a run gives: what it takes may have more, of which a kernel finds no whole row.
        scale = grid.scales[steps[-1].output]
        given = self._with("Add", self._rows(steps), scale - 1)
        rows = self._with("Div", given, scale)
        numbers = range(bands + 1)
        self._first, self._last = (
            self._with("Div", self._with("Mul", rows, *each), bands)
            for each in (numbers[:-1], numbers[1:])
        )

    def between(
        self, there: Margin | None, wanted: Margin | None, scale: int, number: int
    ) -> tuple[str, str]:
        """Which rows of an image a band takes (None: its own alone), the end not among them, where
        it has those with another margin (None: all)."""
        start, end = self._first, self._last
        if wanted is not None:
            start, end = self._start(wanted), self._end(wanted)
        if there is not None:
            start, end = (self._made("Sub", each, self._start(there)) for each in (start, end))
        return self._of(start, scale, number), self._of(end, scale, number)

    def _rows(self, steps: Sequence[Step]) -> str:
        """How many a run gives, from those of an image outside of it."""
        makers = {step.output: step for step in steps}
        name, passed = steps[-1].output, []
        while (step := makers.get(name)) is not None:
            passed.append(step.how)
            name = step.reads[0]
        there = self._parting.slice(self._made("Shape", name), ROW_AXIS, ROW_AXIS + 1, axis=0)
        self.nodes.append(there)
        rows = there.output[0]
        for how in reversed(passed):
            rows = self._with("Mul", rows, how.spreads)
            if how.lacking(0) or how.stride > 1:
                strides = self._with("Div", self._with("Add", rows, how.beyond), how.stride)
                rows = self._with("Add", strides, 1)
        return rows

    def _start(self, margin: Margin) -> str:
        if not margin.before:
            return self._first
        return self._from_zero(self._with("Sub", self._first, margin.before))

    def _end(self, margin: Margin) -> str:
        """As if each band gave a row at least, of an image with fewer rows than bands: kernels take
        no image that is shorter than they are."""
        more = self._with("Sub", self._made("Sub", self._last, self._first), 1)
        row = self._with("Add", self._made("Add", self._first, self._from_zero(more)), 1)
        return self._with("Add", row, margin.behind)

    def _of(self, edge: str, scale: int, number: int) -> str:
        name = self._with("Mul", edge, scale)
        if name not in self._split:
            self.nodes.append(self._parting.split(name, self._bands))
            self._split[name] = self.nodes[-1].output
        return self._split[name][number]

    def _from_zero(self, name: str) -> str:
        """What is not below it. (`Max` takes no integers in older models.)"""
        twice = self._made("Add", name, self._made("Abs", name))
        return self._with("Div", twice, 2)

    def _with(self, operator: str, name: str, *values: int) -> str:
        if (operator, *values) in _NOTHING:
            return name
        return self._made(operator, name, self._parting.add_integers(self._label, values))

    def _made(self, operator: str, *reads: str) -> str:
        if (made := self._known.get((operator, *reads))) is None:
            made = self._known[operator, *reads] = self._parting.fresh(
                f"{self._label}.{len(self.nodes)}"
            )
            self.nodes.append(helper.make_node(operator, reads, [made]))
        return made
