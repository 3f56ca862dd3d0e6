"""A plan in words and tables: what `shoal plan` prints, and the one line of an event."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from shoal_planner.costs import Costs, Span
from shoal_planner.device_costs import Holding
from shoal_planner.figures import item_shares
from shoal_planner.outcome import (
    SHORTEST_PERIOD,
    Infeasible,
    Plan,
    Rejected,
    Share,
    StagePlan,
    duration,
)
from shoal_protocol.partition import Fragment, PartitionDocument
from shoal_protocol.units import counted, format_bytes, format_number, format_upwards

_UNKNOWN: Final = "?"
_HELD: Final = {
    Holding.WHOLE: "",
    Holding.IN_BLOCKS: " (in blocks)",
    Holding.RELOADED: " (in turn)",
}


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


def explain_refusal(answer: Infeasible) -> tuple[Table, ...]:
    """What each device lacks for the fragment that fits nowhere; empty where size is no trouble."""
    if answer.need_bytes is None:
        return ()
    rows = tuple(
        (name, format_bytes(budget), format_upwards(max(0, answer.need_bytes - budget)))
        for name, budget in answer.budgets
    )
    numbers = ("has", "lacks")
    need = format_upwards(answer.need_bytes)
    title = f"Fragment {answer.fragment} needs at least {need}, with what enters and leaves it"
    return (
        Table(title=title, headings=("device", *numbers), rows=rows, numbers=frozenset(numbers)),
    )


def _stages(plan: Plan) -> Table:
    numbers = ("share", "compute", "reads again", "transfer", "memory", "an item every")
    title = summary(plan)
    if plan.latency_nanoseconds is not None and plan.items_per_second is not None:
        title += f"; an item takes {duration(plan.latency_nanoseconds)}"
    return Table(
        title=title,
        headings=("stage", "fragments", "devices", *numbers),
        rows=tuple(row for index, stage in enumerate(plan.stages) for row in _rows(index, stage)),
        numbers=frozenset(("stage", *numbers)),
    )


def _rows(index: int, stage: StagePlan) -> Iterator[tuple[str, ...]]:
    """One for the devices that are alike; what is the stage's is in the first."""
    parts = item_shares(stage) or (None,) * len(stage.shares)
    alike: dict[tuple[Share, float | None], list[str]] = {}
    for share, part in zip(stage.shares, parts, strict=True):
        alike.setdefault((replace(share, device=""), part), []).append(share.device)
    first, last = stage.fragments[0], stage.fragments[-1]
    own = (str(index), f"{first}" if first == last else f"{first}-{last}")
    period = _period(stage.period_nanoseconds)
    for (share, part), devices in alike.items():
        cost = share.cost
        yield (
            *own,
            ", ".join(devices),
            _UNKNOWN if part is None else f"{100 * part:.0f} %",
            _duration(None if cost is None else cost.compute),
            _duration(cost.read) if cost is not None and cost.read else "",
            _duration(None if cost is None else cost.transfer),
            f"{format_bytes(share.resident_bytes)} of {format_bytes(share.budget_bytes)}"
            + _HELD[share.holding],
            period,
        )
        own, period = ("", ""), ""


def _memory(plan: Plan, document: PartitionDocument) -> Table:
    """What fragments need, and what they get. What the items take that enter and leave a stage
    beside the one in work is its own: the least budget has room for both."""
    numbers = ("fragment", "at least", "resident")
    costs = Costs(document)
    return Table(
        title="Memory",
        headings=(*numbers, "in and out", "granted"),
        rows=tuple(row for stage in plan.stages for row in _needs(stage, costs)),
        numbers=frozenset((*numbers, "in and out")),
    )


def _needs(stage: StagePlan, costs: Costs) -> Iterator[tuple[str, ...]]:
    """One row for each fragment; what is the stage's is in the first."""
    first, last = stage.fragments[0], stage.fragments[-1]
    frames = format_bytes(costs.frames(Span(first, last + 1)))
    for index in stage.fragments:
        fragment = costs.document.fragments[index]
        least, resident = fragment.least_bytes, fragment.resident_bytes
        granted = _granted(fragment, stage)
        yield str(index), format_bytes(least), format_bytes(resident), frames, granted
        frames = ""


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
    numbers = ("items/s", "an item takes")
    return Table(
        title="Rejected",
        headings=("alternative", *numbers, "because"),
        rows=tuple(
            (
                each.alternative,
                rate(each.items_per_second),
                _duration(each.latency_nanoseconds),
                each.reason,
            )
            for each in plan.rejected
        ),
        numbers=frozenset(numbers),
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
    if plan.goal.cold:
        parts.append(_makespan(plan))
    if plan.even_split is not None and plan.even_split.items_per_second is not None:
        parts.append(f"even split would give {rate(plan.even_split.items_per_second)}")
    parts.extend(_shortages(plan))
    if plan.beside:
        parts.append(plan.beside)
    if plan.gap is None:
        parts.append("search cut short, a better plan may exist")
    elif plan.gap:
        parts.append(could_be_better(plan.gap))
    return "; ".join(parts)


def _shortages(plan: Plan) -> Iterator[str]:
    """What follows where devices have too little memory for all at once."""
    if any(stage.held(Holding.IN_BLOCKS) for stage in plan.stages):
        yield "where memory is short, fragments run in blocks and read weights again"
    if plan.reloading:
        yield "fragments are loaded in turn, because no device holds its own together"
    if plan.waiting:
        yield "other items wait on disk, because no memory is left beside a fragment"


def _makespan(plan: Plan) -> str:
    """`16 items take 8.1 s with loading`; of a number that nobody knew it says so."""
    took = plan.makespan_nanoseconds
    takes = "take" if plan.goal.items > 1 else "takes"
    time = "an unknown time" if took is None else duration(took)
    text = f"{counted(plan.goal.items, 'item')} {takes} {time} with loading"
    return text if plan.items is not None else f"{text} (their number is assumed)"


def could_be_better(gap: float) -> str:
    """`search cut short, a plan could be better by 7.4 %`."""
    percent = format_number(float(f"{100 * gap / (1 + gap):.2g}"))
    return f"search cut short, a plan could be better by {percent} %"


def sentences(plan: Plan) -> tuple[str, ...]:
    """The summary, and why each alternative lost."""
    return summary(plan), *map(_why_lost, plan.rejected)


def _why_lost(rejected: Rejected) -> str:
    known = rejected.items_per_second
    gives = "" if known is None else f" would give {rate(known)} items/s"
    return f"{rejected.alternative}{gives}: {rejected.reason}"


def _duration(nanoseconds: int | None) -> str:
    return _UNKNOWN if nanoseconds is None else duration(nanoseconds)


def _period(nanoseconds: int | None) -> str:
    known = nanoseconds is not None and nanoseconds >= SHORTEST_PERIOD
    return _duration(nanoseconds) if known else _UNKNOWN


def rate(items_per_second: float | None) -> str:
    """Items per second in three digits; `?` where that is unknown."""
    return _UNKNOWN if items_per_second is None else format_number(items_per_second)
