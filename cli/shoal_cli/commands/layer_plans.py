"""`shoal plan --profile FILE --devices FILE`: a plan from measured layers, without the model."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from shoal_protocol import choices

if TYPE_CHECKING:
    from shoal_cli.commands.planned import Planned

T = TypeVar("T")


def plan_layers(
    profile: Path, devices: str | None, objective: choices.Objective, items: int
) -> "Planned":
    """The plan, its explanation, and what lost against it."""
    from shoal_cli.commands.planned import of_layers
    from shoal_planner.layers.documents import read_pool, read_profile
    from shoal_planner.layers.planning import plan
    from shoal_planner.layers.plans import Unplaceable

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
    return of_layers(f"{profile.name} on {devices}, {objective}", graph, pool, answer)


def _read(option: str, file: Path, parse: Callable[[str], T]) -> T:
    try:
        return parse(file.read_text())
    except OSError as failed:
        raise typer.BadParameter(f"{option} {file}: {failed.strerror}") from None
    except ValueError as wrong:
        raise typer.BadParameter(f"{option} {file}: {wrong}") from None
