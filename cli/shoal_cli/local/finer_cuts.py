"""`shoal run` cuts a model finer: which jobs, and how their reports are merged. Pure."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from shoal_cli.local.orders import JobOrder
from shoal_cli.local.report import DeviceReport, JobReport
from shoal_planner import finer_cuts
from shoal_protocol.partition import PartitionDocument

_SUMMED: Final = (
    *("loads", "evictions", "tasks", "sent_bytes", "received_bytes", "fetched_bytes"),
    *("restarts", "limit_failures", "out_of_memory_kills"),
)


def is_too_large(report: JobReport) -> bool:
    """Whether the job failed because a fragment fits on no device."""
    return report.state == "Failed" and finer_cuts.is_too_large(report.reason)


def cut_finer(order: JobOrder, document: PartitionDocument) -> JobOrder | None:
    """The job with a model cut for less than in the `document`; None where the manifests say how it
    is cut."""
    cut = order.plan.cut
    if cut.tensors or cut.fragments or cut.max_bytes or cut.pinned:
        return None
    limits = [finer_cuts.kept_limit(document, device.budget_bytes) for device in cut.devices]
    devices = tuple(
        replace(device, budget_bytes=finer_cuts.finer(limit))
        for device, limit in zip(cut.devices, limits, strict=True)
    )
    finer = replace(cut, devices=devices, finer_than=max(limits))
    return replace(order, plan=replace(order.plan, cut=finer))


def in_words(order: JobOrder, report: JobReport) -> str:
    """What happened, and what is done about it."""
    limits = [device.budget_bytes for device in order.plan.cut.devices]
    return f"{order.name}: {finer_cuts.in_words(report.message, limits)}"


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
