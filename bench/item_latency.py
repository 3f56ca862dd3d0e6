"""Where the time of one item goes: wall and processor time between the boundaries of its way.

Three fragments on three devices, one item at a time, as in `peers`: once as a program calls a
model, once as a job that has a file for each item. All processes stamp each boundary that the item
comes to, with the same clock; while there is one item, the stamps in the order of time are its way.
A line is the median of what lies between two boundaries; its processor time is known where one
thread goes from one to the other. On a machine that others use, processor times, quartiles and the
least of all say more than medians of wall time.

    .venv/bin/python bench/item_latency.py [--quick] [--json FILE]
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Final, NamedTuple

from asked import Asked
from item_cost import PROCESSES
from measurement import Measurement, Report, run_in_folder
from peers import DEVICES, STAGES, Subject, called, subjects
from pool import Pool, cut, running_pool, write_items
from processor_time import used_seconds

from shoal.asynchronous import AsyncModel
from shoal_protocol.partition import PartitionDocument
from shoal_protocol.units import counted

_CALLED: Final = "the program calls"
_ANSWERED: Final = "the program has the results"
_DECIDED: Final = "the item is decided"
_BOUNDARIES: Final = Path(__file__).with_name("boundaries")
WARM: Final = 50


class Stamp(NamedTuple):
    """An item at a boundary: when, in which thread, and what that had used of a processor by then;
    nanoseconds."""

    name: str
    at: int
    thread: tuple[int, int]
    used: int


def stamp(name: str) -> Stamp:
    """One of this process."""
    thread = (os.getpid(), threading.get_ident())
    return Stamp(name, time.monotonic_ns(), thread, time.thread_time_ns())


async def _stamps(asked: Asked, pool: Pool) -> list[Stamp]:
    """Those of the pool's processes, since they were last asked."""
    return [
        Stamp(boundary, at, (pool.process_id(name), thread), used)
        for name, found in (await asked.take(pool)).items()
        for boundary, at, thread, used in found
    ]


def ways(stamps: Iterable[Stamp], first: str) -> list[list[Stamp]]:
    """The way of each item, which begins at `first`; those that differ from most are left out: a
    device may have said something else meanwhile."""
    ordered: list[list[Stamp]] = []
    for each in sorted(stamps, key=lambda stamp: stamp.at):
        if each.name == first:
            ordered.append([])
        if ordered:
            ordered[-1].append(each)
    counts = Counter(tuple(stamp.name for stamp in way) for way in ordered)
    usual = [names for names, _ in counts.most_common(1)]
    return [way for way in ordered if tuple(stamp.name for stamp in way) in usual]


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of one way."""

    report: Report
    title: str

    def add(self, name: str, value: float, spread: tuple[float, float] | None = None) -> None:
        """Microseconds."""
        line = Measurement(name=f"{self.title}{name}", value=value, unit="us", spread=spread)
        self.report.add(line)

    def add_wall(self, name: str, lasted: Sequence[int]) -> None:
        """The median and the quartiles of so many nanoseconds."""
        first, middle, third = (each / 1e3 for each in quantiles(lasted, n=4))
        self.add(name, middle, (first, third))

    def add_ways(self, found: Sequence[Sequence[Stamp]]) -> None:
        """All of them, and what lies between their boundaries, in their order. On a busy machine
        each of a few items may have come by a way of its own."""
        if len(found) < 2:
            few = f"{counted(len(found), 'item')} came by the usual way"
            self.report.note(f"{self.title}: not measured: {few}; more do on a quiet machine")
            return
        lasted = [way[-1].at - way[0].at for way in found]
        self.add_wall(": all", lasted)
        self.add(": all, the least", min(lasted) / 1e3)
        for place, ends in enumerate(pairwise(found[0])):
            pairs = [way[place : place + 2] for way in found]
            name = f" {place + 1:02}: {', '.join(each.name for each in ends)}"
            self.add_wall(name, [there.at - here.at for here, there in pairs])
            used = [there.used - here.used for here, there in pairs if here.thread == there.thread]
            if used:
                self.add(f"{name}, processor", median(used) / 1e3)


async def _called(
    lines: Lines,
    pool: Pool,
    asked: Asked,
    subject: Subject,
    model: AsyncModel,
    count: int,
) -> None:
    """Calls, one after the other."""
    for _ in range(WARM):
        await model.run(subject.item)
    await asked.take(pool)
    before = _used(pool)
    stamps: list[Stamp] = []
    for _ in range(count):
        stamps.append(stamp(_CALLED))
        await model.run(subject.item)
        stamps.append(stamp(_ANSWERED))
    used = _used(pool)
    lines.add_ways(ways([*stamps, *await _stamps(asked, pool)], _CALLED))
    for name, seconds in used.items():
        lines.add(f": processor, {name}", 1e6 * (seconds - before[name]) / count)


def _used(pool: Pool) -> dict[str, float]:
    """Processor seconds of each process."""
    used = {name: used_seconds(pool.process_id(name)) for name in PROCESSES}
    return {**used, "the program": time.process_time()}


async def _filed(
    lines: Lines,
    pool: Pool,
    asked: Asked,
    subject: Subject,
    document: PartitionDocument,
    count: int,
) -> None:
    """A job with a file for each item, one at a time."""
    await asked.take(pool)
    inputs = write_items(asked.folder / f"{subject.name}-in", [subject.item] * count)
    homes = [[name] for name in DEVICES]
    outputs = inputs.with_name(f"{subject.name}-out")
    await pool.run("files", document, inputs, outputs, homes=homes, parallelism=1)
    lines.add_ways(ways(await _stamps(asked, pool), _DECIDED))


async def _measure_over(
    report: Report, folder: Path, subject: Subject, link: str, *, secured: bool
) -> None:
    """Both ways, over one kind of links."""
    count = (60 if report.quick else 1000) // (3 if subject.name == "MiniLM" else 1)
    title = f"{subject.name} over {link}"
    asked = Asked(_BOUNDARIES, folder / f"{subject.name}-boundaries", PROCESSES)
    devices = [{"name": name, "memory": "256Mi"} for name in DEVICES]
    running = running_pool(folder / subject.name, devices, cgroups=False, secured=secured)
    async with asked.imported(), running as pool:
        shapes = {name: value.shape for name, value in subject.item.items()}
        document = cut(subject.path, pool.store, STAGES, shapes)
        async with called(pool, document) as model:
            lines = Lines(report, f"{title}, a call")
            await _called(lines, pool, asked, subject, model, count)
        lines = Lines(report, f"{title}, a file")
        await _filed(lines, pool, asked, subject, document, count)


async def measure(report: Report, folder: Path) -> None:
    """Both models over both kinds of links."""
    for subject in subjects(folder):
        await _measure_over(report, folder / "local", subject, "the local link", secured=False)
        await _measure_over(report, folder / "secured", subject, "mutual TLS", secured=True)


if __name__ == "__main__":
    run_in_folder(__doc__, measure)
