"""The picture of a plan: where its stages are and over which links, one item through them, and
many. Drawn from the plan's figures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from shoal_cli.drawing.bands import Bands
from shoal_cli.drawing.chart import GREEN, GREY, ORANGE, Chart, Spec, layer, quantity
from shoal_cli.drawing.svg import WIDTH
from shoal_planner.figures import DeviceFigures, PlanFigures, StageFigures
from shoal_planner.schedule import Bar, Phase, schedule
from shoal_protocol.units import format_bytes

MANY: Final = 12
"""Items of the second Gantt chart."""
_ROW: Final = 36
_PHASES: Final = {
    Phase.RECEIVE: (0.06, 0.22),
    Phase.READ: (0.25, 0.7),
    Phase.COMPUTE: (0.25, 0.7),
    Phase.SEND: (0.73, 0.89),
}
"""Where a bar begins and ends, as parts of its row."""
_BOX: Final = (190, 88)
_BOXES: Final = 4
_GAP: Final = 12
_BETWEEN: Final = 46
"""Height between the boxes of two stages."""
_INSIDE: Final = 10

Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Rates in words: of each device's own link, where devices have one, and of pairs of them."""

    own: Mapping[str, str] = field(default_factory=dict)
    between: Callable[[str, str], str]


def charts(name: str, plan: PlanFigures, links: Links, idle: Sequence[str]) -> list[Chart]:
    """What is drawn of one plan. `idle` are devices that it does without."""
    shown = [topology(name, plan, links, idle)]
    for title, bars in (
        ("One item", schedule(plan, 1)),
        (f"{MANY} items in a row", schedule(plan, MANY)),
    ):
        if bars:
            order = [each.device for stage in plan.stages for each in stage.devices]
            shown.append(gantt(title, bars, order))
    return shown


def link_words(bytes_per_second: float | None, latency_seconds: float = 0.0) -> str:
    """`12.5 MB/s, 20 ms`; empty for a link that never limits."""
    words = []
    if bytes_per_second is not None and bytes_per_second < inf:
        words.append(f"{bytes_per_second / 1e6:.3g} MB/s")
    if latency_seconds:
        words.append(f"{1e3 * latency_seconds:.3g} ms")
    return ", ".join(words)


def gantt(title: str, bars: Sequence[Bar], order: Iterable[str]) -> Chart:
    """A row for each device that has something to do, in the order of the stages: receiving above,
    sending below. Items take turns in brightness, so that one sees where the next begins."""
    busy = {bar.device for bar in bars}
    names = [device for device in order if device in busy]
    end = max(bar.end for bar in bars)
    unit, scale = ("milliseconds", 1e3) if end < 1 else ("seconds", 1.0)
    axes = Bands(names=names, begin=0.0, end=scale * end, title=unit)
    own = {name: sorted({bar.item for bar in bars if bar.device == name}) for name in names}
    rows = [
        {
            "begin": scale * bar.begin,
            "end": scale * bar.end,
            "top": names.index(bar.device) + _PHASES[bar.phase][0],
            "bottom": names.index(bar.device) + _PHASES[bar.phase][1],
            "kind": str(bar.phase),
            "what": f"item {bar.item}",
            "opacity": 0.6 if own[bar.device].index(bar.item) % 2 else 1.0,
        }
        for bar in bars
    ]
    kinds = [str(phase) for phase in _PHASES if any(bar.phase is phase for bar in bars)]
    spec = axes.rectangles(rows, kinds, shaded=True)
    return Chart(name=title, title=title, text="", spec={"height": _ROW * len(names), **spec})


# ---- the topology --------------------------------------------------------------------------------


def topology(name: str, plan: PlanFigures, links: Links, idle: Sequence[str]) -> Chart:
    """The devices of each stage in boxes, stage below stage, and what goes from one to the next.

    Positions are in pixels from the left top corner.
    """
    ways: list[Row] = []
    boxes: list[Row] = []
    words: list[Row] = [_words(0, 4, f"inputs{_amount(plan.stages[0].received_bytes)}")]
    top = 18.0
    for before, stage in zip((None, *plan.stages), plan.stages, strict=False):
        if before is not None:
            top += _BETWEEN
            ways += _ways(top, before, stage)
            words.append(_beside(top - _BETWEEN / 2, before, stage, _over(before, stage, links)))
        for place, device in enumerate(stage.devices):
            x, y = _corner(place, top)
            boxes += _boxes(x, y, device)
            words += _inside(x, y, stage, device, links.own)
        top = _corner(len(stage.devices) - 1, top)[1] + _BOX[1]
    words.append(_words(0, top + 14, f"results{_amount(plan.stages[-1].sent_bytes)}"))
    return Chart(
        name="topology",
        title=f"{name}: stages and links",
        text=f"not used: {', '.join(idle)}" if idle else "",
        spec=_placed(top + 24, ways, boxes, words),
    )


def _corner(place: int, top: float) -> tuple[float, float]:
    """Of the box of a stage's device, `_BOXES` in a row."""
    x = (place % _BOXES) * (_BOX[0] + _GAP)
    return float(x), top + (place // _BOXES) * (_BOX[1] + _GAP)


def _ways(top: float, before: StageFigures, stage: StageFigures) -> Iterable[Row]:
    """From the last row of boxes above to the first below."""
    for one in range((len(before.devices) - 1) % _BOXES + 1):
        for other in range(min(_BOXES, len(stage.devices))):
            ends = [_corner(place, 0)[0] + _BOX[0] / 2 for place in (one, other)]
            yield {"x": ends[0], "y": top - _BETWEEN + 2, "x2": ends[1], "y2": top - 2}


def _beside(y: float, before: StageFigures, stage: StageFigures, words: str) -> Row:
    """Words to the right of the lines between two stages; where these take the whole width, at its
    end."""
    widest = max(len(before.devices), len(stage.devices))
    if widest >= _BOXES:
        return _words(WIDTH, y, words, "right")
    return _words(_corner(widest - 1, 0)[0] + _BOX[0] / 2 + 2 * _INSIDE, y, words)


def _over(before: StageFigures, stage: StageFigures, links: Links) -> str:
    """What comes in, and over which links."""
    pairs = [(a.device, b.device) for a in before.devices for b in stage.devices]
    known = filter(None, dict.fromkeys(links.between(*pair) for pair in pairs))
    over = "; ".join(known)
    return _amount(before.sent_bytes).strip() + f" over {over}" * bool(over)


def _boxes(x: float, y: float, device: DeviceFigures) -> Iterable[Row]:
    """A device, and how full its memory is."""
    yield {"x": x, "y": y, "x2": x + _BOX[0], "y2": y + _BOX[1], "opacity": 0.25, "colour": GREY}
    if device.budget_bytes is not None:
        bar = {"x": x + _INSIDE, "y": y + 74, "y2": y + 80}
        inner = _BOX[0] - 2 * _INSIDE
        full = inner * min(1.0, device.held_bytes / max(1, device.budget_bytes))
        colour = ORANGE if device.read_seconds else GREEN
        yield {**bar, "x2": bar["x"] + inner, "opacity": 0.5, "colour": GREY}
        yield {**bar, "x2": bar["x"] + full, "opacity": 1.0, "colour": colour}


def _inside(
    x: float, y: float, stage: StageFigures, device: DeviceFigures, own: Mapping[str, str]
) -> Iterable[Row]:
    """Its name, what it serves, and what it holds."""
    first, last = stage.fragments[0], stage.fragments[-1]
    served = f"{first}" if first == last else f"{first}-{last}"
    part = "" if device.share is None else f", {100 * device.share:.0f} % of items"
    link = own.get(device.device)
    of = "" if device.budget_bytes is None else f" of {format_bytes(device.budget_bytes)}"
    yield _words(x + _INSIDE, y + 16, device.device, weight="bold")
    lines = [f"serves {served}{part}", f"{format_bytes(device.held_bytes)}{of}"]
    for number, line in enumerate([f"link: {link}", *lines] if link else lines):
        yield _words(x + _INSIDE, y + 32 + 16 * number, line)


def _words(x: float, y: float, words: str, align: str = "left", weight: str = "normal") -> Row:
    return {"x": x, "y": y, "text": words, "align": align, "weight": weight}


def _amount(size: float | None) -> str:
    return "" if size is None else f" {format_bytes(round(size))} an item"


def _placed(height: float, ways: list[Row], boxes: list[Row], words: list[Row]) -> Spec:
    """Lines, boxes and words where they are said to be."""
    x = quantity("x", axis=None, scale={"domain": [0, WIDTH], "nice": False})
    y = quantity("y", axis=None, scale={"domain": [0, height], "nice": False, "reverse": True})
    place = {"x": x, "y": y, "x2": {"field": "x2"}, "y2": {"field": "y2"}}
    shade = quantity("opacity", scale=None, legend=None)
    filled = {"field": "colour", "type": "nominal", "scale": None}
    layers: list[Spec] = [
        layer(ways, {"type": "rule", "color": GREY}, **place),
        layer(boxes, {"type": "rect", "cornerRadius": 4}, **place, color=filled, opacity=shade),
    ]
    for align, weight in dict.fromkeys((each["align"], each["weight"]) for each in words):
        own = [each for each in words if (each["align"], each["weight"]) == (align, weight)]
        limit = _BOX[0] - 2 * _INSIDE if weight == "bold" else WIDTH
        mark = {"type": "text", "align": align, "fontWeight": weight, "fontSize": 12}
        mark |= {"baseline": "middle", "limit": limit}
        layers.append(layer(own, mark, x=x, y=y, text={"field": "text"}))
    return {"height": height, "layer": layers}
