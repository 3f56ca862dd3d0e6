"""Cuts and devices chosen together: the cut whose fragments the devices of a pool run best. Pure.

A table has every fragment that could be (`shoal_protocol.cut_table`). A stage of one fragment is
what a stage of a finished partition is, so the search and the costs are those of a placement
(`search`, `costs`), over the table's cuts instead of fragments: each stage of the best division
becomes one fragment.

Where the devices cannot hold the model at once, fragments are loaded in turn, and then the fewest
are best that each fit a device.

A cut that exists is worth more than one that is only better by little: fragments are cut,
delivered and prepared again for a new one. So it is replaced where the best cut gains more than
`GAIN` over it, both weighed by the same table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from shoal_planner.costs import Costs, Span, SpanCosts
from shoal_planner.device_costs import DeviceCost, Holding
from shoal_planner.devices import PoolDevice
from shoal_planner.dividing import divided
from shoal_planner.few_fragments import comfortable
from shoal_planner.goal import Goal
from shoal_planner.heuristics import Divisions
from shoal_planner.links import NOWHERE, Homes
from shoal_planner.outcome import Infeasible, Plan, Rejected, duration
from shoal_planner.replanning import GAIN
from shoal_planner.search import Question
from shoal_protocol.choices import Objective
from shoal_protocol.cut_table import CutTable
from shoal_protocol.partition import MODEL, Edge, Fragment, PartitionDocument
from shoal_protocol.units import Bytes, Nanoseconds, counted

_ALONE: Final = Span(0, 1)
_UNFIT: Final = 3
"""More than any plan has in `cut_order`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCut:
    """Where to cut: behind these tensors; none leaves the model whole. `period` and `latency` are
    what the best plan of it gives; None where the devices cannot hold the model at once. `gain`:
    the part of the value that it saves against the cut that it replaces. `gap`: by what part of the
    best possible value it is larger at most; None: that is not known."""

    tensors: tuple[str, ...]
    period: Nanoseconds | None = None
    latency: Nanoseconds | None = None
    divisions: Divisions = ()
    gain: float | None = None
    gap: float | None = None

    def value(self, goal: Goal) -> float:
        """Less is better; loading in turn is worse than anything else."""
        if self.period is None or self.latency is None:
            return float("inf")
        return goal.value(self.period, self.latency)


class TableCosts(SpanCosts):
    """The costs of stages of one fragment each, between the cuts of a table."""

    def __init__(self, table: CutTable, loading_items: int = 0) -> None:
        self.table, self.loading_items = table, loading_items
        self._alone = lru_cache(None)(self._made)
        self._on = lru_cache(None)(self._weighed)

    @property
    def count(self) -> int:
        return self.table.end

    def resident(self, span: Span) -> Bytes:
        return self._alone(span).resident(_ALONE)

    def at_once(self, span: Span, device: PoolDevice) -> Holding | None:
        return self._alone(span).at_once(_ALONE, device)

    def holding(self, span: Span, device: PoolDevice) -> Holding | None:
        return self._alone(span).holding(_ALONE, device)

    def receives(self, span: Span, device: PoolDevice) -> bool:
        return self._alone(span).receives(_ALONE, device)

    def on(self, span: Span, device: PoolDevice, homes: Homes = NOWHERE) -> DeviceCost:
        """By the device's own link: what crosses is not known by its other end."""
        del homes
        return self._on(span, device)

    def _weighed(self, span: Span, device: PoolDevice) -> DeviceCost:
        return self._alone(span).on(_ALONE, device)

    def _made(self, span: Span) -> Costs:
        """A partition of this fragment alone."""
        each = self.table.candidate(span.start, span.end)
        fragment = Fragment(
            index=0,
            digest=self.table.model_digest,
            nodes=1,
            weight_bytes=each.weight_bytes,
            resident_bytes=each.resident_bytes,
            least_bytes=each.least_bytes,
            activation_bytes=None,
            flops=each.flops,
            inputs=(),
            outputs=(),
            work=each.work,
        )
        edges = (
            Edge(producer=MODEL, consumer=0, tensors=(), bytes_per_item=each.received_bytes),
            Edge(producer=0, consumer=MODEL, tensors=(), bytes_per_item=each.sent_bytes),
        )
        document = PartitionDocument(
            model_digest=self.table.model_digest,
            fragments=(fragment,),
            edges=edges,
            inputs=(),
            outputs=(),
        )
        return Costs(document, self.loading_items)


def with_room(pool: Sequence[PoolDevice]) -> list[PoolDevice]:
    """The devices with some of their budgets left free, since needs are estimated."""
    return [replace(each, budget_bytes=Bytes(comfortable(each.budget_bytes))) for each in pool]


def choose_cut(table: CutTable, pool: Sequence[PoolDevice], goal: Goal) -> PlannedCut | None:
    """The cut that these devices run best; None: there is none of which every fragment fits one."""
    costs = TableCosts(table, goal.loading_items)
    pool = [replace(each, cached=()) for each in pool]  # nothing of a cut that there is not yet
    for devices, waiting in ((with_room(pool), False), (pool, False), (pool, True)):
        found = divided(Question(costs=costs, pool=devices, goal=goal, waiting=waiting))
        if found.divisions:
            divisions = found.divisions[0]
            period, latency = costs.totals(divisions)
            return PlannedCut(
                tensors=table.named([each.span.end for each in divisions]),
                period=period,
                latency=latency,
                divisions=divisions,
                gap=found.gap(goal.value(period, latency)),
            )
    ends = _fewest(costs, pool)
    return None if ends is None else PlannedCut(tensors=table.named(ends))


def next_cut(
    table: CutTable, pool: Sequence[PoolDevice], goal: Goal, current: Sequence[str]
) -> PlannedCut | None:
    """The cut to have: the current one, unless the best gains more than `GAIN` over it."""
    best = choose_cut(table, pool, goal)
    known = {name: place for place, name in enumerate(table.tensors, 1)}
    if best is None or best.tensors == tuple(current) or not known.keys() >= set(current):
        return best
    now = choose_cut(table.only([known[name] for name in current]), pool, goal)
    if now is None:
        return best
    if best.period is None:
        return _kept(now, current)  # loading in turn, one cut is as good as another
    if now.period is None:
        return best
    gain = 1 - best.value(goal) / now.value(goal)
    return replace(best, gain=gain) if gain > GAIN else _kept(now, current)


def _kept(now: PlannedCut, current: Sequence[str]) -> PlannedCut:
    """The current cut, though its plan may not need all of its borders."""
    return replace(now, tensors=tuple(current))


def cut_order(found: Plan | Infeasible, goal: Goal) -> tuple[int, int]:
    """Of the plans of several cuts the least is the best: what each device holds at once, with room
    for other items and then without, then what is loaded in turn, then what fits in no way: what
    needs the least tells what would do."""
    if isinstance(found, Infeasible):
        return _UNFIT, found.need_bytes or 0
    period, latency = found.period_nanoseconds or 0, found.latency_nanoseconds or 0
    return 2 if found.reloading else int(found.waiting), goal.value(period, latency)


def rejected_cut(fragments: int, lost: Plan | Infeasible, best: Plan | Infeasible) -> Rejected:
    """A cut whose plan lost, and why."""
    name = f"cut into {fragments} fragment{'s' * (fragments != 1)}"
    if isinstance(lost, Infeasible) or isinstance(best, Infeasible):
        return Rejected(alternative=name, reason="its fragments fit these devices in no way")
    if lost.reloading and not best.reloading:
        reason = "devices would load its fragments in turn"
    elif lost.waiting and not (best.waiting or best.reloading):
        reason = "other items would wait on disk, because no memory would be left beside a fragment"
    elif cut_order(lost, best.goal) == cut_order(best, best.goal):
        reason = "is as good"
    elif best.goal.cold:
        times = _times(lost.makespan_nanoseconds, best.makespan_nanoseconds)
        reason = f"{counted(best.goal.items, 'item')} would take {times}"
    elif best.objective is Objective.LATENCY:
        reason = f"an item would take {_times(lost.latency_nanoseconds, best.latency_nanoseconds)}"
    else:
        reason = f"an item every {_times(lost.period_nanoseconds, best.period_nanoseconds)}"
    return Rejected(
        alternative=name,
        reason=reason,
        period_nanoseconds=lost.period_nanoseconds,
        latency_nanoseconds=lost.latency_nanoseconds,
    )


def _times(lost: Nanoseconds | None, best: Nanoseconds | None) -> str:
    return f"{duration(lost or 0)}, against {duration(best or 0)}"


def _fewest(costs: TableCosts, pool: Sequence[PoolDevice]) -> tuple[int, ...] | None:
    """The ends of the fewest fragments that each fit: every device whole, else some device whole,
    else some device in blocks, else some device by itself, while other items wait."""
    rules: tuple[Callable[[Span], bool], ...] = (
        lambda span: all(costs.at_once(span, each) is Holding.WHOLE for each in pool),
        lambda span: any(costs.at_once(span, each) is Holding.WHOLE for each in pool),
        lambda span: any(costs.at_once(span, each) for each in pool),
        lambda span: any(costs.holding(span, each) for each in pool),
    )
    for fits in rules:
        if (ends := _shortest(costs.count, fits)) is not None:
            return ends
    return None


def _shortest(count: int, fits: Callable[[Span], bool]) -> tuple[int, ...] | None:
    ways: dict[int, tuple[int, ...]] = {0: ()}
    for end in range(1, count + 1):
        known = [ways[start] for start in range(end) if start in ways and fits(Span(start, end))]
        if known:
            ways[end] = (*min(known, key=len), end)
    return ways.get(count)
