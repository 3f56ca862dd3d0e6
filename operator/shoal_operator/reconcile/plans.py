"""Plans compared: the one in force as a status describes it, the best one, and the difference
between them. Pure.

The planner searches without the plan in force, which would make a class of its own of each device
that serves already, and its search grows with the classes. What follows the plan in force is
decided afterwards: devices keep their fragments if others of their kind would do, and a plan that
moves fewer fragments may do. All of that takes seconds where there is much to place, so it is a
`Question` that the controller has answered in a thread of its own.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Final

from shoal_api.kinds import Placement
from shoal_api.kinds.placement import (
    MAX_GRANTS,
    Cost,
    FragmentMemory,
    Grant,
    Makespan,
    Pin,
    PlacementStatus,
    Rejected,
    StageStatus,
)
from shoal_operator.reconcile.conditions import shortened
from shoal_planner.costs import Costs, Division, Span
from shoal_planner.devices import PoolDevice
from shoal_planner.figures import known_seconds, makespan, stage_figures
from shoal_planner.goal import Goal
from shoal_planner.outcome import Infeasible, Plan, StagePlan
from shoal_planner.placement import MAX_REJECTED, plan, replan, stage_plans
from shoal_planner.sharing import Taken, Use, added, beside, crowded, is_at_once, left_over
from shoal_protocol.copying import copied
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import Nanoseconds, seconds

_REMEMBERED: Final = 32
"""Plans: a thousand jobs of one partition on one pool need the same."""
_NOTHING: Final = frozenset[int]()


TakenParts = tuple[tuple[str, Taken], ...]
"""What other models take of devices, by their names."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What of a stage makes it another one."""

    fragments: tuple[int, ...]
    devices: tuple[str, ...]


Stages = Sequence[StagePlan | StageStatus | Stage]
"""Of a plan that was made, or of one that a status describes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What is to be placed, and on what."""

    document: PartitionDocument
    devices: tuple[PoolDevice, ...]


@lru_cache(_REMEMBERED)
def best_plan(site: Site, goal: Goal, pins: tuple[Pin, ...]) -> Plan | Infeasible:
    """The best placement, as if nothing ran yet."""
    return plan(site.document, site.devices, goal.objective, None, pins, goal.known_items)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be planned, and the assignment of the plan in force. Where the spec has changed,
    `anew`, the best plan follows whatever it moves. `taken` is what other models take of the
    devices. Equal questions have equal answers."""

    site: Site
    goal: Goal
    pins: tuple[Pin, ...]
    previous: tuple[Stage, ...] = ()
    anew: bool = False
    taken: TakenParts = ()

    def is_like(self, other: object) -> bool:
        """Whether another differs only in what devices and links were measured to do: its answer
        is a plan for this one too, though maybe not the best."""
        return isinstance(other, Question) and self._unmeasured() == other._unmeasured()

    def _unmeasured(self) -> "Question":
        return replace(self, site=replace(self.site, devices=unmeasured(self.site.devices)))

    def answer(self) -> Plan | Infeasible:
        """The next plan. It may take seconds."""
        taken = dict(self.taken)
        if taken:
            site = replace(self.site, devices=left_over(self.site.devices, taken))
            best = best_plan(site, self.goal, self.pins)
            if isinstance(best, Plan) and is_at_once(best):
                return beside(self._next(site, best), taken)
        best = best_plan(self.site, self.goal, self.pins)
        if isinstance(best, Infeasible):
            return best
        return crowded(self._next(self.site, best), taken)

    def _next(self, site: Site, best: Plan) -> Plan:
        if not self.previous:
            return best
        pinned = frozenset(pin.device for pin in self.pins)
        best = with_fewest_moves(site, best, self.previous, pinned)
        if self.anew:
            return best
        return replan(site.document, site.devices, best, self.previous, self.pins)


def unmeasured(devices: Sequence[PoolDevice]) -> tuple[PoolDevice, ...]:
    """What devices have, without what they were measured to do."""
    return tuple(
        PoolDevice(
            name=each.name,
            budget_bytes=each.budget_bytes,
            cache_bytes=each.cache_bytes,
            single=each.single,
        )
        for each in devices
    )


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


def is_too_much(status: PlacementStatus, budgets: Mapping[str, int]) -> bool:
    """Whether a plan gives a device a fragment that has no room in its budget, even in blocks:
    budgets have become smaller since."""
    needs = {each.fragment: each.least_bytes for each in status.fragments}
    for stage in status.stages:
        least = max((needs.get(fragment, 0) for fragment in stage.fragments), default=0)
        if any(least > budgets.get(name, least) for name in stage.devices):
            return True
    return False


def served_by(
    stages: Sequence[StageStatus],
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[int, ...], ...]]:
    """Per fragment the devices that serve it, and what each grants it (0: all that it needs)."""
    devices = {index: stage.devices for stage in stages for index in stage.fragments}
    grants = {
        (each.fragment, each.device): each.granted_bytes
        for stage in stages
        for each in stage.in_blocks
    }
    names = tuple(devices[index] for index in range(len(devices)))
    granted = tuple(
        tuple(grants.get((index, name), 0) for name in each) for index, each in enumerate(names)
    )
    return names, granted


def taken_by(placements: Iterable[Placement], document: PartitionDocument | None) -> TakenParts:
    """What other Placements take of devices; not those that have the same fragments."""
    own = set() if document is None else {each.digest for each in document.fragments}
    others = [
        each.status
        for each in placements
        if each.status is not None
        and not any(fragment.digest in own for fragment in each.status.fragments)
    ]
    taken = added(
        use for status in others for stage in status.stages for use in _uses(status, stage)
    )
    return tuple(taken.items())


def _uses(status: PlacementStatus, stage: StageStatus) -> Iterator[Use]:
    """What each device of a stage gives to it: as its last job measured, else as predicted of items
    that come as fast as they can."""
    cost = status.measured or status.predicted
    rate = 0.0 if cost is None else cost.items_per_second or 0.0
    each = rate / len(stage.devices)
    busy = each * (stage.measured_seconds or stage.predicted_seconds or 0.0)
    link = each * (stage.link_seconds or 0.0)
    yield from (Use(name, stage.resident_bytes, busy, link) for name in stage.devices)


def assignment(stages: Stages) -> tuple[Stage, ...]:
    """Which fragments are where: what makes two plans the same."""
    return tuple(Stage(stage.fragments, stage.devices) for stage in stages)


def with_fewest_moves(site: Site, best: Plan, previous: Stages, pinned: frozenset[str]) -> Plan:
    """The best plan with devices of a kind exchanged, so that as many as possible keep their
    fragments. Devices that are pinned are not exchanged.
    """
    if not previous or assignment(best.stages) == assignment(previous):
        return best
    cached, loads_count = Costs(site.document).cached_by(site.devices), best.goal.cold
    kinds = {
        each.name: replace(each, name="", cached=each.cached if loads_count else ())
        for each in site.devices
        if each.name not in pinned
    }
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
            -len(served.get(name, _NOTHING).intersection(best.stages[place].fragments)),
            -len(cached.get(name, _NOTHING).intersection(best.stages[place].fragments)),
            place,
            name,
        )
        for place, kind in free
        for name in names_of[kind]
    )
    placed: set[str] = set()
    for _, _, place, name in pairs:
        left = free[place, kinds[name]]
        if left and name not in placed:
            placed.add(name)
            slots[place][left.popleft()] = name
    before = {stage.fragments: stage.devices for stage in previous}
    for stage, names in zip(best.stages, slots, strict=True):
        same = before.get(stage.fragments, ())
        if set(same) == set(names):
            names[:] = same
    return replace(best, stages=_served_by(site, best.stages, slots))


def _served_by(
    site: Site, stages: Sequence[StagePlan], names: Sequence[Sequence[str]]
) -> tuple[StagePlan, ...]:
    """The stages on other devices of the same kinds: what each grants follows from its kind."""
    devices = {device.name: device for device in site.devices}
    divisions = tuple(
        Division(
            Span(stage.fragments[0], stage.fragments[-1] + 1), tuple(devices[name] for name in its)
        )
        for stage, its in zip(stages, names, strict=True)
    )
    predictable = all(stage.costs for stage in stages)
    return stage_plans(Costs(site.document), divisions, predictable=predictable)


def status_of(of: Plan, site: Site) -> PlacementStatus:
    """A plan as a status, without epoch and conditions."""
    document, costs = site.document, Costs(site.document)
    return PlacementStatus(
        stages=tuple(
            StageStatus(
                fragments=stage.fragments,
                devices=stage.devices,
                compute_seconds=known_seconds(stage.compute_nanoseconds),
                read_seconds=known_seconds(stage.read_nanoseconds),
                device_seconds=tuple(
                    seconds(Nanoseconds(sum(share.predicted)))
                    for share in stage.shares
                    if share.predicted
                ),
                transfer_seconds=known_seconds(stage.transfer_nanoseconds),
                link_seconds=known_seconds(stage.link_nanoseconds),
                period_seconds=known_seconds(stage.period_nanoseconds),
                predicted_seconds=figures.predicted_seconds,
                resident_bytes=stage.resident_bytes,
                in_blocks=_in_blocks(stage, document)[:MAX_GRANTS],
            )
            for stage, figures in zip(of.stages, map(stage_figures, of.stages), strict=True)
        ),
        fragments=tuple(
            copied(
                FragmentMemory,
                document.fragments[fragment],
                fragment=fragment,
                granted_bytes=min(granted),
                **_seconds(costs, fragment, _kinds(site, stage)),
            )
            for stage in of.stages
            for fragment, *granted in zip(
                stage.fragments, *(share.granted_bytes for share in stage.shares), strict=True
            )
        ),
        predicted=Cost(
            latency_seconds=known_seconds(of.latency_nanoseconds),
            items_per_second=of.items_per_second,
        ),
        makespan=_makespan(of),
        rejected=tuple(
            Rejected(
                alternative=shortened(each.alternative, 512),
                items_per_second=each.items_per_second,
                latency_seconds=known_seconds(each.latency_nanoseconds),
                reason=shortened(each.reason, 4096),
            )
            for each in of.rejected[:MAX_REJECTED]
        ),
    )


def _kinds(site: Site, stage: StagePlan) -> Set[PoolDevice]:
    """Of the devices of a stage those that differ in what they take for a task."""
    names = set(stage.devices)
    return {replace(each, name="", cached=()) for each in site.devices if each.name in names}


def _seconds(costs: Costs, fragment: int, devices: Set[PoolDevice]) -> Mapping[str, float | None]:
    """What a task takes on the slowest, as a whole and within the least; None: not known."""
    if not costs.known:
        return {"resident_seconds": None, "least_seconds": None}
    known = costs.document.fragments[fragment]
    needs = {"resident_seconds": known.resident_bytes, "least_seconds": known.least_bytes}
    return {
        name: known_seconds(max(costs.at_grant(fragment, each, need) for each in devices))
        for name, need in needs.items()
    }


def _makespan(of: Plan) -> Makespan | None:
    found = makespan(of)
    return None if found is None else Makespan(**asdict(found))


def _in_blocks(stage: StagePlan, document: PartitionDocument) -> tuple[Grant, ...]:
    """The grants of fragments that get less than they need to be resident."""
    return tuple(
        Grant(fragment=fragment, device=share.device, granted_bytes=granted)
        for share in stage.shares
        for fragment, granted in zip(stage.fragments, share.granted_bytes, strict=True)
        if granted < document.fragments[fragment].resident_bytes
    )


def with_measured(
    stages: Sequence[StageStatus], before: Sequence[StageStatus], fragments: Mapping[int, float]
) -> tuple[StageStatus, ...]:
    """Beside what a run measured of these stages, else what was known of them before."""
    known = {(each.fragments, each.devices): each.measured_seconds for each in before}
    return tuple(
        replace(
            stage,
            measured_seconds=sum(fragments[each] for each in stage.fragments)
            if fragments.keys() >= set(stage.fragments)
            else known.get((stage.fragments, stage.devices)),
        )
        for stage in stages
    )
