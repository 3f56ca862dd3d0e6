"""What `shoal top`, `describe` and `why` draw of a view, as rich renderables."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal_cli.commands.columns import Columns, ColumnTable, facts_grid, share_bar
from shoal_cli.commands.tables import format_done, format_seconds, format_tiers, titled
from shoal_cli.live.reasons import Why
from shoal_cli.live.view import (
    CandidateView,
    DeviceView,
    HeldView,
    ItemView,
    JobView,
    StageView,
    View,
)
from shoal_protocol.units import counted, format_bytes, format_number, listed

_BAR: Final = 10
_GOOD: Final = frozenset({"Ready", "Running", "Complete", "Pending"})


def picture(
    title: str, view: View, shown_jobs: int | None = None, *, stages: bool = True
) -> RenderableType:
    """All of it: jobs with their stages, then devices. `shown_jobs`: so many jobs at most."""
    jobs = jobs_of(view)
    parts: list[RenderableType] = [Text(_headline(title, view), style="bold"), Text()]
    for job in jobs[:shown_jobs]:
        parts += [_job_bar(job), _stages(job) if stages else Text()]
    if (more := len(jobs) - len(jobs[:shown_jobs])) > 0:
        parts += [Text(f"{more} more active jobs", style="dim"), Text()]
    parts.append(device_table(view.devices))
    if view.omitted_devices:
        parts.append(Text(f"and {view.omitted_devices} more devices", style="dim"))
    return Group(*parts)


def jobs_of(view: View) -> Sequence[JobView]:
    """The jobs of a picture: those that are active, else the last one."""
    return [job for job in view.jobs if not job.has_ended] or view.jobs[:1]


def _stages(job: JobView) -> RenderableType:
    if _was_let_go(job):
        return Text()
    return Padding(stage_table(job), (0, 0, 1, 2), expand=False)


def _headline(title: str, view: View) -> str:
    ready = sum(device.state == "Ready" for device in view.devices)
    going = sum(not job.has_ended for job in view.jobs)
    parts = [
        f"{ready} of {counted(len(view.devices) + view.omitted_devices, 'device')} ready",
        f"jobs: {going} in progress, {len(view.jobs) + view.omitted_jobs - going} ended",
    ]
    if view.relayed_bytes_per_second:
        parts.append(f"{_rate_of_bytes(view.relayed_bytes_per_second)} relayed")
    return f"{title}: {', '.join(parts)}"


# ---- jobs ----------------------------------------------------------------------------------------


def _job_bar(job: JobView) -> RenderableType:
    ended = job.succeeded + job.failed
    row = Table.grid(padding=(0, 1))
    total = None if job.following else max(1, job.items)
    bar = ProgressBar(total=total, completed=ended, width=2 * _BAR)
    row.add_row(Text(job.name, style="bold"), bar, Text(job_line(job), style=_style(job.state)))
    return row


def job_line(job: JobView) -> str:
    """How far a job is, in a line."""
    state = "Completing" if job.completing else job.state
    done = job.succeeded if job.has_ended else job.succeeded + job.failed
    parts = [state, format_done(done, job.items, following=job.following)]
    if job.items_per_second is not None:
        parts.append(f"{format_number(job.items_per_second)} items/s")
    if job.failed:
        parts.append(f"{job.failed} failed")
    if job.retries:
        parts.append(f"{counted(job.retries, 'retry')}")
    if job.seconds_left is not None and not job.has_ended:
        parts.append(f"{format_seconds(job.seconds_left)} left")
    return ", ".join(parts)


def _was_let_go(job: JobView) -> bool:
    """Whether the coordinator knows nothing of its stages any more, since it has ended."""
    return job.has_ended and not job.stages


def stage_table(job: JobView) -> RenderableType:
    """One row per stage; the one that limits the others is marked."""
    if job.stages_omitted or not job.stages:
        return Text("stages not shown" if job.stages_omitted else "no stages yet", style="dim")
    names: Columns[StageView] = [
        ("stage", lambda stage: Text(f"{stage.index}{' *' if stage.limits else ''}")),
        ("devices", _who),
    ]
    columns: Columns[StageView] = [
        ("ready", lambda stage: str(stage.ready)),
        ("running", lambda stage: str(stage.running)),
        ("finished", lambda stage: str(stage.finished)),
        ("compute", lambda stage: _seconds(stage.compute_seconds)),
        ("an item every", lambda stage: _seconds(stage.period_seconds)),
    ]
    spare = ("an item every", "finished", "compute")
    return ColumnTable(rows=job.stages, names=names, columns=columns, spare=spare)


def _who(stage: StageView) -> Text:
    if stage.devices:
        return Text(" ".join(stage.devices))
    if stage.loading:
        return Text(f"loading on {' '.join(stage.loading)}", style="yellow")
    return Text("none", style="red" if stage.ready else "dim")


def job_description(job: JobView) -> RenderableType:
    """Everything of a job."""
    latency = job.latency
    facts = [
        ("state", job_line(job)),
        ("why", ": ".join(filter(None, (job.reason, job.message)))),
        (
            "on their way",
            f"{counted(job.active, 'item')}, at most {job.window} on devices" if job.window else "",
        ),
        ("resumed", f"{counted(job.resumed, 'result')} existed before" if job.resumed else ""),
        ("took", format_seconds(job.seconds) if job.seconds else ""),
        (
            "latency",
            f"half within {format_seconds(latency.p50_seconds)}, 99 of 100 within "
            f"{format_seconds(latency.p99_seconds)}, at most "
            f"{format_seconds(latency.maximum_seconds)}"
            if latency.maximum_seconds
            else "",
        ),
        ("tiers 1-4", format_tiers(job.tier_hits)),
        ("plan", f"number {job.plan}, priority {job.priority}"),
    ]
    parts: list[RenderableType] = [titled(job.name, facts_grid(facts))]
    if not _was_let_go(job):
        parts += [Text(), _planned_table(job)]
    for failure in job.failures:
        parts.append(Text(f"failed: {failure}", style="red"))
    return Group(*parts)


def _planned_table(job: JobView) -> RenderableType:
    """The stages with what the plan says of them."""
    names: Columns[StageView] = [
        ("stage", lambda stage: Text(f"{stage.index}")),
        ("planned", _planned),
        ("serve it", _who),
    ]
    columns: Columns[StageView] = [
        ("needs", lambda stage: format_bytes(stage.resident_bytes)),
        ("at least", lambda stage: format_bytes(stage.least_bytes)),
        ("ready", lambda stage: str(stage.ready)),
        ("running", lambda stage: str(stage.running)),
        ("finished", lambda stage: str(stage.finished)),
        ("compute", lambda stage: _seconds(stage.compute_seconds)),
    ]
    spare = ("at least", "finished", "ready", "running")
    return ColumnTable(rows=job.stages, names=names, columns=columns, spare=spare)


def _planned(stage: StageView) -> str:
    """`pi-4 jetson(12 MiB)`: in parentheses what a fragment in blocks is granted."""
    grants = dict(zip(stage.planned, stage.granted_bytes, strict=False))
    less = {name: grant for name, grant in grants.items() if grant < stage.resident_bytes}
    shown = (f"{n} ({format_bytes(less[n])})" if n in less else n for n in stage.planned)
    return ", ".join(shown) or "any device"


# ---- devices -------------------------------------------------------------------------------------


def device_table(devices: Sequence[DeviceView]) -> RenderableType:
    """One row per device; what none of them has takes no column."""
    names: Columns[DeviceView] = [
        ("device", lambda device: device.name),
        ("state", lambda device: Text(device.state, style=_style(device.state))),
    ]
    optional: list[tuple[str, Callable[[DeviceView], str]]] = [
        ("tasks/s", lambda device: _number(device.tasks_per_second)),
        ("in/s", lambda device: _rate_of_bytes(device.received_bytes_per_second)),
        ("out/s", lambda device: _rate_of_bytes(device.sent_bytes_per_second)),
        ("fetch/s", lambda device: _rate_of_bytes(device.fetched_bytes_per_second)),
        ("round trip", lambda device: _seconds(device.round_trip_seconds)),
        ("evicted", lambda device: str(device.evictions or "-")),
        ("cpu", lambda device: _percent(device.cpu_fraction)),
        ("celsius", lambda device: _number(device.temperature_celsius)),
        ("battery", lambda device: _percent(device.battery_fraction)),
    ]
    shown = [each for each in optional if any(each[1](device) != "-" for device in devices)]
    columns: Columns[DeviceView] = [
        ("memory", lambda device: share_bar(device.used_bytes, device.budget_bytes)),
        ("now", lambda device: format_bytes(device.used_bytes)),
        ("peak", _peak),
        ("budget", lambda device: format_bytes(device.budget_bytes)),
        ("holds", _holds),
        ("queue", lambda device: str(device.queued)),
        *shown,
        ("tiers 1-4", lambda device: format_tiers(device.tier_hits)),
    ]
    spare = (
        *("battery", "celsius", "evicted", "cpu", "fetch/s", "round trip"),
        *("tiers 1-4", "out/s", "in/s", "holds", "peak", "tasks/s", "queue"),
    )
    texts = ("memory", "holds")
    return ColumnTable(rows=devices, names=names, columns=columns, spare=spare, texts=texts)


def _peak(device: DeviceView) -> Text:
    style = "bold red" if device.over_budget else ""
    return Text(format_bytes(device.peak_bytes), style=style)


def _holds(device: DeviceView) -> str:
    """The resident fragments, as `ocr/0`, those in motion marked."""
    marks = {"Resident": "", "Loading": " loading", "Unloading": " leaving"}
    shown = [f"{held.name}{marks[held.state]}" for held in device.fragments if held.state in marks]
    return listed(shown, 6) or "-"


def _free(size: int | None) -> str:
    return "" if size is None else f"{format_bytes(size)} of the machine, or of the agent's limit"


def device_description(device: DeviceView) -> RenderableType:
    """Everything of a device."""
    state, silent = device.state, device.silent_seconds
    if state in {"Silent", "Lost", "Left"}:
        state += f", last heard of {format_seconds(silent)} ago"
    reach = "other devices reach it directly"
    if not device.reachable:
        reach = "other devices cannot reach it: what it gets is relayed"
    if device.relayed_to:
        reach += f"; it cannot reach {', '.join(device.relayed_to)}"
    budget = format_bytes(device.budget_bytes)
    cached = counted(device.cached_fragments, "fragment")
    facts = [
        ("state", state),
        ("agent", " ".join(filter(None, (device.version, device.architecture)))),
        ("budget", f"{budget} above a floor of {format_bytes(device.floor_bytes)}"),
        (
            "measured",
            f"{format_bytes(device.used_bytes)} now, {format_bytes(device.peak_bytes)} at most"
            + (": OVER BUDGET" if device.over_budget else ""),
        ),
        ("ledger", f"{format_bytes(device.resident_bytes)} of fragments"),
        ("memory free", _free(device.memory_available_bytes)),
        ("disk", f"{cached}, {format_bytes(device.cached_bytes)}"),
        (
            "work",
            f"{counted(device.queued, 'task')} queued, {device.tasks} done{_per_second(device)}",
        ),
        (
            "fragments",
            f"{counted(device.loads, 'load')}, {counted(device.evictions, 'eviction')}, "
            f"tiers 1-4 {format_tiers(device.tier_hits)}",
        ),
        ("links", reach),
        ("round trip", _seconds(device.round_trip_seconds).replace("-", "")),
        ("sensors", _sensors(device)),
    ]
    return Group(titled(device.name, facts_grid(facts)), Text(), _held_table(device.fragments))


def _per_second(device: DeviceView) -> str:
    rate = device.tasks_per_second
    return "" if rate is None else f", {format_number(rate)} a second"


def _sensors(device: DeviceView) -> str:
    readings = (
        ("processor", _percent(device.cpu_fraction)),
        ("celsius", _number(device.temperature_celsius)),
        ("battery", _percent(device.battery_fraction)),
    )
    return ", ".join(f"{name} {value}" for name, value in readings if value != "-")


def _held_table(fragments: Sequence[HeldView]) -> RenderableType:
    if not fragments:
        return Text("no fragment is resident", style="dim")
    names: Columns[HeldView] = [
        ("fragment", lambda held: held.name),
        ("state", lambda held: held.state),
        ("last failure", lambda held: held.failure or "-"),
    ]
    columns: Columns[HeldView] = [
        ("takes", lambda held: format_bytes(held.bytes)),
        ("granted", lambda held: format_bytes(held.granted_bytes) + " in blocks" * held.in_blocks),
        ("tasks", lambda held: str(held.tasks)),
    ]
    spare = ("granted",)
    return ColumnTable(rows=fragments, names=names, columns=columns, spare=spare)


# ---- why -----------------------------------------------------------------------------------------


def explanation(reasons: Why) -> RenderableType:
    """The one sentence, the rest, and the tables that prove them."""
    return Group(Text(reasons.headline, style="bold"), *_evidence(reasons))


def _evidence(reasons: Why) -> Iterator[RenderableType]:
    for finding in reasons.findings:
        yield Text(f"- {finding}")
    for stage in reasons.stages:
        if stage.candidates:
            yield Text()
            yield titled(f"Stage {stage.index}: why not here", _candidates(stage.candidates))
    if reasons.plan:
        yield Text()
        lines = (Text(f"- {sentence}") for sentence in reasons.plan)
        yield titled("Why the plan is as it is", Group(*lines))
    if reasons.items:
        yield Text()
        yield titled("Where the time of items went", _item_table(reasons.items))


def _candidates(candidates: Sequence[CandidateView]) -> RenderableType:
    names: Columns[CandidateView] = [
        ("device", lambda each: each.device),
        ("because", lambda each: each.reason),
    ]
    columns: Columns[CandidateView] = [
        ("needs", lambda each: format_bytes(each.need_bytes)),
        ("has", lambda each: format_bytes(each.have_bytes)),
        ("free", lambda each: format_bytes(each.free_bytes)),
    ]
    return ColumnTable(rows=candidates, names=names, columns=columns)


def _item_table(items: Sequence[ItemView]) -> RenderableType:
    names: Columns[ItemView] = [
        ("item", lambda item: item.input or str(item.item)),
        ("most of it", _most),
    ]
    columns: Columns[ItemView] = [
        ("took", lambda item: format_seconds(item.seconds)),
        ("waited", lambda item: format_seconds(item.waited_seconds)),
        ("moved", lambda item: format_seconds(item.moved_seconds)),
        ("computed", lambda item: format_seconds(item.computed_seconds)),
        ("stored", lambda item: format_seconds(item.stored_seconds)),
        ("retries", lambda item: str(item.retries)),
    ]
    spare = ("retries", "stored")
    return ColumnTable(rows=items, names=names, columns=columns, spare=spare)


def _most(item: ItemView) -> str:
    if item.running:
        return f"runs now on {', '.join(item.running)}"
    return "-" if item.stage is None else f"stage {item.stage} on {item.device}"


# ---- cells ---------------------------------------------------------------------------------------


def _style(state: str) -> str:
    return "green" if state in _GOOD else "red" if state in {"Lost", "Failed"} else "yellow"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _number(value: float | None) -> str:
    return "-" if value is None else format_number(value)


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.0%}"


def _rate_of_bytes(rate: float | None) -> str:
    return format_bytes(round(rate)) if rate else "-"
