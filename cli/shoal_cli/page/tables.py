"""What a page says in words and numbers: the head, what went wrong, and tables."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from shoal_cli.local.report import DeviceReport, JobReport, RunReport
from shoal_cli.page.series import ACTIVITIES, device_series
from shoal_planner.outcome import duration
from shoal_protocol.partition import MODEL
from shoal_protocol.units import NANOSECONDS_PER_SECOND, counted, format_bytes, format_number

MOST_ROWS: Final = 200
MOST_NAMED: Final = 3
"""Jobs in the title."""
NOTHING: Final = "-"

R = TypeVar("R")
Columns = Sequence[tuple[str, Callable[[R], str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows below their headings; `left_out` rows are in the report only. The first `names` columns
    are text, the others numbers."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 1
    left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of the head."""

    name: str
    value: str
    wrong: bool = False


def title(jobs: Sequence[JobReport]) -> str:
    """What ran, in a line."""
    named = ", ".join(job.name for job in jobs[:MOST_NAMED])
    more = len(jobs) - MOST_NAMED
    return f"{named} and {counted(more, 'other job')}" if more > 0 else named or "no job"


def figures(report: RunReport) -> tuple[Figure, ...]:
    """The head of the page."""
    jobs, devices = report.jobs, report.devices
    items, done = sum(job.items for job in jobs), sum(job.succeeded for job in jobs)
    found = [
        Figure(name="items", value=f"{done} of {items}", wrong=done < items),
        Figure(name="the whole run", value=_seconds(report.seconds)),
    ]
    if len(jobs) == 1 and jobs[0].items_per_second:
        found += [
            Figure(name="items a second", value=format_number(jobs[0].items_per_second)),
            Figure(name="an item, median", value=_seconds(jobs[0].latency.p50_seconds)),
        ]
    if verified := sum(job.verification.items for job in jobs if job.verification):
        found.append(Figure(name="verified", value=f"{verified} of {items}"))
    if devices:
        share = max(_share(device) for device in devices)
        held = "enforced" if report.enforced else "measured only"
        over = not report.within_budget
        found.append(Figure(name=f"of a budget at most, {held}", value=f"{share:.0%}", wrong=over))
        restarts = sum(device.restarts for device in devices) + report.coordinator_restarts
        if restarts:
            found.append(Figure(name="restarts", value=str(restarts), wrong=True))
    return tuple(found)


def troubles(report: RunReport) -> tuple[str, ...]:
    """What went wrong, and what did not go as planned: a sentence each."""
    found = ["The run was interrupted."] if report.interrupted else []
    for job in report.jobs:
        if job.message and not job.complete:
            found.append(f"{job.name}: {job.message}")
        if job.verification_error:
            found.append(f"{job.name}: not verified: {job.verification_error}")
        elif job.verification is not None and not job.verification.passed:
            different = job.verification.max_rel_diff
            found.append(f"{job.name}: differs from the whole model, by up to {different:.3g}")
    for death in report.deaths:
        found.append(
            f"{death.process} {death.cause}, {death.seconds:.1f} s after the run began; "
            "it was started again"
        )
    for device in report.devices:
        if not device.within_budget:
            peak, budget = device.peak_bytes_above_floor, device.budget_bytes
            found.append(
                f"device {device.name} used {format_bytes(peak)} of its {format_bytes(budget)}"
            )
    return (*found[:MOST_ROWS], *report.notes)


def tables(report: RunReport) -> tuple[Table, ...]:
    """All that have rows."""
    found = (
        _failures(report.jobs),
        _jobs(report.jobs),
        _devices(report.devices),
        _times(report),
        *(_links(job) for job in report.jobs),
    )
    return tuple(table for table in found if table.rows)


def _table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1
) -> Table:
    whole = [tuple(row) for row in rows]
    return Table(
        title=title,
        headings=tuple(headings),
        rows=tuple(whole[:MOST_ROWS]),
        names=names,
        left_out=max(0, len(whole) - MOST_ROWS),
    )


def _failures(jobs: Sequence[JobReport]) -> Table:
    rows = [
        (job.name, failure.input or f"item {failure.item}", failure.reason)
        for job in jobs
        for failure in job.failures
    ]
    return _table("Items that failed", ("job", "input", "reason"), rows, names=3)


def _jobs(jobs: Sequence[JobReport]) -> Table:
    columns: Columns[JobReport] = (
        ("job", lambda job: job.name),
        ("state", lambda job: job.state),
        ("items", lambda job: str(job.items)),
        ("failed", lambda job: str(job.failed)),
        ("retries", lambda job: str(job.retries)),
        ("items/s", lambda job: format_number(job.items_per_second)),
        ("p50", lambda job: _seconds(job.latency.p50_seconds)),
        ("p99", lambda job: _seconds(job.latency.p99_seconds)),
    )
    return _table("Jobs", *_shown(jobs, columns), names=2)


def _devices(devices: Sequence[DeviceReport]) -> Table:
    columns: Columns[DeviceReport] = (
        ("device", lambda device: device.name),
        ("peak", lambda device: format_bytes(device.peak_bytes_above_floor)),
        ("budget", lambda device: format_bytes(device.budget_bytes)),
        ("share", lambda device: f"{_share(device):.0%}"),
        ("tasks", lambda device: str(device.tasks)),
        ("loads", lambda device: str(device.loads)),
        ("evicted", lambda device: str(device.evictions)),
        ("sent", lambda device: format_bytes(device.sent_bytes)),
        ("received", lambda device: format_bytes(device.received_bytes)),
        ("fetched", lambda device: format_bytes(device.fetched_bytes)),
        ("died", lambda device: str(device.restarts)),
        ("killed by the kernel", lambda device: str(device.out_of_memory_kills)),
    )
    return _table("Devices", *_shown(devices, columns))


def _shown(of: Sequence[R], columns: Columns[R]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row of each."""
    return [name for name, _ in columns], [[show(each) for _, show in columns] for each in of]


def _times(report: RunReport) -> Table:
    """How each device spent its time."""
    series = device_series(report.timelines, [device.name for device in report.devices])
    rows = [
        (each.name, *(_seconds(each.seconds(activity)) for activity in ACTIVITIES))
        for each in series
        if each.cells
    ]
    return _table("Time of each device", ("device", *ACTIVITIES), rows)


def _links(job: JobReport) -> Table:
    """What goes between the fragments of a job for an item, and where these are."""
    if job.cut is None:
        return _table("", (), ())
    homes = {each.index: ", ".join(each.devices) for each in job.cut.fragments}
    rows = [
        (
            "inputs" if edge.producer == MODEL else f"{edge.producer} on {homes[edge.producer]}",
            "outputs" if edge.consumer == MODEL else f"{edge.consumer} on {homes[edge.consumer]}",
            str(edge.tensors),
            "unknown" if edge.bytes_per_item is None else format_bytes(edge.bytes_per_item),
        )
        for edge in job.cut.edges
    ]
    title = f"Between the fragments of {job.model}"
    return _table(title, ("from", "to", "tensors", "bytes of an item"), rows, names=2)


def _share(device: DeviceReport) -> float:
    return device.peak_bytes_above_floor / device.budget_bytes if device.budget_bytes else 0.0


def _seconds(value: float) -> str:
    return duration(round(value * NANOSECONDS_PER_SECOND)) if value else NOTHING
