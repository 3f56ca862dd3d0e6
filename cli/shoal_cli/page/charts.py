"""All charts of a page, and those of jobs and devices."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from shoal_cli.local.report import DeviceReport, JobReport, RunReport
from shoal_cli.page.chart import MIB, Chart, Spec, colour
from shoal_cli.page.graph import cut_graph
from shoal_cli.page.over_time import activity, memory, traffic
from shoal_cli.page.series import MOST_DEVICES, MOVEMENTS, device_series, movements

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
    if job.plan is None:
        return
    yield Chart(
        name=f"cut-{number}",
        title=f"How {job.model} is cut",
        text=f"{len(job.plan.fragments)} fragments in the order of the model, each with its memory "
        "and the devices that the plan gives it; lines are the tensors between them.",
        spec=cut_graph(job.plan),
    )
    times = {stage.index: stage.compute_seconds for stage in job.stages}
    rows = []
    for stage in job.plan.stages:
        measured = sum(times.get(index, 0.0) for index in stage.fragments)
        name = f"{_range(stage.fragments)} on {', '.join(stage.devices)}"
        for kind, value in (("planned", stage.compute_seconds), ("measured", measured)):
            if value:
                rows.append({"row": name, "kind": kind, "value": round(1e3 * value, 4)})
    if rows:
        yield Chart(
            name=f"compute-{number}",
            title=f"Computation of an item of {job.name}: planned and measured",
            text="Per stage: milliseconds in ONNX Runtime as the plan predicts them for the "
            "slowest device, and the median that was measured.",
            spec=_bars(rows, ("planned", "measured"), "ms of an item"),
        )


def _range(fragments: Sequence[int]) -> str:
    first, last = fragments[0], fragments[-1]
    return f"fragment {first}" if first == last else f"fragments {first}-{last}"


# ---- of devices ----------------------------------------------------------------------------------


def _planned_memory(jobs: Sequence[JobReport], devices: Sequence[DeviceReport]) -> Chart | None:
    planned: dict[str, int] = {}
    for job in jobs:
        for each in job.plan.memory if job.plan else ():
            planned[each.device] = planned.get(each.device, 0) + each.resident_bytes
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


def _transfers(devices: Sequence[DeviceReport]) -> Chart | None:
    rows = [
        {"row": device.name, "kind": kind, "value": round(size / MIB, 4)}
        for device in devices
        for kind, size in zip(
            MOVEMENTS,
            (device.sent_bytes, device.received_bytes, device.fetched_bytes),
            strict=True,
        )
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
    names = list(dict.fromkeys(str(row["row"]) for row in rows))
    return Chart(
        name="tiers",
        title="What had to be done before a task could run",
        text="Per device, of its tasks: nothing (resident), a load from its disk (cached), a load "
        "while it held nothing (idle), or an eviction first (evict).",
        spec={
            "data": {"values": rows},
            "height": 26 * len(names) + 10,
            "mark": {"type": "bar"},
            "encoding": {
                "y": {"field": "row", "type": "nominal", "title": None, "sort": names},
                "x": {
                    "field": "value", "type": "quantitative", "title": "tasks", "stack": "zero",
                },
                "color": colour(_TIERS),
                "order": {"field": "order"},
                "tooltip": [{"field": "row"}, {"field": "kind"}, {"field": "value"}],
            },
        },
    )  # fmt: skip


def _bars(rows: Sequence[Mapping[str, object]], kinds: Sequence[str], title: str) -> Spec:
    """Groups of horizontal bars, one group for each row."""
    names = list(dict.fromkeys(str(row["row"]) for row in rows))
    return {
        "data": {"values": list(rows)},
        "height": (14 * len(kinds) + 12) * len(names),
        "mark": {"type": "bar"},
        "encoding": {
            "y": {"field": "row", "type": "nominal", "title": None, "sort": names},
            "yOffset": {"field": "kind", "sort": list(kinds)},
            "x": {"field": "value", "type": "quantitative", "title": title},
            "color": colour(kinds),
            "tooltip": [
                {"field": "row", "title": " "},
                {"field": "kind", "title": " "},
                {"field": "value", "title": title},
            ],
        },
    }
