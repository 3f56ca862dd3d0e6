"""Plans compared: the one in force as a status describes it, the best one, and the difference
between them. Pure.

The planner is asked without the plan in force, which would make a class of its own of each device
that serves already, and its search grows with the classes. What the plan in force is worth, and
that devices stay where they are if others of their kind would do, is seen to here.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, assert_never

from shoal_api.kinds import Placement
from shoal_api.kinds.placement import Cost, Pin, PlacementStatus, Rejected, StageStatus
from shoal_operator.reconcile.conditions import shortened
from shoal_planner.costs import Costs, Division, PoolDevice, Span
from shoal_planner.outcome import Infeasible, Plan, StagePlan
from shoal_planner.placement import MAX_REJECTED, plan
from shoal_planner.search import fits
from shoal_protocol.choices import Objective
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import NANOSECONDS_PER_SECOND, Bytes

_ITEMS: Final = 100
_REMEMBERED: Final = 32
"""Plans: a thousand jobs of one partition on one pool ask for the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What is to be placed, and on what."""

    document: PartitionDocument
    devices: tuple[PoolDevice, ...]


@lru_cache(_REMEMBERED)
def best_plan(site: Site, objective: Objective, pins: tuple[Pin, ...]) -> Plan | Infeasible:
    """The best placement, as if nothing ran yet."""
    return plan(site.document, site.devices, objective, None, pins)


def in_force(placement: Placement, document: PartitionDocument) -> Plan | None:
    """The plan that the status describes, if it is one of this document's fragments."""
    status = placement.status or PlacementStatus()
    fragments = [index for stage in status.stages for index in stage.fragments]
    if not status.stages or fragments != list(range(len(document.fragments))):
        return None
    return Plan(
        epoch=status.epoch or 0,
        objective=placement.spec.objective,
        stages=tuple(
            StagePlan(
                fragments=stage.fragments,
                devices=stage.devices,
                compute_nanoseconds=None,
                transfer_nanoseconds=None,
                period_nanoseconds=None,
                resident_bytes=Bytes(stage.resident_bytes),
            )
            for stage in status.stages
        ),
        period_nanoseconds=None,
        latency_nanoseconds=None,
        even_split=None,
        rejected=(),
        complete=True,
    )


def homes(of: Plan) -> tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]:
    """Which fragments are where: what makes two plans the same."""
    return tuple((stage.fragments, stage.devices) for stage in of.stages)


def at_home(site: Site, best: Plan, previous: Plan, pinned: frozenset[str]) -> Plan:
    """The best plan with devices of a kind exchanged, so that as many as possible keep their
    fragments. Devices that are pinned are not exchanged.
    """
    if homes(best) == homes(previous):
        return best
    kinds = {each.name: replace(each, name="") for each in site.devices if each.name not in pinned}
    served = {
        name: frozenset(stage.fragments) for stage in previous.stages for name in stage.devices
    }
    names_of: dict[PoolDevice, list[str]] = {}
    for name, kind in kinds.items():
        names_of.setdefault(kind, []).append(name)
    seats = [list(stage.devices) for stage in best.stages]
    free: dict[tuple[int, PoolDevice], deque[int]] = {}
    for place, names in enumerate(seats):
        for seat, name in enumerate(names):
            if name in kinds:
                free.setdefault((place, kinds[name]), deque()).append(seat)
    pairs = sorted(
        (
            -len(served.get(name, frozenset()).intersection(best.stages[place].fragments)),
            place,
            name,
        )
        for place, kind in free
        for name in names_of[kind]
    )
    seated: set[str] = set()
    for _, place, name in pairs:
        left = free[place, kinds[name]]
        if left and name not in seated:
            seated.add(name)
            seats[place][left.popleft()] = name
    before = {stage.fragments: stage.devices for stage in previous.stages}
    for stage, names in zip(best.stages, seats, strict=True):
        same = before.get(stage.fragments, ())
        if set(same) == set(names):
            names[:] = same
    stages = zip(best.stages, seats, strict=True)
    return replace(
        best, stages=tuple(replace(stage, devices=tuple(names)) for stage, names in stages)
    )


def gain_percent(site: Site, previous: Plan, best: Plan) -> float | None:
    """By how much the best plan is better than the one in force; None: that one does not do."""
    costs, devices = Costs(site.document), {device.name: device for device in site.devices}
    if any(name not in devices for stage in previous.stages for name in stage.devices):
        return None
    old = _divisions(previous, devices)
    swapping = any(stage.swaps for stage in best.stages)
    if not all(
        fits(costs, division.span, device, swapping=swapping)
        for division in old
        for device in division.devices
    ):
        return None
    before = _worth(costs, old, best.objective)
    after = _worth(costs, _divisions(best, devices), best.objective)
    return 100.0 * (before - after) / before if before > 0 else 0.0


def _divisions(of: Plan, devices: Mapping[str, PoolDevice]) -> tuple[Division, ...]:
    return tuple(
        Division(
            Span(stage.fragments[0], stage.fragments[-1] + 1),
            tuple(devices[name] for name in stage.devices),
        )
        for stage in of.stages
    )


def _worth(costs: Costs, divisions: Sequence[Division], objective: Objective) -> int:
    """Nanoseconds of what the objective makes small."""
    period, latency = costs.totals(divisions)
    match objective:
        case Objective.THROUGHPUT:
            return period
        case Objective.LATENCY:
            return latency
        case Objective.MAKESPAN:
            return latency + (_ITEMS - 1) * period
        case _:
            assert_never(objective)


def status_of(of: Plan) -> PlacementStatus:
    """A plan as a status, without epoch and conditions."""
    return PlacementStatus(
        stages=tuple(
            StageStatus(
                fragments=stage.fragments,
                devices=stage.devices,
                compute_seconds=_seconds(stage.compute_nanoseconds),
                transfer_seconds=_seconds(stage.transfer_nanoseconds),
                resident_bytes=stage.resident_bytes,
            )
            for stage in of.stages
        ),
        predicted=Cost(
            latency_seconds=_seconds(of.latency_nanoseconds), items_per_second=of.items_per_second
        ),
        rejected=tuple(
            Rejected(
                alternative=shortened(each.alternative, 512),
                items_per_second=each.items_per_second,
                reason=shortened(each.reason, 4096),
            )
            for each in of.rejected[:MAX_REJECTED]
        ),
    )


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / NANOSECONDS_PER_SECOND
