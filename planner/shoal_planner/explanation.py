"""A plan in words and tables: what `shoal plan` prints, and the one line of an event."""

from dataclasses import dataclass

from shoal_planner.costs import Holding
from shoal_planner.outcome import SHORTEST_PERIOD, Plan, Rejected, StagePlan, duration
from shoal_protocol.partition import Fragment, PartitionDocument
from shoal_protocol.units import format_bytes

_UNKNOWN = "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text below their headings."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[str]
    """The headings of columns that hold numbers: those are aligned to the right."""


def explain(plan: Plan, document: PartitionDocument) -> tuple[Table, ...]:
    """The stages, the memory of each fragment, and the alternatives with why they lost."""
    tables = (_stages(plan), _memory(plan, document), _rejected(plan))
    return tuple(table for table in tables if table.rows)


def _stages(plan: Plan) -> Table:
    numbers = ("memory", "compute", "transfer", "an item every")
    title = summary(plan)
    if plan.latency_nanoseconds is not None and plan.items_per_second is not None:
        title += f"; an item takes {duration(plan.latency_nanoseconds)}"
    return Table(
        title=title,
        headings=("stage", "fragments", "devices", *numbers),
        rows=tuple(_stage_row(index, stage) for index, stage in enumerate(plan.stages)),
        numbers=frozenset(("stage", *numbers)),
    )


def _memory(plan: Plan, document: PartitionDocument) -> Table:
    """What fragments need, and what they get."""
    return Table(
        title="Memory",
        headings=("fragment", "at least", "resident", "granted"),
        rows=tuple(
            (
                str(index),
                format_bytes(fragment.least_bytes),
                format_bytes(fragment.resident_bytes),
                _granted(fragment, stage),
            )
            for stage in plan.stages
            for index in stage.fragments
            for fragment in (document.fragments[index],)
        ),
        numbers=frozenset({"fragment", "at least", "resident"}),
    )


def _granted(fragment: Fragment, stage: StagePlan) -> str:
    """`all on jetson; 12 MiB in blocks on pi-4, pi-zero`."""
    devices: dict[int, list[str]] = {}
    for device, granted in zip(stage.devices, stage.grants(fragment.index), strict=True):
        devices.setdefault(granted, []).append(device)
    return "; ".join(
        ("all" if granted == fragment.resident_bytes else f"{format_bytes(granted)} in blocks")
        + f" on {', '.join(names)}"
        for granted, names in devices.items()
    )


def _rejected(plan: Plan) -> Table:
    return Table(
        title="Rejected",
        headings=("alternative", "items/s", "because"),
        rows=tuple(
            (each.alternative, rate(each.items_per_second), each.reason) for each in plan.rejected
        ),
        numbers=frozenset({"items/s"}),
    )


def summary(plan: Plan) -> str:
    """`3 stages on jetson, pi-4, pi-zero; 38 items/s; even split would give 21`."""
    devices = list(dict.fromkeys(name for stage in plan.stages for name in stage.devices))
    count = len(plan.stages)
    parts = [f"{count} stage{'s' * (count != 1)} on {', '.join(devices)}"]
    if plan.items_per_second is not None:
        parts.append(f"{rate(plan.items_per_second)} items/s")
    elif plan.period_nanoseconds is not None:
        parts.append("items/s unknown, the work on an item is too little to be estimated")
    if plan.even_split is not None and plan.even_split.items_per_second is not None:
        parts.append(f"even split would give {rate(plan.even_split.items_per_second)}")
    if any(stage.held(Holding.IN_BLOCKS) for stage in plan.stages):
        parts.append("where memory is short, fragments run in blocks and read weights again")
    if any(stage.held(Holding.RELOADED) for stage in plan.stages):
        parts.append("fragments are loaded in turn, because no device holds its own together")
    if not plan.complete:
        parts.append("search cut short, a better plan may exist")
    return "; ".join(parts)


def sentences(plan: Plan) -> tuple[str, ...]:
    """The summary, and why each alternative lost."""
    return summary(plan), *map(_why_lost, plan.rejected)


def _why_lost(rejected: Rejected) -> str:
    known = rejected.items_per_second
    gives = "" if known is None else f" would give {rate(known)} items/s"
    return f"{rejected.alternative}{gives}: {rejected.reason}"


def _stage_row(index: int, stage: StagePlan) -> tuple[str, ...]:
    first, last = stage.fragments[0], stage.fragments[-1]
    return (
        str(index),
        f"{first}" if first == last else f"{first}-{last}",
        ", ".join(stage.devices),
        format_bytes(stage.resident_bytes) + _how(stage),
        _duration(stage.compute_nanoseconds),
        _duration(stage.transfer_nanoseconds),
        _period(stage.period_nanoseconds),
    )


def _how(stage: StagePlan) -> str:
    if stage.held(Holding.RELOADED):
        return " (in turn)"
    return " (in blocks)" * stage.held(Holding.IN_BLOCKS)


def _duration(nanoseconds: int | None) -> str:
    return _UNKNOWN if nanoseconds is None else duration(nanoseconds)


def _period(nanoseconds: int | None) -> str:
    known = nanoseconds is not None and nanoseconds >= SHORTEST_PERIOD
    return _duration(nanoseconds) if known else _UNKNOWN


def rate(items_per_second: float | None) -> str:
    """Items per second in three digits; `?` where that is unknown."""
    return _UNKNOWN if items_per_second is None else f"{items_per_second:.3g}"
