"""What was recorded over time, as a bounded number of cells to draw.

A cell is a stretch of time of one device in which nothing changed. The columns of a timeline are
folded until all devices together have at most `MOST_CELLS`; sums and highest values survive that.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from shoal_cli.local.run_record import DeviceTimeline, Timeline

MOST_CELLS: Final = 2000
MOST_COLUMNS: Final = 600
"""Of what all devices do together."""
MOST_DEVICES: Final = 64
MOST_ABSENCES: Final = 8
"""Of each device, the last ones; each loss is in the report."""
ACTIVITIES: Final = ("compute", "load", "send", "wait")
MOVEMENTS: Final = ("sent", "received", "fetched")
_EXACTLY: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Seconds count from the run's start. `shares` of its time are by `ACTIVITIES`; where several
    went on at once, the first of them counts. `memory_bytes` is the most that was measured, or what
    was measured last; 0: nothing."""

    begin: float
    end: float
    shares: Mapping[str, float]
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A device was lost, and came back or did not."""

    begin: float
    end: float
    reason: str
    returned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSeries:
    """One device over the whole run."""

    name: str
    cells: tuple[Cell, ...]
    absences: tuple[Absence, ...]

    def seconds(self, activity: str) -> float:
        """Time of one of `ACTIVITIES`."""
        return sum(cell.shares[activity] * (cell.end - cell.begin) for cell in self.cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """Bytes a second of all devices in a stretch of time, by `MOVEMENTS`."""

    begin: float
    end: float
    rates: Mapping[str, float]


def device_series(
    timelines: Sequence[Timeline], order: Sequence[str] = ()
) -> tuple[DeviceSeries, ...]:
    """Each device, in that order and then by name; the first `MOST_DEVICES`."""
    known = {device.name for timeline in timelines for device in timeline.devices}
    first = [name for name in order if name in known]
    shown = [*first, *sorted(known - {*first})][:MOST_DEVICES]
    columns = sum(_length(timeline) * len(timeline.devices) for timeline in timelines)
    factor = max(1, math.ceil(columns / max(1, MOST_CELLS - len(timelines) * len(shown))))
    return tuple(_series(name, timelines, factor) for name in shown)


def movements(timelines: Sequence[Timeline]) -> tuple[Movement, ...]:
    """What went over the links in each column, all devices together."""
    factor = max(1, math.ceil(sum(map(_length, timelines)) / MOST_COLUMNS))
    found = []
    for timeline in timelines:
        width, devices = factor * timeline.column_seconds, timeline.devices
        for number in range(math.ceil(_length(timeline) / factor)):
            place = slice(factor * number, factor * (number + 1))
            begin = timeline.begun_seconds + number * width
            rates = {
                name: sum(sum(getattr(each, f"{name}_bytes")[place]) for each in devices) / width
                for name in MOVEMENTS
            }
            found.append(Movement(begin=begin, end=begin + width, rates=rates))
    return tuple(found)


def _length(timeline: Timeline) -> int:
    return max((len(device.busy_seconds) for device in timeline.devices), default=0)


def _series(name: str, timelines: Sequence[Timeline], factor: int) -> DeviceSeries:
    cells: list[Cell] = []
    absences: list[Absence] = []
    for timeline in timelines:
        for device in timeline.devices:
            if device.name == name:
                lost = tuple(_absences(device, timeline))
                cells += _merged(_cells(device, timeline, factor, lost))
                absences += lost
    return DeviceSeries(name=name, cells=tuple(cells), absences=tuple(absences[-MOST_ABSENCES:]))


def _cells(
    device: DeviceTimeline, timeline: Timeline, factor: int, lost: Sequence[Absence]
) -> Iterable[Cell]:
    """A device's columns, `factor` of them folded into each cell. Memory stays as it was measured
    until the next measurement, but a device that is lost has none."""
    width, memory = factor * timeline.column_seconds, 0
    for number in range(math.ceil(len(device.busy_seconds) / factor)):
        place = slice(factor * number, factor * (number + 1))
        begin = timeline.begun_seconds + number * width
        if any(absence.begin <= begin < absence.end for absence in lost):
            memory = 0
        memory = max(device.memory_bytes[place], default=0) or memory
        yield Cell(
            begin=begin,
            end=begin + width,
            shares=_shares(device, place, width),
            memory_bytes=memory,
        )


def _shares(device: DeviceTimeline, place: slice, width: float) -> dict[str, float]:
    """How a stretch of time was spent: it is given away once, in the order of `ACTIVITIES`."""
    left, given = 1.0, dict[str, float]()
    times = (device.computing_seconds, device.loading_seconds, device.sending_seconds)
    for name, spent in zip(ACTIVITIES, times, strict=False):
        given[name] = round(min(left, sum(spent[place]) / width), _EXACTLY)
        left = max(0.0, left - given[name])
    busy = min(1.0, sum(device.busy_seconds[place]) / width)
    return {**given, "wait": round(max(0.0, busy - sum(given.values())), _EXACTLY)}


def _merged(cells: Iterable[Cell]) -> list[Cell]:
    """The cells, with equal neighbours as one."""
    merged: list[Cell] = []
    for cell in cells:
        last = merged[-1] if merged else None
        if last and (last.shares, last.memory_bytes) == (cell.shares, cell.memory_bytes):
            merged[-1] = replace(last, end=cell.end)
        else:
            merged.append(cell)
    return merged


def _absences(device: DeviceTimeline, timeline: Timeline) -> Iterable[Absence]:
    """From each loss to the next session, or to the end."""
    begun = timeline.begun_seconds
    end = begun + len(device.busy_seconds) * timeline.column_seconds
    for change, following in pairwise((*device.changes, None)):
        if change is not None and not change.joined:
            back = begun + following.seconds if following else max(end, begun + change.seconds)
            yield Absence(
                begin=begun + change.seconds,
                end=back,
                reason=change.reason,
                returned=following is not None and following.joined,
            )
