"""The options of `shoal plan` that no other command has."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from shoal_cli.commands import options
from shoal_cli.local.sizes import MOST_DEVICES
from shoal_planner.goal import ASSUMED_ITEMS
from shoal_protocol import choices
from shoal_protocol.units import parse_whole, shortened

_profile: Final = options.panel("A profile")

PlanFiles = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILE...",
        help="Manifests, or folders of manifests, or one [bold].onnx[/bold] file.",
        show_default=False,
    ),
]
PlanItems = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Items of a job, for the objective Makespan. [dim]Default: those in the job's folder "
        f"of inputs; where nobody knows, {ASSUMED_ITEMS}[/dim]",
        show_default=False,
    ),
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


class Format(StrEnum):
    """How results are printed."""

    TEXT = "text"
    JSON = "json"


Output = Annotated[
    Format,
    typer.Option("--output", "-o", case_sensitive=False, help="For people, or for programs."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BareModel:
    """What manifests say, for a model without them."""

    inputs: Annotated[
        Path | None,
        options.bare(help="Folder of .npz and .npy files, whose shapes are planned for."),
    ] = None
    shape: Annotated[
        list[str] | None,
        options.bare(
            metavar="INPUT=1,3,48,320",
            help="The shape of an input with dynamic axes, to plan for. Repeatable.",
        ),
    ] = None
    devices: Annotated[
        str | None,
        options.bare(
            metavar="N|FILE",
            help="How many devices to simulate; with [bold]--profile[/bold], a file of devices and "
            "links. [dim]Default: 3[/dim]",
        ),
    ] = None
    budget: options.Budgets = None
    fragments: options.Fragments = None
    residency: options.Residency = None

    @property
    def device_count(self) -> int | None:
        """How many devices to simulate. Raises `typer.BadParameter`."""
        if self.devices is None:
            return None
        if not (count := parse_whole(self.devices, MOST_DEVICES)):
            raise typer.BadParameter(
                f"--devices {shortened(self.devices)}: a number from 1 to {MOST_DEVICES}; a file "
                "goes with --profile"
            )
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """Measured layers, in the place of a model."""

    profile: Annotated[
        Path | None,
        _profile(
            metavar="FILE",
            help="Layers with their measured times or FLOPs, in the place of a model: "
            "[bold]docs/profiles.md[/bold] says in which formats.",
        ),
    ] = None
    objective: Annotated[
        choices.Objective | None,
        _profile(case_sensitive=False, help="What is made best. [dim]Default: Throughput[/dim]"),
    ] = None
