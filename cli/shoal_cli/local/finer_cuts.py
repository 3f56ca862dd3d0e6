"""What follows when devices have measured that fragments take more than was planned, and nothing
on them helps: the model is cut again, as if each device had less. Pure.

By how much an estimate is wrong is often not known: a trial is stopped where it exceeds the budget.
So each further cut is for three quarters of what the one before was for.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from shoal_cli.local.orders import JobOrder
from shoal_cli.local.report import DeviceReport, JobReport
from shoal_protocol.units import Bytes, format_bytes

MOST_CUTS: Final = 4
"""Of one model in one run: the last is for two fifths of the budgets."""
_TOO_LARGE: Final = "Budget"
"""The reason of a job that failed because a fragment fits on no device."""
_SUMMED: Final = (
    *("loads", "evictions", "tasks", "sent_bytes", "received_bytes", "fetched_bytes"),
    *("restarts", "limit_failures", "out_of_memory_kills"),
)


def is_too_large(report: JobReport) -> bool:
    """Whether the job failed because a fragment fits on no device."""
    return report.state == "Failed" and report.reason == _TOO_LARGE


def cut_finer(order: JobOrder) -> JobOrder | None:
    """The job with a model cut for less; None where the manifests say how it is cut."""
    cut = order.plan.cut
    if cut.tensors or cut.fragments or cut.max_bytes or cut.pinned:
        return None
    devices = tuple(
        replace(device, budget_bytes=Bytes(device.budget_bytes * 3 // 4)) for device in cut.devices
    )
    return replace(order, plan=replace(order.plan, cut=replace(cut, devices=devices)))


def in_words(order: JobOrder, report: JobReport) -> str:
    """What happened, and what is done about it."""
    sizes = [device.budget_bytes for device in order.plan.cut.devices]
    least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
    shown = least if least == most else f"{least} to {most}"
    return f"{order.name}: {report.message}; now it is cut for {shown} on each device"


def merged(reports: Iterable[DeviceReport]) -> tuple[DeviceReport, ...]:
    """One report for each device, of all that it did: counts are added, the highest peak counts."""
    found: dict[str, DeviceReport] = {}
    for now in reports:
        before = found.get(now.name)
        if before is not None:
            now = replace(  # noqa: PLW2901 - the same device
                now,
                peak_bytes_above_floor=max(
                    before.peak_bytes_above_floor, now.peak_bytes_above_floor
                ),
                tier_hits=before.tier_hits + now.tier_hits,
                **{name: getattr(before, name) + getattr(now, name) for name in _SUMMED},
            )
        found[now.name] = now
    return tuple(found.values())
