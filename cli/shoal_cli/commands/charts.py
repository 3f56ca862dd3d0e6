"""Charts as SVG, without a library: panels one below the other, each with axes, a legend, areas,
lines and levels in it. Readable on light and on dark ground.

A chart is a value, and `draw` is a function of it. Positions are in user units of a picture that is
`WIDTH` wide; numbers of the axes are whatever the titles of the axes say.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol
from xml.sax.saxutils import escape

WIDTH: Final = 920
_LEFT: Final = 74
RIGHT: Final = 26
_PLOT_WIDTH: Final = WIDTH - _LEFT - RIGHT
_HEAD: Final = 66
"""Height of what is above the first panel: title and subtitle."""
_TITLE: Final = 32
_LEGEND_ROW: Final = 20
"""Above each plot: its title and the rows of its legend."""
_FOOT: Final = 52
"""Below each plot: the axis, its numbers and its title."""
_LETTER: Final = 7.1
"""Width of a letter of the legend, on the safe side: SVG says not how wide text is."""
_TICKS: Final = 6
_ROOM: Final = 1.08
"""The axis goes on a little beyond the largest value."""

_STYLE: Final = """\
text { fill: #1f2933; } .box { fill: #f5f8fa; stroke: #8896a5; } .way { stroke: #b9c4cf; }
.soft { fill: #5b6b7a; font-size: 12px; } .name { font-weight: 600; }
.ground { fill: #fff; } .grid { stroke: #e3e9ef; } .axis { stroke: #8896a5; }
.a { fill: #b9c4cf; stroke: #b9c4cf; } .b { fill: #12946f; stroke: #12946f; }
.c { fill: #2f7fb8; stroke: #2f7fb8; } .d { fill: #c2591c; stroke: #c2591c; }
.e { fill: #7d5ba6; stroke: #7d5ba6; } .f { fill: #a6871f; stroke: #a6871f; }
.limit { fill: #c0262d; stroke: #c0262d; }
path.area, rect.area { stroke: none; fill-opacity: 0.85; }
path.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .level { stroke-width: 1.6; }
.dashed { stroke-dasharray: 6 4; } .spread { stroke-width: 1.4; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .box { fill: #1a222a; stroke: #7d8c9b; } .way { stroke: #55636f; }
.soft { fill: #9fb0c0; }
.ground { fill: #10161c; } .grid { stroke: #28323c; } .axis { stroke: #7d8c9b; }
.a { fill: #55636f; stroke: #55636f; } .b { fill: #3fbf97; stroke: #3fbf97; }
.c { fill: #58a6dd; stroke: #58a6dd; } .d { fill: #ec8a4b; stroke: #ec8a4b; }
.e { fill: #b08fd8; stroke: #b08fd8; } .f { fill: #d9b84a; stroke: #d9b84a; }
.limit { fill: #ff6b70; stroke: #ff6b70; }
}"""
_FONTS: Final = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Arial, sans-serif"


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """What lies between `low` and `high` at each x. `colour` is a letter from a to f."""

    name: str
    colour: str
    points: Sequence[tuple[float, float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points `(x, y)`, joined unless there is one; `spreads` are the quartiles of each y."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    spreads: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A horizontal line over the whole width."""

    name: str
    value: float
    colour: str = "limit"
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plot. Its y axis begins at zero; its x axis at the least x, or is logarithmic."""

    title: str
    x_title: str
    y_title: str
    areas: Sequence[Area] = ()
    lines: Sequence[Line] = ()
    levels: Sequence[Level] = ()
    height: int = 220
    logarithmic: bool = False

    def drawn(self, top: float) -> tuple[Iterable[str], float]:
        plot = _Plot(self, top)
        return plot.elements(), plot.bottom + _FOOT


class Drawable(Protocol):
    """What a picture is made of: panels, Gantt charts, topologies."""

    def drawn(self, top: float) -> tuple[Iterable[str], float]:
        """Its elements, where there is room for it from `top` on; and where the next one begins."""
        ...


def draw(title: str, subtitle: str, panels: Sequence[Drawable]) -> str:
    """The chart as the text of an SVG file."""
    top, parts = float(_HEAD), list[str]()
    for panel in panels:
        elements, top = panel.drawn(top)
        parts += elements
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" role="img" '
        f'aria-labelledby="title summary" font-family="{_FONTS}" font-size="13">'
    )
    named = f'<title id="title">{escape(title)}</title><desc id="summary">{escape(subtitle)}</desc>'
    ground = f'<rect class="ground" width="{WIDTH}" height="{top:.0f}"/>'
    heading = f'<text class="name" x="{RIGHT}" y="30" font-size="17">{escape(title)}</text>'
    below = f'<text class="soft" x="{RIGHT}" y="51">{escape(subtitle)}</text>'
    style = f"<style>{_STYLE}</style>"
    return "\n".join((head, named, style, ground, heading, below, *parts, "</svg>\n"))


def ticks(least: float, most: float, *, logarithmic: bool = False) -> list[float]:
    """Round numbers within a range: powers of two and what lies between them, or about `_TICKS` at
    the same distances."""
    if logarithmic:
        first, last = math.ceil(math.log2(least)), math.floor(math.log2(most))
        step = max(1, math.ceil((last - first + 1) / (2 * _TICKS)))
        powers = [2.0**power for power in range(first, last + 1, step)]
        between = [1.5 * power for power in (2.0 ** (first - 1), *powers)] if step == 1 else []
        return sorted(each for each in (*powers, *between) if least <= each <= most)
    if most <= least:
        return [least]
    rough = (most - least) / _TICKS
    scale = 10.0 ** math.floor(math.log10(rough))
    step_size = next(scale * each for each in (1, 2, 2.5, 5, 10) if scale * each >= rough)
    first, last = math.ceil(least / step_size - 1e-9), math.floor(most / step_size + 1e-9)
    return [number * step_size for number in range(first, last + 1)]


class _Plot:
    """One panel with its scales."""

    def __init__(self, panel: Panel, above: float) -> None:
        """`above` is where the room for title and legend begins."""
        self._panel, self._above = panel, above
        self._entries = list(_legend(panel))
        rows = max((row for _, row, _ in self._entries), default=0) + 1
        self._top = above + _TITLE + rows * _LEGEND_ROW
        self.bottom = self._top + panel.height
        tops = [(x, high) for area in panel.areas for x, _, high in area.points]
        tops += [point for line in panel.lines for point in line.points]
        xs = [x for x, _ in tops] or [0.0, 1.0]
        self._least, self._most = min(xs), max(xs)
        if panel.logarithmic:
            self._least, self._most = self._least / 1.25, self._most * 1.25
        else:
            self._least = 0.0
        if self._most == self._least:
            self._most += 1
        ys = [y for _, y in tops]
        ys += [high for line in panel.lines for _, high in line.spreads]
        ys += [level.value for level in panel.levels]
        self._highest = _ROOM * max(ys, default=1.0) or 1.0

    def elements(self) -> Iterator[str]:
        panel = self._panel
        place = f'x="{_LEFT}" y="{self._above + 20:.1f}"'
        yield f'<text class="name" {place}>{escape(panel.title)}</text>'
        yield from self._grid()
        for area in panel.areas:
            yield self._area(area)
        for level in panel.levels:
            yield self._level(level)
        for line in panel.lines:
            yield from self._line(line)
        yield from self._legend_elements()

    def _x(self, value: float) -> float:
        least, most = self._least, self._most
        if self._panel.logarithmic:
            return _LEFT + _PLOT_WIDTH * math.log(value / least) / math.log(most / least)
        return _LEFT + _PLOT_WIDTH * (value - least) / (most - least)

    def _y(self, value: float) -> float:
        return self._top + self._panel.height * (1 - value / self._highest)

    def _grid(self) -> Iterator[str]:
        panel, bottom, right = self._panel, self._top + self._panel.height, WIDTH - RIGHT
        for value in ticks(0, self._highest):
            y = self._y(value)
            yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>'
            label = f"{value:g}"
            yield text(_LEFT - 8, y + 4, label, anchor="end")
        for value in ticks(self._least, self._most, logarithmic=panel.logarithmic):
            x = self._x(value)
            yield f'<path class="axis" d="M{x:.1f} {bottom:.1f}v5"/>'
            yield text(x, bottom + 19, f"{value:g}", anchor="middle")
        yield f'<path class="axis" d="M{_LEFT} {bottom:.1f}H{right}"/>'
        yield text(_LEFT + _PLOT_WIDTH / 2, bottom + 37, panel.x_title, anchor="middle")
        x, y = 20, self._top + panel.height / 2
        yield (
            f'<text class="soft" text-anchor="middle" transform="translate({x} {y:.1f}) '
            f'rotate(-90)">{escape(panel.y_title)}</text>'
        )

    def _area(self, area: Area) -> str:
        upper = [f"{self._x(x):.1f} {self._y(high):.1f}" for x, _, high in area.points]
        lower = [f"{self._x(x):.1f} {self._y(low):.1f}" for x, low, _ in reversed(area.points)]
        return f'<path class="area {area.colour}" d="M{"L".join((*upper, *lower))}Z"/>'

    def _level(self, level: Level) -> str:
        y, dashed = self._y(level.value), " dashed" * level.dashed
        kind = f"line level {level.colour}{dashed}"
        return f'<path class="{kind}" d="M{_LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'

    def _line(self, line: Line) -> Iterator[str]:
        places = [(self._x(x), self._y(y)) for x, y in line.points]
        if len(places) > 1:
            way = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            yield f'<path class="line {line.colour}" d="M{way}"/>'
        for (x, _), (low, high) in zip(places, line.spreads, strict=False):
            ends = f"M{x:.1f} {self._y(low):.1f}V{self._y(high):.1f}"
            yield f'<path class="spread {line.colour}" d="{ends}"/>'
        for x, y in places:
            yield _dot(line.colour, x, y)

    def _legend_elements(self) -> Iterator[str]:
        for entry, row, place in self._entries:
            x, y = _LEFT + place, self._above + _TITLE + _LEGEND_ROW * row + 10
            match entry:
                case Area():
                    mark = f'<rect class="area {entry.colour}" x="{x:.1f}" y="{y - 9:.1f}" '
                    yield mark + 'width="14" height="10" rx="2"/>'
                case Line():
                    yield _dot(entry.colour, x + 7, y - 4)
                case Level():
                    kind = f"line level {entry.colour}{' dashed' * entry.dashed}"
                    yield f'<path class="{kind}" d="M{x:.1f} {y - 4:.1f}h14"/>'
            yield text(x + 19, y, entry.name)


def _legend(panel: Panel) -> Iterator[tuple[Area | Line | Level, int, float]]:
    """What the legend names, the topmost first, with its row and its place there."""
    row, place = 0, 0.0
    entries: list[Area | Line | Level] = [*reversed(panel.areas), *panel.lines, *panel.levels]
    for entry in entries:
        width = 19 + _LETTER * len(entry.name) + 18
        if place and place + width > _PLOT_WIDTH:
            row, place = row + 1, 0.0
        yield entry, row, place
        place += width


def _dot(colour: str, x: float, y: float) -> str:
    return f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "soft") -> str:
    """Words whose base line begins, ends or has its middle at a point."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(words)}</text>'


def shortened(words: str, most: int) -> str:
    """So many letters at most; the middle goes."""
    if len(words) <= most:
        return words
    return f"{words[: most // 2]}…{words[len(words) - (most - 1) // 2 :]}"
