"""`shoal plan --profile FILE --devices FILE`: a plan from measured layers, without the model."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import typer

from shoal_protocol.choices import Objective

T = TypeVar("T")


def print_layer_plan(profile: Path, devices: str | None, objective: Objective, items: int) -> None:
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
