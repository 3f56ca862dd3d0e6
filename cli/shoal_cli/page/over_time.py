"""Charts of what happened over the run.

A chart with one row per device has bands: the device with index i takes the y values from i to
i + 1, the first on top.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from shoal_cli.local.report import DeviceReport
from shoal_cli.local.run_record import Timeline
from shoal_cli.page.chart import COLOURS, MIB, Chart, Spec, colour
from shoal_cli.page.series import ACTIVITIES, MOVEMENTS, Cell, DeviceSeries, movements
from shoal_protocol.units import format_bytes

_BAND: Final = 0.78
"""Of a row, the part that is drawn on."""
_SECONDS: Final = "seconds since the run began"


def activity(series: Sequence[DeviceSeries]) -> Chart | None:
    rows = [
        {"begin": cell.begin, "end": cell.end, "kind": kind, "top": top, "bottom": bottom, **shown}
        for index, each in enumerate(series)
        for cell in each.cells
        for shown in (_shown(cell, each.name),)
        for kind, top, bottom in _stacked(cell, index)
    ]
    if not rows:
        return None
    lost = [
        {
            "begin": absence.begin,
            "end": absence.end,
            "kind": "lost",
            "top": index + 0.5 - _BAND / 2,
            "bottom": index + 0.5 + _BAND / 2,
            "device": each.name,
            "what": f"lost: {absence.reason}" + ("" if absence.returned else "; did not return"),
        }
        for index, each in enumerate(series)
        for absence in each.absences
    ]
    kinds = [*ACTIVITIES, *["lost"] * bool(lost)]
    layers: list[Spec] = [_rectangles(rows, kinds)]
    if lost:
        layers += [_rectangles(lost, kinds, opacity=0.3), _marks(lost)]
    return Chart(
        name="activity",
        title="What each device did",
        text="Per device: time in computation, loads, sending, and waiting with work in hand, over "
        "the run; where several went on at once, the first of these is shown"
        + (f". {len(lost)} times a device was lost." if lost else "."),
        spec=_banded([each.name for each in series], layers, rows + lost),
    )


def _shown(cell: Cell, device: str) -> dict[str, object]:
    """What the tooltip of a cell says."""
    shares = [(kind, getattr(cell.shares, kind)) for kind in ACTIVITIES]
    what = ", ".join(f"{kind} {share:.0%}" for kind, share in shares if share)
    return {"device": device, "what": what}


def _stacked(cell: Cell, index: int) -> Iterable[tuple[str, float, float]]:
    """The parts of a cell from the bottom of its band upwards."""
    bottom = index + 0.5 + _BAND / 2
    for kind in ACTIVITIES:
        share: float = getattr(cell.shares, kind)
        if share:
            top = bottom - _BAND * share
            yield kind, round(top, 4), round(bottom, 4)
            bottom = top


def memory(series: Sequence[DeviceSeries], devices: Sequence[DeviceReport]) -> Chart | None:
    budgets = {device.name: device.budget_bytes for device in devices}
    measured = [each for each in series if budgets.get(each.name)]
    shares = [cell.memory_bytes / budgets[each.name] for each in measured for cell in each.cells]
    if not any(shares):
        return None
    scale = _BAND / max(1.0, *shares)
    rows = [
        {
            "begin": cell.begin,
            "end": cell.end,
            "kind": "over budget" if cell.memory_bytes > budgets[each.name] else "within budget",
            "top": round(
                index + 0.5 + _BAND / 2 - scale * cell.memory_bytes / budgets[each.name], 4
            ),
            "bottom": index + 0.5 + _BAND / 2,
            "device": each.name,
            "what": f"{format_bytes(cell.memory_bytes)} of {format_bytes(budgets[each.name])}",
        }
        for index, each in enumerate(measured)
        for cell in each.cells
        if cell.memory_bytes
    ]
    limits = [
        {"y": index + 0.5 + _BAND / 2 - scale, "what": f"budget {format_bytes(budgets[each.name])}"}
        for index, each in enumerate(measured)
    ]
    rule: Spec = {
        "data": {"values": limits},
        "mark": {"type": "rule", "color": COLOURS["lost"], "strokeDash": [5, 3]},
        "encoding": {"y": {"field": "y", "type": "quantitative"}},
    }
    words: Spec = {
        "data": {"values": limits},
        "mark": {
            "type": "text", "align": "right", "baseline": "bottom", "dy": -2, "fontSize": 10,
            "color": COLOURS["lost"],
        },
        "encoding": {
            "x": {"value": {"expr": "width"}},
            "y": {"field": "y", "type": "quantitative"},
            "text": {"field": "what"},
        },
    }  # fmt: skip
    kinds = [
        "within budget",
        *["over budget"] * any(each["kind"] != "within budget" for each in rows),
    ]
    return Chart(
        name="memory",
        title="Memory against budget",
        text="Per device: the most memory above the floor that was measured, over the run; the "
        "dashed line is the budget.",
        spec=_banded(
            [each.name for each in measured],
            [_rectangles(rows, kinds), rule, words],
            rows,
            height=58,
        ),
    )


def traffic(timelines: Sequence[Timeline]) -> Chart | None:
    rows = [
        {
            "begin": each.begin,
            "end": each.end,
            "kind": kind,
            "rate": round(getattr(each, kind) / (each.end - each.begin) / MIB, 5),
        }
        for each in movements(timelines)
        for kind in MOVEMENTS
    ]
    if not any(row["rate"] for row in rows):
        return None
    points = [{"x": row["begin"], **row} for row in rows]
    return Chart(
        name="traffic",
        title="Transfers over time",
        text="All devices together: activations and results sent and received, and fragments "
        "fetched, in MiB a second.",
        spec={
            "data": {"values": points},
            "height": 150,
            "mark": {"type": "area", "interpolate": "step-after", "opacity": 0.85, "aria": False},
            "encoding": {
                "x": {"field": "x", "type": "quantitative", "title": _SECONDS},
                "y": {
                    "field": "rate", "type": "quantitative", "title": "MiB/s", "stack": "zero",
                },
                "color": colour(MOVEMENTS),
            },
        },
    )  # fmt: skip


def _rectangles(
    rows: Sequence[Mapping[str, object]], kinds: Sequence[str], *, opacity: float = 1.0
) -> Spec:
    return {
        "data": {"values": list(rows)},
        "mark": {"type": "rect", "opacity": opacity, "aria": False},
        "encoding": {
            "x": {"field": "begin", "type": "quantitative", "title": _SECONDS},
            "x2": {"field": "end"},
            "y": {"field": "top", "type": "quantitative"},
            "y2": {"field": "bottom"},
            "color": colour(kinds),
            "tooltip": [
                {"field": "device"},
                {"field": "begin", "type": "quantitative", "title": "second", "format": ".2f"},
                {"field": "what", "title": " "},
            ],
        },
    }


def _marks(lost: Sequence[Mapping[str, object]]) -> Spec:
    """A cross where a device was lost."""
    return {
        "data": {"values": list(lost)},
        "transform": [{"calculate": "(datum.top + datum.bottom) / 2", "as": "middle"}],
        "mark": {"type": "text", "text": "✕", "fontSize": 17, "fontWeight": "bold", "dx": 1},
        "encoding": {
            "x": {"field": "begin", "type": "quantitative"},
            "y": {"field": "middle", "type": "quantitative"},
            "color": {"value": COLOURS["lost"]},
        },
    }


def _banded(
    names: Sequence[str],
    layers: Sequence[Spec],
    rows: Sequence[Mapping[str, object]],
    *,
    height: int = 44,
) -> Spec:
    """Layers over one row per name."""
    last = max(float(str(row["end"])) for row in rows)
    axis = {
        "values": [index + 0.5 for index in range(len(names))],
        "labelExpr": f"{json.dumps(names)}[floor(datum.value)]",
        "title": None,
        "grid": False,
        "ticks": False,
        "domain": False,
        "labelLimit": 110,
    }
    first, *rest = layers
    scaled = _with_scales(first, {"domain": [0, last], "nice": False}, axis, len(names))
    return {"height": height * len(names), "layer": [scaled, *rest]}


def _with_scales(layer: Spec, x: Spec, axis: Spec, rows: int) -> Spec:
    encoding = dict(layer["encoding"])  # type: ignore[call-overload]
    encoding["x"] = {**encoding["x"], "scale": x}
    encoding["y"] = {
        **encoding["y"],
        "axis": axis,
        "scale": {"domain": [0, rows], "reverse": True, "nice": False},
    }
    return {**layer, "encoding": encoding}
