"""What runs where, before anything starts: models are cut and placed, and once more for less where
devices have measured that it does not fit."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.finer_cuts import FinerJob
from shoal_cli.local.observer import Observer
from shoal_cli.local.orders import JobOrder, PlanOrder
from shoal_cli.local.planned_jobs import PlannedJob, with_items
from shoal_cli.local.preparation import Prepared, prepare
from shoal_cli.local.steps import StepCrashed, StepRefused
from shoal_cli.local.workspace import Workspace
from shoal_planner.devices import PoolDevice
from shoal_planner.outcome import Infeasible, Plan
from shoal_planner.placement import MAX_REJECTED, plan
from shoal_planner.sharing import beside, crowded, is_at_once, left_over, taken_by
from shoal_protocol.partition import PartitionDocument

T = TypeVar("T")


class NoPlan(Exception):
    """A partition fits the pool in no way."""


async def prepare_once(
    order: CutOrder, prepared: dict[str, Prepared], workspace: Workspace, observer: Observer
) -> Prepared:
    """Cut a model, unless its partition is among the `prepared` ones, where it is afterwards."""
    if order.name not in prepared:
        observer.phase(f"checking and cutting {order.model} ({order.path.name})")
        tell = partial(observer.cutting, order.name)
        prepared[order.name] = await prepare(order, workspace.store, tell)
        if prepared[order.name].note:
            observer.note(prepared[order.name].note)
    return prepared[order.name]


def plan_on_pool(order: PlanOrder, prepared: Prepared, others: Iterable[Plan] = ()) -> Plan:
    """The placement of a partition beside other plans; raises `NoPlan`."""
    found = find_plan(with_items(order, prepared), prepared, others)
    if isinstance(found, Infeasible):
        raise NoPlan(found.message(order.cut.name, prepared.advice))
    return found


async def try_finer(
    jobs: Sequence[FinerJob],
    run: Callable[[Sequence[JobOrder]], Awaitable[Sequence[T]]],
    note: Callable[[str], None],
) -> Sequence[T]:
    """What `run` makes of jobs that are cut finer; where no finer cut is possible, of their
    fallbacks. `note` receives why each of them runs. Empty: nothing helps."""
    noted = False
    while jobs:
        for why in (each.why for each in jobs if each.why):
            note(why)
        try:
            return await run([each.order for each in jobs])
        except (StepRefused, StepCrashed, NoPlan) as error:
            if not noted:
                note(f"it cannot be cut finer: {error}")
            noted = True
            jobs = [less for each in jobs if (less := each.fall_back()) is not None]
    return ()


async def plan_jobs(
    orders: Sequence[JobOrder],
    workspace: Workspace,
    observer: Observer,
    note: Callable[[str], None],
    *,
    alone: bool = False,
) -> list[PlannedJob]:
    """Jobs cut and planned, each beside those before it on its pool; `alone`: as if it had none.
    `note` receives what plans take for granted. Raises `NoPlan`, and what cutting raises."""
    prepared: dict[str, Prepared] = {}
    jobs: list[PlannedJob] = []
    for order in orders:
        known = () if alone else [(job.order.plan, job.plan) for job in jobs]
        others = plans_beside(order.plan, known)
        cut = cut_beside(order.plan, others)
        partition = await prepare_once(cut, prepared, workspace, observer)
        found = plan_on_pool(order.plan, partition, others)
        if text := assumption(order.name, found):
            note(text)
        jobs.append(PlannedJob(order=order, prepared=partition, plan=found))
    return jobs


def notes_of(jobs: Iterable[PlannedJob]) -> list[str]:
    """What was said while their models were cut, each once."""
    return list(dict.fromkeys(job.prepared.note for job in jobs if job.prepared.note))


# ---- plans, one beside the other on the pools that they share ------------------------------------


def find_plan(
    order: PlanOrder, prepared: Prepared, others: Iterable[Plan] = ()
) -> Plan | Infeasible:
    """The placement of a partition beside other plans, or why there is none."""
    document, devices = prepared.document, order.cut.devices
    taken = taken_by(others)
    if taken:
        found = _plan(order, document, left_over(devices, taken))
        if isinstance(found, Plan) and is_at_once(found):
            return _with_cuts(beside(found, taken), prepared)
    alone = _plan(order, document, devices)
    return _with_cuts(crowded(alone, taken) if isinstance(alone, Plan) else alone, prepared)


def _plan(
    order: PlanOrder, document: PartitionDocument, devices: Sequence[PoolDevice]
) -> Plan | Infeasible:
    cut = order.cut
    return plan(document, devices, cut.objective, pins=order.pins, items=cut.items)


def assumption(job: str, found: Plan) -> str:
    """What the plan of a job takes for granted; "": nothing."""
    if not found.goal.cold or found.items is not None:
        return ""
    return f"job {job}: how many items come is not known; planned for {found.goal.items}"


def cut_beside(order: PlanOrder, others: Iterable[Plan]) -> CutOrder:
    """How a partition is to be cut beside other plans: for what those leave of the devices. A cut
    of which fragments are divided is as it was."""
    if order.cut.outgrown:
        return order.cut
    taken = taken_by(others)
    left = left_over(order.cut.devices, taken) if taken else ()
    return replace(order.cut, beside=left)


def _with_cuts(found: Plan | Infeasible, prepared: Prepared) -> Plan | Infeasible:
    """A plan with the other cuts that were weighed among what lost; where there is not room for
    all, at least half of it is for the plan's own alternatives."""
    if isinstance(found, Infeasible):
        return found
    own = found.rejected[: max(MAX_REJECTED // 2, MAX_REJECTED - len(prepared.rejected))]
    return replace(found, rejected=(*own, *prepared.rejected)[:MAX_REJECTED])


def plans_beside(order: PlanOrder, known: Iterable[tuple[PlanOrder, Plan]]) -> list[Plan]:
    """The plans of other partitions on the same pool; jobs of one partition share its fragments."""
    others = {
        other.cut.name: found
        for other, found in known
        if other.pool is order.pool and other.cut.name != order.cut.name
    }
    return list(others.values())
