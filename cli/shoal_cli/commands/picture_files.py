"""The file that a picture goes to."""

import os
from pathlib import Path

import typer

from shoal_cli.drawing.svg import check_drawing


def check_picture(option: str, path: Path) -> Path:
    """Refuse what cannot be written, before anything long is done for it.

    Raises `typer.BadParameter`, `NothingDraws`.
    """
    if path.suffix != ".svg":
        raise typer.BadParameter(f"{option} {path}: pictures are SVG; name a file in .svg")
    if path.is_dir():
        raise typer.BadParameter(f"{option} {path}: is a folder; name a file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise typer.BadParameter(f"{option} {path}: {path.parent} cannot be written")
    check_drawing()
    return path
