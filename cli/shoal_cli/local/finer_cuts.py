"""`shoal run` cuts a model finer: which jobs, and how their reports are merged. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from shoal_cli.local.orders import JobOrder
from shoal_cli.local.planned_jobs import PlannedJob
from shoal_cli.local.report import DeviceReport, JobReport
from shoal_planner import finer_cuts
from shoal_protocol.partition import Outgrown

_SUMMED: Final = (
    *("loads", "evictions", "tasks", "sent_bytes", "received_bytes", "fetched_bytes"),
    *("restarts", "limit_failures", "out_of_memory_kills"),
)

MOST_LEFT_OUT: Final = 16
"""Kinds of items; each time costs a cut, and a trial of its fragments."""


def is_too_large(report: JobReport) -> bool:
    """Whether the job failed because a fragment fits on no device."""
    return report.state == "Failed" and finer_cuts.is_too_large(report.reason)


def cut_finer(
    reports: Iterable[tuple[PlannedJob, JobReport]], note: Callable[[str], None]
) -> list[JobOrder]:
    """The jobs of which fragments turned out too large for every device: cut for the sizes that
    items were seen to have, or, where these are nothing new, with those fragments divided; not
    where the manifests say how it is cut, or nobody knows what to divide."""
    finer = []
    for job, report in reports:
        cut = job.prepared.order
        if not is_too_large(report) or cut.tensors or cut.fragments or cut.max_bytes or cut.pinned:
            continue
        found: tuple[Outgrown, ...] = ()
        if (seen := finer_cuts.learned(cut.seen, report.seen)) is not None:
            cut = replace(cut, seen=seen, outgrown=())
        elif found := finer_cuts.to_divide(job.prepared.document, report.outgrown, cut.seen):
            cut = replace(cut, outgrown=(*cut.outgrown, *found))
        else:
            continue
        note(f"{job.order.name}: {finer_cuts.in_words(report.message, found)}")
        finer.append(replace(job.order, plan=replace(job.order.plan, cut=cut)))
    return finer


def cover_less(order: JobOrder) -> JobOrder | None:
    """The job, cut anew for all but the largest kinds of its items, twice as many each time; None:
    that was done often enough, or nobody knows its items. What is larger than the plan covers runs
    by itself, guarded: an envelope of mixed shapes is larger than any item."""
    cut = order.plan.cut
    if cut.sample is None or cut.left_out >= MOST_LEFT_OUT:
        return None
    less = replace(cut, seen={}, outgrown=(), left_out=max(1, 2 * cut.left_out))
    return replace(order, plan=replace(order.plan, cut=less))


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
