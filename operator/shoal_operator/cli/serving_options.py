"""The options of what serves, `shoal coordinator` and `shoal operator`; see `options`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal_operator.cli.options import SECURITY, TASK_SECONDS_HELP, LogLevel


class RelayChoice(StrEnum):
    """What the coordinator's `--relay` takes."""

    AUTO = "Auto"
    ALWAYS = "Always"


HowMuchLog = Annotated[LogLevel, typer.Option(help="How much to log.")]

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
TaskSeconds = Annotated[float, typer.Option(min=0.1, help=TASK_SECONDS_HELP)]
Clients = Annotated[
    list[str] | None,
    typer.Option(
        "--client",
        metavar="NAME",
        help="Common name of a certificate that may submit jobs. Repeatable. "
        "[dim]Default: shoal, shoal-operator[/dim]",
        rich_help_panel=SECURITY,
    ),
]
ExitWithParent = Annotated[
    bool,
    typer.Option("--exit-with-parent", help="End when the process that started it ends."),
]

# ---- the operator --------------------------------------------------------------------------------

OperatorSettingsFile = Annotated[
    Path,
    typer.Option(
        "--settings",
        metavar="FILE",
        help="How it is installed, as the chart writes it.",
        exists=True,
    ),
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Whose rights it has, out of a cluster. [dim]Default: what KUBECONFIG says, else the "
        "pod's service account[/dim]",
        exists=True,
    ),
]
Namespaces = Annotated[
    list[str] | None,
    typer.Option(
        "--namespace",
        metavar="NAME",
        help="Look at this one only. Repeatable. [dim]Default: all[/dim]",
    ),
]
Identity = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Its name in the Lease. [dim]Default: host and process[/dim]"
    ),
]
OperatorMetricsAddress = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Serve /metrics, /healthz and /readyz there.")
]
EnrolmentAddress = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Where agents get their certificates.")
]
CoordinatorTargets = Annotated[
    list[str] | None,
    typer.Option(
        "--coordinator",
        metavar="NAMESPACE/POOL=TARGET",
        help="Reach a pool's coordinator there and not by its Service. Repeatable.",
    ),
]
ResyncSeconds = Annotated[
    float, typer.Option(min=1.0, help="How often everything is listed and looked at again.")
]
WatchSeconds = Annotated[
    int,
    typer.Option(
        min=1,
        help="How long a watch lasts before it is asked for anew; when one has been silent for 2.5 "
        "times this, /readyz fails.",
    ),
]


def parse_targets(texts: list[str] | None) -> dict[str, str]:
    """`NAMESPACE/POOL=TARGET`, each pool once."""
    targets: dict[str, str] = {}
    for text in texts or []:
        pool, separator, target = text.partition("=")
        if not (separator and target and pool.count("/") == 1):
            raise typer.BadParameter(f"--coordinator {text}: write NAMESPACE/POOL=TARGET")
        if pool in targets:
            raise typer.BadParameter(f"--coordinator {pool} is given twice")
        targets[pool] = target
    return targets
