"""What runs where, before anything starts: models are cut and placed, and once more for less where
devices have measured that it does not fit."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.finer_cuts import cover_less
from shoal_cli.local.observer import Observer
from shoal_cli.local.orders import JobOrder, PlanOrder
from shoal_cli.local.planned_jobs import with_items
from shoal_cli.local.plans import find_plan
from shoal_cli.local.preparation import Prepared, prepare
from shoal_cli.local.steps import StepCrashed, StepRefused
from shoal_cli.local.workspace import Workspace
from shoal_planner.outcome import Infeasible, Plan

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
    orders: Sequence[JobOrder],
    run: Callable[[Sequence[JobOrder]], Awaitable[Sequence[T]]],
    note: Callable[[str], None],
) -> Sequence[T]:
    """What `run` makes of jobs that are cut finer; where no finer cut is possible, of the same
    jobs, planned for fewer of their larger items. Empty: nothing helps."""
    noted = False
    while orders:
        try:
            return await run(orders)
        except (StepRefused, StepCrashed, NoPlan) as error:
            if not noted:
                note(f"it cannot be cut finer: {error}")
            noted = True
            orders = [less for each in orders if (less := cover_less(each)) is not None]
    return ()
