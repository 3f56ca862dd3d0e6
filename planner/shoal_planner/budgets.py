"""What a partition would give with other budgets: the smallest that work, and the times at several.

The fragments are those that there are; where budgets decide how a model is cut, another budget may
cut it otherwise, and do better. All devices have the same budget here.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from shoal_planner.costs import Costs, Holding, PoolDevice, Span
from shoal_planner.explanation import Table, rate
from shoal_planner.outcome import Infeasible, Plan, duration
from shoal_planner.placement import plan
from shoal_protocol.choices import Objective
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import Bytes, format_bytes, format_upwards

_SHOWN: Final = 6


def smallest_budget(need: Callable[[Span], int], fragments: int, devices: int) -> Bytes:
    """The least that lets so many devices hold consecutive fragments at once, each filled before
    the next; `need` is what those of a span need together."""
    low = max(need(Span(index, index + 1)) for index in range(fragments))
    high = max(low, need(Span(0, fragments)))
    while low < high:
        middle = (low + high) // 2
        if _runs(need, fragments, middle) <= devices:
            high = middle
        else:
            low = middle + 1
    return Bytes(low)


def _runs(need: Callable[[Span], int], fragments: int, most: int) -> int:
    """How many devices it takes, each filled before the next; none needs more than `most`."""
    count, start = 1, 0
    for index in range(fragments):
        if need(Span(start, index + 1)) > most:
            count, start = count + 1, index
    return count


def with_other_budgets(
    document: PartitionDocument, pool: Sequence[PoolDevice], objective: Objective
) -> Table:
    """The plan at budgets from where all is resident down to the smallest that works."""
    costs, fragments, count = Costs(document), len(document.fragments), len(pool)
    at_once = smallest_budget(costs.least, fragments, count)
    in_turn = max(costs.least(Span(index, index + 1)) for index in range(fragments))
    if count == 1:
        in_turn = costs.least_in_turn(Span(0, fragments))
    ample = smallest_budget(costs.resident, fragments, count)
    where = "the device" if count == 1 else f"each of {count} devices"
    title = f"Smallest budget that works, cut as it is: {format_upwards(at_once)} on {where}"
    if in_turn < at_once:
        title += f"; {format_upwards(in_turn)} where fragments are loaded in turn"
    rows = []
    for budget in _steps(ample, in_turn):
        devices = [replace(device, budget_bytes=budget) for device in pool]
        answer = plan(document, devices, objective)
        if not isinstance(answer, Infeasible):
            rows.append(_row(budget, answer))
    numbers = ("budget", "an item takes", "items/s")
    return Table(
        title=title, headings=(*numbers, "fragments"), rows=tuple(rows), numbers=frozenset(numbers)
    )


def _steps(most: int, least: int) -> list[Bytes]:
    """From the most to the least, each smaller by the same factor."""
    factor = (least / most) ** (1 / (_SHOWN - 1))
    between = [round(most * factor**step) for step in range(1, _SHOWN - 1)]
    return [Bytes(size) for size in dict.fromkeys((most, *between, least))]


def _row(budget: Bytes, answer: Plan) -> tuple[str, ...]:
    held = next(
        (each for each in (Holding.RELOADED, Holding.IN_BLOCKS) if _held(answer, each)),
        Holding.WHOLE,
    )
    how = {Holding.WHOLE: "whole", Holding.IN_BLOCKS: "in blocks", Holding.RELOADED: "in turn"}
    latency = answer.latency_nanoseconds
    return (
        format_bytes(budget),
        "?" if latency is None else duration(latency),
        rate(answer.items_per_second),
        how[held],
    )


def _held(answer: Plan, holding: Holding) -> bool:
    return any(stage.held(holding) for stage in answer.stages)
