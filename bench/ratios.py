"""The picture of a bench: each ratio to its peer, with the goal where there is one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal_cli.drawing.chart import BLUE, GREEN, GREY, RED, Chart
from shoal_cli.drawing.svg import draw

if TYPE_CHECKING:
    from measurement import Measurement

ROW = 22
MET = {True: "goal, met", False: "goal, missed"}


def picture(title: str, measurements: Sequence["Measurement"]) -> str:
    """The text of an SVG file."""
    subtitle = "Each figure as a ratio to its peer in the same run, medians; a logarithmic axis."
    return draw(title, subtitle, [chart(measurements)])


def chart(measurements: Sequence["Measurement"]) -> Chart:
    """What was compared, in its order; a tick where the goal is."""
    compared = [each for each in measurements if each.ratio is not None]
    points = [{"name": each.name, "at": each.ratio, "kind": "measured"} for each in compared]
    goals = [
        {"name": each.name, "at": each.goal.bound, "kind": MET[bool(each.met)]}
        for each in compared
        if each.goal is not None and each.goal.of == "ratio"
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
