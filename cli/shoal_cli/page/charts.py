"""All charts of a page, and those of jobs and devices."""

from collections.abc import Iterable, Sequence
from typing import Final

from shoal_cli.drawing.bands import Row
from shoal_cli.drawing.chart import MIB, Chart, Spec, colour, layer, quantity
from shoal_cli.local.report import DeviceReport, JobReport, RunReport, StageReport, TaskTime
from shoal_cli.page.graph import cut_graph
from shoal_cli.page.over_time import activity, memory, traffic
from shoal_cli.page.series import MOST_DEVICES, MOVEMENTS, device_series, movements
from shoal_protocol.units import counted

_MOST_ROWS: Final = 64
_TIERS: Final = ("resident", "cached", "idle", "evict")


def charts(report: RunReport) -> tuple[Chart, ...]:
    """All that the report has data for, in the order of the page."""
    series = device_series(report.timelines, [device.name for device in report.devices])
    devices = report.devices[:MOST_DEVICES]
    jobs = [_job_charts(number, job) for number, job in enumerate(report.jobs)]
    found = (
        activity(series),
        memory(series, devices),
        *(chart for charts in jobs for chart in charts),
        _planned_memory(report.jobs, devices),
        traffic(movements(report.timelines)),
        _transfers(devices),
        _tiers(devices),
    )
    return tuple(chart for chart in found if chart is not None)


# ---- of a job ------------------------------------------------------------------------------------


def _job_charts(number: int, job: JobReport) -> Iterable[Chart]:
    if job.cut is not None:
        yield Chart(
            name=f"cut-{number}",
            title=f"How {job.model} is cut",
            text=f"{counted(len(job.cut.fragments), 'fragment')} in the order of the model, with "
            "memory and the devices that the plan gives them; lines are the tensors between them.",
            spec=cut_graph(job.cut),
        )
    times = _slowest(job.stages)
    rows = [
        {"row": f"{stage.index} on {time.device}", "kind": kind, "value": round(1e3 * value, 4)}
        for stage, time in times
        for kind, value in (
            ("planned", time.predicted_seconds),
            ("measured", time.measured_seconds),
        )
        if value
    ]
    if rows:
        yield Chart(
            name=f"compute-{number}",
            title=f"Tasks of {job.name}: planned and measured",
            text="Per fragment and device: milliseconds of a task as the plan predicts them, and "
            "the mean of the last ones."
            + (" The slowest are shown." if len(times) == _MOST_ROWS else ""),
            spec=_bars(rows, ("planned", "measured"), "ms of a task"),
        )


def _slowest(stages: Sequence[StageReport]) -> list[tuple[StageReport, TaskTime]]:
    """The times that are shown, in the order of the model."""
    times = [(stage, time) for stage in stages for time in stage.times]
    times.sort(key=lambda each: each[1].measured_seconds, reverse=True)
    return sorted(times[:_MOST_ROWS], key=lambda each: each[0].index)


# ---- of devices ----------------------------------------------------------------------------------


def _planned_memory(jobs: Sequence[JobReport], devices: Sequence[DeviceReport]) -> Chart | None:
    planned = _planned_bytes(jobs, devices)
    rows = [
        {"row": device.name, "kind": kind, "value": round(size / MIB, 3)}
        for device in devices
        for kind, size in (
            ("planned", planned.get(device.name, 0)),
            ("measured", device.peak_bytes_above_floor),
        )
    ]
    if not planned or not any(row["value"] for row in rows):
        return None
    return Chart(
        name="planned-memory",
        title="Memory: planned and measured",
        text="Per device: what its fragments need by the plan, and the highest peak "
        "above the floor.",
        spec=_bars(rows, ("planned", "measured"), "MiB above the floor"),
    )


def _planned_bytes(jobs: Sequence[JobReport], devices: Sequence[DeviceReport]) -> dict[str, int]:
    """Per device, what it holds at once by the plan. Of a job without figures of its plan: all that
    the fragments need that it has, or what they were granted."""
    granted = {
        (device.name, held.partition, held.index): held.granted_bytes
        for device in devices
        for held in device.fragments
    }
    planned: dict[str, int] = {}
    for job in jobs:
        if job.plan is not None:
            held = [(each.device, each.held_bytes) for s in job.plan.stages for each in s.devices]
        else:
            held = [
                (name, granted.get((name, job.partition, each.index)) or each.resident_bytes)
                for each in (job.cut.fragments if job.cut else ())
                for name in each.devices
            ]
        for name, size in held:
            planned[name] = planned.get(name, 0) + size
    return planned


def _transfers(devices: Sequence[DeviceReport]) -> Chart | None:
    rows = [
        {
            "row": device.name,
            "kind": kind,
            "value": round(getattr(device, f"{kind}_bytes") / MIB, 4),
        }
        for device in devices
        for kind in MOVEMENTS
    ]
    if not any(row["value"] for row in rows):
        return None
    return Chart(
        name="transfers",
        title="Transfers of each device",
        text="Per device: activations and results sent, activations and inputs received, and "
        "fragments fetched into its cache.",
        spec=_bars(rows, MOVEMENTS, "MiB"),
    )


def _tiers(devices: Sequence[DeviceReport]) -> Chart | None:
    rows = [
        {"row": device.name, "kind": tier, "order": order, "value": hits}
        for device in devices
        for order, tier in enumerate(_TIERS)
        if (hits := getattr(device.tier_hits, tier))
    ]
    if not rows:
        return None
    return Chart(
        name="tiers",
        title="What had to be done before a task could run",
        text="Per device, of its tasks: nothing (resident), a load from its disk (cached), a load "
        "while it held nothing (idle), or an eviction first (evict).",
        spec=_horizontal(
            rows,
            26 * len(_names(rows)) + 10,
            x=quantity("value", title="tasks", stack="zero"),
            color=colour(_TIERS),
            order={"field": "order"},
            tooltip=[{"field": "row"}, {"field": "kind"}, {"field": "value"}],
        ),
    )


def _bars(rows: Sequence[Row], kinds: Sequence[str], title: str) -> Spec:
    """Groups of horizontal bars, one group for each row."""
    return _horizontal(
        rows,
        (14 * len(kinds) + 12) * len(_names(rows)),
        yOffset={"field": "kind", "sort": list(kinds)},
        x=quantity("value", title=title),
        color=colour(kinds),
        tooltip=[
            {"field": "row", "title": " "},
            {"field": "kind", "title": " "},
            {"field": "value", "title": title},
        ],
    )


def _horizontal(rows: Sequence[Row], height: int, **encoding: object) -> Spec:
    """Bars in the order of their rows."""
    y = {"field": "row", "type": "nominal", "title": None, "sort": _names(rows)}
    return {**layer(rows, {"type": "bar"}, y=y, **encoding), "height": height}


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(row["row"]) for row in rows))
