"""A plan in figures, as programs read it: seconds, bytes and names, nothing to look up.

`shoal plan --output json` prints it, the report of a run carries it with what was measured, and
pictures are drawn from it. `dataclasses.asdict` makes JSON of it. Its size is bounded by the
devices of its stages and `MAX_REJECTED` alternatives.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shoal_planner.device_costs import DeviceCost
from shoal_planner.outcome import Infeasible, Plan, Rejected, Share, StagePlan
from shoal_protocol.units import Nanoseconds, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of a whole pipeline, predicted or measured; None: unknown."""

    items_per_second: float | None
    latency_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """What an item of a stage takes one of its devices, in seconds, and what it holds at once.

    `share` is its part of the stage's items, `read_seconds` the reading of weights again or, where
    they are loaded in turn, an item's part of that; `move_seconds` is the processor's work to
    receive and send. The first item waits besides until the fragments are fetched, `fetch_seconds`
    from the beginning, and for their `load_seconds`. Times are None where a shape is unknown,
    `budget_bytes` where any model fits.
    """

    device: str
    holding: str
    share: float | None
    compute_seconds: float | None
    read_seconds: float | None
    fetch_seconds: float | None
    load_seconds: float | None
    move_seconds: float | None
    receive_seconds: float | None
    send_seconds: float | None
    delay_seconds: float | None
    held_bytes: int
    budget_bytes: int | None

    @property
    def busy_seconds(self) -> float:
        """Seconds in which an item keeps the processor busy: computing and reading weights; 0:
        unknown."""
        return (self.compute_seconds or 0.0) + (self.read_seconds or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """Fragments and the devices that share their items; `period_seconds` is theirs together.

    `received_bytes` come in with an item, and `sent_bytes` go out; None where nothing does.
    `measured_seconds`: what an item took in ONNX Runtime, of one device; the prediction is compute
    and reading, weighted by the devices' shares.
    """

    fragments: tuple[int, ...]
    devices: tuple[DeviceFigures, ...]
    received_bytes: float | None
    sent_bytes: float | None
    period_seconds: float | None
    predicted_seconds: float | None
    measured_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AlternativeFigures:
    """A plan that lost; its rates are None where it cannot be."""

    alternative: str
    reason: str
    predicted: Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class MakespanFigures:
    """What a job takes from cold devices on. `assumed`: how many items it has is not known.
    `seconds` are None where a shape is unknown."""

    items: int
    assumed: bool
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """A plan. `gap`: by what part of the best one another could be better at most, by the
    prediction; None where the search was cut short and does not know. `makespan` is there where
    that is the objective."""

    objective: str
    gap: float | None
    predicted: Rates
    stages: tuple[StageFigures, ...]
    rejected: tuple[AlternativeFigures, ...]
    measured: Rates | None = None
    makespan: MakespanFigures | None = None

    def with_measured(self, rates: Rates, fragments: Mapping[int, float]) -> "PlanFigures":
        """Beside what a run measured: `fragments` are seconds of a task in ONNX Runtime."""
        stages = (
            replace(stage, measured_seconds=sum(fragments[each] for each in stage.fragments))
            if fragments.keys() >= set(stage.fragments)
            else stage
            for stage in self.stages
        )
        return replace(self, measured=rates, stages=tuple(stages))

    def renamed(self, name: Callable[[str], str]) -> "PlanFigures":
        """With other names of its devices."""
        stages = (
            replace(
                stage,
                devices=tuple(replace(each, device=name(each.device)) for each in stage.devices),
            )
            for stage in self.stages
        )
        return replace(self, stages=tuple(stages))


def figures(plan: Plan) -> PlanFigures:
    """A plan as it is predicted: bytes, seconds and items per second; nothing is measured yet."""
    return PlanFigures(
        objective=plan.objective.value,
        gap=plan.gap,
        predicted=predicted(plan),
        stages=tuple(map(stage_figures, plan.stages)),
        rejected=tuple(
            AlternativeFigures(
                alternative=each.alternative,
                reason=each.reason,
                predicted=predicted(each),
            )
            for each in plan.rejected
        ),
        makespan=makespan(plan),
    )


def makespan(plan: Plan) -> MakespanFigures | None:
    """None where another objective was planned for."""
    if not plan.goal.cold:
        return None
    return MakespanFigures(
        items=plan.goal.items,
        assumed=plan.items is None,
        seconds=known_seconds(plan.makespan_nanoseconds),
    )


def predicted(of: Plan | Rejected) -> Rates:
    return Rates(
        items_per_second=of.items_per_second, latency_seconds=known_seconds(of.latency_nanoseconds)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """What a device lacks for the fragment that fits nowhere."""

    device: str
    budget_bytes: int
    missing_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InfeasibleFigures:
    """Why there is no plan. `fragment` and its needs are None where the trouble is no fragment's
    size."""

    problem: str
    fragment: int | None
    need_bytes: int | None
    devices: tuple[Missing, ...]


def infeasible_figures(answer: Infeasible, message: str) -> InfeasibleFigures:
    """The same of no plan. `message` is what people are told (`Infeasible.message`); a device lacks
    0 bytes where it is not asked for more than its budget."""
    need = answer.need_bytes or 0
    return InfeasibleFigures(
        problem=message,
        fragment=answer.fragment,
        need_bytes=answer.need_bytes,
        devices=tuple(
            Missing(device=name, budget_bytes=budget, missing_bytes=max(0, need - budget))
            for name, budget in answer.budgets
        ),
    )


def item_shares(stage: StagePlan) -> tuple[float, ...]:
    """The part of the stage's items that each device takes, as fast as it can; empty: unknown."""
    rates = [1 / cost.period for cost in stage.costs]
    return tuple(rate / sum(rates) for rate in rates)


def stage_figures(stage: StagePlan) -> StageFigures:
    """Of one stage. Bytes are those of an item; seconds are None where its costs are not
    predicted."""
    parts = item_shares(stage)
    devices = tuple(
        _device(share, part)
        for share, part in zip(stage.shares, parts or (None,) * len(stage.shares), strict=True)
    )
    mean = sum(each.busy_seconds * (each.share or 0.0) for each in devices)
    return StageFigures(
        fragments=stage.fragments,
        devices=devices,
        received_bytes=stage.received_bytes,
        sent_bytes=stage.sent_bytes,
        period_seconds=known_seconds(stage.period_nanoseconds),
        predicted_seconds=mean if parts else None,
    )


def _device(share: Share, part: float | None) -> DeviceFigures:
    cost: DeviceCost | None = share.cost
    return DeviceFigures(
        device=share.device,
        holding=share.holding.value,
        share=part,
        compute_seconds=None if cost is None else known_seconds(cost.compute),
        read_seconds=None if cost is None else known_seconds(cost.read),
        fetch_seconds=None if cost is None else known_seconds(cost.fetch),
        load_seconds=None if cost is None else known_seconds(cost.load),
        move_seconds=None if cost is None else known_seconds(cost.move),
        receive_seconds=None if cost is None else known_seconds(cost.receive),
        send_seconds=None if cost is None else known_seconds(cost.send),
        delay_seconds=None if cost is None else known_seconds(cost.delay),
        held_bytes=share.resident_bytes,
        budget_bytes=share.budget_bytes,
    )


def known_seconds(nanoseconds: int | None) -> float | None:
    """Nanoseconds in seconds; None stays None, which is: not known."""
    return None if nanoseconds is None else seconds(Nanoseconds(nanoseconds))
