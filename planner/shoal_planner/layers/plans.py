"""What planning at the level of layers answers, in values and in tables."""

from dataclasses import dataclass
from math import inf

from shoal_planner.device_costs import Holding
from shoal_planner.explanation import Table, could_be_better, rate
from shoal_planner.figures import (
    AlternativeFigures,
    DeviceFigures,
    PlanFigures,
    Rates,
    StageFigures,
)
from shoal_planner.layers.arcs import Stages
from shoal_planner.layers.costs import Costs
from shoal_planner.layers.search import Times
from shoal_planner.outcome import duration
from shoal_protocol.choices import Objective
from shoal_protocol.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one device does of a stage: its part of the items, the seconds that one of them takes
    it, of these the seconds of reading weights again, and the bytes that it holds at once."""

    device: str
    share: float
    seconds: float
    reading_seconds: float
    held_bytes: float
    budget_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Layers (indices) and the devices that share their items. `period_seconds` is theirs together,
    `transfer_seconds` what an item's inputs take to come in, on the slowest link."""

    layers: tuple[int, ...]
    parts: tuple[Part, ...]
    received_bytes: float
    sent_bytes: float
    period_seconds: float
    transfer_seconds: float

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(part.device for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan that lost, and why; without times where it cannot be."""

    name: str
    reason: str
    times: Times | None = None
    value: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """Stages in order. `value` is what the objective makes small, in seconds, and no plan is below
    `lower_bound`: where both are the same, this plan is the best there is."""

    objective: Objective
    items: int
    stages: tuple[StagePlan, ...]
    times: Times
    value: float
    lower_bound: float
    rejected: tuple[Alternative, ...] = ()

    @property
    def gap(self) -> float:
        """How much better a plan could be at most, as a part of the bound."""
        if self.value <= self.lower_bound * (1 + 1e-9):
            return 0.0
        return self.value / self.lower_bound - 1 if self.lower_bound else inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Unplaceable:
    """Why there is no plan: the neediest layer, and what each device has."""

    layer: str
    need_bytes: float
    budgets: tuple[tuple[str, float], ...]

    def message(self, model: str) -> str:
        """One sentence for people: the layer, what it needs, what each device has, what to do."""
        have = ", ".join(f"{name} has {_bytes(budget)}" for name, budget in self.budgets)
        return (
            f"{model} cannot be placed: layer {self.layer} needs {_bytes(self.need_bytes)} by "
            f"itself; {have}; raise a budget"
        )


def stage_plans(costs: Costs, stages: Stages) -> tuple[StagePlan, ...]:
    """With devices by name: those of a class in the order of the pool."""
    left = [list(members) for members in costs.classes]
    plans, before = [], None
    for stage in stages:
        shares = dict(costs.shares(stage.group, stage.start, stage.end))
        at = (stage.start, stage.end)
        parts = []
        for place, count in enumerate(stage.group):
            like = costs.like[place]
            beyond = max(0.0, float(costs.resident[at]) - like.budget_bytes)
            parts += [
                Part(
                    device=left[place].pop(0).name,
                    share=shares[like],
                    seconds=costs.takes(place, *at),
                    reading_seconds=beyond / like.reload_bytes_per_second,
                    held_bytes=min(float(costs.resident[at]), like.budget_bytes),
                    budget_bytes=like.budget_bytes,
                )
                for _ in range(count)
            ]
        _, slowest, delay = costs.crossing(before, stage.group)
        plans.append(
            StagePlan(
                layers=costs.cuts.layers(*at),
                parts=tuple(sorted(parts, key=lambda part: part.seconds)),
                received_bytes=float(costs.cuts.crossing[stage.start]),
                sent_bytes=float(costs.cuts.crossing[stage.end]),
                period_seconds=costs.together(stage.group, *at)[0],
                transfer_seconds=slowest * float(costs.cuts.crossing[stage.start]) + delay,
            )
        )
        before = stage.group
    return tuple(plans)


def explain(plan: LayerPlan, names: tuple[str, ...]) -> tuple[Table, ...]:
    """The stages with what they take, and the alternatives with why they lost."""
    tables = (_stages(plan, names), _rejected(plan))
    return tuple(table for table in tables if table.rows)


def summary(plan: LayerPlan) -> str:
    """`2 stages on a, b; 12.5 items/s; an item takes 130 ms; no plan is better`."""
    devices = list(dict.fromkeys(name for stage in plan.stages for name in stage.devices))
    count = len(plan.stages)
    parts = [
        f"{count} stage{'s' * (count != 1)} on {', '.join(devices)}",
        f"{rate(1 / plan.times.period if plan.times.period else None)} items/s",
    ]
    if plan.objective is Objective.MAKESPAN:
        parts.append(f"{plan.items} items take {format_seconds(plan.value)} with loading")
    else:
        parts.append(f"an item takes {format_seconds(plan.times.first)}")
    parts.append(could_be_better(plan.gap) if plan.gap else "no plan is better")
    return "; ".join(parts)


def figures(plan: LayerPlan) -> PlanFigures:
    """For programs; the `fragments` of a stage are its layers."""
    return PlanFigures(
        objective=plan.objective.value,
        gap=None if plan.gap == inf else plan.gap,
        predicted=_rates(plan.times),
        stages=tuple(map(_stage_figures, plan.stages)),
        rejected=tuple(
            AlternativeFigures(
                alternative=each.name, reason=each.reason, predicted=_rates(each.times)
            )
            for each in plan.rejected
        ),
    )


def _rates(times: Times | None) -> Rates:
    if times is None:
        return Rates(items_per_second=None, latency_seconds=None)
    per_second = 1 / times.period if times.period else None
    return Rates(items_per_second=per_second, latency_seconds=times.first)


def _stage_figures(stage: StagePlan) -> StageFigures:
    return StageFigures(
        fragments=stage.layers,
        devices=tuple(
            DeviceFigures(
                device=part.device,
                holding=(Holding.IN_BLOCKS if part.reading_seconds else Holding.WHOLE).value,
                share=part.share,
                compute_seconds=part.seconds - part.reading_seconds,
                move_seconds=0.0,
                read_seconds=part.reading_seconds,
                fetch_seconds=0.0,
                load_seconds=0.0,
                receive_seconds=stage.transfer_seconds,
                send_seconds=0.0,
                delay_seconds=0.0,
                held_bytes=round(part.held_bytes),
                budget_bytes=None if part.budget_bytes == inf else round(part.budget_bytes),
            )
            for part in stage.parts
        ),
        received_bytes=stage.received_bytes,
        sent_bytes=stage.sent_bytes,
        period_seconds=stage.period_seconds,
        predicted_seconds=sum(part.share * part.seconds for part in stage.parts),
    )


def _stages(plan: LayerPlan, names: tuple[str, ...]) -> Table:
    numbers = ("share", "compute", "reads again", "memory", "transfer", "an item every")
    rows = []
    for number, stage in enumerate(plan.stages):
        first = names[stage.layers[0]]
        last = names[stage.layers[-1]]
        layers = first if len(stage.layers) == 1 else f"{first} to {last} ({len(stage.layers)})"
        for place, part in enumerate(stage.parts):
            head = place == 0
            rows.append(
                (
                    str(number) if head else "",
                    layers if head else "",
                    part.device,
                    f"{100 * part.share:.0f} %",
                    format_seconds(part.seconds - part.reading_seconds),
                    format_seconds(part.reading_seconds) if part.reading_seconds else "",
                    _bytes(part.held_bytes),
                    format_seconds(stage.transfer_seconds) if head else "",
                    format_seconds(stage.period_seconds) if head else "",
                )
            )
    return Table(
        title=summary(plan),
        headings=("stage", "layers", "device", *numbers),
        rows=tuple(rows),
        numbers=frozenset(("stage", *numbers)),
    )


def _rejected(plan: LayerPlan) -> Table:
    return Table(
        title="Rejected",
        headings=("alternative", "items/s", "an item takes", "because"),
        rows=tuple(
            (
                each.name,
                rate(1 / each.times.period if each.times and each.times.period else None),
                format_seconds(each.times.first) if each.times else "?",
                each.reason,
            )
            for each in plan.rejected
        ),
        numbers=frozenset(("items/s", "an item takes")),
    )


def format_seconds(seconds: float) -> str:
    """Seconds for people."""
    return duration(round(seconds * 1e9))


def _bytes(amount: float) -> str:
    return "any" if amount == inf else format_bytes(round(amount))
