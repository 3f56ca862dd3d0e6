"""What a run shows while it goes: a live picture on a terminal, plain lines elsewhere, also on a
dumb one, where nothing can be drawn anew.

Both are `Observer`s. The live picture has one table per job (stages with their queues), one of
devices (residency against budget), and a bar of items with throughput and the time left. Plain
lines are for logs: progress comes every `PLAIN_SECONDS`, one line per job, but once only while
nothing happens. Unless they were asked for, a phase is named once it lasts, so that a run that is
over soon prints none.
"""

import sys
import time
from threading import Timer
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal_cli.commands.columns import Columns, ColumnTable, share_bar
from shoal_cli.commands.tables import Waiting, format_done, format_seconds
from shoal_cli.local.observer import Observer, Snapshot
from shoal_protocol.units import counted, format_bytes, format_number
from shoal_protocol.v1 import coordinator_pb2 as pb
from shoal_protocol.visible import visible

PLAIN_SECONDS: Final = 5.0
LASTING_SECONDS: Final = 2.0
_BAR_WIDTH: Final = 24


def choose_progress(kind: str | None, console: Console) -> Observer:
    """The observer for `--progress`; None shows nothing."""
    if kind is None:
        return Observer()
    redraws = console.is_terminal and not console.is_dumb_terminal
    if kind == "rich" or (kind == "auto" and redraws):
        return LiveProgress(console)
    return PlainProgress(0 if kind == "plain" else LASTING_SECONDS)


class PlainProgress(Observer):
    """Lines on stderr; standard output is for the summary."""

    def __init__(self, lasting_seconds: float) -> None:
        """A phase that is over within `lasting_seconds` is not named."""
        self._lasting_seconds = lasting_seconds
        self._shown = time.monotonic()
        self._phase: Timer | None = None
        self._told: tuple[object, ...] = ()

    def phase(self, text: str) -> None:
        self.ended()
        self._shown = time.monotonic()
        if not self._lasting_seconds:
            self._print(text)
            return
        self._phase = Timer(self._lasting_seconds, self._print, [text])
        self._phase.daemon = True
        self._phase.start()

    def ended(self) -> None:
        if self._phase is not None:
            self._phase.cancel()

    def note(self, text: str) -> None:
        self._print(f"! {text}")

    def cutting(self, partition: str, done: int, total: int) -> None:
        if self._due():
            self._print(f"{partition}: {done} of {counted(total, 'fragment')} written")

    def verifying(self, job: str, done: int, total: int) -> None:
        if self._due():
            self._print(f"{job}: {done} of {counted(total, 'item')} compared")

    def measuring(self, what: str, done: int, total: int) -> None:
        if self._due():
            self._print(f"{what}: {done} of {total} measured")

    def running(self, snapshot: Snapshot) -> None:
        if not self._due():
            return
        told, self._told = self._told, _at_rest(snapshot)
        if self._told and told == self._told:
            return
        for job in snapshot.jobs:
            self._print(f"{job.name}: {_job_line(job)}")
        for device in snapshot.devices:
            used, budget = format_bytes(device.used_bytes), format_bytes(device.budget_bytes)
            parts = [f"{used} of {budget}", f"{device.queued} queued"]
            parts.append(f"{format_bytes(device.fetched_bytes)} fetched")
            if loading := _loading(device):
                parts.append(loading)
            self._print(f"  {device.name}: {', '.join(parts)}")

    def _due(self) -> bool:
        now = time.monotonic()
        if now - self._shown < PLAIN_SECONDS:
            return False
        self._shown = now
        return True

    def _print(self, text: str) -> None:
        print(visible(text), file=sys.stderr, flush=True)


class LiveProgress(Observer):
    """A picture that is drawn anew in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def phase(self, text: str) -> None:
        self._show(Waiting(text))

    def note(self, text: str) -> None:
        self._console.print(Text(f"! {text}", style="yellow"))

    def cutting(self, partition: str, done: int, total: int) -> None:
        self._show(_bar(f"cutting {partition}", done, total, f"{done}/{total} fragments"))

    def verifying(self, job: str, done: int, total: int) -> None:
        self._show(_bar(f"verifying {job}", done, total, f"{done}/{total} items"))

    def measuring(self, what: str, done: int, total: int) -> None:
        self._show(_bar(f"measuring {what}", done, total, f"{done}/{total}"))

    def running(self, snapshot: Snapshot) -> None:
        self._show(picture(snapshot))

    def ended(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, what: RenderableType) -> None:
        if self._live is None:
            self._live = Live(what, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        else:
            self._live.update(what)


def picture(snapshot: Snapshot) -> RenderableType:
    """All of a snapshot."""
    parts: list[RenderableType] = []
    for job in snapshot.jobs:
        ended = job.succeeded + job.failed
        total = None if job.following else job.items
        parts.append(_bar(Text(job.name, style="bold"), ended, total, _job_line(job)))
        parts.append(_stage_table(job))
    parts.append(_device_table(snapshot))
    return Group(*parts)


def _bar(what: str | Text, done: int, total: int | None, line: str) -> Table:
    """Without a `total` nobody knows how much there will be."""
    row = Table.grid(padding=(0, 1))
    whole = None if total is None else max(1, total)
    bar = ProgressBar(total=whole, completed=done, width=_BAR_WIDTH)
    row.add_row(what, bar, line)
    return row


def _job_line(job: pb.JobStatus) -> str:
    ended = job.succeeded + job.failed
    done = format_done(ended, job.items, following=job.following)
    parts = [done, *_tasks(job), f"{format_number(job.items_per_second)} items/s"]
    if job.failed:
        parts.append(f"{job.failed} failed")
    if job.retries:
        parts.append(f"{counted(job.retries, 'retry')}")
    if job.items_per_second > 0 and ended < job.items and not job.following:
        parts.append(f"{format_seconds((job.items - ended) / job.items_per_second)} left")
    return ", ".join(parts)


def _tasks(job: pb.JobStatus) -> list[str]:
    """How many are done of all, while that is all there is to see: of a thousand stages, no item
    may be done for a quarter of an hour. Some run again, after a loss."""
    total = job.items * len(job.stages)
    if len(job.stages) < 2 or job.succeeded or job.failed or not total:
        return []
    return [f"{min(total, sum(stage.finished for stage in job.stages))}/{total} tasks"]


def _at_rest(snapshot: Snapshot) -> tuple[object, ...]:
    """What jobs have come to that wait for files, and their devices: the same for weeks, perhaps,
    and told once. Empty while anything is under way."""
    if any(not job.following or job.succeeded + job.failed < job.items for job in snapshot.jobs):
        return ()
    jobs = ((job.name, job.items, job.failed, job.retries) for job in snapshot.jobs)
    return (*jobs, *((device.name, device.state) for device in snapshot.devices))


def _stage_table(job: pb.JobStatus) -> RenderableType:
    names: Columns[pb.StageStatus] = [("stage", lambda stage: str(stage.index))]
    columns: Columns[pb.StageStatus] = [
        ("ready", lambda stage: f"{stage.ready:8}"),
        ("running", lambda stage: f"{stage.running:8}"),
        ("finished", lambda stage: f"{stage.finished:8}"),
        ("compute", lambda stage: f"{_compute(stage):>8}"),
        ("devices", lambda stage: " ".join(stage.devices)),
    ]
    return ColumnTable(
        rows=job.stages,
        names=names,
        columns=columns,
        spare=("finished", "compute", "ready"),
        numbers=frozenset(("stage", "ready", "running", "finished", "compute")),
    )


def _compute(stage: pb.StageStatus) -> str:
    return format_seconds(stage.compute_seconds) if stage.compute_seconds else "-"


def _device_table(snapshot: Snapshot) -> RenderableType:
    names: Columns[pb.DeviceStatus] = [("device", lambda device: device.name)]
    columns: Columns[pb.DeviceStatus] = [
        ("memory", lambda device: share_bar(device.used_bytes, device.budget_bytes)),
        ("now", lambda device: format_bytes(device.used_bytes)),
        ("peak", lambda device: format_bytes(device.peak_bytes)),
        ("budget", lambda device: format_bytes(device.budget_bytes)),
        ("fetched", lambda device: format_bytes(device.fetched_bytes)),
        ("queued", lambda device: str(device.queued)),
        ("died", lambda device: str(snapshot.restarts.get(device.name, 0))),
        ("state", _state),
    ]
    return ColumnTable(
        rows=snapshot.devices,
        names=names,
        columns=columns,
        spare=("memory", "died", "fetched", "queued", "peak"),
        texts=("memory", "state"),
    )


def _loading(device: pb.DeviceStatus) -> str:
    """That it loads a fragment, where that takes long: to fetch and prepare a large one does."""
    if device.loading_seconds < LASTING_SECONDS:
        return ""
    return f"loading for {format_seconds(round(device.loading_seconds))}"


def _state(device: pb.DeviceStatus) -> Text:
    if device.state == pb.DeviceStatus.READY and (loading := _loading(device)):
        return Text(loading, style="blue")
    state = pb.DeviceStatus.State.Name(device.state).lower()
    return Text(state, style="green" if state == "ready" else "yellow")
