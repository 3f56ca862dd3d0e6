"""Placements on unequal devices: predicted against measured, and plans against simpler ones.

    sudo .venv/bin/python bench/placements.py [--quick] [--json FILE] [--details FILE]

An environment is a coordinator and some agents, each in a network namespace as on a host of its
own, with a quota of processor time, a limit on its memory (cgroups), and a link of some rate (tbf).
They are measured as every agent is, and nobody says what they are. In each environment the models
are run as planned; evenly split; split in proportion to memory (exo's rule); on the best device
alone; and replicated. Then they are planned anew, with what tasks took meanwhile.

- *The last plan against the others*, measured: from one item to the next, in each environment.
- *Predicted against measured*, over all runs, by rates alone and as tasks and loads have corrected
  it: the rank correlation, and the median error.
- *From nothing*: a job of some items on devices that have to fetch and prepare everything first.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from statistics import correlation
from typing import Any, Final

from measurement import (
    RATIO,
    VALUE,
    Measurement,
    Report,
    argument_parser,
    measured,
    new_file,
    shared,
)
from placement_runs import CHOSEN, COLD, COLD_ITEMS, REFINED, Device, Request

from shoal_cli.local.cgroups import DeviceGroup, RunGroups, Unavailable, open_groups, run_name

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from separate_hosts import Host, limit_rate, separate_hosts, wait_until

COORDINATOR: Final = "shelf"
PORT: Final = 7400
FRAGMENTS: Final = 6
RUN_SECONDS: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A device: processors, MiB above the idle agent, and megabits per second of its link."""

    name: str
    cpus: str
    memory: int = 256
    link: int = 1000


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Devices, and the models that they run."""

    name: str
    shapes: tuple[Shape, ...]
    models: tuple[str, ...]


ENVIRONMENTS: Final = (
    Environment(
        name="processors 5:2",
        shapes=(Shape(name="a", cpus="0.2"), Shape(name="b", cpus="0.5")),
        models=("resnet18", "minilm_l6"),
    ),
    Environment(
        name="processors 4:2:1",
        shapes=(
            Shape(name="a", cpus="0.12"),
            Shape(name="b", cpus="0.25"),
            Shape(name="c", cpus="0.5"),
        ),
        models=("resnet18", "mobilenet_v2"),
    ),
    Environment(
        name="no room for the whole",
        shapes=(
            Shape(name="a", cpus="0.2", memory=48),
            Shape(name="b", cpus="0.4", memory=40),
            Shape(name="c", cpus="0.2", memory=64),
        ),
        models=("resnet18", "minilm_l6"),
    ),
    Environment(
        name="slow links",
        shapes=(
            Shape(name="a", cpus="0.3", link=20),
            Shape(name="b", cpus="0.3", link=60),
            Shape(name="c", cpus="0.3", link=20),
        ),
        models=("resnet18", "squeezenet1_1"),
    ),
    Environment(
        name="fast and far, slow and near",
        shapes=(
            Shape(name="a", cpus="0.6", link=10),
            Shape(name="b", cpus="0.2", link=200),
            Shape(name="c", cpus="0.15", link=200),
        ),
        models=("mobilenet_v2", "minilm_l6"),
    ),
    Environment(
        name="all unequal",
        shapes=(
            Shape(name="a", cpus="0.15", memory=96, link=100),
            Shape(name="b", cpus="0.3", memory=48, link=40),
            Shape(name="c", cpus="0.45", memory=32, link=200),
        ),
        models=("resnet18", "mobilenet_v2"),
    ),
    Environment(
        name="fragments in turn",
        shapes=(Shape(name="a", cpus="0.3", memory=24), Shape(name="b", cpus="0.5", memory=24)),
        models=("resnet18", "minilm_l6"),
    ),
)
QUICK: Final = Environment(
    name="quick",
    shapes=(Shape(name="a", cpus="0.25"), Shape(name="b", cpus="0.5", link=100)),
    models=("squeezenet1_1",),
)

Runs = list[dict[str, Any]]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--details", type=new_file, metavar="FILE", help="write every run here, as JSON"
    )
    parser.add_argument("--environment", help="this one alone, by name")
    options = parser.parse_args()
    report = Report(shared(options))
    found: dict[str, Runs] = {}
    chosen = (QUICK,) if options.quick else ENVIRONMENTS
    for each in chosen:
        if options.environment in {None, each.name}:
            found[each.name] = runs_in(each, report, 2.0 if options.quick else RUN_SECONDS)
    if options.details is not None:
        options.details.write_text(json.dumps(found, indent=1) + "\n")
    cold = [run for runs in found.values() for run in runs if run["placement"] == COLD]
    warm = {name: [run for run in runs if run["placement"] != COLD] for name, runs in found.items()}
    every = [run for runs in warm.values() for run in runs if "measured" in run]
    for measurement in (*gains(warm), *predictions(every), from_nothing(cold)):
        report.add(measurement)
    report.finish()


def runs_in(environment: Environment, report: Report, run_seconds: float) -> Runs:
    """Every placement of every model there."""
    report.note(f"{environment.name}: " + ", ".join(map(_shape, environment.shapes)))
    with (
        tempfile.TemporaryDirectory(prefix="shoal-placements-") as folder,
        hosts_of(environment, Path(folder)) as (shelf, devices),
    ):
        request = Request(
            target=f"{shelf.address}:{PORT}",
            folder=folder,
            devices=devices,
            models=environment.models,
            fragments=FRAGMENTS,
            seconds=run_seconds,
        )
        runs = _runs(shelf, request)
    for run in runs:
        report.note(f"  {_described(run)}")
    return runs


def _runs(shelf: Host, request: Request) -> Runs:
    """In the network of the coordinator. (`ip netns exec` would hide the control groups.)"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    script = Path(__file__).with_name("placement_runs.py")
    network = f"--net=/run/netns/{shelf.namespace}"
    ended = subprocess.run(
        ["nsenter", network, sys.executable, script, request.to_json()],
        env=kept | {"HOME": str(shelf.home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


@contextmanager
def hosts_of(environment: Environment, folder: Path) -> Iterator[tuple[Host, tuple[Device, ...]]]:
    """The coordinator's host and the devices, with agents that are ready."""
    groups = open_groups(run_name())
    assert not isinstance(groups, Unavailable), groups
    names = [shape.name for shape in environment.shapes]
    try:
        with separate_hosts(folder, COORDINATOR, *names) as (shelf, *hosts):
            shelf.group = groups.create(COORDINATOR)
            _prefer(groups)
            shelf.start("out", "-m", "shoal_cli", "coordinator")
            wait_until("the coordinator is up", lambda: "works once" in shelf.said("out"))
            shelf.shoal("join", _invited(shelf, "--client"))
            made = []
            for host, shape in zip(hosts, environment.shapes, strict=True):
                group = started(host, shape, _invited(shelf), groups)
                made.append((shape, group))
            wait_until("the agents are ready", lambda: len(shelf.asked("devices")) == len(made))
            yield shelf, tuple(_limited(shape, group) for shape, group in made)
    finally:
        groups.remove()


def started(host: Host, shape: Shape, line: str, groups: RunGroups) -> DeviceGroup:
    """An agent within its limits."""
    limit_rate(host, shape.link)
    group = groups.create(shape.name)
    group.limit_processors(Decimal(shape.cpus))
    host.group = group
    command = ("-m", "shoal_agent", line, "--name", shape.name, "--threads", "1")
    host.start("log", *command, "--budget", f"{shape.memory}Mi")
    return group


def _prefer(groups: RunGroups) -> None:
    """Before whatever else this machine does."""
    for root in groups.roots:
        for name, most in (("cpu.shares", 262_144), ("cpu.weight", 10_000)):
            if (root / name).exists():
                (root / name).write_text(str(most))


def _invited(shelf: Host, *options: str) -> str:
    printed = str(shelf.shoal("invite", *options).stdout)
    return printed.rsplit(maxsplit=1)[-1]


def _limited(shape: Shape, group: DeviceGroup) -> Device:
    """Its memory is limited to what the idle agent takes and the budget."""
    group.limit_memory(group.charged_bytes() + (shape.memory << 20))
    return Device(
        name=shape.name,
        cpus=shape.cpus,
        version=group.version,
        memory=str(group.memory),
        cpu=str(group.cpu),
    )


# ---- what comes out ------------------------------------------------------------------------------


def predictions(runs: Runs) -> Iterator[Measurement]:
    """Over all runs."""
    first = [abs(run["by_rates"] / run["measured"] - 1) for run in runs]
    pairs = [(run["predicted"], run["measured"]) for run in runs]
    errors = [abs(predicted / took - 1) for predicted, took in pairs]
    yield measured("error of a prediction by rates alone", first, unit="of the time")
    yield Measurement(
        name=f"{len(runs)} placements: rank correlation of predicted and measured",
        value=rank_correlation(pairs),
        unit="",
        goal=VALUE >= 0.9,
    )
    name = "error of a prediction that tasks have corrected"
    yield measured(name, errors, unit="of the time", goal=VALUE <= 0.15)


def from_nothing(runs: Runs) -> Measurement:
    """Of whole jobs, with what their devices have to fetch, prepare and load first."""
    errors = [abs(run["predicted"] / run["measured"] - 1) for run in runs]
    name = f"{COLD_ITEMS} items on devices that have nothing yet: error of the predicted makespan"
    return measured(name, errors, unit="of the time", goal=VALUE <= 0.15)


def gains(found: Mapping[str, Runs]) -> Iterator[Measurement]:
    """The plan against each of the others, and against the best of them."""
    for environment, runs in found.items():
        for model in dict.fromkeys(run["model"] for run in runs):
            took = {run["placement"]: run for run in runs if run["model"] == model}
            first, refined = took.pop(CHOSEN), took.pop(REFINED)
            if "measured" not in refined:
                refined = took.get(refined["same"], first)
            ours = refined["measured"]
            others = {name: run["measured"] for name, run in took.items() if "measured" in run}
            if others:
                best = min(others, key=lambda name: others[name])
                listed = ", ".join(f"{name} {each / ours:.2f}" for name, each in others.items())
                yield Measurement(
                    name=f"{environment}, {model}: an item by the plan, and by: {listed}",
                    value=ours,
                    unit="s",
                    peer=others[best],
                    ratio=ours / others[best],
                    goal=RATIO <= 1.05,
                )


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's: how far the one grows with the other."""
    first, second = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    return correlation(first, second) if len(pairs) > 1 else 1.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Equal ones share the mean of their ranks."""
    return [
        sum(other < each for other in values) + sum(other == each for other in values) / 2
        for each in values
    ]


def _shape(shape: Shape) -> str:
    return f"{shape.name} has {shape.cpus} processors, {shape.memory} MiB, {shape.link} Mbit/s"


def _described(run: Mapping[str, Any]) -> str:
    title = f"{run['model']}, {run['placement']}"
    if "measured" not in run:
        same = run["same"]
        return f"{title}: {'has no room' if same is None else f'the same as {same}'}"
    times = f"{run['predicted'] * 1000:.1f} ms predicted, {run['measured'] * 1000:.1f} measured"
    return f"{title} ({run['described']}): {times}"


if __name__ == "__main__":
    main()
