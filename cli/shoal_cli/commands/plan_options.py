"""The options of `shoal plan` that no other command has."""

from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from shoal_protocol import choices

_bare: Final = partial(typer.Option, rich_help_panel="A bare model")
_profile: Final = partial(typer.Option, rich_help_panel="A profile")

_MOST_DEVICES: Final = 64
"""As many as `shoal run` pretends."""

PlanFiles = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILE...",
        help="Manifests, or folders of manifests, or one [bold].onnx[/bold] file.",
        show_default=False,
    ),
]
PlanInputs = Annotated[
    Path | None, _bare(help="Folder of .npz and .npy files, whose shapes are planned for.")
]
PlanWork = Annotated[
    Path | None,
    typer.Option(help="Folder for fragments. [dim]Default: the one that `shoal run` uses[/dim]"),
]
PlanPicture = Annotated[
    Path | None,
    typer.Option(
        "--svg",
        metavar="FILE",
        help="Draw the plan: stages and links, one item through them, and many.",
    ),
]
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
