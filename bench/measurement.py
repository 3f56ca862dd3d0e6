"""What every bench shares: measuring two things alternately, saying what came out, judging it.

A machine has fast and slow phases, so a number alone says little: what is compared is measured in
turns in one run, and a ratio is the median of the ratios of the turns, not a ratio of medians. A
bench

    report = Report(parse_arguments(__doc__))
    samples = alternate({"ours": ours, "peer": peer}, turns=100)
    report.add(compared("hop", samples["ours"], samples["peer"], unit="s", goal=RATIO <= 1.3))
    report.finish()

prints a table, and with `--json FILE` writes a list of `{name, value, unit, peer, ratio, goal,
met}` (`peer` and `ratio` are null where nothing was compared, `goal` and `met` where nothing was
aimed at), and with `--picture FILE` draws the ratios. With `--quick` the whole bench ends within 50
seconds on two cores, and says less.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

from ratios import Compared, picture
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The options of every bench."""

    json: Path | None
    quick: bool
    picture: Path | None = None


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every bench has; the first line of its docstring describes it."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n", maxsplit=1)[0])
    for option, what in (
        ("--json", "write the measurements here too"),
        ("--picture", "draw the ratios here (SVG)"),
    ):
        parser.add_argument(option, type=new_file, metavar="FILE", help=what)
    parser.add_argument("--quick", action="store_true", help="end within 50 seconds, say less")
    return parser


def new_file(text: str) -> Path:
    """A file to be written at the end: that it cannot be is said before hours have passed."""
    path = Path(text)
    existing_folder(str(path.parent))
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file")
    return path


def existing_folder(text: str) -> Path:
    """A folder for files that are written at the end."""
    if not os.access(text, os.W_OK) or not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text} that can be written")
    return Path(text)


def parse_arguments(description: str | None) -> Arguments:
    """For a bench that has no options of its own."""
    return shared(argument_parser(description).parse_args())


def shared(options: argparse.Namespace) -> Arguments:
    """Of options, those that every bench has."""
    return Arguments(json=options.json, quick=options.quick, picture=options.picture)


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on a measurement's value or on its ratio to the peer's."""

    of: Literal["value", "ratio"]
    relation: Literal["<=", ">="]
    bound: float

    def __str__(self) -> str:
        return f"{self.of} {self.relation} {self.bound:g}"

    def met_by(self, number: float) -> bool:
        """Whether a number keeps within the bound."""
        return number <= self.bound if self.relation == "<=" else number >= self.bound


@dataclass(frozen=True, slots=True)
class Bounded:
    """`VALUE <= 3` and `RATIO >= 0.95` are goals."""

    of: Literal["value", "ratio"]

    def __le__(self, bound: float) -> Goal:
        return Goal(self.of, "<=", bound)

    def __ge__(self, bound: float) -> Goal:
        return Goal(self.of, ">=", bound)


VALUE = Bounded("value")
RATIO = Bounded("ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One line of the result. `spread` are the quartiles of the value where it was measured
    often."""

    name: str
    value: float
    unit: str
    peer: float | None = None
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    goal: Goal | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal was met; None without a goal, or without the ratio that it is about."""
        if self.goal is None:
            return None
        number = self.value if self.goal.of == "value" else self.ratio
        return None if number is None else self.goal.met_by(number)


def alternate(
    subjects: Mapping[str, Callable[[], float]], *, turns: int, limit_seconds: float = 600.0
) -> dict[str, list[float]]:
    """Measure each subject once a turn, each turn in the other order; what they returned, by turn.

    Ends before all turns are done when the time is up, but not before the third.
    """
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    names = list(subjects)
    deadline = time.monotonic() + limit_seconds
    for turn in range(turns):
        if turn >= 3 and time.monotonic() > deadline:
            break
        for name in names:
            samples[name].append(subjects[name]())
        names.reverse()
    return samples


def timed(action: Callable[[], object]) -> Callable[[], float]:
    """An action as a subject of `alternate`: the seconds that it took."""

    def measure() -> float:
        started = time.perf_counter()
        action()
        return time.perf_counter() - started

    return measure


def measured(
    name: str, samples: Sequence[float], *, unit: str, goal: Goal | None = None
) -> Measurement:
    """The median of samples, with their spread."""
    return Measurement(
        name=name, value=median(samples), unit=unit, spread=_quartiles(samples), goal=goal
    )


def compared(
    name: str,
    samples: Sequence[float],
    peers: Sequence[float],
    *,
    unit: str,
    goal: Goal | None = None,
) -> Measurement:
    """Samples against a peer's of the same turns."""
    return Measurement(
        name=name,
        value=median(samples),
        unit=unit,
        peer=median(peers),
        ratio=median(ours / theirs for ours, theirs in zip(samples, peers, strict=True)),
        spread=_quartiles(samples),
        goal=goal,
    )


def _quartiles(samples: Sequence[float]) -> tuple[float, float] | None:
    if len(samples) < 2:
        return None
    lower, _, upper = quantiles(samples, n=4)
    return lower, upper


class Report:
    """Collects measurements; `finish` prints them, and writes them where the arguments say."""

    def __init__(self, arguments: Arguments, console: Console | None = None) -> None:
        self.quick = arguments.quick
        self._json, self._picture = arguments.json, arguments.picture
        # Nothing says how wide a file or a pipe is; 80 columns would break the table.
        self._console = console or Console(width=None if sys.stdout.isatty() else 150)
        self.measurements: list[Measurement] = []

    def add(self, measurement: Measurement) -> None:
        """Take a measurement, and show at once that there is progress."""
        self.measurements.append(measurement)
        self._console.print(
            f"{measurement.name}: {_amount(measurement.value, measurement.unit)}", highlight=False
        )

    def note(self, text: str) -> None:
        """Say under what circumstances the next measurements are made."""
        self._console.print(text, highlight=False)

    def finish(self) -> None:
        """Print the table; write the JSON file and the picture."""
        self._console.print(_table(self.measurements))
        if self._json is not None:
            lines = [_as_json(measurement) for measurement in self.measurements]
            self._json.write_text(json.dumps(lines, indent=2) + "\n")
        if self._picture is not None:
            self._picture.write_text(picture(self._picture.stem, _ratios(self.measurements)))


def run_in_folder(
    description: str | None, measure: Callable[[Report, Path], Coroutine[Any, Any, None]]
) -> None:
    """A bench that has no options of its own, in a folder that is gone after it."""
    report = Report(parse_arguments(description))
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        asyncio.run(measure(report, Path(folder)))
    report.finish()


def _as_json(measurement: Measurement) -> dict[str, object]:
    return {
        "name": measurement.name,
        "value": measurement.value,
        "unit": measurement.unit,
        "peer": measurement.peer,
        "ratio": measurement.ratio,
        "goal": None if measurement.goal is None else str(measurement.goal),
        "met": measurement.met,
    }


def _ratios(measurements: Sequence[Measurement]) -> list[Compared]:
    """Of those that have one."""
    return [
        Compared(
            name=each.name,
            ratio=each.ratio,
            goal=each.goal.bound if each.goal is not None and each.goal.of == "ratio" else None,
            met=bool(each.met),
        )
        for each in measurements
        if each.ratio is not None
    ]


def _table(measurements: Sequence[Measurement]) -> Table:
    table = Table()
    table.add_column("measurement", overflow="fold")
    for column in ("value", "quartiles", "peer", "ratio", "goal"):
        table.add_column(column, justify="right")
    table.add_column("met")
    for line in measurements:
        unit = line.unit
        table.add_row(
            line.name,
            _amount(line.value, unit),
            "" if line.spread is None else " - ".join(_amount(one, unit) for one in line.spread),
            "" if line.peer is None else _amount(line.peer, unit),
            "" if line.ratio is None else f"{line.ratio:.2f}",
            "" if line.goal is None else str(line.goal),
            {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[line.met],
        )
    return table


_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def _amount(value: float, unit: str) -> str:
    """A value with its unit as people read it."""
    if unit == "s":
        scale, name = next((pair for pair in _SECONDS if abs(value) >= pair[0]), _SECONDS[-1])
        value, unit = value / scale, name
    if abs(value) >= 1000:
        return f"{value:,.0f} {unit}"
    return f"{value:#.3g}".rstrip(".") + f" {unit}"
