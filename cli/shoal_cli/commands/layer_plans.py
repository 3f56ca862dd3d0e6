"""`shoal plan --profile FILE --devices FILE`: a plan from measured layers, without the model."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from shoal_protocol import choices

_profile: Final = partial(typer.Option, rich_help_panel="A profile")

_MOST_DEVICES: Final = 64
"""As many as `shoal run` pretends."""

T = TypeVar("T")

PlanDevices = Annotated[
    str | None,
    typer.Option(
        rich_help_panel="A bare model",
        metavar="N|FILE",
        help="How many devices to pretend; with [bold]--profile[/bold], a file of devices and "
        "links. [dim]Default: 3[/dim]",
    ),
]
Profile = Annotated[
    Path | None,
    _profile(
        metavar="FILE",
        help="Layers with their measured times or FLOPs, in the place of a model: "
        "[bold]docs/profiles.md[/bold] says in which formats.",
    ),
]
Objective = Annotated[
    choices.Objective | None,
    _profile(case_sensitive=False, help="What is made best. [dim]Default: Throughput[/dim]"),
]
Items = Annotated[
    int | None,
    _profile(min=1, help="Items of a job, for Makespan. [dim]Default: 100[/dim]"),
]


def parse_device_count(devices: str | None) -> int | None:
    """How many devices to pretend."""
    if devices is None:
        return None
    if not devices.isdecimal() or not 1 <= int(devices) <= _MOST_DEVICES:
        raise typer.BadParameter(
            f"--devices {devices}: a number from 1 to {_MOST_DEVICES}; a file goes with --profile"
        )
    return int(devices)


def print_layer_plan(
    profile: Path, devices: str | None, objective: choices.Objective, items: int
) -> None:
    """The plan, its explanation, and what lost against it."""
    from rich.console import Group
    from rich.text import Text

    from shoal_cli.commands.tables import explained_table, output
    from shoal_planner.layers.documents import read_pool, read_profile
    from shoal_planner.layers.planning import plan
    from shoal_planner.layers.plans import Unplaceable, explain

    if devices is None:
        raise typer.BadParameter("--profile needs --devices FILE: the devices and their links")
    graph = _read("--profile", profile, read_profile)
    pool = _read("--devices", Path(devices), read_pool)
    try:
        answer = plan(graph, pool, objective, items)
    except ValueError as unknown:
        raise typer.BadParameter(f"{profile} on {devices}: {unknown}") from None
    if isinstance(answer, Unplaceable):
        raise typer.BadParameter(answer.message(profile.name))
    tables = map(explained_table, explain(answer, tuple(layer.name for layer in graph.layers)))
    title = Text(f"{profile.name} on {devices}, {objective}", style="bold underline")
    output().print(Group(title, *tables))


def _read(option: str, file: Path, parse: Callable[[str], T]) -> T:
    try:
        return parse(file.read_text())
    except OSError as failed:
        raise typer.BadParameter(f"{option} {file}: {failed.strerror}") from None
    except ValueError as wrong:
        raise typer.BadParameter(f"{option} {file}: {wrong}") from None
