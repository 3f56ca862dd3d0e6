"""Files that commands write about a run: their options, and whether they can be written."""

import os
from pathlib import Path
from typing import Annotated

import typer

Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="Write one HTML page of the run, with pictures (docs/report.md).",
        rich_help_panel="What to show",
    ),
]
Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A report (`shoal run --report`), or the work folder of a run.",
        show_default=False,
    ),
]


def check(option: str, path: Path) -> None:
    """Refuse a file that cannot be written. Raises `OSError` where its folder cannot be had."""
    if path.is_dir():
        raise typer.BadParameter(f"{option} {path}: is a folder; name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise typer.BadParameter(f"{option} {path}: {path.parent} cannot be written")
