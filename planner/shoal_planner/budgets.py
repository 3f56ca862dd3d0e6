"""What a partition, or a fragment of it, would give with other budgets: the smallest that work, and
the times at several.

The fragments are those that there are; where budgets decide how a model is cut, another budget may
cut it otherwise, and do better. All devices have the same budget here.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shoal_planner.costs import Costs, Span
from shoal_planner.device_costs import Holding
from shoal_planner.devices import PoolDevice
from shoal_planner.explanation import Table, rate
from shoal_planner.figures import Rates, predicted
from shoal_planner.finer_cuts import has_unknown_sizes
from shoal_planner.goal import Goal
from shoal_planner.outcome import Infeasible, Plan, duration
from shoal_planner.placement import plan_without_alternatives
from shoal_planner.smallest_budgets import smallest_at_once
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import NANOSECONDS_PER_SECOND, Bytes, Nanoseconds, format_upwards

_SHOWN: Final = 6
FRAGMENT_BUDGETS: Final = 5
"""At so many budgets the times of a fragment are predicted, at most."""
MOST_BUDGETS: Final = 8
"""With those at which they were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtBudget:
    """What the plan gives where each device has this budget. Rates are None where unknown.
    `waiting`: as of `Plan`."""

    budget_bytes: int
    predicted: Rates
    holding: Holding
    waiting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherBudgets:
    """Plans at budgets from where all is resident down to the smallest that works; for each of so
    many devices. `smallest_bytes` hold all fragments at once, `smallest_in_turn_bytes` one.
    `at_least`: some sizes are unknown, so that more may be needed."""

    devices: int
    smallest_bytes: int
    smallest_in_turn_bytes: int
    at_least: bool
    plans: tuple[AtBudget, ...]


def with_other_budgets(
    document: PartitionDocument, pool: Sequence[PoolDevice], goal: Goal
) -> OtherBudgets:
    """What these fragments would do on devices that differ in their budget alone."""
    costs, fragments, count = Costs(document), len(document.fragments), len(pool)
    at_once = smallest_at_once(costs.least, fragments, count)
    in_turn = costs.least_in_turn(Span(0, fragments), waiting=True)
    ample = smallest_at_once(costs.resident, fragments, count)
    plans = []
    for budget in _steps(ample, in_turn, _SHOWN):
        devices = [replace(device, budget_bytes=budget) for device in pool]
        answer = plan_without_alternatives(document, devices, goal)
        if not isinstance(answer, Infeasible):
            plans.append(_at_budget(budget, answer))
    return OtherBudgets(
        devices=count,
        smallest_bytes=at_once,
        smallest_in_turn_bytes=min(at_once, in_turn),
        at_least=has_unknown_sizes(document),
        plans=tuple(plans),
    )


def explain_budgets(others: OtherBudgets) -> Table:
    """The smallest that works, and the plan at several."""
    where = "the device" if others.devices == 1 else f"each of {others.devices} devices"
    at_once, in_turn = others.smallest_bytes, others.smallest_in_turn_bytes
    title = f"Smallest budget that works, cut as it is: {format_upwards(at_once)} on {where}"
    if others.at_least:
        title = f"No smaller budget than {format_upwards(in_turn)} on {where} works; "
        title += "some sizes are unknown, and more may be needed"
    elif in_turn < at_once:
        title += f"; {format_upwards(in_turn)} where {_at_least(others.plans)}"
    numbers = ("budget", "an item takes", "items/s")
    return Table(
        title=title,
        headings=(*numbers, "fragments"),
        rows=tuple(dict.fromkeys(map(_row, others.plans))),
        numbers=frozenset(numbers),
    )


def fragment_at_budgets(
    costs: Costs, index: int, device: PoolDevice, granted: Iterable[int] = ()
) -> Mapping[Bytes, tuple[Nanoseconds | None, int | None]]:
    """What a task of a fragment takes on a device that runs nothing else, by its budget: from where
    all of it is resident down to the smallest that it runs in; also where the fragment is `granted`
    these, which stand beside the times then (0: as a whole). Times are None where unknown."""
    span, fragment = Span(index, index + 1), costs.document.fragments[index]

    def grant(budget: int) -> int:
        return costs.grants(span, replace(device, budget_bytes=Bytes(budget)))[0]

    most, least = costs.resident(span), costs.least_in_turn(span, waiting=True)
    between, budgets = _steps(most, least, FRAGMENT_BUDGETS)[1:-1], range(least, most)
    known = {}
    for each in granted:
        place = bisect_left(budgets, each, key=grant) if each else len(budgets)
        if not each or (each < fragment.resident_bytes and place < len(budgets)):
            known[budgets[place] if each else most] = each
    room = MOST_BUDGETS - len(known.keys() | {most, least})
    shown = sorted({most, *between[:room], *known, least}, reverse=True)
    return {
        Bytes(budget): (
            costs.at_grant(index, device, grant(budget)) if costs.known else None,
            known.get(budget),
        )
        for budget in shown
    }


def _steps(most: int, least: int, count: int) -> list[Bytes]:
    """So many, from the most to the least, each smaller by the same factor."""
    factor = (least / max(1, most)) ** (1 / (count - 1))
    between = [round(most * factor**step) for step in range(1, count - 1)]
    return [Bytes(size) for size in dict.fromkeys((most, *between, least))]


def _at_budget(budget: Bytes, answer: Plan) -> AtBudget:
    held = {share.holding for stage in answer.stages for share in stage.shares}
    ways = (Holding.RELOADED, Holding.IN_BLOCKS, Holding.WHOLE)
    return AtBudget(
        budget_bytes=budget,
        predicted=predicted(answer),
        holding=next(each for each in ways if each in held),
        waiting=answer.waiting,
    )


def _at_least(plans: Sequence[AtBudget]) -> str:
    """What it takes to do with the last of these budgets."""
    waiting = bool(plans) and plans[-1].waiting
    in_turn = not waiting or plans[-1].holding is Holding.RELOADED
    said = ["fragments are loaded in turn"] * in_turn + ["other items wait"] * waiting
    return " and ".join(said)


def _row(at: AtBudget) -> tuple[str, ...]:
    how = {Holding.WHOLE: "whole", Holding.IN_BLOCKS: "in blocks", Holding.RELOADED: "in turn"}
    latency = at.predicted.latency_seconds
    return (
        format_upwards(at.budget_bytes),
        "?" if latency is None else duration(round(latency * NANOSECONDS_PER_SECOND)),
        rate(at.predicted.items_per_second),
        how[at.holding],
    )
