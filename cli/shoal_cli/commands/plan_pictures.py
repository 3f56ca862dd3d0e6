"""The picture of a plan: where its stages are and over which links, one item through them, and
many. Drawn from the plan's figures.

No library: a Gantt chart is rectangles, a topology is boxes in rows, and both share the frame,
colours and axes of `charts`, so a picture is one small file that needs nothing to be shown.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final
from xml.sax.saxutils import escape

from shoal_cli.commands.charts import RIGHT, WIDTH, Drawable, shortened, text, ticks
from shoal_planner.figures import DeviceFigures, PlanFigures, StageFigures
from shoal_planner.schedule import Bar, Phase, schedule
from shoal_protocol.units import format_bytes

MANY: Final = 12
"""Items of the second Gantt chart."""
_LEFT: Final = 150
_PLOT: Final = WIDTH - _LEFT - RIGHT
_NAME: Final = 19
"""Letters of a name beside a chart; its title has all of it."""
_ROW: Final = 36
_HEAD: Final = 52
_FOOT: Final = 56
_PHASES: Final = {
    Phase.RECEIVE: ("b", 2, 6),
    Phase.READ: ("d", 9, 16),
    Phase.COMPUTE: ("c", 9, 16),
    Phase.SEND: ("e", 26, 6),
}
"""Colour, offset within the row, height."""
_BOX: Final = (208, 88)
_BOXES: Final = 4
_GAP: Final = 12
_BETWEEN: Final = 46
"""Height between the boxes of two stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Rates in words: of each device's own link, where devices have one, and of pairs of them."""

    own: Mapping[str, str] = field(default_factory=dict)
    between: Callable[[str, str], str]


def panels(name: str, plan: PlanFigures, links: Links, idle: Sequence[str]) -> list[Drawable]:
    """What is drawn of one plan. `idle` are devices that it does without."""
    topology = Topology(f"{name}: stages and links", plan, links, idle)
    one, many = schedule(plan, 1), schedule(plan, MANY)
    if not one:
        return [topology]
    order = [each.device for stage in plan.stages for each in stage.devices]
    return [
        topology,
        Gantt("One item", _by_device(one, order)),
        Gantt(f"{MANY} items in a row", _by_device(many, order)),
    ]


def _by_device(bars: Sequence[Bar], order: Sequence[str]) -> dict[str, list[Bar]]:
    """Of those that have something to do."""
    found: dict[str, list[Bar]] = {device: [] for device in order}
    for bar in bars:
        found[bar.device].append(bar)
    return {device: own for device, own in found.items() if own}


def link_words(bytes_per_second: float | None, latency_seconds: float = 0.0) -> str:
    """`12.5 MB/s, 20 ms`; empty for a link that never limits."""
    words = []
    if bytes_per_second is not None and bytes_per_second < inf:
        words.append(f"{bytes_per_second / 1e6:.3g} MB/s")
    if latency_seconds:
        words.append(f"{1e3 * latency_seconds:.3g} ms")
    return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Gantt:
    """A row for each device, in the order of the stages: receiving above, sending below. Its items
    take turns in brightness, so that one sees where the next begins."""

    title: str
    rows: Mapping[str, Sequence[Bar]]

    def drawn(self, top: float) -> tuple[Iterable[str], float]:
        bottom = top + _HEAD + _ROW * len(self.rows)
        return self._elements(top, bottom), bottom + _FOOT

    def _elements(self, top: float, bottom: float) -> Iterator[str]:
        bars = [bar for row in self.rows.values() for bar in row]
        end = max(bar.end for bar in bars)
        unit, scale = ("ms", 1e3) if end < 1 else ("s", 1.0)
        yield text(_LEFT, top + 20, self.title, kind="name")
        yield from _legend(top + 42, {bar.phase for bar in bars})
        for value in ticks(0.0, scale * end):
            x = _LEFT + _PLOT * value / (scale * end)
            yield f'<path class="grid" d="M{x:.1f} {top + _HEAD:.1f}V{bottom:.1f}"/>'
            yield text(x, bottom + 19, f"{value:g}", anchor="middle")
        for number, (device, row) in enumerate(self.rows.items()):
            y = top + _HEAD + _ROW * number
            yield _named(_LEFT - 10, y + 22, device)
            turns = {item: turn for turn, item in enumerate(sorted({bar.item for bar in row}))}
            for bar in row:
                said = f"item {bar.item}: {bar.phase}, {scale * (bar.end - bar.begin):.3g} {unit}"
                yield _rectangle(bar, y, _PLOT / end, said, bright=turns[bar.item] % 2 == 1)
        yield f'<path class="axis" d="M{_LEFT} {bottom:.1f}h{_PLOT}"/>'
        yield text(_LEFT + _PLOT / 2, bottom + 37, unit, anchor="middle")


def _rectangle(bar: Bar, y: float, per_second: float, said: str, *, bright: bool) -> str:
    colour, offset, height = _PHASES[bar.phase]
    x, width = _LEFT + per_second * bar.begin, max(0.6, per_second * (bar.end - bar.begin))
    return (
        f'<rect class="area {colour}" x="{x:.1f}" y="{y + offset:.1f}" width="{width:.1f}" '
        f'height="{height}" opacity="{0.6 if bright else 1}"><title>{said}</title></rect>'
    )


def _legend(y: float, phases: set[Phase]) -> Iterator[str]:
    x = float(_LEFT)
    for phase, (colour, _, _) in _PHASES.items():
        if phase in phases:
            place = f'x="{x:.1f}" y="{y - 9:.1f}" width="14" height="10"'
            yield f'<rect class="area {colour}" {place} rx="2"/>'
            yield text(x + 19, y, phase)
            x += 40 + 7.1 * len(phase)


def _named(x: float, y: float, name: str) -> str:
    shown = escape(shortened(name, _NAME))
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="end"'
    return f"<text {place}><title>{escape(name)}</title>{shown}</text>"


@dataclass(frozen=True, slots=True)
class Topology:
    """The devices of each stage in boxes, stage below stage, and what goes from one to the next."""

    title: str
    plan: PlanFigures
    links: Links
    idle: Sequence[str]

    def drawn(self, top: float) -> tuple[Iterable[str], float]:
        elements = [text(RIGHT, top + 20, shortened(self.title, 110), kind="name")]
        top += _BETWEEN + _GAP
        for number, stage in enumerate(self.plan.stages):
            before = self.plan.stages[number - 1] if number else None
            elements += self._joint(top, before, stage)
            rows = [stage.devices[i : i + _BOXES] for i in range(0, len(stage.devices), _BOXES)]
            for row in rows:
                elements += [
                    each
                    for place, device in enumerate(row)
                    for each in _box(_x(place), top, stage, device, self.links.own)
                ]
                top += _BOX[1] + _GAP
            top += _BETWEEN - _GAP
        last = self.plan.stages[-1]
        elements.append(text(RIGHT, top - 22, f"results{_amount(last.sent_bytes)}"))
        if self.idle:
            elements.append(text(RIGHT, top, shortened(f"not used: {', '.join(self.idle)}", 120)))
        return elements, top + _BETWEEN / 2

    def _joint(self, top: float, before: StageFigures | None, stage: StageFigures) -> Iterator[str]:
        """Above the boxes of a stage: what comes in, and over which links."""
        if before is None:
            yield text(RIGHT, top - 12, f"inputs{_amount(stage.received_bytes)}")
            return
        above, below = top - _BETWEEN + 2, top - 2
        for one in range((len(before.devices) - 1) % _BOXES + 1):
            for other in range(min(_BOXES, len(stage.devices))):
                ends = [_x(place) + _BOX[0] / 2 for place in (one, other)]
                way = f"M{ends[0]:.1f} {above:.1f}L{ends[1]:.1f} {below:.1f}"
                yield f'<path class="way" d="{way}"/>'
        pairs = [(a.device, b.device) for a in before.devices for b in stage.devices]
        known = filter(None, dict.fromkeys(self.links.between(*pair) for pair in pairs))
        over = shortened("; ".join(known), 90)
        words = _amount(before.sent_bytes).strip() + f" over {over}" * bool(over)
        yield text(WIDTH - RIGHT, top - _BETWEEN / 2 + 4, words, anchor="end")


def _x(place: int) -> float:
    return RIGHT + place * (_BOX[0] + _GAP)


def _box(
    x: float, y: float, stage: StageFigures, device: DeviceFigures, own: Mapping[str, str]
) -> Iterator[str]:
    """A device: its name, what it serves, and how full its memory is."""
    width, height = _BOX
    yield f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{width}" height="{height}" rx="6"/>'
    title = f"<title>{escape(device.device)}</title>{escape(shortened(device.device, 23))}"
    yield f'<text class="name" x="{x + 10:.1f}" y="{y + 20:.1f}">{title}</text>'
    first, last = stage.fragments[0], stage.fragments[-1]
    served = f"{first}" if first == last else f"{first}-{last}"
    part = "" if device.share is None else f", {100 * device.share:.0f} % of items"
    if link := own.get(device.device):
        yield text(x + 10, y + 36, f"link: {link}")
    yield text(x + 10, y + 52, f"serves {served}{part}")
    held = format_bytes(device.held_bytes)
    if device.budget_bytes is None:
        yield text(x + 10, y + 68, held)
        return
    yield text(x + 10, y + 68, f"{held} of {format_bytes(device.budget_bytes)}")
    inner = width - 20
    full = inner * min(1.0, device.held_bytes / max(1, device.budget_bytes))
    colour = "d" if device.read_seconds else "b"
    for kind, size in (("area a", inner), (f"area {colour}", full)):
        place = f'x="{x + 10:.1f}" y="{y + 74:.1f}" width="{size:.1f}" height="6"'
        yield f'<rect class="{kind}" {place} rx="2"/>'


def _amount(size: float | None) -> str:
    return "" if size is None else f" {format_bytes(round(size))} an item"
