"""Every option and argument of `shoal`, declared once: its type, its help, its bounds.

A command names these types in its signature (`volume: options.Volumes = None`), so the signature
says what the command takes and with which default, and this module says what each of them means.
Below them is what several commands do with what they were given.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from shoal_operator.api import choices
from shoal_operator.shell.local import cgroups
from shoal_protocol.units import parse_bytes

if TYPE_CHECKING:
    from shoal_operator.shell.manifests import Manifests

_BARE: Final = "A bare model"
_HOW: Final = "How to run"
_SHOW: Final = "What to show"
_SECURITY: Final = "Security"


class LogLevel(StrEnum):
    """What `--log-level` takes."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class ProgressKind(StrEnum):
    """What `--progress` takes."""

    AUTO = "auto"
    RICH = "rich"
    PLAIN = "plain"


class RelayChoice(StrEnum):
    """What the coordinator's `--relay` takes."""

    AUTO = "Auto"
    ALWAYS = "Always"


# ---- several commands ----------------------------------------------------------------------------

Volumes = Annotated[
    list[str] | None,
    typer.Option(
        "--volume",
        metavar="CLAIM=DIR",
        help="The folder that pvc://CLAIM/... stands for. Repeatable. "
        "[dim]Default: CLAIM/ beside the manifest[/dim]",
    ),
]

# ---- shoal run -----------------------------------------------------------------------------------

RunFiles = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="Manifests, or folders of manifests ([bold]-[/bold]: standard input), or one "
        "[bold].onnx[/bold] file.",
        show_default=False,
    ),
]
Inputs = Annotated[
    Path | None, typer.Option(help="Folder of .npz and .npy files.", rich_help_panel=_BARE)
]
Outputs = Annotated[
    Path | None, typer.Option(help="Folder for the results.", rich_help_panel=_BARE)
]
Devices = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=64,
        help="How many devices to pretend. [dim]Default: 3[/dim]",
        rich_help_panel=_BARE,
    ),
]
Budgets = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SIZE",
        help="Each device's memory above its idle floor; given several times, one device each. "
        "[dim]Default: 64Mi[/dim]",
        rich_help_panel=_BARE,
    ),
]
Fragments = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=256,
        help="How many fragments. [dim]Default: as few as fit[/dim]",
        rich_help_panel=_BARE,
    ),
]
Mode = Annotated[
    choices.Mode | None,
    typer.Option(
        case_sensitive=False,
        help="Whether an item waits for its own predecessors only, or for whole stages.",
        rich_help_panel=_BARE,
    ),
]
Policy = Annotated[
    choices.Policy | None,
    typer.Option(
        case_sensitive=False,
        help="How devices that suit a task equally well are ranked.",
        rich_help_panel=_BARE,
    ),
]
Residency = Annotated[
    choices.Residency | None,
    typer.Option(
        case_sensitive=False,
        help="As many fragments on a device as its budget takes, or one at a time.",
        rich_help_panel=_BARE,
    ),
]
Enforce = Annotated[
    cgroups.Enforce,
    typer.Option(
        help="Hold each agent to floor + budget with a cgroup: where possible, in any case, "
        "or only measure.",
        rich_help_panel=_HOW,
    ),
]
RelayAlways = Annotated[
    bool,
    typer.Option(
        "--relay",
        help="Send activations through the coordinator, not from agent to agent.",
        rich_help_panel=_HOW,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Threads of ONNX Runtime per agent. [dim]Default: the device's share of the "
        "processors[/dim]",
        rich_help_panel=_HOW,
    ),
]
RunWork = Annotated[
    Path | None,
    typer.Option(
        help="Folder for fragments, caches and logs. [dim]Default: one under the user's cache "
        "folder for these files, so that a second run is warm[/dim]",
        rich_help_panel=_HOW,
    ),
]
Keep = Annotated[
    bool,
    typer.Option(
        "--keep/--no-keep",
        help="Leave fragments and caches for the next run, or remove them at the end.",
        rich_help_panel=_HOW,
    ),
]
RunLogLevel = Annotated[
    LogLevel, typer.Option(help="Of the logs in the work folder.", rich_help_panel=_HOW)
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Compare every result with the whole model's in ONNX Runtime, run in a process of "
        "its own.",
        rich_help_panel=_SHOW,
    ),
]
Tolerance = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="Largest difference that --verify accepts: |difference| / (1 + |whole model's|).",
        rich_help_panel=_SHOW,
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write what the summary says as JSON (docs/report.md).",
        rich_help_panel=_SHOW,
    ),
]
Progress = Annotated[
    ProgressKind, typer.Option(help="A live picture, or plain lines.", rich_help_panel=_SHOW)
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="No progress and no summary.", rich_help_panel=_SHOW),
]

# ---- shoal plan ----------------------------------------------------------------------------------

PlanFiles = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="Manifests, or folders of manifests.")
]
PlanWork = Annotated[
    Path | None,
    typer.Option(help="Folder for fragments. [dim]Default: the one that `shoal run` uses[/dim]"),
]

# ---- shoal partition -----------------------------------------------------------------------------

ModelFile = Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file.")]
Count = Annotated[int | None, typer.Option(min=1, max=256, help="How many fragments.")]
MaxBytes = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="The most that a fragment may need, such as 16Mi."),
]
Cuts = Annotated[
    str | None, typer.Option(metavar="TENSOR,...", help="Cut where these tensors are made.")
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="INPUT=1,3,48,320",
        help="The shape of an input with dynamic axes, to reckon with. Repeatable.",
    ),
]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep the fragments here, as a fragment store.")
]

# ---- shoal coordinator ---------------------------------------------------------------------------

Listen = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS", help="Where agents and clients reach it: unix:/path or HOST:PORT."
    ),
]
Store = Annotated[Path, typer.Option(metavar="DIR", help="The fragment store.")]
State = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where it notes the jobs that run, so that the next one goes on with them. "
        "[dim]Default: state/ in the store[/dim]",
    ),
]
Relay = Annotated[
    RelayChoice,
    typer.Option(
        case_sensitive=False,
        help="Activations: from agent to agent where a route exists, or always through here.",
    ),
]
MetricsAddress = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Serve /metrics, /healthz and /readyz there."),
]
TelemetrySeconds = Annotated[
    float, typer.Option(min=0.05, help="How often agents are asked to report.")
]
SilenceSeconds = Annotated[
    float, typer.Option(min=0.1, help="A device silent for so long is probed.")
]
PatienceSeconds = Annotated[
    float, typer.Option(min=0.1, help="A probed device that is silent for so long is lost.")
]
TaskSeconds = Annotated[float, typer.Option(min=0.1, help="The longest that one task may take.")]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="The authority that all sides trust.", rich_help_panel=_SECURITY
    ),
]
TlsCertificate = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="This coordinator's certificate.", rich_help_panel=_SECURITY),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The certificate's key.", rich_help_panel=_SECURITY),
]
Clients = Annotated[
    list[str] | None,
    typer.Option(
        "--client",
        metavar="NAME",
        help="Common name of a certificate that may submit jobs. Repeatable. "
        "[dim]Default: shoal, shoal-operator[/dim]",
        rich_help_panel=_SECURITY,
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="No TLS; refused for what is not loopback.", rich_help_panel=_SECURITY
    ),
]
ExitWithParent = Annotated[
    bool,
    typer.Option("--exit-with-parent", help="End when the process that started it ends."),
]
CoordinatorLogLevel = Annotated[LogLevel, typer.Option(help="How much to log.")]

# ---- what commands do with them ------------------------------------------------------------------


def help_of(command: Callable[..., object]) -> str:
    """A command's docstring, each paragraph as one line: the terminal's width breaks it."""
    text = getdoc(command)
    assert text is not None, f"{command} says nothing of itself"
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


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
