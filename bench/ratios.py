"""The picture of a bench: each ratio to its peer, with the goal where there is one."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal_cli.drawing.chart import BLUE, GREEN, GREY, RED, Chart
from shoal_cli.drawing.svg import draw

ROW = 22
MET = {True: "goal, met", False: "goal, missed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A figure as a ratio to its peer's; `goal` bounds the ratio, and is met or not."""

    name: str
    ratio: float
    goal: float | None = None
    met: bool = False


def picture(title: str, compared: Sequence[Compared]) -> str:
    """The text of an SVG file."""
    subtitle = "Each figure as a ratio to its peer in the same run, medians; a logarithmic axis."
    return draw(title, subtitle, [chart(compared)])


def chart(compared: Sequence[Compared]) -> Chart:
    """What was compared, in its order; a tick where the goal is."""
    points = [{"name": each.name, "at": each.ratio, "kind": "measured"} for each in compared]
    goals = [
        {"name": each.name, "at": each.goal, "kind": MET[each.met]}
        for each in compared
        if each.goal is not None
    ]
    encoding = {
        "y": {
            "field": "name",
            "type": "nominal",
            "title": None,
            "sort": [each.name for each in compared],
            "axis": {"labelLimit": 380, "grid": True, "domain": False, "ticks": False},
        },
        "x": {
            "field": "at",
            "type": "quantitative",
            "title": "ratio to the peer",
            "scale": {"type": "log", "base": 2},
            "axis": {"format": "~g"},
        },
        "color": {
            "field": "kind",
            "type": "nominal",
            "title": None,
            "scale": {"domain": ["measured", *MET.values()], "range": [BLUE, GREEN, RED]},
            "legend": {"orient": "top"},
        },
    }
    even = {"data": {"values": [{"at": 1}]}, "encoding": {"x": encoding["x"]}}
    layers = [
        {**even, "mark": {"type": "rule", "color": GREY, "strokeDash": [4, 4]}},
        {
            "data": {"values": goals},
            "mark": {"type": "tick", "thickness": 3, "size": 16, "opacity": 1},
            "encoding": encoding,
        },
        {
            "data": {"values": points},
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": encoding,
        },
    ]
    spec = {"height": ROW * len(compared), "layer": layers}
    return Chart(name="ratios", title="", text="", spec=spec)
