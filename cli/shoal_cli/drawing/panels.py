"""Plots of numbers against numbers: lines, areas and levels over one x axis."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal_cli.drawing.chart import Chart, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """What lies between `low` and `high` at each x: points are `(x, low, high)`."""

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
    colour: str
    value: float
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plot. Its axes begin at zero, unless the x axis is logarithmic."""

    title: str
    x_title: str
    y_title: str
    areas: Sequence[Area] = ()
    lines: Sequence[Line] = ()
    levels: Sequence[Level] = ()
    height: int = 220
    logarithmic: bool = False

    def chart(self, name: str) -> Chart:
        """What is drawn of it."""
        layers = [
            *(self._layer(_area_rows(each), {"type": "area"}, band=True) for each in self.areas),
            *map(self._level, self.levels),
            *(layer for each in self.lines for layer in self._line(each)),
        ]
        axes = self._layer([], {"type": "point", "filled": True, "opacity": 1})
        spec = {"height": self.height, "layer": [axes, *layers]}
        return Chart(name=name, title=self.title, text="", spec=spec)

    def _line(self, line: Line) -> Iterable[Spec]:
        rows = [{"x": x, "y": y, "kind": line.name} for x, y in line.points]
        joined = {"type": "line", "strokeWidth": 2, "point": {"filled": True, "size": 60}}
        if line.spreads:
            spreads = [
                {**row, "y": low, "y2": high}
                for row, (low, high) in zip(rows, line.spreads, strict=True)
            ]
            yield self._layer(spreads, {"type": "rule", "strokeWidth": 1.4}, band=True)
        yield self._layer(rows, joined)

    def _level(self, level: Level) -> Spec:
        dashes = [6, 4] if level.dashed else [1, 0]
        mark = {"type": "rule", "strokeWidth": 1.6, "strokeDash": dashes}
        layer = self._layer([{"y": level.value, "kind": level.name}], mark)
        del layer["encoding"]["x"]
        return layer

    def _layer(
        self, rows: Sequence[dict[str, object]], mark: Spec, *, band: bool = False
    ) -> dict[str, dict[str, object]]:
        """Rows of `x`, `y` and `kind`; with `band`, of `y2` as well."""
        named: list[Area | Line | Level] = [*reversed(self.areas), *self.lines, *self.levels]
        colours = {
            "field": "kind",
            "type": "nominal",
            "title": None,
            "scale": {
                "domain": [each.name for each in named],
                "range": [each.colour for each in named],
            },
            "legend": {"orient": "top", "labelLimit": 400, "columns": 3} if named else None,
        }
        y = {"field": "y", "type": "quantitative", "title": self.y_title, "stack": None}
        encoding = {
            "x": {"field": "x", "type": "quantitative", "title": self.x_title, **self._x_scale()},
            "y": {**y, "scale": {"zero": True}},
            "color": colours,
        }
        if band:
            encoding["y2"] = {"field": "y2"}
        return {"data": {"values": list(rows)}, "mark": {**mark}, "encoding": encoding}

    def _x_scale(self) -> Spec:
        if not self.logarithmic:
            return {"scale": {"zero": True, "nice": False}}
        xs = [x for line in self.lines for x, _ in line.points] or [1.0]
        domain = [min(xs) / 1.25, max(xs) * 1.25]
        return {
            "scale": {"type": "log", "base": 2, "domain": domain, "nice": False},
            "axis": {"format": "~g"},
        }


def _area_rows(area: Area) -> list[dict[str, object]]:
    return [{"x": x, "y": low, "y2": high, "kind": area.name} for x, low, high in area.points]
