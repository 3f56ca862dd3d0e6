"""What every device does when, as a plan predicts it: the bars of a Gantt chart. Pure.

The items are there from the beginning, and each goes through the stages in order. A device receives
an item, reads weights again and computes, and sends; its first item waits for fetches and loads as
well. Each of the three does one item at a time, and they overlap between items, as the cost model
says; where fragments are loaded in turn, they are drawn one after the other. Of the devices of a
stage, an item goes to the one that would be done with it first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from shoal_planner.device_costs import Holding
from shoal_planner.figures import DeviceFigures, PlanFigures


class Phase(StrEnum):
    """What a device does with an item."""

    RECEIVE = "receive"
    READ = "read weights"
    COMPUTE = "compute"
    SEND = "send"


@dataclass(frozen=True, slots=True)
class Bar:
    """A phase of an item on a device, in seconds from the beginning."""

    device: str
    item: int
    phase: Phase
    begin: float
    end: float


def schedule(plan: PlanFigures, items: int) -> tuple[Bar, ...]:
    """Empty where times are not predicted."""
    if any(each.compute_seconds is None for stage in plan.stages for each in stage.devices):
        return ()
    lanes = {each.device: _Lanes(each) for stage in plan.stages for each in stage.devices}
    bars: list[Bar] = []
    for item in range(items):
        ready = 0.0
        for stage in plan.stages:
            offers = [tuple(lanes[each.device].bars(item, ready)) for each in stage.devices]
            chosen = min(offers, key=lambda offer: offer[-1].end)
            lanes[chosen[-1].device].take(chosen)
            bars += chosen
            ready = chosen[-1].end
    return tuple(bar for bar in bars if bar.end > bar.begin)


class _Lanes:
    """When a device's receiver, processor and sender are free."""

    def __init__(self, device: DeviceFigures) -> None:
        self._device = device
        self._receiver = self._sender = 0.0
        self._processor = device.fetch_seconds or 0.0
        self._load = device.load_seconds or 0.0

    def bars(self, item: int, ready: float) -> Iterator[Bar]:
        """What it would do with an item that is ready to leave the stage before."""
        device = self._device
        steps = (
            (Phase.RECEIVE, device.receive_seconds or 0.0, self._receiver),
            (Phase.READ, self._load + (device.read_seconds or 0.0), self._processor),
            (Phase.COMPUTE, (device.compute_seconds or 0.0) + (device.move_seconds or 0.0), 0.0),
            (Phase.SEND, device.send_seconds or 0.0, self._sender),
        )
        end = ready + (device.delay_seconds or 0.0)
        for phase, seconds, free in steps:
            begin = max(end, free)
            end = begin + seconds
            yield Bar(device.device, item, phase, begin, end)

    def take(self, bars: tuple[Bar, ...]) -> None:
        receive, _, compute, send = bars
        self._receiver, self._processor, self._sender = receive.end, compute.end, send.end
        if self._device.holding == Holding.RELOADED:
            self._receiver = self._processor = send.end
        self._load = 0.0
