"""What a chart is, and the colours that all of them share, readable on light and on dark ground."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Spec = Mapping[str, object]
"""A specification for Vega-Lite, as JSON values, without a width: charts are as wide as the page or
the picture that they are in."""

MIB: Final = 1 << 20
BLUE: Final = "#2f7fb8"
GREEN: Final = "#12946f"
ORANGE: Final = "#d98b1f"
BROWN: Final = "#c2591c"
VIOLET: Final = "#7d5ba6"
OLIVE: Final = "#a6871f"
RED: Final = "#d0404a"
GREY: Final = "#a3aebb"
COLOURS: Final = {
    "receive": GREEN,
    "read weights": ORANGE,
    "compute": BLUE,
    "load": ORANGE,
    "send": GREEN,
    "wait": GREY,
    "sent": GREEN,
    "received": BLUE,
    "fetched": ORANGE,
    "resident": GREEN,
    "cached": BLUE,
    "idle": GREY,
    "evict": BROWN,
    "planned": GREY,
    "measured": BLUE,
    "within budget": GREEN,
    "over budget": RED,
    "lost": RED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One figure: `name` is its id on a page, `text` says what is seen, for those who do not."""

    name: str
    title: str
    text: str
    spec: Spec


def layer(rows: Iterable[Mapping[str, object]], mark: Spec, **encoding: object) -> Spec:
    """Rows, drawn as marks; `encoding` says where which of their fields is seen."""
    return {"data": {"values": list(rows)}, "mark": mark, "encoding": encoding}


def quantity(field: str, **more: object) -> Spec:
    """Numbers of a field."""
    return {"field": field, "type": "quantitative", **more}


def compact(rows: Sequence[Mapping[str, object]]) -> Spec:
    """Many rows of equal fields, as data that names the fields once."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, fieldnames=rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return {"values": text.getvalue(), "format": {"type": "csv"}}


def colour(kinds: Sequence[str]) -> Spec:
    """The colours of what is named, with a legend."""
    return {
        "field": "kind",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(kinds), "range": [COLOURS[kind] for kind in kinds]},
        "legend": {"orient": "top"},
    }
