"""Plans compared: the one in force as a status describes it, the best one, and the difference
between them. Pure.

The planner is asked without the plan in force, which would make a class of its own of each device
that serves already, and its search grows with the classes. What the plan in force is worth, and
that devices keep their fragments if others of their kind would do, is decided here.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, assert_never

from shoal_api.kinds import Placement
from shoal_api.kinds.placement import (
    MAX_GRANTS,
    Cost,
    FragmentMemory,
    Grant,
    Pin,
    PlacementStatus,
    Rejected,
    StageStatus,
)
from shoal_operator.reconcile.conditions import shortened
from shoal_planner.costs import Costs, Division, Holding, PoolDevice, Span
from shoal_planner.outcome import Infeasible, Plan, StagePlan
from shoal_planner.placement import MAX_REJECTED, plan, shares
from shoal_planner.search import fits
from shoal_protocol.choices import Objective
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import Nanoseconds, seconds

_ITEMS: Final = 100
_REMEMBERED: Final = 32
"""Plans: a thousand jobs of one partition on one pool need the same."""


Stages = Sequence[StagePlan | StageStatus]
"""Of a plan that was made, or of one that a status describes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What is to be placed, and on what."""

    document: PartitionDocument
    devices: tuple[PoolDevice, ...]


@lru_cache(_REMEMBERED)
def best_plan(site: Site, objective: Objective, pins: tuple[Pin, ...]) -> Plan | Infeasible:
    """The best placement, as if nothing ran yet."""
    return plan(site.document, site.devices, objective, None, pins)


def in_force(placement: Placement, document: PartitionDocument) -> tuple[StageStatus, ...]:
    """The stages that the status describes, if they are of this document's fragments."""
    status = placement.status
    stages = () if status is None else status.stages
    fragments = [index for stage in stages for index in stage.fragments]
    if status is None or fragments != list(range(len(document.fragments))):
        return ()
    placed = [(each.fragment, each.digest) for each in status.fragments if each.digest is not None]
    same = all(document.fragments[index].digest == digest for index, digest in placed)
    return stages if same else ()


def assignment(stages: Stages) -> tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]:
    """Which fragments are where: what makes two plans the same."""
    return tuple((stage.fragments, stage.devices) for stage in stages)


def with_fewest_moves(site: Site, best: Plan, previous: Stages, pinned: frozenset[str]) -> Plan:
    """The best plan with devices of a kind exchanged, so that as many as possible keep their
    fragments. Devices that are pinned are not exchanged.
    """
    if not previous or assignment(best.stages) == assignment(previous):
        return best
    kinds = {each.name: replace(each, name="") for each in site.devices if each.name not in pinned}
    served = {name: frozenset(stage.fragments) for stage in previous for name in stage.devices}
    names_of: dict[PoolDevice, list[str]] = {}
    for name, kind in kinds.items():
        names_of.setdefault(kind, []).append(name)
    slots = [list(stage.devices) for stage in best.stages]
    free: dict[tuple[int, PoolDevice], deque[int]] = {}
    for place, names in enumerate(slots):
        for slot, name in enumerate(names):
            if name in kinds:
                free.setdefault((place, kinds[name]), deque()).append(slot)
    pairs = sorted(
        (
            -len(served.get(name, frozenset()).intersection(best.stages[place].fragments)),
            place,
            name,
        )
        for place, kind in free
        for name in names_of[kind]
    )
    placed: set[str] = set()
    for _, place, name in pairs:
        left = free[place, kinds[name]]
        if left and name not in placed:
            placed.add(name)
            slots[place][left.popleft()] = name
    before = {stage.fragments: stage.devices for stage in previous}
    for stage, names in zip(best.stages, slots, strict=True):
        same = before.get(stage.fragments, ())
        if set(same) == set(names):
            names[:] = same
    stages = zip(best.stages, slots, strict=True)
    return replace(
        best, stages=tuple(_served_by(site, stage, tuple(names)) for stage, names in stages)
    )


def _served_by(site: Site, stage: StagePlan, names: tuple[str, ...]) -> StagePlan:
    """The stage on other devices of the same kinds: what each grants follows from its kind."""
    devices = {device.name: device for device in site.devices}
    costs, span = Costs(site.document), Span(stage.fragments[0], stage.fragments[-1] + 1)
    return replace(stage, shares=shares(costs, span, [devices[name] for name in names]))


def gain_percent(site: Site, previous: Stages, best: Plan) -> float | None:
    """By how much the best plan is better than the one in force; None: that one does not do."""
    costs, devices = Costs(site.document), {device.name: device for device in site.devices}
    if any(name not in devices for stage in previous for name in stage.devices):
        return None
    old = _divisions(previous, devices)
    reloading = any(stage.held(Holding.RELOADED) for stage in best.stages)
    if not all(
        fits(costs, division.span, device, reloading=reloading)
        for division in old
        for device in division.devices
    ):
        return None
    before = _worth(costs, old, best.objective)
    after = _worth(costs, _divisions(best.stages, devices), best.objective)
    return 100.0 * (before - after) / before if before > 0 else 0.0


def _divisions(stages: Stages, devices: Mapping[str, PoolDevice]) -> tuple[Division, ...]:
    return tuple(
        Division(
            Span(stage.fragments[0], stage.fragments[-1] + 1),
            tuple(devices[name] for name in stage.devices),
        )
        for stage in stages
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


def status_of(of: Plan, document: PartitionDocument) -> PlacementStatus:
    """A plan as a status, without epoch and conditions."""
    return PlacementStatus(
        stages=tuple(
            StageStatus(
                fragments=stage.fragments,
                devices=stage.devices,
                compute_seconds=_seconds(stage.compute_nanoseconds),
                device_seconds=tuple(
                    seconds(Nanoseconds(sum(share.predicted)))
                    for share in stage.shares
                    if share.predicted
                ),
                transfer_seconds=_seconds(stage.transfer_nanoseconds),
                resident_bytes=stage.resident_bytes,
                in_blocks=_in_blocks(stage, document)[:MAX_GRANTS],
            )
            for stage in of.stages
        ),
        fragments=tuple(
            FragmentMemory(
                fragment=fragment,
                digest=document.fragments[fragment].digest,
                resident_bytes=document.fragments[fragment].resident_bytes,
                least_bytes=document.fragments[fragment].least_bytes,
                granted_bytes=min(granted),
            )
            for stage in of.stages
            for fragment, *granted in zip(
                stage.fragments, *(share.granted_bytes for share in stage.shares), strict=True
            )
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


def _in_blocks(stage: StagePlan, document: PartitionDocument) -> tuple[Grant, ...]:
    """The grants of fragments that get less than they need to be resident."""
    return tuple(
        Grant(fragment=fragment, device=share.device, granted_bytes=granted)
        for share in stage.shares
        for fragment, granted in zip(stage.fragments, share.granted_bytes, strict=True)
        if granted < document.fragments[fragment].resident_bytes
    )


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else seconds(Nanoseconds(nanoseconds))
