"""Charts with one row for each name: bands below one another, and time from left to right.

The name with index i has the y values from i to i + 1, the first on top.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal_cli.drawing.chart import Spec, colour, compact, quantity

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bands:
    """The axes: time from `begin` to `end`, in the unit of its title, and one band for each
    name."""

    names: Sequence[str]
    begin: float
    end: float
    title: str = "seconds since the run began"

    @property
    def x(self) -> dict[str, object]:
        return {
            "type": "quantitative",
            "title": self.title,
            "scale": {"domain": [self.begin, self.end], "nice": False, "zero": False},
        }

    @property
    def y(self) -> dict[str, object]:
        return {
            "type": "quantitative",
            "scale": {"domain": [0, len(self.names)], "reverse": True, "nice": False},
            "axis": {
                "values": [index + 0.5 for index in range(len(self.names))],
                "labelExpr": f"{json.dumps(self.names)}[floor(datum.value)]",
                "labelLimit": 110,
                "title": None,
                "grid": False,
                "ticks": False,
                "domain": False,
            },
        }

    def rectangles(
        self,
        rows: Sequence[Row],
        kinds: Sequence[str],
        opacity: float = 1.0,
        *,
        shaded: bool = False,
    ) -> Spec:
        """From `begin` to `end` and from `top` to `bottom`, coloured by `kind`. `shaded`: each has
        an `opacity` of its own."""
        shade = quantity("opacity", scale=None, legend=None)
        return {
            "data": compact(rows),
            "mark": {"type": "rect", "opacity": opacity, "aria": False},
            "encoding": {
                "x": {"field": "begin", **self.x},
                "x2": {"field": "end"},
                "y": {"field": "top", **self.y},
                "y2": {"field": "bottom"},
                "color": colour(kinds),
                **({"opacity": shade} if shaded else {}),
                "tooltip": [
                    quantity("begin", title="second", format=".2f"),
                    {"field": "kind", "title": " "},
                    {"field": "what", "title": " "},
                ],
            },
        }
