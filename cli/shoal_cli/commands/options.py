"""Options and arguments that several commands take, each declared once: its type, help and bounds.

A command names these types in its signature (`volume: options.Volumes = None`), so the signature
says what the command takes and with which default, and this module says what each of them means.
Options that belong together are one dataclass (`option_groups`). What one command alone takes is
beside it. Below them is what several commands do with what they were given.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from shoal_cli.local import cgroups
from shoal_protocol import choices
from shoal_protocol.digests import is_digest
from shoal_protocol.units import LONGEST_SECONDS, parse_whole, shortened
from shoal_protocol.visible import visible

if TYPE_CHECKING:
    from shoal_cli.transfer.addresses import Access


def panel(title: str) -> Callable[..., Any]:
    """Options that help shows together."""
    return partial(typer.Option, rich_help_panel=title)


bare = panel("A bare model")
how = panel("How to run")
show = panel("What to show")
_security = panel("Security")

LogLevel = Literal["debug", "info", "warning", "error"]
ProgressKind = Literal["auto", "rich", "plain"]


def a_number(value: float) -> float:
    """Refuse `nan`, which is within all bounds, and `inf`."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


Volumes = Annotated[
    list[str] | None,
    typer.Option(
        "--volume",
        metavar="CLAIM=DIR",
        help="The folder that pvc://CLAIM/... stands for. Repeatable. "
        "[dim]Default: CLAIM/ beside the manifest[/dim]",
    ),
]
Budgets = Annotated[
    list[str] | None,
    bare(
        metavar="SIZE",
        help="Each device's memory above its idle floor; given several times, one device each. "
        "[dim]Default: 64Mi[/dim]",
    ),
]
Fragments = Annotated[
    int | None, bare(min=1, max=256, help="How many fragments. [dim]Default: as few as fit[/dim]")
]
Residency = Annotated[
    choices.Residency | None,
    bare(
        case_sensitive=False,
        help="As many fragments on a device as its budget takes, or one at a time.",
    ),
]
Enforce = Annotated[
    cgroups.Enforce,
    how(
        help="Hold each agent to floor + budget with a cgroup: where possible, in any case, "
        "or only measure."
    ),
]
Threads = Annotated[
    int | None,
    how(
        min=1,
        help="Threads of ONNX Runtime per agent. [dim]Default: the device's share of the "
        "processors[/dim]",
    ),
]
TaskSeconds = Annotated[
    float,
    how(
        min=0.1,
        max=LONGEST_SECONDS,
        callback=a_number,
        help="The longest that one task may take on a device, its wait there included.",
    ),
]
RunWork = Annotated[
    Path | None,
    how(
        help="Folder for fragments, caches and logs. [dim]Default: one under the user's cache "
        "folder for these files, so that a second run is warm[/dim]"
    ),
]
Progress = Annotated[ProgressKind, show(help="A live picture, or plain lines.")]
ModelAddress = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="An ONNX file, or the address of one: pvc://, s3://, https://, oci://, file://. A "
        "folder or an artifact has one .onnx file in it.",
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="INPUT=1,3,48,320",
        help="The shape of an input with dynamic axes, to reckon with. Repeatable.",
    ),
]
Digest = Annotated[
    str | None,
    typer.Option(
        metavar="sha256:HEX",
        help="The digest that the model must have; any other is refused with status 2.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print what was found as one line of JSON, at the end.")
]
ModelCache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="DIR",
        help="Where fetched models are kept. [dim]Default: the user's cache folder[/dim]",
    ),
]
MaxDownload = Annotated[
    str, typer.Option(metavar="SIZE", help="The most that is fetched of one model.")
]

# ---- what commands do with them ------------------------------------------------------------------


def help_of(command: Callable[..., object]) -> str:
    """A command's docstring, each paragraph as one line: the terminal's width breaks it."""
    text = getdoc(command)
    assert text is not None, f"{command} says nothing of itself"
    # With PYTHONOPTIMIZE=2 there are no docstrings, and no asserts: then help lists options alone.
    return "\n\n".join(" ".join(part.split()) for part in (text or "").split("\n\n"))


def note(text: str) -> None:
    """Say something beside the output."""
    typer.echo(visible(text), err=True)


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
    from shoal_cli.local.sizes import size_in

    try:
        return size_in(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from error


def parse_budget(text: str, option: str = "--budget") -> int:
    """What a device may have, in bytes."""
    from shoal_cli.local.sizes import budget_problem

    size = parse_size(text, option)
    if problem := budget_problem(text, size):
        raise typer.BadParameter(f"{option} {text}: {problem}")
    return size


def parse_budgets(texts: list[str], devices: int | None) -> list[int]:
    """A budget for each device; one stands for all of them."""
    sizes = [parse_budget(text) for text in texts]
    if len(sizes) == 1:
        return sizes * (devices or 3)
    if devices not in (None, len(sizes)):
        raise typer.BadParameter(f"--devices {devices}, but --budget is given {len(sizes)} times")
    return sizes


def parse_shapes(
    texts: list[str] | None, option: str = "--shape", name_is: str = "INPUT"
) -> dict[str, tuple[int, ...]]:
    """`INPUT=1,3,48,320`, each input once."""
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts or []:
        name, _, sizes = text.rpartition("=")
        shape = [parse_whole(size) for size in sizes.split(",")] if sizes else []
        if None in shape or not name:
            raise typer.BadParameter(f"{option} {shortened(text)}: write {name_is}=1,3,48,320")
        shapes[name] = tuple(size for size in shape if size is not None)
    return shapes


def parse_digest(text: str | None) -> str | None:
    """`sha256:` and 64 hexadecimal digits."""
    if text is not None and not is_digest(text):
        raise typer.BadParameter(f"--digest {text}: write sha256: and 64 hexadecimal digits")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Who is trusted, and as whom."""

    tls_ca: Annotated[
        Path | None, _security(metavar="FILE", help="The authority that all sides trust.")
    ] = None
    tls_certificate: Annotated[
        Path | None, _security(metavar="FILE", help="This side's certificate.")
    ] = None
    tls_key: Annotated[Path | None, _security(metavar="FILE", help="The certificate's key.")] = None
    insecure: Annotated[
        bool, _security("--insecure", help="No TLS; refused for what is not loopback.")
    ] = False

    def access(self, volumes: list[str] | None) -> "Access":
        """What addresses are opened with."""
        from shoal_cli.transfer.addresses import Access
        from shoal_protocol.channels import Credentials

        named = (self.tls_ca, self.tls_certificate, self.tls_key)
        files = [file for file in named if file is not None]
        if len(files) not in (0, 3):
            raise typer.BadParameter("--tls-ca, --tls-certificate and --tls-key go together")
        for file in files:
            if not file.is_file():
                raise typer.BadParameter(f"{file} is no file")
        credentials = None
        if files:
            credentials = Credentials(ca=files[0], certificate=files[1], key=files[2])
        return Access(
            volumes=parse_volumes(volumes), credentials=credentials, insecure=self.insecure
        )


_FOREIGN: Final = (
    *(".pt", ".pth", ".h5", ".keras", ".tflite", ".pb", ".safetensors", ".gguf", ".ort"),
)


def _why_not_both(models: Sequence[Path], files: Sequence[Path]) -> str:
    """What to do about several files of which some are models."""
    if len(models) == len(files):
        return f"there are {len(models)} models, {models[0]} and {models[1]}; give one"
    for file in files:
        if not file.exists() and file.name.isdecimal():
            return f"there is no file {file}; a number for an option is written as --verify={file}"
    return "give one .onnx model, or manifests, not both"


def is_model(files: Sequence[Path]) -> bool:
    """One ONNX file instead of manifests; a mixture, and a model of another kind, is refused."""
    for file in files:
        if file.suffix.lower() in _FOREIGN:
            raise typer.BadParameter(
                f"{file} is neither an .onnx model nor a manifest; export the model to ONNX first"
            )
    models = [file for file in files if file.suffix.lower() == ".onnx"]
    if models and len(files) > 1:
        raise typer.BadParameter(_why_not_both(models, files))
    return bool(models)


def refuse_with_manifests(given: Sequence[str]) -> None:
    """Manifests say all that the options of a bare model say."""
    for option in given:
        raise typer.BadParameter(
            f"{option} goes with a bare .onnx model; manifests say it themselves"
        )
