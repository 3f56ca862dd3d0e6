"""Files that commands write: the options of those about a run, and whether they can be written."""

import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import typer

from shoal_cli.drawing.svg import check_drawing
from shoal_protocol.durable_files import is_stream

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
    if is_stream(path):
        if not os.access(path, os.W_OK):
            raise typer.BadParameter(f"{option} {path}: cannot be written")
        return
    folder = Path(os.path.realpath(path)).parent
    folder.mkdir(parents=True, exist_ok=True)
    try:
        TemporaryFile(dir=folder).close()  # some folders say that they can be written, and cannot
    except OSError as error:
        raise typer.BadParameter(f"{option} {path}: {folder} cannot be written") from error


def check_picture(option: str, path: Path) -> Path:
    """The same for a picture, whose folder is not made, before anything long is done for it.

    Raises `typer.BadParameter`, `NothingDraws`.
    """
    if path.suffix != ".svg":
        raise typer.BadParameter(f"{option} {path}: pictures are SVG; name a file in .svg")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{option} {path}: {path.parent} cannot be written")
    check(option, path)
    check_drawing()
    return path
