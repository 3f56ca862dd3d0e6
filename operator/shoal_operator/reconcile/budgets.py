"""Whether devices stay within their budgets: the condition WithinBudget of a Device, of a Placement
and of an InferenceJob. Pure.

A device is over its budget from a measurement above it until `RECOVERY_SECONDS` have passed without
another, or its agent has started again. So is a Placement where the device serves a stage. An
InferenceJob where that happened while it ran stays so, because it is a record of the run. While the
coordinator does not answer, the condition stays as it was.
"""

from collections.abc import Callable, Set
from typing import Final

from shoal_api.kinds import Device, InferenceJob, Placement
from shoal_operator.reconcile.conditions import FALSE, TRUE, UNKNOWN, ConditionUpdate, as_before
from shoal_operator.reconcile.decision import Note
from shoal_operator.reconcile.snapshot import (
    ConnectedDevice,
    CoordinatorView,
    Excess,
    Unreachable,
)
from shoal_operator.reconcile.times import instant
from shoal_protocol.units import format_bytes, listed

WITHIN_BUDGET: Final = "WithinBudget"
OVER_BUDGET: Final = "OverBudget"
_GOOD: Final = ConditionUpdate(WITHIN_BUDGET, TRUE, WITHIN_BUDGET)
_UNKNOWN: Final = ConditionUpdate(
    WITHIN_BUDGET, UNKNOWN, "NotMeasured", "the coordinator has not reported it yet"
)
_NAMED: Final = 8


def device_budget(device: Device, reported: ConnectedDevice | None) -> ConditionUpdate:
    """Of a Device; `reported`: None while the coordinator says nothing of it."""
    if reported is None:
        return as_before(device, WITHIN_BUDGET) or _UNKNOWN
    excess = reported.excess
    if excess is None or not excess.is_recent:
        return _GOOD
    return ConditionUpdate(WITHIN_BUDGET, FALSE, OVER_BUDGET, excess_text(excess))


def placement_budget(
    placement: Placement, devices: Set[str], view: CoordinatorView | Unreachable
) -> ConditionUpdate:
    """Of a Placement whose plan uses these devices."""
    if isinstance(view, Unreachable):
        return as_before(placement, WITHIN_BUDGET) or _UNKNOWN
    return _of_plan(view, devices, lambda excess: excess.is_recent) or _GOOD


def job_budget(
    job: InferenceJob,
    started: str | None,
    placement: Placement | None,
    ran: Set[str],
    view: CoordinatorView | Unreachable,
    now: str,
) -> ConditionUpdate:
    """Of an InferenceJob that started at a time, or has not yet; these devices `ran` it, besides
    those of its plan."""
    before = as_before(job, WITHIN_BUDGET) or _GOOD
    if isinstance(view, Unreachable) or started is None:
        return before
    seconds = instant(now) - instant(started)
    status = None if placement is None else placement.status
    stages = () if status is None else status.stages
    used = ran | {name for stage in stages for name in stage.devices}
    return _of_plan(view, used, lambda excess: excess.seconds <= seconds) or before


def excess_note(device: Device, update: ConditionUpdate, since: str) -> tuple[Note, ...]:
    """That a device has begun to be over its budget."""
    before = device.condition(WITHIN_BUDGET)
    if update.status is not FALSE or (before is not None and before.status is FALSE):
        return ()
    return (Note(OVER_BUDGET, update.message, warning=True, since=since),)


def excess_text(excess: Excess) -> str:
    """`peaked at 126 MiB, budget 100 MiB (126 %)`; the share is rounded up."""
    peak, budget = format_bytes(excess.peak_bytes), format_bytes(excess.budget_bytes)
    percent = -(-100 * excess.peak_bytes // max(1, excess.budget_bytes))
    return f"peaked at {peak}, budget {budget} ({percent} %)"


def _of_plan(
    view: CoordinatorView, devices: Set[str], counts: Callable[[Excess], bool]
) -> ConditionUpdate | None:
    over = [
        f"{each.name} {excess_text(each.excess)}"
        for each in sorted(view.devices, key=lambda device: device.name)
        if each.name in devices and each.excess is not None and counts(each.excess)
    ]
    if not over:
        return None
    return ConditionUpdate(WITHIN_BUDGET, FALSE, OVER_BUDGET, listed(over, _NAMED, "; "))
