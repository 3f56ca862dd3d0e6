"""What a chart is, and the colours that all of them share.

They are readable on light and on dark ground. The page's style sheet colours axes and their text.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Spec = Mapping[str, object]
"""A specification for Vega-Lite, as JSON values, without a width: charts fill the page's."""

MIB: Final = 1 << 20
COLOURS: Final = {
    "compute": "#2f7fb8",
    "load": "#d98b1f",
    "send": "#12946f",
    "wait": "#a3aebb",
    "sent": "#12946f",
    "received": "#2f7fb8",
    "fetched": "#d98b1f",
    "resident": "#12946f",
    "cached": "#2f7fb8",
    "idle": "#a3aebb",
    "evict": "#c2591c",
    "planned": "#a3aebb",
    "measured": "#2f7fb8",
    "within budget": "#12946f",
    "over budget": "#d0404a",
    "lost": "#d0404a",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One figure: `name` is its id on the page, `text` says what is seen, for those who do not."""

    name: str
    title: str
    text: str
    spec: Spec


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
