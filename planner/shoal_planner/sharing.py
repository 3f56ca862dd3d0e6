"""Several models on one pool: the next plan has the memory that those before it leave. Pure.

What cannot be held at once beside the others is planned as if it were alone: its fragments and
theirs are then loaded in turn, which is slow, but each model runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shoal_planner.costs import Holding, PoolDevice
from shoal_planner.outcome import Infeasible, Plan
from shoal_protocol.units import Bytes


def held_bytes(plans: Iterable[Plan]) -> Mapping[str, int]:
    """What devices hold for these plans, by their names."""
    held: dict[str, int] = {}
    for each in plans:
        for stage in each.stages:
            for share in stage.shares:
                held[share.device] = held.get(share.device, 0) + share.resident_bytes
    return held


def left_over(pool: Sequence[PoolDevice], held: Mapping[str, int]) -> tuple[PoolDevice, ...]:
    """The devices with what is left of their budgets."""
    return tuple(
        replace(each, budget_bytes=Bytes(max(0, each.budget_bytes - held.get(each.name, 0))))
        for each in pool
    )


def is_at_once(answer: Plan | Infeasible) -> bool:
    """Whether each device holds its fragments at once."""
    return isinstance(answer, Plan) and not any(
        stage.held(Holding.RELOADED) for stage in answer.stages
    )
