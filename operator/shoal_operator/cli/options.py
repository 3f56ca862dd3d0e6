"""What several commands take: files, volumes, sizes."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_protocol.units import parse_bytes

if TYPE_CHECKING:
    from shoal_operator.shell.manifests import Manifests


class LogLevel(StrEnum):
    """What `--log-level` takes."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Volumes = Annotated[
    list[str] | None,
    typer.Option(
        "--volume",
        metavar="CLAIM=DIR",
        help="The folder that pvc://CLAIM/... stands for. Repeatable. "
        "[dim]Default: CLAIM/ beside the manifest[/dim]",
    ),
]


def parse_volumes(texts: list[str] | None) -> dict[str, Path]:
    """`CLAIM=DIR`, each claim once."""
    volumes: dict[str, Path] = {}
    for text in texts or []:
        claim, separator, folder = text.partition("=")
        if not (separator and claim and folder):
            raise typer.BadParameter(f"--volume {text}: write CLAIM=DIR")
        if claim in volumes:
            raise typer.BadParameter(f"--volume {claim} is given twice")
        volumes[claim] = Path(folder)
    return volumes


def parse_size(text: str, option: str) -> int:
    """A size such as 64Mi, in bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from error


def is_model(files: Sequence[Path]) -> bool:
    """One ONNX file instead of manifests; a mixture is refused."""
    models = [file for file in files if file.suffix == ".onnx"]
    if models and len(files) > 1:
        raise typer.BadParameter("give one .onnx model, or manifests, not both")
    return bool(models)


def load_files(files: Sequence[Path]) -> "Manifests":
    """Read manifests; raises `ManifestErrors`."""
    from shoal_operator.shell.manifests import load_manifests

    return load_manifests(files)
