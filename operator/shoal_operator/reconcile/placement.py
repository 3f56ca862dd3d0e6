"""Placement: the plan in force, and when another one takes its place. Pure.

A plan is made from the partition's document and the devices that the pool's coordinator reports
with their budgets. A new plan costs: items under way start over, fragments move. So the plan in
force stays

- while a device of it is silent, or away for less than `GRACE_SECONDS` (Ready is False meanwhile);
- while its coordinator cannot be reached (Ready is Unknown);
- while a node of it is cordoned, though a new plan does without cordoned nodes;
- while the best plan gains less than a tenth over it.

Only a plan with other stages is a new epoch.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Final, assert_never

from shoal_api.columns import print_placement
from shoal_api.conditions import holds
from shoal_api.kinds.placement import Cost, PlacementStatus
from shoal_operator.reconcile.condition_updates import (
    FALSE,
    TRUE,
    UNKNOWN,
    ConditionUpdate,
    conditions,
    find,
    holds_for,
    message_of,
)
from shoal_operator.reconcile.decision import Decision, Note
from shoal_operator.reconcile.partition import current_document
from shoal_operator.reconcile.plans import (
    Site,
    at_home,
    best_plan,
    gain_percent,
    homes,
    in_force,
    status_of,
)
from shoal_operator.reconcile.snapshot import (
    CoordinatorView,
    DeviceState,
    PlacementSnapshot,
    Run,
    Unreachable,
)
from shoal_operator.reconcile.times import seconds_since
from shoal_planner.costs import PoolDevice
from shoal_planner.explanation import summary
from shoal_planner.outcome import Infeasible, Plan
from shoal_protocol.choices import Residency

GRACE_SECONDS: Final = 30.0
"""What a pod needs to be started again on its node."""
_GAIN_PERCENT: Final = 10
_MEASURED_AFTER_SECONDS: Final = 10.0
_NAMED: Final = 8


@dataclass(frozen=True, slots=True)
class _Blocked:
    """Why there is nothing to plan with."""

    reason: str
    message: str


def reconcile_placement(snapshot: PlacementSnapshot) -> Decision:
    """What is to be done about a Placement."""
    site = _site(snapshot)
    if isinstance(site, _Blocked):
        return _blocked(snapshot, site)
    previous = in_force(snapshot.placement, site.document)
    if previous is not None and (missing := _missing(previous, site.devices)):
        since = _missing_since(snapshot)
        if since is None or since < GRACE_SECONDS:
            return _patient(snapshot, missing, GRACE_SECONDS - (since or 0.0))
    spec, before = snapshot.placement.spec, snapshot.placement.status or PlacementStatus()
    pinned = frozenset(pin.device for pin in spec.pins)
    cordoned = snapshot.cordoned - pinned
    if previous is not None and not _is_new(snapshot) and cordoned & _used(previous):
        return _decision(snapshot, before, _good(message_of(before.conditions, "Planned")))
    site = replace(site, devices=tuple(d for d in site.devices if d.name not in cordoned))
    if not site.devices:
        text = f"every connected device of {spec.pool_ref.name} is on a cordoned node"
        text = f"{text}; kubectl uncordon {min(cordoned)}"
        return _blocked(snapshot, _Blocked("WaitingForDevices", text))
    best = best_plan(site, spec.objective, spec.pins)
    match best:
        case Infeasible():
            return _infeasible(snapshot, best)
        case Plan():
            best = best if previous is None else at_home(site, best, previous, pinned)
            return _planned(snapshot, site, previous, best)
        case _:
            assert_never(best)


# ---- what there is -------------------------------------------------------------------------------


def _site(snapshot: PlacementSnapshot) -> Site | _Blocked:
    spec, partition = snapshot.placement.spec, snapshot.partition
    if partition is None:
        return _Blocked("PartitionNotFound", f"there is no Partition {spec.partition_ref.name}")
    document = current_document(partition, snapshot.document)
    if document is None:
        known = partition.status.conditions if partition.status is not None else ()
        said = message_of(known, "Ready") if not holds(known, "Ready") else ""
        name = partition.metadata.name
        return _Blocked("PartitionNotReady", f"Partition {name} is not ready: {said or 'waiting'}")
    if snapshot.pool is None:
        return _Blocked("PoolNotFound", f"there is no DevicePool {spec.pool_ref.name}")
    match snapshot.view:
        case Unreachable(reason=reason):
            name = snapshot.pool.metadata.name
            message = f"the coordinator of {name} does not answer: {reason}"
            return _Blocked("CoordinatorUnreachable", message)
        case CoordinatorView(devices=devices):
            single = snapshot.pool.spec.residency is Residency.SINGLE
            usable = tuple(
                PoolDevice(name=each.name, budget_bytes=each.budget_bytes, single=single)
                for each in sorted(devices, key=lambda device: device.name)
                if each.state in (DeviceState.READY, DeviceState.SILENT)
            )
            if not usable:
                name = snapshot.pool.metadata.name
                return _Blocked("WaitingForDevices", f"no device of {name} is connected")
            return Site(document=document, devices=usable)
        case _:
            assert_never(snapshot.view)


def _missing(previous: Plan, devices: Sequence[PoolDevice]) -> tuple[str, ...]:
    """Devices of the plan that are not there."""
    there = {device.name for device in devices}
    return tuple(name for name in _used(previous) if name not in there)


def _used(of: Plan) -> Set[str]:
    """The devices of a plan, in the order of its stages."""
    return dict.fromkeys(name for stage in of.stages for name in stage.devices).keys()


def _is_new(snapshot: PlacementSnapshot) -> bool:
    """Whether the spec was not planned yet."""
    known = snapshot.placement.status.conditions if snapshot.placement.status else ()
    return not holds_for(known, "Planned", snapshot.placement.metadata.generation or 0)


def _missing_since(snapshot: PlacementSnapshot) -> float | None:
    """For how many seconds devices of the plan are missing; None: nobody has noticed yet."""
    status = snapshot.placement.status or PlacementStatus()
    ready = find(status.conditions, "Ready")
    if ready is None or ready.status is not FALSE or ready.reason != "DevicesMissing":
        return None
    return seconds_since(ready.last_transition_time, snapshot.now)


# ---- the plan in force, or another ---------------------------------------------------------------


def _planned(
    snapshot: PlacementSnapshot, site: Site, previous: Plan | None, best: Plan
) -> Decision:
    placement = snapshot.placement
    before = placement.status or PlacementStatus()
    text = summary(best)
    if previous is not None and homes(previous) == homes(best):
        status = replace(status_of(best), epoch=previous.epoch)
        return _decision(snapshot, status, _good(text))
    if previous is not None and not _is_new(snapshot):
        gain = gain_percent(site, previous, best)
        if gain is not None and gain < _GAIN_PERCENT:
            return _decision(snapshot, before, _good(message_of(before.conditions, "Planned")))
    # A Placement that was deleted under a run begins after the plan that the run goes by.
    of_the_run = 0 if snapshot.measured is None else snapshot.measured.plan
    status = replace(status_of(best), epoch=max(before.epoch or 0, of_the_run) + 1)
    since = f"epoch {status.epoch}"
    note = Note(reason="PlannedPlacement", message=text, since=since)
    if previous is not None:
        gone = _missing(previous, site.devices)
        why = f"; without {_listed(gone)}" if gone else ""
        note = Note(reason="ReplannedPlacement", message=f"{text}{why}", since=since)
    return replace(_decision(snapshot, status, _good(text)), notes=(note,))


# ---- the status ----------------------------------------------------------------------------------


def _good(text: str) -> list[ConditionUpdate]:
    return [
        ConditionUpdate("Planned", TRUE, "Planned", text),
        ConditionUpdate("Ready", TRUE, "Ready", text),
    ]


def _patient(snapshot: PlacementSnapshot, missing: Sequence[str], seconds: float) -> Decision:
    """Devices of the plan are away: they may be back before another plan would pay."""
    before = snapshot.placement.status or PlacementStatus()
    message = f"{_listed(missing)} not connected; planned anew if that lasts"
    updates = [
        ConditionUpdate("Planned", TRUE, "Planned", message_of(before.conditions, "Planned")),
        ConditionUpdate("Ready", FALSE, "DevicesMissing", message),
    ]
    return replace(_decision(snapshot, before, updates), requeue_seconds=max(1.0, seconds))


def _blocked(snapshot: PlacementSnapshot, blocked: _Blocked) -> Decision:
    before = snapshot.placement.status or PlacementStatus()
    reason, message = blocked.reason, blocked.message
    generation = snapshot.placement.metadata.generation or 0
    if reason in ("CoordinatorUnreachable", "WaitingForDevices"):
        # The plan in force stays in force: nobody knows better. The devices' time of grace begins
        # when the first of them is seen again, which Unknown sees to.
        planned = ConditionUpdate("Planned", FALSE, reason, message)
        if before.stages and holds_for(before.conditions, "Planned", generation):
            planned = ConditionUpdate(
                "Planned", TRUE, "Planned", message_of(before.conditions, "Planned")
            )
        updates = [
            planned,
            ConditionUpdate("Ready", UNKNOWN if planned.status is TRUE else FALSE, reason, message),
        ]
    else:
        updates = [ConditionUpdate(type_, FALSE, reason, message) for type_ in ("Planned", "Ready")]
    return _decision(snapshot, before, updates)


def _infeasible(snapshot: PlacementSnapshot, problem: Infeasible) -> Decision:
    before = snapshot.placement.status or PlacementStatus()
    message = problem.message(snapshot.placement.spec.partition_ref.name)
    updates = [
        ConditionUpdate(type_, FALSE, "Infeasible", message) for type_ in ("Planned", "Ready")
    ]
    status = PlacementStatus(
        conditions=before.conditions, epoch=before.epoch, measured=before.measured
    )
    note = Note(reason="Infeasible", message=message, warning=True)
    return replace(_decision(snapshot, status, updates), notes=(note,))


def _decision(
    snapshot: PlacementSnapshot, status: PlacementStatus, updates: Sequence[ConditionUpdate]
) -> Decision:
    before = snapshot.placement.status or PlacementStatus()
    generation = snapshot.placement.metadata.generation or 0
    known = conditions(before.conditions, updates, generation=generation, now=snapshot.now)
    measured = _measured(snapshot.measured, before.measured)
    status = replace(status, conditions=known, observed_generation=generation, measured=measured)
    return Decision(status=print_placement(status))


def _measured(run: Run | None, before: Cost | None) -> Cost | None:
    """By the last job; while it runs only if nothing else is known, and not right away."""
    if run is None or not run.succeeded or run.items_per_second <= 0:
        return before
    if not run.state.is_over and (before is not None or run.seconds < _MEASURED_AFTER_SECONDS):
        return before
    latency = run.latency_p50_seconds if run.latency_p50_seconds > 0 else None
    return Cost(latency_seconds=latency, items_per_second=run.items_per_second)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
