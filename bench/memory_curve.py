"""A model within several grants, from the smallest that it can run in to all it needs, beside ONNX
Runtime's default load, one with the weights mapped from the file and nothing packed, ncnn and
OpenVINO.

Memory: each way in a process of its own, the peak above its floor over five runs, by the kernel's
mark. Time: each way and the default in turns in one process, weights in the page cache; cold, with
nothing in it. A picture of each model.
"""

import mmap
import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

from measurement import RATIO, Goal, Measurement, Report, compared, measured
from memory_items import SUBJECTS
from memory_peers import NEEDS, PeerUnable, convert_for_ncnn
from memory_subjects import Bench, names, opened
from memory_ways import MIB, Task, WayFailed, in_child

from shoal_cli.drawing.chart import BLUE, BROWN, GREEN, OLIVE, VIOLET
from shoal_cli.drawing.panels import Line, Panel
from shoal_cli.drawing.svg import draw

GRANTS = 6
NAMES = {
    "granted": "Shoal",
    "default": "ONNX Runtime, default",
    "mapped": "ONNX Runtime, mapped",
    "ncnn": "ncnn",
    "openvino": "OpenVINO",
}
COLOURS = {
    "granted": BLUE,
    "default": BROWN,
    "mapped": VIOLET,
    "ncnn": GREEN,
    "openvino": OLIVE,
}


def curve(report: Report, options: Namespace) -> None:
    for name in names(report, options):
        with opened(report, name, options) as bench:
            _bandwidths(bench)
            default = _peak(bench, bench.task, None, None)
            seconds = _default_seconds(bench)
            points = {"default": [(default, 1.0)]}
            for way in ("mapped", *NEEDS):
                if point := _of_peer(bench, way, default):
                    points[way] = [point]
            points["granted"] = [_of_grant(bench, each, default) for each in _grants(bench)]
            if options.pictures is not None:
                _draw(bench, points, seconds, options.pictures)


def _of_grant(bench: Bench, size_bytes: int, default: int) -> tuple[int, float]:
    """Peak of the fragment within a grant, and its time as a share of the default's."""
    subject, least = SUBJECTS[bench.name], bench.fragment.least_bytes
    title = f"granted {size_bytes / MIB:.0f} MiB"
    aim = _goal(subject.peak if size_bytes == least else None)
    peak = _peak(bench, bench.granted(size_bytes, "peak"), default, aim, title)
    times = _times(bench, bench.granted(size_bytes, "times"), title, _goal(subject.time))
    _cold(bench, bench.granted(size_bytes, "cold"), title)
    return peak, times


def _of_peer(bench: Bench, way: str, default: int) -> tuple[int, float] | None:
    """The same of a peer, or nothing, where it cannot run the model."""
    task = replace(bench.task, way=way, turns=bench.turns)
    try:
        if way == "ncnn":
            source, feeds = Path(task.original), SUBJECTS[bench.name].inputs()
            task = replace(task, model=str(convert_for_ncnn(source, feeds, bench.folder / "ncnn")))
        times = _times(bench, replace(task, what="times"), NAMES[way], None)
        peak = _peak(bench, task, default, None)
        _cold(bench, replace(task, what="cold"), NAMES[way])
    except (PeerUnable, WayFailed) as reason:
        bench.report.note(f"{bench.name}: no figures of {NAMES[way]}: {reason}")
        return None
    return peak, times


def _peak(
    bench: Bench, task: Task, default: int | None, goal: Goal | None, title: str | None = None
) -> int:
    ((value,),) = in_child(replace(task, what="peak"))
    bench.report.add(
        Measurement(
            name=f"{bench.name} {title or NAMES[task.way]}: peak",
            value=value / MIB,
            unit="MiB",
            peer=None if default is None else default / MIB,
            ratio=None if default is None else value / default,
            goal=goal,
        )
    )
    return int(value)


def _times(bench: Bench, task: Task, title: str, goal: Goal | None) -> float:
    """How often the default's time, in the same turns."""
    ours, peers = in_child(task)
    line = compared(f"{bench.name} {title}: time", ours, peers, unit="s", goal=goal)
    bench.report.add(line)
    assert line.ratio is not None, "both were measured"
    return line.ratio


def _default_seconds(bench: Bench) -> float:
    task = replace(bench.task, what="times", turns=bench.turns)
    ours, _ = in_child(task)
    _cold(bench, replace(task, what="cold"), NAMES["default"])
    return median(ours)


def _cold(bench: Bench, task: Task, title: str) -> None:
    (begun, runs) = in_child(task)
    report, name = bench.report, f"{bench.name} {title}"
    report.add(Measurement(name=f"{name}: cold load and run", value=begun[0], unit="s"))
    if runs:
        report.add(measured(f"{name}: cold run", runs, unit="s"))


def _goal(bound: float | None) -> Goal | None:
    return None if bound is None else bound >= RATIO


def _grants(bench: Bench) -> list[int]:
    """From the least to all, each larger by the same factor."""
    least, most = bench.fragment.least_bytes, bench.fragment.resident_bytes
    count = 2 if bench.report.quick else GRANTS
    if least == most:
        return [most]
    return [round(least * (most / least) ** (step / (count - 1))) for step in range(count)]


def _bandwidths(bench: Bench) -> None:
    """The physical limit: how fast weights come from the disk, and from the page cache."""
    path = Path(bench.task.original).with_name("weights.bin")
    size = path.stat().st_size
    with path.open("rb") as file:
        for where in ("disk", "page cache"):
            if where == "disk":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = perf_counter()
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                mapped.madvise(mmap.MADV_SEQUENTIAL)
                for offset in range(0, size, mmap.PAGESIZE):
                    mapped[offset]
            rate = size / (perf_counter() - started) / 1e6
            name = f"{bench.name}: weights mapped from the {where}"
            bench.report.add(Measurement(name=name, value=rate, unit="MB/s"))


def _draw(
    bench: Bench, points: dict[str, list[tuple[int, float]]], seconds: float, folder: Path
) -> None:
    """`points` are peaks and times, these as shares of the default's `seconds`."""
    panel = Panel(
        title="Time of an item against memory",
        x_title="most memory above the floor, MiB",
        y_title="of the default's time",
        lines=[
            Line(
                name=NAMES[way],
                colour=COLOURS[way],
                points=[(peak / MIB, share) for peak, share in sorted(points[way])],
            )
            for way in NAMES
            if way in points
        ],
        logarithmic=True,
        height=320,
    )
    threads = f"{bench.task.threads} thread{'s' * (bench.task.threads != 1)}"
    subtitle = (
        f"{threads}, medians of {bench.turns} pairs with the weights in the page cache; "
        f"the default takes {1e3 * seconds:.3g} ms"
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{bench.name}.svg").write_text(draw(bench.name, subtitle, [panel.chart("curve")]))
