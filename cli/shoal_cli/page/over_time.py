"""Charts of what happened over the run, with the same time from left to right."""

from collections.abc import Iterable, Sequence
from typing import Final

from shoal_cli.drawing.bands import Bands, Row
from shoal_cli.drawing.chart import COLOURS, MIB, Chart, Spec, colour, compact, layer, quantity
from shoal_cli.local.report import DeviceReport
from shoal_cli.page.series import ACTIVITIES, MOVEMENTS, Absence, Cell, DeviceSeries, Movement
from shoal_protocol.units import format_bytes

_BAND: Final = 0.78
"""Of a row, the part that is drawn on."""
_FOOT: Final = 0.5 + _BAND / 2
"""Where that part ends, from the top of the row."""
_LIMIT: Final = COLOURS["over budget"]


def bands(series: Sequence[DeviceSeries]) -> Bands:
    """The axes for these devices."""
    return Bands(
        names=[each.name for each in series],
        begin=min((cell.begin for each in series for cell in each.cells), default=0.0),
        end=max((cell.end for each in series for cell in each.cells), default=1.0),
    )


# ---- what devices did ----------------------------------------------------------------------------


def activity(series: Sequence[DeviceSeries]) -> Chart | None:
    """What each device did; and when it was lost."""
    axes = bands(series)
    rows = [row for index, each in enumerate(series) for row in _stacks(index, each.cells)]
    lost = [row for index, each in enumerate(series) for row in _losses(index, each.absences)]
    if not rows and not lost:
        return None
    kinds = [*ACTIVITIES, *["lost"] * bool(lost)]
    layers = [axes.rectangles(rows, kinds)]
    if lost:
        layers += [axes.rectangles(lost, kinds, opacity=0.3), _crosses(axes, series)]
    return Chart(
        name="activity",
        title="What each device did",
        text="The time of each device: computing, loading, sending, and waiting with work in hand; "
        "where several went on at once, the first of these is shown."
        + (" A cross says that the device was lost." if lost else ""),
        spec={"height": 44 * len(series), "layer": layers},
    )


def _stacks(index: int, cells: Iterable[Cell]) -> Iterable[Row]:
    """The parts of each cell, from the bottom of the band upwards."""
    for cell in cells:
        bottom = index + _FOOT
        for kind in ACTIVITIES:
            if share := cell.shares[kind]:
                top = bottom - _BAND * share
                yield _row(cell.begin, cell.end, top, bottom, kind, f"{share:.0%}")
                bottom = top


def _losses(index: int, absences: Iterable[Absence]) -> Iterable[Row]:
    for each in absences:
        what = each.reason + ("" if each.returned else "; it did not return")
        yield _row(each.begin, each.end, index + _FOOT - _BAND, index + _FOOT, "lost", what)


def _crosses(axes: Bands, series: Sequence[DeviceSeries]) -> Spec:
    moments = [
        {"begin": round(absence.begin, 3), "middle": index + 0.5}
        for index, each in enumerate(series)
        for absence in each.absences
    ]
    return layer(
        moments,
        {"type": "text", "text": "✕", "fontSize": 17, "fontWeight": "bold"},
        x={"field": "begin", **axes.x},
        y={"field": "middle", **axes.y},
        color={"value": COLOURS["lost"]},
    )


# ---- memory --------------------------------------------------------------------------------------


def memory(series: Sequence[DeviceSeries], devices: Sequence[DeviceReport]) -> Chart | None:
    """The memory of each device against its budget; a band is as high as the highest share."""
    budgets = {each.name: each.budget_bytes for each in devices if each.budget_bytes}
    known = [each for each in series if each.name in budgets]
    shares = [cell.memory_bytes / budgets[each.name] for each in known for cell in each.cells]
    if not any(shares):
        return None
    axes, scale = bands(known), _BAND / max(1.0, *shares)
    rows = [
        row
        for index, each in enumerate(known)
        for row in _levels(index, each.cells, budgets[each.name], scale)
    ]
    limits = [
        {
            "begin": axes.end,
            "level": round(index + _FOOT - scale, 4),
            "what": f"budget {format_bytes(budgets[each.name])}",
        }
        for index, each in enumerate(known)
    ]
    over = any(share > 1 for share in shares)
    layers = [
        axes.rectangles(rows, ["within budget", *["over budget"] * over]),
        *_budgets(axes, limits),
    ]
    return Chart(
        name="memory",
        title="Memory against budget",
        text="The most memory above the floor that was measured, for each device; the dashed line "
        "is its budget." + (" Where it is red, the device was over it." if over else ""),
        spec={"height": 62 * len(known), "layer": layers},
    )


def _levels(index: int, cells: Iterable[Cell], budget: int, scale: float) -> Iterable[Row]:
    for cell in cells:
        if cell.memory_bytes:
            kind = "over budget" if cell.memory_bytes > budget else "within budget"
            what = f"{format_bytes(cell.memory_bytes)} of {format_bytes(budget)}"
            bottom = index + _FOOT
            top = bottom - scale * cell.memory_bytes / budget
            yield _row(cell.begin, cell.end, top, bottom, kind, what)


def _budgets(axes: Bands, limits: Sequence[Row]) -> Iterable[Spec]:
    """Lines, and their names."""
    y = {"field": "level", **axes.y}
    yield layer(limits, {"type": "rule", "color": _LIMIT, "strokeDash": [5, 3]}, y=y)
    mark = {"type": "text", "align": "right", "baseline": "bottom", "dy": -2, "color": _LIMIT}
    x = {"field": "begin", **axes.x}
    yield layer(limits, {**mark, "fontSize": 10}, x=x, y=y, text={"field": "what"})


# ---- transfers -----------------------------------------------------------------------------------


def traffic(found: Sequence[Movement]) -> Chart | None:
    """What all devices together sent, received and fetched."""
    rows = [
        {"begin": round(each.begin, 3), "kind": kind, "rate": round(each.rates[kind] / MIB, 4)}
        for each in found
        for kind in MOVEMENTS
    ]
    if not any(row["rate"] for row in rows):
        return None
    axes = Bands(names=(), begin=found[0].begin, end=found[-1].end)
    return Chart(
        name="traffic",
        title="Transfers over time",
        text="All devices together, in MiB a second: activations and results sent, activations and "
        "inputs received, fragments fetched.",
        spec={
            "data": compact(rows),
            "height": 150,
            "mark": {"type": "area", "interpolate": "step-after", "opacity": 0.85, "aria": False},
            "encoding": {
                "x": {"field": "begin", **axes.x},
                "y": quantity("rate", title="MiB/s", stack="zero"),
                "color": colour(MOVEMENTS),
            },
        },
    )


def _row(begin: float, end: float, top: float, bottom: float, kind: str, what: str) -> Row:
    return {
        "begin": round(begin, 3),
        "end": round(end, 3),
        "top": round(top, 4),
        "bottom": round(bottom, 4),
        "kind": kind,
        "what": what,
    }
