"""What `shoal` prints once: the summary of a run, the table of a partition, as rich renderables."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from pathlib import Path
from typing import Final, TypeVar

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.spinner import Spinner
from rich.text import Text

from shoal_cli.commands.columns import Columns, ColumnTable, written_out
from shoal_cli.local.report import (
    DeviceReport,
    FragmentHeld,
    JobReport,
    RunReport,
    TierHits,
    Verification,
)
from shoal_planner.explanation import Table as Explained
from shoal_protocol.heap_reserve import HEAP_RESERVE_BYTES
from shoal_protocol.units import counted, format_bytes, format_number
from shoal_protocol.visible import visible, visible_line

FAILURES_SHOWN = 8
LOG_COLUMNS = 200

R = TypeVar("R")

_MUCH_KEPT: Final = 1 << 30


class _Terminal(Console):
    """Names of models, tensors and files are text: what is in one is no command (`visible`), nor is
    `[/0]` markup. Texts are written out before their lines are broken, or these would be longer
    than the terminal is wide, and lose their ends."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        if isinstance(renderable, Text):
            renderable = written_out(renderable)
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


def output() -> Console:
    """Standard output. A file or a pipe has no width, so there nothing is broken or cut short."""
    environment = _environment()
    if sys.stdout.isatty() or "COLUMNS" in environment:
        return _Terminal(markup=False, _environ=environment)
    return _Terminal(width=LOG_COLUMNS, markup=False, soft_wrap=True)


def errors() -> Console:
    """Standard error: progress and notes."""
    return _Terminal(stderr=True, markup=False, _environ=_environment())


def _environment() -> dict[str, str]:
    """Without a width of 0, as programs give it that know none: nothing would be printed."""
    columns = os.environ.get("COLUMNS", "")
    known = columns.isdecimal() and int(columns) > 0
    return {name: text for name, text in os.environ.items() if known or name != "COLUMNS"}


class Waiting:
    """A sign of life: what goes on, and how long already once that is more than a second."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._started = time.monotonic()
        self._spinner = Spinner("dots")

    def __rich__(self) -> Spinner:
        seconds = int(time.monotonic() - self._started)
        elapsed = f" {seconds} s" if seconds else ""
        self._spinner.update(text=Text(f"{self._what} ...{elapsed}", style="dim"))
        return self._spinner


def working(what: str) -> Live:
    """A sign of life on standard error while something long runs; a terminal alone shows it."""
    return Live(Waiting(what), console=errors(), refresh_per_second=8, transient=True)


def fetching(*, far: bool) -> AbstractContextManager[object]:
    """While what manifests name is fetched, if any of it is `far`."""
    return working("fetching what the manifests name") if far else nullcontext()


def sending(*, far: bool) -> AbstractContextManager[object]:
    """While results are sent to addresses of other machines, if any is `far`."""
    return working("sending results") if far else nullcontext()


def measuring() -> Live:
    """While this machine is measured."""
    return working("measuring this machine, once")


def print_summary(console: Console, report: RunReport, *, logs_stay: bool = True) -> None:
    """What the run did; where the logs are, if something failed and they are kept."""
    begun = any(job.items or job.complete for job in report.jobs)
    if begun:
        console.print(titled("Jobs", job_table(report.jobs)))
        console.print()
    for note in report.notes:
        console.print(Text(f"! {note}"), soft_wrap=True)
    failures = [line for job in report.jobs for line in _failure_lines(job)]
    for line in failures:
        console.print(line, highlight=False)
    if (report.notes or failures) and begun:
        console.print()
    if begun and report.devices:
        console.print(titled("Devices", device_table(report.devices)))
        console.print(_enforcement_line(report), highlight=False)
        for device in report.devices:
            if not device.within_budget:
                console.print(Text(over_budget_line(device), style="bold red"))
    for job in report.jobs:
        _print_verification(console, job, report)
    if begun and logs_stay and not (report.succeeded or report.interrupted):
        text = f"logs of the coordinator and of each device: {Path(report.work) / 'logs'}"
        console.print(Text(text), soft_wrap=True)


def print_kept(console: Console, folder: str, kept_bytes: int) -> None:
    """What the work folder takes of the disk, where that is much."""
    if kept_bytes >= _MUCH_KEPT:
        text = f"{format_bytes(kept_bytes)} of fragments stay in {folder}, so that the next run "
        text += "begins sooner; --no-keep leaves none"
        console.print(Text(text), soft_wrap=True)


def _print_verification(console: Console, job: JobReport, report: RunReport) -> None:
    if job.verification_error:
        console.print(Text(_not_verified(job), style="bold red"))
    if job.verification is not None:
        whose = f"{job.name}: " if len(report.jobs) > 1 else ""
        line = _verification_line(job.verification, report.devices)
        console.print(Text(whose, style=line.style).append_text(line), highlight=False)


def _not_verified(job: JobReport) -> str:
    return f"{job.name}: not verified: {job.verification_error}"


def job_table(jobs: Sequence[JobReport]) -> RenderableType:
    """One row per job; what is nothing for all of them has no column."""
    columns: Columns[JobReport] = [
        ("items", lambda job: f"{job.succeeded}/{job.items}"),
        *_counts(jobs, before="resumed", failed="failed", retries="retries"),
        ("items/s", lambda job: format_rate(0 if job.ran_nothing else job.items_per_second)),
        ("p50", lambda job: _latency(job.latency.p50_seconds)),
        ("p90", lambda job: _latency(job.latency.p90_seconds)),
        ("p99", lambda job: _latency(job.latency.p99_seconds)),
    ]
    names: Columns[JobReport] = [
        ("job", lambda job: job.name),
        ("state", lambda job: Text(job.state, style="green" if job.complete else "red")),
    ]
    spare = ("p90", "p99", "before", "retries", "p50", "items/s", "failed")
    return ColumnTable(rows=jobs, names=names, columns=columns, spare=spare)


def device_table(devices: Sequence[DeviceReport]) -> RenderableType:
    """One row per device: memory against budget, work, bytes."""
    columns: Columns[DeviceReport] = [
        ("floor", lambda device: format_bytes(device.floor_bytes)),
        ("peak of budget", _peak),
        ("loads", lambda device: str(device.loads)),
        *_counts(devices, evicted="evictions"),
        ("tiers 1-4", lambda device: format_tiers(device.tier_hits)),
        ("moved", lambda device: format_bytes(device.sent_bytes + device.received_bytes)),
        ("fetched", lambda device: format_bytes(device.fetched_bytes)),
        *_counts(devices, died="restarts"),
    ]
    names: Columns[DeviceReport] = [
        ("device", lambda device: device.name),
        ("has", _fragments),
    ]
    spare = ("fetched", "moved", "floor", "tiers 1-4", "loads", "evicted", "died")
    return ColumnTable(rows=devices, names=names, columns=columns, spare=spare)


def _counts(rows: Sequence[R], **fields: str) -> Columns[R]:
    """Columns of counts, by heading; none for one that is zero in every row."""

    def column(heading: str, field: str) -> tuple[str, Callable[[R], str]]:
        return heading, lambda row: str(getattr(row, field))

    return [
        column(heading, field)
        for heading, field in fields.items()
        if any(getattr(row, field) for row in rows)
    ]


def _latency(seconds: float) -> str:
    """`12.3 ms`; `-` where no item ran in this run."""
    return format_seconds(seconds) if seconds else "-"


def _peak(device: DeviceReport) -> Text:
    """`20.1 of 24 MiB, 84 %`"""
    share = device.peak_bytes_above_floor / device.budget_bytes if device.budget_bytes else 0.0
    peak, budget = format_bytes(device.peak_bytes_above_floor), format_bytes(device.budget_bytes)
    if peak.split()[1] == budget.split()[1]:
        peak = peak.split()[0]
    style = "green" if device.within_budget else "bold red"
    return Text(f"{peak} of {budget} {share:.0%}", style=style)


def explained_table(explained: Explained) -> RenderableType:
    """One table of an explanation, below an empty line."""
    columns: Columns[tuple[str, ...]] = [
        (heading, itemgetter(index)) for index, heading in enumerate(explained.headings)
    ]
    table = ColumnTable(
        rows=explained.rows,
        names=columns[:1],
        columns=columns[1:],
        spare=explained.headings[:0:-1],
        numbers=explained.numbers,
        wrap=True,
    )
    return Group(Text(), titled(explained.title, table))


def format_tiers(hits: TierHits) -> str:
    return f"{hits.resident}/{hits.cached}/{hits.idle}/{hits.evict}"


def format_done(ended: int, items: int, *, following: bool) -> str:
    """`3/10 items`; while more may come, nobody knows of how many."""
    if not following:
        return f"{ended}/{items} items"
    return f"{ended:,} done" if ended < items else f"{ended:,} done, waiting for more"


def format_seconds(seconds: float) -> str:
    """`830 us`, `12.3 ms`, `4.56 s`, `3 min 20 s`."""
    if seconds >= 100:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{format_number(seconds / scale)} {unit}"
    return f"{seconds / 1e-6:.0f} us"


def format_rate(per_second: float) -> str:
    """`38.2`; `-` where nothing was done."""
    return format_number(per_second) if per_second else "-"


def format_count(count: int | None) -> str:
    """`1.23 G`; `unknown` for None."""
    if count is None:
        return "unknown"
    size = float(count)
    for unit in ("", " k", " M", " G"):
        if size < 1000:
            return f"{format_number(size)}{unit}"
        size /= 1000
    return f"{format_number(size)} T"


def titled(title: str, table: RenderableType) -> RenderableType:
    """A title that is broken at the terminal's width; a table's own would be at the table's."""
    return Group(Text(title, style="bold"), table)


def _fragments(device: DeviceReport) -> str:
    """`0-2 5, 3 in blocks`; one line per partition, with its name where there are several."""
    partitions: dict[str, list[FragmentHeld]] = {}
    for held in device.fragments:
        partitions.setdefault(held.partition, []).append(held)
    if len(partitions) <= 1:
        return " ".join(map(_held, partitions.values())) or "-"
    return "\n".join(f"{name}: {_held(fragments)}" for name, fragments in partitions.items())


def _held(fragments: Sequence[FragmentHeld]) -> str:
    whole = _ranges([each.index for each in fragments if each.granted_bytes is None])
    swapped = _ranges([each.index for each in fragments if each.granted_bytes is not None])
    return ", ".join(filter(None, (whole, swapped and f"{swapped} in blocks")))


def _ranges(indices: Sequence[int]) -> str:
    """`0-2 5` for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return " ".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)


def _failure_lines(job: JobReport) -> list[Text]:
    style = "" if job.complete else "red"
    lines = [Text(f"{job.name}: {_what_failed(job)}", style=style)] if job.message else []
    if job.ran_nothing and not job.message:
        done = f"all {counted(job.items, 'item')} had their results before"
        lines.append(Text(f"{job.name}: nothing was left to compute: {done}"))
    for failure in job.failures[:FAILURES_SHOWN]:
        where = failure.input or f"item {failure.item}"
        reason = failure.reason.removeprefix(f"{where}: ")
        lines.append(Text(f"{job.name}: {visible_line(where)}: {reason}", style="red"))
    if job.failed > FAILURES_SHOWN:
        lines.append(Text(f"{job.name}: {job.failed - FAILURES_SHOWN} more in failures.json"))
    return lines


def trouble_lines(report: RunReport) -> Iterator[str]:
    """What is said of a run of which nothing else is shown: nothing where all went well."""
    for job in report.jobs:
        if not (job.complete or report.interrupted):
            yield from (line.plain for line in _failure_lines(job))
        if job.verification_error:
            yield _not_verified(job)
        elif job.verification is not None and not job.verification.passed:
            yield f"{job.name}: {_verification_line(job.verification, ()).plain}"
    for device in report.devices:
        if not device.within_budget:
            yield over_budget_line(device)


def _what_failed(job: JobReport) -> str:
    if job.reason != "ItemsFailed":
        return job.message
    others = f"the results of the other {job.succeeded} are in" if job.succeeded else "see"
    return f"{job.failed} of {counted(job.items, 'item')} failed; {others} {job.outputs}"


def _enforcement_line(report: RunReport) -> Text:
    kills = sum(device.out_of_memory_kills for device in report.devices)
    mode, reason = report.enforcement.mode, report.enforcement.reason
    if report.enforced:
        grows = format_bytes(HEAP_RESERVE_BYTES)
        line = f"budgets: enforced by {mode}, limit = charged to the idle agent + {grows} + budget"
    else:
        unlimited = [device.name for device in report.devices if device.limit_bytes is None]
        if mode != "none" and unlimited:
            reason = f"{mode} set no limit for {', '.join(unlimited)}"
        elif mode != "none":
            reason = f"{mode} limits what is charged to a device, not what others brought there"
        line = f"budgets: measured only ({reason})"
    if mode != "none":
        line += f"; {kills} out-of-memory kills"
    if report.within_budget:
        line += "; every device inside its budget"
    return Text(line, style="red" if kills else "")


def over_budget_line(device: DeviceReport) -> str:
    """What a device took of what it had, and what to do."""
    percent = math.ceil(100 * device.peak_bytes_above_floor / max(1, device.budget_bytes))
    return (
        f"device {device.name} used {format_bytes(device.peak_bytes_above_floor)} of its "
        f"{format_bytes(device.budget_bytes)}, {percent}%: OVER BUDGET; give it more memory or cut "
        "the model into more fragments"
    )


def interrupted_line(report: RunReport) -> str:
    """How far an interrupted run came, and how to continue it."""
    items = sum(job.items for job in report.jobs)
    if not items:
        return "interrupted before the first item; run the same command again"
    done = sum(job.succeeded for job in report.jobs)
    return (
        f"interrupted with {done} of {counted(items, 'item')} done; run the same command again to "
        "resume"
    )


def _of(verification: Verification) -> str:
    """`16 items`, `16 of 10000 items`"""
    compared, there = verification.items, verification.of_items
    return (
        f"{compared} of {counted(there, 'item')}"
        if compared < there
        else f"{counted(compared, 'item')}"
    )


def _verification_line(verification: Verification, devices: Sequence[DeviceReport]) -> Text:
    whole = format_bytes(verification.peak_bytes)
    line = (
        f"verified {_of(verification)} against the whole model: largest difference "
        f"{verification.max_abs_diff:.2g} absolute, {verification.max_rel_diff:.2g} relative; "
        f"same maxima in {verification.agreements}/{verification.items}"
    )
    if verification.reference_items:
        line += (
            f"; ONNX Runtime's own rounding (default against other options, "
            f"{counted(verification.reference_items, 'item')}): "
            f"{verification.reference_abs_diff:.2g} absolute"
        )
    if verification.skipped:
        line += f"; {verification.skipped} failed items skipped"
    if verification.mismatched:
        first = verification.worst_item
        line += f"; {counted(verification.mismatched, 'item')} cannot be compared (first: {first})"
    if verification.rounded_apart:
        line += (
            f"\n{counted(verification.rounded_items, 'item')} beyond the tolerance of "
            f"{verification.tolerance:g}, by no more than two units of rounding of the model's own "
            "half-precision numbers; a fault of that size would not show"
        )
    elif verification.matches_other_options:
        line += (
            "\nthe difference is the model's own: each item that differs "
            f"({verification.different_items}) equals the whole model under other options of "
            "ONNX Runtime"
        )
    elif verification.own_rounding:
        line += (
            f"\nthe difference is no larger than the model's own: the whole model differs from "
            f"itself by {verification.reference_rel_diff:.2g} relative when ONNX Runtime rounds "
            "otherwise; a fault of that size would not show"
        )
    if not verification.passed:
        line += f"\nDIFFERENT: more than the tolerance of {verification.tolerance:g}"
    largest = max((device.budget_bytes for device in devices), default=0)
    if largest and verification.peak_bytes:
        over = verification.peak_bytes > largest
        relation = "more than every budget" if over else "within a budget"
        line += f"\nwhole model in one process: {whole} above its floor, {relation}"
        line += f" ({format_bytes(largest)})"
    return Text(line, style="" if verification.passed else "bold red")
