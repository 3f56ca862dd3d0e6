"""The cut of a model as a picture: fragments from top to bottom, lines for what goes between them.

Edges go forward only. One to the next fragment is a short line; one that skips some goes around
them on the right, the further the more it skips. Of more than `MOST_NODES` fragments, consecutive
ones are shown as one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal_cli.drawing.chart import layer, quantity
from shoal_cli.local.run_record import CutReport, PlannedFragment
from shoal_protocol.partition import MODEL
from shoal_protocol.units import format_bytes

MOST_NODES: Final = 40
_COLOURS: Final = ("#2f7fb8", "#12946f", "#c2591c", "#7d5ba6", "#a6871f", "#b0486f")
_GREY: Final = "#66727f"
_HEIGHT: Final = 46
"""Of a fragment and the line below it."""
_HALF: Final = 0.27
"""Half the height of a box, in nodes."""
_LEFT: Final = 0.02
_RIGHT: Final = 0.66
"""Where boxes end if lines go around them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One box: fragments `first` to `last`, or the model's inputs or outputs."""

    text: str
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """From one node to a later one; `size_bytes` is None where a shape is unknown."""

    begin: int
    end: int
    tensors: int
    size_bytes: int | None

    @property
    def text(self) -> str:
        size = "size unknown" if self.size_bytes is None else format_bytes(self.size_bytes)
        return size if self.tensors == 1 else f"{size} in {self.tensors}"


def cut_graph(cut: CutReport) -> Mapping[str, object]:
    """The specification of the picture."""
    nodes, lines = layout(cut)
    right = _RIGHT if any(line.end - line.begin > 1 for line in lines) else 1 - _LEFT
    middle = (_LEFT + right) / 2
    paths = [point for number, line in enumerate(lines) for point in _path(number, line, middle)]
    near = [line for line in lines if line.end - line.begin == 1]
    far = [line for line in lines if line.end - line.begin > 1]
    words = [{"x": middle, "y": line.begin + 0.5, "text": line.text} for line in near]
    words += [
        {"x": _bend(line), "y": (line.begin + line.end) / 2, "text": line.text} for line in far
    ]
    boxes = [
        {
            "x": _LEFT,
            "x2": right,
            "middle": middle,
            "y": index - _HALF,
            "y2": index + _HALF,
            "row": index,
            "text": node.text,
            "colour": node.colour,
        }
        for index, node in enumerate(nodes)
    ]
    vertical = {"domain": [-0.6, len(nodes) - 0.4], "reverse": True, "nice": False}
    x = quantity("x", axis=None, scale={"domain": [0, 1]})
    y = quantity("y", axis=None, scale=vertical)
    text = {"field": "text"}
    box = layer(
        boxes,
        {"type": "rect", "cornerRadius": 5},
        x=x,
        x2={"field": "x2"},
        y=y,
        y2={"field": "y2"},
        color={"field": "colour", "type": "nominal", "scale": None},
        tooltip=text,
    )
    label = layer(
        boxes,
        {"type": "text", "color": "#fff", "fontSize": 11, "limit": 400},
        x={**x, "field": "middle"},
        y={**y, "field": "row"},
        text=text,
    )
    between = layer(
        paths,
        {"type": "line", "interpolate": "basis", "opacity": 0.75, "color": "#8b98a6"},
        x=x,
        y=y,
        order={"field": "order"},
        detail={"field": "line"},
        strokeWidth=quantity("width", scale=None),
        tooltip=text,
    )
    beside = {"type": "text", "align": "left", "dx": 7, "fontSize": 10, "color": "#7f8b98"}
    sizes = layer(words, beside, x=x, y=y, text=text)
    return {"height": _HEIGHT * len(nodes), "layer": [between, sizes, box, label]}


def layout(cut: CutReport) -> tuple[tuple[Node, ...], tuple[Line, ...]]:
    """Boxes in order, and the lines between them; lines between the same boxes are one."""
    size = max(1, math.ceil(len(cut.fragments) / MOST_NODES))
    groups = [cut.fragments[start : start + size] for start in range(0, len(cut.fragments), size)]
    homes = list(dict.fromkeys(each.devices for each in cut.fragments))
    nodes = [
        Node(text="inputs", colour=_GREY),
        *(_node(group, homes) for group in groups),
        Node(text="outputs", colour=_GREY),
    ]
    summed: dict[tuple[int, int], Line] = {}
    for edge in cut.edges:
        begin = 0 if edge.producer == MODEL else 1 + edge.producer // size
        end = len(nodes) - 1 if edge.consumer == MODEL else 1 + edge.consumer // size
        if begin == end:
            continue
        known = summed.get((begin, end))
        sizes = [edge.bytes_per_item, *([known.size_bytes] if known else ())]
        whole = None if None in sizes else sum(each or 0 for each in sizes)
        tensors = edge.tensors + (known.tensors if known else 0)
        summed[begin, end] = Line(begin=begin, end=end, tensors=tensors, size_bytes=whole)
    return tuple(nodes), tuple(summed.values())


def _node(group: Sequence[PlannedFragment], homes: Sequence[tuple[str, ...]]) -> Node:
    first, last = group[0], group[-1]
    name = f"{first.index}" if len(group) == 1 else f"{first.index}-{last.index}"
    size = format_bytes(sum(each.resident_bytes for each in group))
    devices = dict.fromkeys(device for each in group for device in each.devices)
    colour = _COLOURS[homes.index(first.devices) % len(_COLOURS)]
    return Node(text=f"{name}: {size} on {', '.join(devices)}", colour=colour)


def _bend(line: Line) -> float:
    """How far to the right a line that skips nodes goes."""
    return _RIGHT + 0.3 * (1 - 1 / math.sqrt(line.end - line.begin))


def _path(number: int, line: Line, middle: float) -> Iterable[dict[str, object]]:
    """The points of a line, with how thick it is."""
    size = line.size_bytes or 0
    width = 1.2 + min(4.0, 0.4 * math.log2(1 + size / 4096))
    shared = {"line": number, "width": round(width, 2), "text": line.text}
    if line.end - line.begin == 1:
        points = [(middle, line.begin + _HALF), (middle, line.end - _HALF)]
    else:
        bend = _bend(line)
        points = [
            (_RIGHT, line.begin),
            (bend, line.begin + 0.5),
            (bend, line.end - 0.5),
            (_RIGHT, line.end),
        ]
    for order, (x, y) in enumerate(points):
        yield {"x": round(x, 4), "y": y, "order": order, **shared}
