"""Charts below one another as one SVG file, readable on light and on dark ground.

vl-convert-python draws, the optional extra `page`; what it draws needs nothing to be shown.
"""

import sys
from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from textwrap import wrap
from typing import Final

from shoal_cli.drawing.chart import Chart

WIDTH: Final = 820
"""Of each chart, without the names of its y axis."""
_LETTERS: Final = 130
"""In a line of that width."""
_FONT: Final = "Liberation Sans, Helvetica, Arial, sans-serif"
_INK: Final = "#1f2933"
_SOFT: Final = "#5b6b7a"
_CONFIG: Final[Mapping[str, object]] = {
    "background": "#fff",
    "font": _FONT,
    "padding": 20,
    "view": {"stroke": None},
    "title": {
        "anchor": "start",
        "frame": "group",
        "color": _INK,
        "subtitleColor": _SOFT,
        "offset": 12,
    },
    "axis": {
        "labelColor": _INK,
        "titleColor": _SOFT,
        "titleFontWeight": "normal",
        "gridColor": "#e3e9ef",
        "domainColor": "#8896a5",
        "tickColor": "#8896a5",
    },
    # Fonts differ in how wide they are: names do not reach into what comes next.
    "legend": {"labelColor": _INK, "labelFontSize": 12, "columnPadding": 30},
    "concat": {"spacing": 44},
}
_DARK: Final = """\
@media (prefers-color-scheme: dark) {
svg > rect { fill: #10161c; } text { fill: #e6edf3; }
.role-axis-title text, .role-title-subtitle text { fill: #9fb0c0; }
.role-axis-grid line { stroke: #28323c; }
.role-axis-domain line, .role-axis-tick line { stroke: #7d8c9b; }
}"""


class NothingDraws(Exception):
    """What draws is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "pages and pictures need vl-convert-python, which is not installed: "
            f"{sys.executable} -m pip install 'shoal[page]'"
        )


def can_draw() -> bool:
    return find_spec("vl_convert") is not None


def check_drawing() -> None:
    """Raise `NothingDraws` where nothing can be drawn."""
    if not can_draw():
        raise NothingDraws


def draw(title: str, subtitle: str, charts: Sequence[Chart]) -> str:
    """The text of an SVG file. Raises `NothingDraws`."""
    check_drawing()
    from vl_convert import vegalite_to_svg  # noqa: PLC0415 - large, and optional

    drawn = vegalite_to_svg(picture(title, subtitle, charts))
    head, rest = drawn.split(">", maxsplit=1)
    named = f"<title>{escape(title)}</title><desc>{escape(subtitle)}</desc>"
    return f'{head} role="img">{named}<style>{_DARK}</style>{rest}\n'


def picture(title: str, subtitle: str, charts: Sequence[Chart]) -> dict[str, object]:
    """The specification of the whole."""
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "config": _CONFIG,
        "title": {"text": title, "subtitle": wrap(subtitle, _LETTERS), "fontSize": 17},
        "resolve": {"scale": {"color": "independent"}},
        "vconcat": [
            {
                **chart.spec,
                "width": WIDTH,
                "title": {"text": chart.title, "subtitle": wrap(chart.text, _LETTERS)},
            }
            for chart in charts
        ],
    }
