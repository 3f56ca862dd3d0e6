"""Bands of exactly the rows that each needs, of images whose rows a model says itself."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import pairwise

import onnx
from onnx import helper

from shoal_compiler.parting import Parting
from shoal_compiler.rows import ROW_AXIS, Rows, set_pads
from shoal_compiler.runs import Run, Runs


def exact(parting: Parting, runs: Runs, run: Run, bands: int) -> list[onnx.NodeProto]:
    """The nodes that compute a run in so many bands."""
    nodes: list[onnx.NodeProto] = []
    joined = []
    for number, rows in enumerate(parts(runs.heights[run.output], bands)):
        nodes.extend(_Band(parting, runs, run, number, rows).nodes())
        joined.append(nodes[-1].output[0])
    last = runs.steps(run)[-1].node
    name = parting.name(last, bands)
    whole = helper.make_node("Concat", joined, [run.output], name=name, axis=ROW_AXIS)
    return [*nodes, whole]


def parts(height: int, bands: int) -> Sequence[Rows]:
    """So many rows in bands that are about as high."""
    ends = [height * band // bands for band in range(bands + 1)]
    return [Rows(*each) for each in pairwise(ends)]


class _Band:
    """The nodes of one band, as they are written."""

    def __init__(self, parting: Parting, runs: Runs, run: Run, number: int, rows: Rows) -> None:
        self._parting = parting
        self._runs = runs
        self._run = run
        self._number = number
        self._needed = runs.needed(run, rows)
        self._names: dict[str, str] = {}
        self._slices: dict[tuple[str, Rows], str] = {}

    def nodes(self) -> Iterator[onnx.NodeProto]:
        """The last one gives the rows of the band."""
        for source, how in self._runs.steps(self._run):
            node = deepcopy(source)
            node.name = self._parting.name(source, self._number)
            rows = self._needed[source.output[0]]
            for each in how.places:
                name = source.input[each]
                height = self._runs.heights[name]
                node.input[each], slices = self._taken(name, how.needs(rows, height), height)
                yield from slices
            if how.kernel > 1 or any(how.pads):
                set_pads(node, how.padded(rows, self._runs.heights[source.input[how.places[0]]]))
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
