"""Placement: the plan in force, and when another one takes its place. Pure.

A plan is made from the partition's document and the devices that the pool's coordinator reports
with their budgets, and with what they and their links were measured to do. Planning takes a while,
so the controller has it done first, in a thread of its own (`question_of`), and reconciles when
there is an answer. A new plan costs: items under way start over, fragments move. So the plan in
force stays

- while a device of it is silent, or away for less than `GRACE_SECONDS` (Ready is False meanwhile);
- while its coordinator cannot be reached (Ready is Unknown);
- while a node of it is cordoned, though a new plan does without cordoned nodes, unless a budget has
  become too small for it;
- while no job will run by it any more, with what was predicted of it, as long as its devices are
  there and have room for it: they measure something else all the time, and each job of last year
  would be written for that;
- while the best plan gains less than a tenth over it. Where it gains more, or devices were lost, a
  plan that moves fewer fragments may follow instead (`shoal_planner.replanning`).

Only a plan with other stages is a new epoch. What is predicted of the plan in force changes with
each measurement, and is written once a minute (`measurements`).

Where the Partition leaves its cuts to the plan, the first question is where to cut
(`planned_cuts`). The answer is in `status.cut`, from where the Partition takes it; what is cut
already is placed meanwhile.
"""

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Final

from shoal_api.columns import print_placement
from shoal_api.kinds.placement import ChosenCut, Cost, PlacementStatus
from shoal_operator.reconcile.budgets import placement_budget
from shoal_operator.reconcile.conditions import (
    FALSE,
    TRUE,
    UNKNOWN,
    Cause,
    ConditionUpdate,
    with_conditions,
)
from shoal_operator.reconcile.decision import Decision, Note
from shoal_operator.reconcile.fragment_budgets import budgets_of
from shoal_operator.reconcile.measurements import seconds_left, without_numbers
from shoal_operator.reconcile.partition import current_document
from shoal_operator.reconcile.planned_cuts import (
    CutQuestion,
    chooser,
    chosen_cut,
    cuts_of,
    is_planned,
)
from shoal_operator.reconcile.plans import (
    Question,
    Site,
    Stages,
    assignment,
    in_force,
    is_too_much,
    status_of,
    taken_by,
    with_measured,
)
from shoal_operator.reconcile.snapshot import (
    CoordinatorView,
    CutAnswer,
    DeviceState,
    PlacementSnapshot,
    Run,
    Unreachable,
)
from shoal_operator.reconcile.times import seconds_since
from shoal_planner.devices import PoolDevice
from shoal_planner.explanation import summary
from shoal_planner.goal import Goal
from shoal_planner.outcome import Infeasible, Plan
from shoal_planner.speeds import levelled, measured_device, refined
from shoal_protocol.choices import Residency
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import listed

GRACE_SECONDS: Final = 30.0
"""What a pod needs to be started again on its node."""
_MEASURED_AFTER_SECONDS: Final = 10.0
_NAMED: Final = 8


def reconcile_placement(snapshot: PlacementSnapshot) -> Decision:
    """What is to be done about a Placement. The snapshot has the answer to its question. Where no
    job will run by it any more, its status stays true, and nothing is told."""
    decision = _reconciled(snapshot)
    return replace(decision, notes=()) if snapshot.job_ended else decision


def _reconciled(snapshot: PlacementSnapshot) -> Decision:
    question = _question(snapshot)
    if isinstance(question, Decision):
        return question
    answer = snapshot.answer
    assert isinstance(question, Question), "where to cut was not answered"
    assert answer is not None, "the question was not answered"
    if isinstance(answer, Infeasible):
        return _infeasible(snapshot, answer)
    return _planned(snapshot, question.site, answer)


def question_of(snapshot: PlacementSnapshot) -> Question | CutQuestion | None:
    """What has to be planned next before it can be reconciled; None: nothing more."""
    question = _question(snapshot)
    if isinstance(question, CutQuestion):
        return question
    return question if isinstance(question, Question) and snapshot.answer is None else None


def with_answer(
    snapshot: PlacementSnapshot, answer: CutAnswer | Plan | Infeasible
) -> PlacementSnapshot:
    """The snapshot with the answer to its question."""
    if isinstance(answer, CutAnswer):
        return replace(snapshot, cut_answer=answer)
    return replace(snapshot, answer=answer)


def _question(snapshot: PlacementSnapshot) -> Question | CutQuestion | Decision:
    """What to plan, or what to do where there is nothing to plan now."""
    document = _document(snapshot)
    chooses = _chooses(snapshot)
    if isinstance(document, Cause) and not chooses:
        return _blocked(snapshot, document)
    devices = _devices(snapshot)
    if isinstance(devices, Cause):
        return _blocked(snapshot, devices)
    previous: Stages = ()
    if not isinstance(document, Cause):
        previous = in_force(snapshot.placement, document)
    usable = _usable(snapshot, previous, devices)
    if isinstance(usable, Decision):
        return usable
    if chooses and snapshot.cut_answer is None:
        return _cut_question(snapshot, usable)
    if isinstance(document, Cause):
        return _blocked(snapshot, document)
    spec = snapshot.placement.spec
    return Question(
        site=Site(document=document, devices=refined(document, usable)),
        goal=_goal(snapshot),
        pins=spec.pins,
        previous=assignment(previous),
        anew=not snapshot.placement.holds("Planned"),
        taken=taken_by(snapshot.beside, document),
    )


def _goal(snapshot: PlacementSnapshot) -> Goal:
    """A makespan is that of the newest job by the plan, as soon as its inputs are counted."""
    goal, run = Goal(snapshot.placement.spec.objective), snapshot.measured
    return Goal(goal.objective, run.known_items) if goal.cold and run is not None else goal


def _chooses(snapshot: PlacementSnapshot) -> bool:
    """Whether this Placement is to say where its Partition is cut."""
    if not is_planned(snapshot.partition) or snapshot.table is None or snapshot.placement.spec.pins:
        return False
    first = chooser(snapshot.placements)
    return first is not None and first.metadata.name == snapshot.placement.metadata.name


def _cut_question(snapshot: PlacementSnapshot, devices: tuple[PoolDevice, ...]) -> CutQuestion:
    """The cut that there is counts, or the one that was chosen; not where the spec has changed."""
    assert snapshot.table is not None, "`_chooses` has checked"
    stored, known = snapshot.document, _before(snapshot).cut
    current = None if stored is None else cuts_of(stored)
    if current is None and known is not None:
        current = known.cuts
    if known is not None and _before(snapshot).observed_generation != snapshot.placement.generation:
        current = None
    return CutQuestion(
        stored=snapshot.table,
        devices=devices,
        objective=snapshot.placement.spec.objective,
        current=current,
        taken=taken_by(snapshot.beside, None if stored is None else stored.document),
    )


# ---- what can be planned with --------------------------------------------------------------------


def _document(snapshot: PlacementSnapshot) -> PartitionDocument | Cause:
    """What the Partition is cut into."""
    spec, partition = snapshot.placement.spec, snapshot.partition
    if partition is None:
        return Cause("PartitionNotFound", f"there is no Partition {spec.partition_ref.name}")
    if is_planned(partition) and spec.pins:
        text = f"it pins fragments by their numbers, and Partition {partition.metadata.name} leaves"
        text = f"{text} the cuts to the plan; remove the pins, or say there how it is cut"
        return Cause("PinsNeedCuts", text)
    document = current_document(partition, snapshot.document)
    if document is None and snapshot.cut_answer == CutAnswer(None):
        text = f"no cut of {partition.spec.model_ref.name} fits the devices of {spec.pool_ref.name}"
        return Cause("Infeasible", f"{text}: one of its layers is too large; raise the budget")
    if document is None:
        ready = partition.condition("Ready")
        said = ready.message if ready is not None and ready.status is not TRUE else ""
        text = f"Partition {partition.metadata.name} is not ready: {said or 'waiting'}"
        return Cause("PartitionNotReady", text)
    return document


def _usable(
    snapshot: PlacementSnapshot, previous: Stages, devices: tuple[PoolDevice, ...]
) -> tuple[PoolDevice, ...] | Decision:
    """The devices that a plan may have now; or what to do as long as the plan in force stays."""
    planned = snapshot.placement.holds("Planned")
    missing = _missing(previous, devices)
    if planned and missing:
        since = _missing_since(snapshot)
        if since is None or since < GRACE_SECONDS:
            return _in_grace_period(snapshot, missing, GRACE_SECONDS - (since or 0.0))
    spec = snapshot.placement.spec
    cordoned = snapshot.cordoned - frozenset(pin.device for pin in spec.pins)
    budgets = {device.name: device.budget_bytes for device in devices}
    fits = not is_too_much(_before(snapshot), budgets)
    stays = snapshot.job_ended and bool(previous) and not missing
    if planned and fits and (stays or cordoned & _used(previous)):
        return _unchanged(snapshot)
    usable = tuple(device for device in devices if device.name not in cordoned)
    if not usable:
        text = f"every connected device of {spec.pool_ref.name} is on a cordoned node"
        text = f"{text}; kubectl uncordon {min(cordoned)}"
        return _blocked(snapshot, Cause("WaitingForDevices", text))
    return usable


def _devices(snapshot: PlacementSnapshot) -> tuple[PoolDevice, ...] | Cause:
    """The devices of the pool that are connected."""
    spec, pool = snapshot.placement.spec, snapshot.pool
    if pool is None:
        return Cause("PoolNotFound", f"there is no DevicePool {spec.pool_ref.name}")
    name = pool.metadata.name
    if isinstance(snapshot.view, Unreachable):
        text = f"the coordinator of {name} does not answer: {snapshot.view.reason}"
        return Cause("CoordinatorUnreachable", text)
    single = pool.spec.residency is Residency.SINGLE
    usable = tuple(
        measured_device(
            each.name,
            each.budget_bytes,
            each.speed,
            each.link,
            each.times,
            cache_bytes=each.cache_bytes or None,
            single=single,
        )
        for each in sorted(snapshot.view.devices, key=lambda device: device.name)
        if each.state in (DeviceState.READY, DeviceState.SILENT)
    )
    if not usable:
        return Cause("WaitingForDevices", f"no device of {name} is connected")
    return levelled(usable)


def _missing(previous: Stages, devices: Sequence[PoolDevice]) -> tuple[str, ...]:
    """Devices of the plan that are not usable."""
    there = {device.name for device in devices}
    return tuple(name for name in _used(previous) if name not in there)


def _used(stages: Stages) -> Set[str]:
    """The devices of a plan, in the order of its stages."""
    return dict.fromkeys(name for stage in stages for name in stage.devices).keys()


def _missing_since(snapshot: PlacementSnapshot) -> float | None:
    """For how many seconds devices of the plan are missing; None: it was not reported yet."""
    ready = snapshot.placement.condition("Ready")
    if ready is None or ready.status is not FALSE or ready.reason != "DevicesMissing":
        return None
    return seconds_since(ready.last_transition_time, snapshot.now)


# ---- the plan in force, or another ---------------------------------------------------------------


def _planned(snapshot: PlacementSnapshot, site: Site, best: Plan) -> Decision:
    previous = in_force(snapshot.placement, site.document)
    text = summary(best)
    epoch = _before(snapshot).epoch or 0
    assert isinstance(snapshot.view, CoordinatorView), "`_devices` has checked"
    status = replace(
        status_of(best, site),
        budgets=budgets_of(best, site, snapshot.view.devices),
        predicted_time=snapshot.now,
        epoch=epoch,
    )
    if assignment(previous) == assignment(best.stages):
        seconds = _stays_seconds(snapshot, status)
        if seconds is None:
            return _decision(snapshot, status, _good(text))
        return replace(_unchanged(snapshot), requeue_seconds=seconds or None)
    # A Placement that was deleted under a run continues the epochs of the run's plan.
    of_the_run = 0 if snapshot.measured is None else snapshot.measured.plan
    status = replace(status, epoch=max(epoch, of_the_run) + 1)
    since = f"epoch {status.epoch}"
    note = Note("PlannedPlacement", text, since=since)
    if previous:
        gone = _missing(previous, site.devices)
        why = f"; without {listed(gone, _NAMED)}" if gone else ""
        note = Note("ReplannedPlacement", f"{text}{why}", since=since)
    decision = _decision(snapshot, status, _good(text))
    return replace(decision, notes=(*decision.notes, note))


def _stays_seconds(snapshot: PlacementSnapshot, status: PlacementStatus) -> float | None:
    """For how long the plan in force stays as it is written; 0: until something changes, None: it
    is to be written now."""
    before = _before(snapshot)
    was, now = _predictions(before), _predictions(status)
    if not snapshot.placement.holds("Planned") or without_numbers(was) != without_numbers(now):
        return None
    if (was, before.rejected) == (now, status.rejected):
        return 0.0
    return seconds_left(before.predicted_time, snapshot.now) or None


def _predictions(status: PlacementStatus) -> tuple[object, ...]:
    stages = tuple(replace(stage, measured_seconds=None) for stage in status.stages)
    return stages, status.fragments, status.budgets, status.predicted, status.makespan


# ---- the status ----------------------------------------------------------------------------------


def _before(snapshot: PlacementSnapshot) -> PlacementStatus:
    return snapshot.placement.status or PlacementStatus()


def _good(text: str) -> list[ConditionUpdate]:
    return [ConditionUpdate(type_, TRUE, type_, text) for type_ in ("Planned", "Ready")]


def _bad(cause: Cause) -> list[ConditionUpdate]:
    return [ConditionUpdate(type_, FALSE, *cause) for type_ in ("Planned", "Ready")]


def _still_planned(snapshot: PlacementSnapshot) -> ConditionUpdate:
    return ConditionUpdate("Planned", TRUE, "Planned", snapshot.placement.message("Planned"))


def _unchanged(snapshot: PlacementSnapshot) -> Decision:
    """The plan in force stays, and is good."""
    updates = _good(snapshot.placement.message("Planned"))
    return _decision(snapshot, _before(snapshot), updates)


def _in_grace_period(
    snapshot: PlacementSnapshot, missing: Sequence[str], seconds: float
) -> Decision:
    """Devices of the plan are away: they may be back before another plan would pay."""
    text = f"{listed(missing, _NAMED)} not connected; planned anew if that lasts"
    ready = ConditionUpdate("Ready", FALSE, "DevicesMissing", text)
    decision = _decision(snapshot, _before(snapshot), [_still_planned(snapshot), ready])
    return replace(decision, requeue_seconds=max(1.0, seconds))


def _blocked(snapshot: PlacementSnapshot, cause: Cause) -> Decision:
    before, updates = _before(snapshot), _bad(cause)
    passing = cause.reason in ("CoordinatorUnreachable", "WaitingForDevices")
    if passing and before.stages and snapshot.placement.holds("Planned"):
        # The plan stays in force. Ready is Unknown, so that the grace period begins when the first
        # device is connected again.
        updates = [_still_planned(snapshot), ConditionUpdate("Ready", UNKNOWN, *cause)]
    return _decision(snapshot, before, updates)


def _infeasible(snapshot: PlacementSnapshot, problem: Infeasible) -> Decision:
    before = _before(snapshot)
    cause = Cause("Infeasible", problem.message(snapshot.placement.spec.partition_ref.name))
    status = PlacementStatus(epoch=before.epoch, measured=before.measured)
    decision = _decision(snapshot, status, _bad(cause))
    return replace(decision, notes=(*decision.notes, Note(*cause, warning=True)))


def _decision(
    snapshot: PlacementSnapshot, status: PlacementStatus, updates: Sequence[ConditionUpdate]
) -> Decision:
    before, run = _before(snapshot), snapshot.measured
    budget = placement_budget(snapshot.placement, _used(status.stages), snapshot.view)
    counts = run is not None and _counts(run, before.measured)
    by_this_plan = run is not None and counts and run.plan == status.epoch
    seconds = dict(run.fragment_seconds) if run is not None and by_this_plan else {}
    status = replace(
        status,
        cut=_cut_to_have(snapshot),
        measured=_cost(run) if run is not None and counts else before.measured,
        stages=with_measured(status.stages, before.stages, seconds),
    )
    notes: tuple[Note, ...] = ()
    if status.cut is not None and (before.cut is None or before.cut.cuts != status.cut.cuts):
        since = ",".join(status.cut.cuts)
        notes = (Note("ChoseCut", status.cut.reason, since=since),)
    status = with_conditions(status, snapshot.placement, [*updates, budget], snapshot.now)
    return Decision(status=print_placement(status), notes=notes)


def _cut_to_have(snapshot: PlacementSnapshot) -> ChosenCut | None:
    """What this Placement has chosen; what another has is in that one's status."""
    if not is_planned(snapshot.partition):
        return None
    known, answer = _before(snapshot).cut, snapshot.cut_answer
    if answer is None or answer.cut is None:
        return known
    return chosen_cut(answer.cut, known)


def _counts(run: Run, before: Cost | None) -> bool:
    """What is measured is that of the last job; while it runs only if nothing else is known, and
    not right away."""
    if not run.succeeded or run.items_per_second <= 0:
        return False
    return run.state.is_over or (before is None and run.seconds >= _MEASURED_AFTER_SECONDS)


def _cost(run: Run) -> Cost:
    latency = run.latency_p50_seconds if run.latency_p50_seconds > 0 else None
    return Cost(latency_seconds=latency, items_per_second=run.items_per_second)
