"""`shoal run` cuts a model finer: which jobs, and how their reports are merged. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from shoal_cli.local.cut_orders import CutOrder
from shoal_cli.local.orders import JobOrder
from shoal_cli.local.planned_jobs import PlannedJob
from shoal_cli.local.report import DeviceReport, JobReport
from shoal_planner import finer_cuts
from shoal_protocol.partition import Outgrown
from shoal_protocol.units import counted

_SUMMED: Final = (
    *("loads", "evictions", "tasks", "sent_bytes", "received_bytes", "fetched_bytes"),
    *("restarts", "limit_failures", "out_of_memory_kills"),
)

_ITEMS_FAILED: Final = "ItemsFailed"
_MOST_LEFT_OUT: Final = 16
"""Kinds of items; each time costs a cut, and a trial of its fragments."""


def is_too_large(report: JobReport) -> bool:
    """Whether the job failed because a fragment fits on no device."""
    return report.state == "Failed" and finer_cuts.is_too_large(report.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinerJob:
    """A job that is cut anew, and `why`, for the user. Where that cannot be, the `fallbacks` are
    tried, one after the other."""

    order: JobOrder
    why: str = ""
    fallbacks: tuple[JobOrder, ...] = ()

    def fall_back(self) -> "FinerJob | None":
        """The next thing to try; None: nothing is left."""
        if not self.fallbacks:
            return None
        order, *others = self.fallbacks
        why = f"{order.name}: items that it is too large for fail by themselves"
        return FinerJob(order=order, why=why if order.final_cut else "", fallbacks=tuple(others))


def cut_finer(reports: Iterable[tuple[PlannedJob, JobReport]]) -> list[FinerJob]:
    """The jobs that run again, by what they have come to in their cuts."""
    return [found for job, report in reports if (found := _cut_anew(job, report)) is not None]


def _cut_anew(job: PlannedJob, report: JobReport) -> FinerJob | None:
    """A job whose smaller items have run, cut for the larger ones. One of which fragments turned
    out too large for every device, cut for the sizes that items were seen to have, or, where these
    are nothing new, with those fragments divided; not where the manifests say how it is cut, or
    nobody knows what to divide."""
    cut = job.prepared.order
    if _leaves_larger(job, report):
        why = f"{counted(report.failed, 'item')} left; now it is cut for larger ones"
        return _in(replace(cut, smaller_first=False, outgrown=()), job, why)
    if not is_too_large(report) or not cut.is_free or job.order.final_cut:
        return None
    found: tuple[Outgrown, ...] = ()
    if (seen := finer_cuts.learned(cut.seen, report.seen)) is not None:
        cut = replace(cut, seen=seen, outgrown=())
    elif found := finer_cuts.to_divide(job.prepared.document, report.outgrown, cut.seen):
        cut = replace(cut, outgrown=(*cut.outgrown, *found))
    else:
        return None
    why = finer_cuts.in_words(report.message, found)
    return replace(_in(cut, job, why), fallbacks=tuple(_fallbacks(job, report)))


def _in(cut: CutOrder, job: PlannedJob, why: str) -> FinerJob:
    order = replace(job.order, plan=replace(job.order.plan, cut=cut))
    return FinerJob(order=order, why=f"{order.name}: {why}")


def _leaves_larger(job: PlannedJob, report: JobReport) -> bool:
    """Whether items have failed for which another cut was to be made; of a fragment that fits on no
    device none has."""
    if not job.prepared.rest or not report.failed:
        return False
    if report.reason != _ITEMS_FAILED and not is_too_large(report):
        return False
    listed = any(finer_cuts.TOO_LARGE in each.reason for each in report.failures)
    return listed or report.failed > len(report.failures)


def _fallbacks(job: PlannedJob, report: JobReport) -> Iterator[JobOrder]:
    """The job as far as it can run where no finer cut is possible. Where sizes are unknown, with
    the cut that it had: each run is guarded, so an item that no device has the memory for fails by
    itself. Unless every item has its verdict."""
    order = replace(job.order, plan=replace(job.order.plan, cut=job.prepared.order))
    if not finer_cuts.has_unknown_sizes(job.prepared.document):
        yield from cover_less(order)
    elif report.succeeded + report.failed < report.items:
        yield replace(order, final_cut=True)


def cover_less(order: JobOrder) -> Iterator[JobOrder]:
    """The job, cut anew for all but the largest kinds of its items, twice as many each time; none
    where nobody knows its items. What is larger than the plan covers runs by itself, guarded: an
    envelope of mixed shapes is larger than any item."""
    cut = order.plan.cut
    left_out = 2 * cut.left_out or 1
    while cut.sample is not None and left_out <= _MOST_LEFT_OUT:
        less = replace(cut, seen={}, outgrown=(), left_out=left_out)
        yield replace(order, plan=replace(order.plan, cut=less))
        left_out *= 2


def continued(before: JobReport | None, now: JobReport) -> JobReport:
    """One report of a job that ran in one cut after the other: what is counted is added. Latencies
    are those of the cut that ran the most items."""
    if before is None:
        return now
    seconds, done = before.seconds + now.seconds, now.succeeded - before.resumed
    earlier = before.succeeded - before.resumed
    return replace(
        now,
        resumed=before.resumed,
        retries=before.retries + now.retries,
        tier_hits=before.tier_hits + now.tier_hits,
        seconds=seconds,
        items_per_second=done / seconds if seconds else 0.0,
        latency=before.latency if 2 * earlier > done else now.latency,
    )


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
                has_exceeded=before.has_exceeded or now.has_exceeded,
                **{name: getattr(before, name) + getattr(now, name) for name in _SUMMED},
            )
        found[now.name] = now
    return tuple(found.values())
