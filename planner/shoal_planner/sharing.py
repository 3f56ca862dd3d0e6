"""Several models on one pool: the next plan has what those before it leave. Pure.

That is memory, and processor time: a device that works for another model three fifths of the time
has two fifths left, so its rates count as two fifths. What works all the time still shares its
processor, so a quarter is left of every device (`_LEAST_LEFT`).

What cannot be held at once beside the others is planned as if it were alone: its fragments and
theirs are then loaded in turn, which is slow, but each model runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shoal_planner.costs import Holding
from shoal_planner.devices import PoolDevice
from shoal_planner.figures import item_shares
from shoal_planner.outcome import Infeasible, Plan, StagePlan
from shoal_protocol.units import Bytes, Nanoseconds, format_bytes

_LEAST_LEFT: Final = 0.25
_NAMED: Final = 4


@dataclass(frozen=True, slots=True)
class Taken:
    """What other models have of a device: memory, and a part of its processor's time. That is in
    tenths, since measurements differ by as much and each difference asks for a new plan."""

    held_bytes: int
    busy: float

    @property
    def left(self) -> float:
        """Of the processor."""
        return round(max(_LEAST_LEFT, 1 - self.busy), 2)


def taken_by(plans: Iterable[Plan]) -> Mapping[str, Taken]:
    """What these plans take of devices, by their names."""
    return added(
        (share.device, share.resident_bytes, busy)
        for each in plans
        for stage in each.stages
        for share, busy in zip(stage.shares, _busy(each, stage), strict=True)
    )


def added(parts: Iterable[tuple[str, int, float]]) -> Mapping[str, Taken]:
    """Bytes and parts of processors, by devices."""
    held: dict[str, int] = {}
    busy: dict[str, float] = {}
    for name, size, part in parts:
        held[name] = held.get(name, 0) + size
        busy[name] = busy.get(name, 0.0) + part
    return {name: Taken(held[name], round(min(1.0, busy[name]), 1)) for name in sorted(held)}


def _busy(plan: Plan, stage: StagePlan) -> Sequence[float]:
    """Which part of the time each device of a stage works, while items come as fast as they can."""
    if plan.items_per_second is None or not plan.period_nanoseconds:
        return [0.0] * len(stage.shares)
    return [
        part * cost.busy / plan.period_nanoseconds
        for part, cost in zip(item_shares(stage), stage.costs, strict=True)
    ]


def left_over(pool: Sequence[PoolDevice], taken: Mapping[str, Taken]) -> tuple[PoolDevice, ...]:
    """The devices with what is left of their budgets and their processors."""
    return tuple(each if (of := taken.get(each.name)) is None else _left(each, of) for each in pool)


def _left(device: PoolDevice, of: Taken) -> PoolDevice:
    return replace(
        device,
        budget_bytes=Bytes(max(0, device.budget_bytes - of.held_bytes)),
        flops_per_second=max(1, int(device.flops_per_second * of.left)),
        convolutions_per_second=_part(device.convolutions_per_second, of.left),
        products_per_second=_part(device.products_per_second, of.left),
        memory_bytes_per_second=_part(device.memory_bytes_per_second, of.left),
        moved_bytes_per_second=_part(device.moved_bytes_per_second, of.left),
        preparing_nanoseconds=Nanoseconds(int(device.preparing_nanoseconds / of.left)),
        handling_nanoseconds=Nanoseconds(int(device.handling_nanoseconds / of.left)),
    )


def _part(rate: int | None, part: float) -> int | None:
    return None if rate is None else max(1, int(rate * part))


def beside(plan: Plan, taken: Mapping[str, Taken]) -> Plan:
    """The plan, made for what is left, which says so."""
    return replace(plan, beside=_sentence(plan, taken))


def _sentence(plan: Plan, taken: Mapping[str, Taken]) -> str:
    budgets = {share.device: share.budget_bytes for stage in plan.stages for share in stage.shares}
    shared = [name for name in budgets if name in taken]
    if not shared:
        return "on devices that no other model uses"
    parts = [
        f"{name} {100 * taken[name].left:.0f} % of its processor and {format_bytes(budgets[name])}"
        for name in shared[:_NAMED]
    ]
    more = len(shared) - _NAMED
    parts += [f"{more} more a part"] * (more > 0)
    return f"other models leave {', '.join(parts)}"


def is_at_once(answer: Plan | Infeasible) -> bool:
    """Whether each device holds its fragments at once."""
    return isinstance(answer, Plan) and not any(
        stage.held(Holding.RELOADED) for stage in answer.stages
    )
