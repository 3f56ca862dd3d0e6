"""The pictures of `shoal bench-device`: memory over time against the budget, and over several
budgets the time of an item against memory.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from shoal_cli.drawing.chart import BLUE, BROWN, GREEN, GREY, OLIVE, RED, VIOLET
from shoal_cli.drawing.panels import Area, Level, Line, Panel
from shoal_cli.drawing.svg import WIDTH, draw
from shoal_cli.local.device_figures import BudgetFigures, DeviceFigures
from shoal_cli.local.resident import Sample
from shoal_protocol.units import counted, format_bytes

MIB: Final = 1 << 20
PEER_NAMES: Final = {"default": "ONNX Runtime, default", "mapped": "ONNX Runtime, mapped"}
_PEER_COLOURS: Final = {"default": BROWN, "mapped": VIOLET}
_ITEMS_CLOSELY: Final = 3
_FAR: Final = 4
"""A budget that is above so many times what was seen would press that to the ground."""


def picture(figures: DeviceFigures) -> str:
    """The text of an SVG file."""
    subtitle = (
        f"{counted(figures.threads, 'thread')}, {counted(figures.turns, 'item')} and runs in turns;"
        " memory above the floor of the idle agent"
    )
    if len(figures.budgets) == 1:
        (only,) = figures.budgets
        title = f"{figures.model} on a device of {format_bytes(only.budget_bytes)}"
        return _drawn(title, subtitle, _over_time(only))
    panels = [curve(figures), *(_closely(each) for each in figures.budgets)]
    return _drawn(f"{figures.model} on devices of several budgets", subtitle, panels)


def _drawn(title: str, subtitle: str, panels: Sequence[Panel]) -> str:
    return draw(title, subtitle, [panel.chart(f"{n}") for n, panel in enumerate(panels)])


def curve(figures: DeviceFigures) -> Panel:
    """The time of an item against the memory that it took, with the peers' points."""
    budgets = sorted(figures.budgets, key=lambda each: each.peak_bytes)
    lines = [
        Line(
            name="Shoal",
            colour=BLUE,
            points=[(each.peak_bytes / MIB, 1e3 * each.runs.compute.median) for each in budgets],
            spreads=[_milliseconds(each.runs.compute.quartiles) for each in budgets],
        )
    ]
    for peer in figures.peers:
        times = [each.runs.peers[peer.way] for each in budgets if peer.way in each.runs.peers]
        if times:
            middle = sorted(times, key=lambda each: each.median)[len(times) // 2]
            lines.append(
                Line(
                    name=PEER_NAMES[peer.way],
                    colour=_PEER_COLOURS[peer.way],
                    points=[(peer.peak_bytes / MIB, 1e3 * middle.median)],
                    spreads=[_milliseconds(middle.quartiles)],
                )
            )
    return Panel(
        title="Time of an item against memory",
        x_title="most memory above the floor, MiB",
        y_title="ms in ONNX Runtime",
        lines=lines,
        logarithmic=True,
        height=300,
    )


def _milliseconds(quartiles: tuple[float, float]) -> tuple[float, float]:
    return 1e3 * quartiles[0], 1e3 * quartiles[1]


def _over_time(figures: BudgetFigures) -> list[Panel]:
    traced = figures.runs.traced
    title = "From the first item on: the model is fetched, prepared and opened; then items in a row"
    whole = _residency(figures, title, traced.begun, traced.items_ended, "seconds", 1.0)
    return [whole, _closely(figures)]


def _closely(figures: BudgetFigures) -> Panel:
    """The last items of those in a row."""
    traced = figures.runs.traced
    long = min(
        _ITEMS_CLOSELY * figures.runs.latency.median, traced.items_ended - traced.items_begun
    )
    title = f"A device of {format_bytes(figures.budget_bytes)}: {_ITEMS_CLOSELY} items closely"
    end = traced.items_ended
    return _residency(figures, title, end - 1.3 * long, end - 0.3 * long, "milliseconds", 1e3)


def _residency(
    figures: BudgetFigures, title: str, begin: float, end: float, unit: str, scale: float
) -> Panel:
    """The agent's memory in layers, between two moments."""
    traced = figures.runs.traced
    shown = [each for each in traced.samples if begin <= each.seconds <= end] or [traced.floor]
    layers: list[list[tuple[float, float, float]]] = [[], [], [], []]
    for sample in thinned(shown, begin, end):
        low = 0.0
        for layer, size in zip(layers, _layers(sample, traced.floor), strict=True):
            layer.append((scale * (sample.seconds - begin), low / MIB, (low + size) / MIB))
            low += size
    names = ("floor", "activations and heap", "weights", "preparation's process")
    areas = [
        Area(name=name, colour=colour, points=layer)
        for name, colour, layer in zip(names, (GREY, GREEN, BLUE, OLIVE), layers, strict=True)
        if any(high > low for _, low, high in layer)
    ]
    budget, peak = figures.budget_bytes, figures.peak_bytes
    levels = [_above_floor(figures, f"peak: floor + {format_bytes(peak)}", peak, dashed=True)]
    limit = f"floor + budget of {format_bytes(budget)}"
    if figures.floor_bytes + budget <= _FAR * (figures.floor_bytes + peak):
        levels.insert(0, _above_floor(figures, limit, budget))
    else:
        title = f"{title}; {limit} is far above"
    return Panel(
        title=title,
        x_title=unit,
        y_title="MiB resident",
        areas=areas,
        levels=levels,
    )


def _above_floor(
    figures: BudgetFigures, name: str, size_bytes: int, *, dashed: bool = False
) -> Level:
    value = (figures.floor_bytes + size_bytes) / MIB
    return Level(name=name, colour=VIOLET if dashed else RED, value=value, dashed=dashed)


def _layers(sample: Sample, floor: Sample) -> tuple[int, int, int, int]:
    activations = max(0, sample.anonymous_bytes - floor.anonymous_bytes)
    weights = max(0, sample.file_bytes - floor.file_bytes)
    floor_bytes = sample.agent_bytes - activations - weights
    return floor_bytes, activations, weights, sample.child_bytes


def thinned(samples: Iterable[Sample], begin: float, end: float) -> Sequence[Sample]:
    """The largest sample of each column of the picture: no peak goes."""
    columns: dict[int, Sample] = {}
    for sample in samples:
        column = int(WIDTH * (sample.seconds - begin) / max(end - begin, 1e-9))
        other = columns.get(column)
        if other is None or _all_bytes(sample) > _all_bytes(other):
            columns[column] = sample
    return [columns[column] for column in sorted(columns)]


def _all_bytes(sample: Sample) -> int:
    return sample.agent_bytes + sample.child_bytes
