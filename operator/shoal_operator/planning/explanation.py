"""A plan in words and tables, for `shoal plan`, events and statuses."""

from dataclasses import dataclass

from shoal_operator.planning.outcome import Plan, StagePlan, duration
from shoal_protocol.units import format_bytes

_UNKNOWN = "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text below their headings."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def explain(plan: Plan) -> tuple[Table, ...]:
    """The stages, and the alternatives with why they lost."""
    return (
        Table(
            title=summary(plan),
            headings=(
                "stage",
                "fragments",
                "devices",
                "memory",
                "compute",
                "transfer",
                "an item every",
            ),
            rows=tuple(_stage_row(index, stage) for index, stage in enumerate(plan.stages)),
        ),
        Table(
            title="Rejected",
            headings=("alternative", "items/s", "because"),
            rows=tuple(
                (each.alternative, _rate(each.items_per_second), each.reason)
                for each in plan.rejected
            ),
        ),
    )


def summary(plan: Plan) -> str:
    """`3 stages on jetson, pi-4, pi-zero; 38 items/s; even split would give 21`."""
    devices = list(dict.fromkeys(name for stage in plan.stages for name in stage.devices))
    count = len(plan.stages)
    parts = [f"{count} stage{'s' * (count != 1)} on {', '.join(devices)}"]
    if plan.items_per_second is not None:
        parts.append(f"{_rate(plan.items_per_second)} items/s")
    if plan.even_split is not None and plan.even_split.items_per_second is not None:
        parts.append(f"even split would give {_rate(plan.even_split.items_per_second)}")
    if any(stage.swaps for stage in plan.stages):
        parts.append("fragments are swapped, because no device holds its own together")
    if not plan.complete:
        parts.append("search cut short, a better plan may exist")
    return "; ".join(parts)


def lines(plan: Plan) -> tuple[str, ...]:
    """`explain` as plain text, in columns."""
    text: list[str] = []
    for table in explain(plan):
        if not table.rows:
            continue
        columns = list(zip(table.headings, *table.rows, strict=True))
        widths = [max(map(len, column)) for column in columns]
        text.append(table.title)
        for row in (table.headings, *table.rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            text.append("  " + "  ".join(cells).rstrip())
    return tuple(text)


def _stage_row(index: int, stage: StagePlan) -> tuple[str, ...]:
    first, last = stage.fragments[0], stage.fragments[-1]
    return (
        str(index),
        f"{first}" if first == last else f"{first}-{last}",
        ", ".join(stage.devices),
        format_bytes(stage.resident_bytes) + " (swaps)" * stage.swaps,
        _duration(stage.compute_nanoseconds),
        _duration(stage.transfer_nanoseconds),
        _duration(stage.period_nanoseconds),
    )


def _duration(nanoseconds: int | None) -> str:
    return _UNKNOWN if nanoseconds is None else duration(nanoseconds)


def _rate(items_per_second: float | None) -> str:
    return _UNKNOWN if items_per_second is None else f"{items_per_second:.3g}"
