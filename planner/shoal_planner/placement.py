"""Placement: which devices serve which fragments, and why not otherwise.

`plan` looks for the best division of the fragments, in topological order, into stages: runs of
consecutive fragments, each served by devices of its own (`search` has the theory, `costs` the
model). It works in phases:

1. refuse at once what fits nowhere, saying what it needs and what each device has;
2. search among divisions in which every device holds its fragments at once, whole or in blocks;
3. only where there is none: allow devices to load and unload fragments for each item;
4. where a search was cut short: put rules of thumb beside it, and let spare devices help;
5. say what the plan would give, and what its alternatives would have given.
"""

from collections.abc import Sequence
from typing import Final, Protocol, assert_never

from shoal_planner.alternatives import even_split, in_words, on_one_device, rejected
from shoal_planner.costs import Costs, Division, Holding, PoolDevice, Span
from shoal_planner.heuristics import Divisions, evenly, packed, with_spares
from shoal_planner.outcome import Infeasible, Plan, Share, StagePlan
from shoal_planner.search import MAX_FOUND, Found, Wishes, Worth, fits, search
from shoal_protocol.choices import Objective, PinPolicy
from shoal_protocol.partition import PartitionDocument

MAX_REJECTED: Final = 8
_NAMED_DEVICES: Final = 8
_PINS: Final = "the pins leave no way to give each device one run of consecutive fragments"


class Pin(Protocol):
    """A fragment tied to a device, as the spec of a Placement says it."""

    @property
    def fragment(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def policy(self) -> PinPolicy: ...


def plan(
    document: PartitionDocument,
    pool: Sequence[PoolDevice],
    objective: Objective,
    previous: Plan | None = None,
    pins: Sequence[Pin] = (),
    items: int = 100,
) -> Plan | Infeasible:
    """The best placement of a partition on a pool; ties go to fewer stages, then smaller names.

    `previous` is the plan in force: of equal plans the one that moves least wins, and the epoch
    goes on from it. `items` matters to Makespan only.
    """
    costs = Costs(document)
    refused = _misfit(costs, pool, pins)
    if refused is not None:
        return refused
    wishes = _wishes(previous, pins)
    worth = _worth(objective, items)
    for reloading in (False, True):
        found = search(costs, pool, wishes, worth, reloading=reloading)
        if not found.complete:
            found = _mended(costs, found, pool, wishes, worth, reloading=reloading)
        if found.divisions:
            return _planned(costs, found, pool, objective, 1 + (previous.epoch if previous else 0))
    return Infeasible(problem=_PINS) if pins else _too_tight(costs, pool)


def _worth(objective: Objective, items: int) -> Worth:
    match objective:
        case Objective.THROUGHPUT:
            return lambda period, latency, penalty: (period, penalty, latency)
        case Objective.LATENCY:
            return lambda period, latency, penalty: (latency, penalty, period)
        case Objective.MAKESPAN:
            return lambda period, latency, penalty: (
                latency + (items - 1) * period,
                penalty,
                latency,
            )
        case _:
            assert_never(objective)


def _wishes(previous: Plan | None, pins: Sequence[Pin]) -> Wishes:
    present = frozenset(
        (fragment, device)
        for stage in (previous.stages if previous else ())
        for fragment in stage.fragments
        for device in stage.devices
    )
    required = {pin.fragment: pin.device for pin in pins if pin.policy is PinPolicy.REQUIRED}
    preferred = frozenset(
        (pin.fragment, pin.device) for pin in pins if pin.policy is PinPolicy.PREFERRED
    )
    return Wishes(required=required, preferred=preferred, present=present)


def _misfit(costs: Costs, pool: Sequence[PoolDevice], pins: Sequence[Pin]) -> Infeasible | None:
    """What no plan can mend: an empty pool, pins into nowhere, a fragment too large."""
    document = costs.document
    budgets = {device.name: device.budget_bytes for device in pool}
    assert len(budgets) == len(pool), "two devices have one name"
    if not pool:
        return Infeasible(problem="the pool has no device")
    required = {pin.fragment: pin.device for pin in pins if pin.policy is PinPolicy.REQUIRED}
    for pin in pins:
        if pin.fragment >= len(document.fragments):
            last = len(document.fragments) - 1
            problem = f"fragment {pin.fragment} is pinned to {pin.device}, but {last} is the last"
            return Infeasible(problem=problem)
        if pin.device not in budgets and pin.policy is PinPolicy.REQUIRED:
            known = ", ".join(list(budgets)[:_NAMED_DEVICES])
            problem = f"fragment {pin.fragment} is pinned to {pin.device}; the pool has {known}"
            return Infeasible(problem=problem)
    for fragment in document.fragments:
        pinned = required.get(fragment.index)
        allowed = budgets if pinned is None else {pinned: budgets[pinned]}
        alone = Span(fragment.index, fragment.index + 1)
        if costs.least(alone) > max(allowed.values()):
            return Infeasible(
                problem="" if pinned is None else f" and is pinned to {pinned}",
                fragment=fragment.index,
                need_bytes=costs.least(alone),
                resident_bytes=costs.resident(alone),
                budgets=tuple(allowed.items()),
            )
    return None


def _too_tight(costs: Costs, pool: Sequence[PoolDevice]) -> Infeasible:
    """Each fragment has room by itself; not beside what enters the runs that there would be."""
    fragments = costs.document.fragments
    neediest = max(fragments, key=lambda fragment: fragment.least_bytes)
    return Infeasible(
        problem="",
        fragment=neediest.index,
        need_bytes=costs.least_in_turn(Span(0, len(fragments))),
        budgets=tuple((device.name, device.budget_bytes) for device in pool),
    )


def _mended(
    costs: Costs,
    found: Found,
    pool: Sequence[PoolDevice],
    wishes: Wishes,
    worth: Worth,
    *,
    reloading: bool,
) -> Found:
    """A search that was cut short, with rules of thumb beside what it found, and spares used."""
    whole, at_once = {Holding.WHOLE}, {Holding.WHOLE, Holding.IN_BLOCKS}
    rules = [evenly(costs, pool), *(packed(costs, pool, each) or () for each in (whole, at_once))]
    admissible = [
        rule
        for rule in rules
        if rule and all(_serves(costs, each, wishes, reloading=reloading) for each in rule)
    ]
    candidates = [*found.divisions, *admissible]
    candidates += [with_spares(costs, each, pool, wishes) for each in candidates[:1] + admissible]
    distinct = dict.fromkeys(candidates)

    def order(divisions: Divisions) -> tuple[int, ...]:
        penalty = sum(
            wishes.penalty(each.span, [device.name for device in each.devices])
            for each in divisions
        )
        return worth(*costs.totals(divisions), penalty)

    return Found(tuple(sorted(distinct, key=order)[:MAX_FOUND]), complete=False)


def _serves(costs: Costs, division: Division, wishes: Wishes, *, reloading: bool) -> bool:
    names = [device.name for device in division.devices]
    return wishes.allow(division.span, names) and all(
        fits(costs, division.span, device, reloading=reloading) for device in division.devices
    )


def _planned(
    costs: Costs, found: Found, pool: Sequence[PoolDevice], objective: Objective, epoch: int
) -> Plan:
    best, *others = found.divisions
    predictable = costs.predictable(pool)
    period, latency = costs.totals(best)
    even = even_split(costs, pool, best)
    lost = [even, on_one_device(costs, pool, best)]
    lost += [rejected(costs, other, in_words(other), best, pool) for other in others]
    return Plan(
        epoch=epoch,
        objective=objective,
        stages=tuple(_stage(costs, each, predictable=predictable) for each in best),
        period_nanoseconds=period if predictable else None,
        latency_nanoseconds=latency if predictable else None,
        even_split=even,
        rejected=tuple(each for each in lost if each is not None)[:MAX_REJECTED],
        complete=found.complete,
    )


def _stage(costs: Costs, division: Division, *, predictable: bool) -> StagePlan:
    """What a plan says of one division."""
    each = [costs.on(division.span, device) for device in division.devices]
    return StagePlan(
        fragments=division.span.fragments,
        shares=shares(costs, division.span, division.devices),
        compute_nanoseconds=max(cost.compute for cost in each) if predictable else None,
        transfer_nanoseconds=max(cost.transfer for cost in each) if predictable else None,
        period_nanoseconds=costs.period(division) if predictable else None,
    )


def shares(costs: Costs, span: Span, devices: Sequence[PoolDevice]) -> tuple[Share, ...]:
    """How each of the devices holds a span; each must be able to."""
    return tuple(
        Share(
            device=device.name,
            holding=costs.on(span, device).holding,
            granted_bytes=costs.grants(span, device),
            predicted=costs.times(span, device) if costs.known else (),
        )
        for device in devices
    )
