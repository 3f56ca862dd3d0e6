"""Placement: which devices serve which fragments, and why not otherwise.

`plan` looks for the best division of the fragments, in topological order, into stages: runs of
consecutive fragments, each served by devices of its own (`dividing` searches, `costs` has the
model). It works in phases:

1. refuse at once what fits nowhere, saying what it needs and what each device has;
2. search among divisions in which every device holds its fragments at once, whole or in blocks;
3. only where there is none: have other items wait on disk while a fragment runs;
4. only where there is none either: allow devices to load and unload fragments for each item;
5. say what the plan would give, and what its alternatives would have given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, Protocol

from shoal_planner.alternatives import Contest
from shoal_planner.costs import Costs, Division, Span, homes_of
from shoal_planner.devices import PoolDevice
from shoal_planner.disks import has_room
from shoal_planner.dividing import divided
from shoal_planner.goal import Goal
from shoal_planner.heuristics import Divisions
from shoal_planner.links import Homes
from shoal_planner.outcome import Infeasible, Plan, Rejected, Share, StagePlan
from shoal_planner.replanning import Situation, improve, next_plan
from shoal_planner.search import MAX_FOUND, Wishes
from shoal_planner.speeds import refined
from shoal_protocol.choices import Objective, PinPolicy
from shoal_protocol.disk_shares import MORE_DISK
from shoal_protocol.partition import Fragment, PartitionDocument
from shoal_protocol.units import Bytes, format_downwards, format_upwards

MAX_REJECTED: Final = 8
_NAMED_DEVICES: Final = 8
_IMPROVED: Final = 3
"""Divisions that local moves start from, where rates between pairs are known."""
_PINS: Final = (
    "the pins leave no way to give each device one run of consecutive fragments that has room "
    "there; without them there is one: remove a pin, or pin to another device"
)


class Pin(Protocol):
    """A fragment tied to a device, as the spec of a Placement says it."""

    @property
    def fragment(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def policy(self) -> PinPolicy: ...


class Served(Protocol):
    """A stage of a plan in force, as a status describes it."""

    @property
    def fragments(self) -> tuple[int, ...]: ...
    @property
    def devices(self) -> tuple[str, ...]: ...


def plan(
    document: PartitionDocument,
    pool: Sequence[PoolDevice],
    objective: Objective,
    previous: Plan | None = None,
    pins: Sequence[Pin] = (),
    items: int | None = None,
) -> Plan | Infeasible:
    """The best placement of a partition on a pool; ties go to fewer stages, then smaller names.

    `previous` is the plan in force: of equal plans the one that moves least wins, and the epoch
    goes on from it. `items` matters to Makespan only: how many a job has; None: not known.
    """
    answer = _best(document, pool, Goal(objective, items), _wishes(previous, pins), pins)
    if isinstance(answer, Infeasible):
        return answer
    contest = answer.contest
    alone = _without_replicas(answer.situation, contest.best)
    rejected = islice(contest.rejected(alone, answer.others), MAX_REJECTED)
    return _planned(contest, tuple(rejected), 1 + (previous.epoch if previous else 0), answer.gap)


def plan_without_alternatives(
    document: PartitionDocument, pool: Sequence[PoolDevice], goal: Goal
) -> Plan | Infeasible:
    """As `plan`, which takes as long again to find out what else there was."""
    answer = _best(document, pool, goal, Wishes(), ())
    if isinstance(answer, Infeasible):
        return answer
    return _planned(answer.contest, (), 1, answer.gap)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The best division, the next best ones, and by what part the best possible may be less."""

    situation: Situation
    contest: Contest
    others: Sequence[Divisions]
    gap: float | None


def _best(
    document: PartitionDocument,
    pool: Sequence[PoolDevice],
    goal: Goal,
    wishes: Wishes,
    pins: Sequence[Pin],
) -> _Answer | Infeasible:
    costs, pool = Costs(document, goal.loading_items), refined(document, pool)
    refused = _misfit(costs, pool, pins)
    if refused is not None:
        return refused
    wishes = replace(wishes, cached=costs.cached_by(pool))
    pool = _weighed(pool, goal)
    for reloading, waiting in ((False, False), (False, True), (True, True)):
        situation = Situation(
            costs=costs,
            pool=pool,
            goal=goal,
            wishes=wishes,
            reloading=reloading,
            waiting=waiting,
        )
        found = divided(situation)
        if found.divisions:
            best, *others = _by_pairs(situation, found.divisions)
            contest = Contest(
                costs=costs, pool=pool, goal=goal, best=best, required=wishes.required
            )
            gap = found.gap(situation.value(best))
            return _Answer(situation=situation, contest=contest, others=others, gap=gap)
    free = replace(situation, wishes=replace(wishes, required={}))
    if wishes.required and divided(free).divisions:
        return Infeasible(problem=_PINS)
    whole = Span(0, costs.count)
    least = costs.least_in_turn(whole, waiting=True)
    return _lacking_disk(costs, whole, [each for each in pool if least <= each.budget_bytes])


def replan(
    document: PartitionDocument,
    pool: Sequence[PoolDevice],
    best: Plan,
    before: Sequence[Served],
    pins: Sequence[Pin] = (),
) -> Plan:
    """The plan that follows the one in force: the best, or one that moves fewer fragments, where
    what the best gains is not worth the difference (`replanning`)."""
    goal = best.goal
    costs = Costs(document, goal.loading_items)
    wishes = replace(_wishes(None, pins), cached=costs.cached_by(pool))
    pool = _weighed(pool, goal)
    devices = {device.name: device for device in pool}
    situation = Situation(
        costs=costs,
        pool=pool,
        goal=goal,
        wishes=wishes,
        before=_divisions(before, devices),
        reloading=best.reloading,
        waiting=best.waiting or best.reloading,
    )
    ideal = _divisions(best.stages, devices)
    chosen = next_plan(situation, ideal)
    contest = Contest(costs=costs, pool=pool, goal=situation.goal, best=chosen)
    rejected = best.rejected
    if (lost := contest.from_scratch(ideal)) is not None:
        rejected = tuple(islice((lost, *contest.rejected(None, ())), MAX_REJECTED))
    return _planned(contest, rejected, best.epoch, best.gap)


def _weighed(pool: Sequence[PoolDevice], goal: Goal) -> tuple[PoolDevice, ...]:
    """The devices as they are weighed. What is on their disks costs nothing but where loads count;
    else devices are alike that differ in nothing more, and many of them are soon too many."""
    return tuple(pool) if goal.cold else tuple(replace(each, cached=()) for each in pool)


def _divisions(stages: Sequence[Served], devices: Mapping[str, PoolDevice]) -> Divisions:
    """Without devices that there are no more."""
    return tuple(
        Division(
            Span(stage.fragments[0], stage.fragments[-1] + 1),
            tuple(devices[name] for name in stage.devices if name in devices),
        )
        for stage in stages
    )


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
    if problem := _misplaced(document, list(budgets), pins):
        return Infeasible(problem=problem)
    required = {pin.fragment: pin.device for pin in pins if pin.policy is PinPolicy.REQUIRED}
    for fragment in document.fragments:
        pinned = required.get(fragment.index)
        allowed = budgets if pinned is None else {pinned: budgets[pinned]}
        alone = Span(fragment.index, fragment.index + 1)
        if fragment.least_bytes > max(allowed.values()):
            return _too_large(costs, fragment, allowed, pinned)
        able = [
            device
            for device in pool
            if device.name in allowed and fragment.least_bytes <= device.budget_bytes
        ]
        if not any(has_room(each, costs.stored.largest(alone.start, alone.end)) for each in able):
            return _lacking_disk(costs, alone, able)
    return None


def _too_large(
    costs: Costs, fragment: Fragment, budgets: Mapping[str, Bytes], pinned: str | None
) -> Infeasible:
    """A fragment has room on none of these; what is told is enough for all that are not pinned."""
    if pinned is None:
        fragment = max(costs.document.fragments, key=lambda each: each.least_bytes)
    return Infeasible(
        problem="" if pinned is None else f" and is pinned to {pinned}",
        fragment=fragment.index,
        need_bytes=Bytes(fragment.least_bytes),
        resident_bytes=Bytes(fragment.resident_bytes),
        budgets=tuple(budgets.items()),
    )


def _misplaced(document: PartitionDocument, pool: Sequence[str], pins: Sequence[Pin]) -> str:
    """What is wrong with a pin; empty: nothing."""
    last = len(document.fragments) - 1
    for pin in pins:
        if pin.fragment > last:
            return f"fragment {pin.fragment} is pinned to {pin.device}, but {last} is the last"
        if pin.device not in pool and pin.policy is PinPolicy.REQUIRED:
            known = ", ".join(pool[:_NAMED_DEVICES])
            return f"fragment {pin.fragment} is pinned to {pin.device}; the pool has {known}"
    return ""


def _lacking_disk(costs: Costs, span: Span, able: Sequence[PoolDevice]) -> Infeasible:
    """These devices have the memory for each of the fragments, and not the disk."""
    stored = costs.stored.largest(span.start, span.end)
    have = [f"{each.name} {format_downwards(each.cache_bytes or 0)}" for each in able]
    more = len(have) - _NAMED_DEVICES
    listed = ", ".join(have[:_NAMED_DEVICES]) + f" and {more} more" * (more > 0)
    return Infeasible(
        problem=f"a fragment takes {format_upwards(stored)} on a device's disk; of the devices "
        f"with enough memory there are for fragments: {listed}; cut finer or {MORE_DISK}"
    )


def _by_pairs(situation: Situation, found: Sequence[Divisions]) -> list[Divisions]:
    """What was found, the best first by the rates between pairs of devices, where those are known;
    with local moves."""
    if not any(device.peers for device in situation.pool):
        return list(found)
    order = situation.order
    improved = [improve(situation, each) for each in sorted(found, key=order)[:_IMPROVED]]
    return sorted(dict.fromkeys([*improved, *found]), key=order)[:MAX_FOUND]


def _without_replicas(situation: Situation, best: Divisions) -> Divisions | None:
    """The best division with one device for each stage; None where the best of all is one, or there
    is none."""
    if all(len(division.devices) == 1 for division in best):
        return None
    alone = replace(situation.wishes, replicas=False)
    found = divided(replace(situation, wishes=alone))
    return found.divisions[0] if found.divisions else None


def _planned(
    contest: Contest, rejected: tuple[Rejected, ...], epoch: int, gap: float | None
) -> Plan:
    costs, best = contest.costs, contest.best
    predictable = costs.predictable(contest.pool)
    period, latency = costs.totals(best)
    return Plan(
        epoch=epoch,
        objective=contest.goal.objective,
        items=contest.goal.known_items,
        stages=stage_plans(costs, best, predictable=predictable),
        period_nanoseconds=period if predictable else None,
        latency_nanoseconds=latency if predictable else None,
        waiting=not all(costs.receives(each.span, on) for each in best for on in each.devices),
        rejected=rejected,
        gap=gap,
    )


def stage_plans(costs: Costs, divisions: Divisions, *, predictable: bool) -> tuple[StagePlan, ...]:
    """What a plan says of its divisions; each device must be able to hold its span."""
    homes = homes_of(divisions)
    return tuple(_stage_plan(costs, each, homes, predictable=predictable) for each in divisions)


def _stage_plan(costs: Costs, division: Division, homes: Homes, *, predictable: bool) -> StagePlan:
    border = costs.crossing(division.span)
    return StagePlan(
        fragments=division.span.fragments,
        shares=tuple(
            Share(
                device=device.name,
                budget_bytes=device.budget_bytes,
                holding=cost.holding,
                granted_bytes=costs.grants(division.span, device),
                cost=cost if predictable else None,
                predicted=costs.times(division.span, device) if costs.known else (),
            )
            for device in division.devices
            for cost in (costs.on(division.span, device, homes),)
        ),
        received_bytes=border.coming,
        sent_bytes=border.going,
    )
