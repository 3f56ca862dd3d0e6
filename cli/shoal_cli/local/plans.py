"""The plans of what manifests order, one beside the other on the pools that they share. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.orders import PlanOrder
from shoal_cli.local.preparation import Prepared
from shoal_planner.devices import PoolDevice
from shoal_planner.outcome import Infeasible, Plan
from shoal_planner.placement import plan
from shoal_planner.sharing import beside, is_at_once, left_over, taken_by
from shoal_protocol.partition import PartitionDocument


def find_plan(
    order: PlanOrder, prepared: Prepared, others: Iterable[Plan] = ()
) -> Plan | Infeasible:
    """The placement of a partition beside other plans, or why there is none."""
    document, devices = prepared.document, order.cut.devices
    if taken := taken_by(others):
        found = _plan(order, document, left_over(devices, taken))
        if isinstance(found, Plan) and is_at_once(found):
            return _with_cuts(beside(found, taken), prepared)
    return _with_cuts(_plan(order, document, devices), prepared)


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
    """A plan with the other cuts that were weighed among what lost."""
    if isinstance(found, Infeasible):
        return found
    return replace(found, rejected=(*found.rejected, *prepared.rejected))


def plans_beside(order: PlanOrder, known: Iterable[tuple[PlanOrder, Plan]]) -> list[Plan]:
    """The plans of other partitions on the same pool; jobs of one partition share its fragments."""
    others = {
        other.cut.name: found
        for other, found in known
        if other.pool is order.pool and other.cut.name != order.cut.name
    }
    return list(others.values())
