"""`shoal agent` and `shoal coordinator`: what a pool is made of, each a process of its own."""

import os
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from shoal_operator.cli.options import LogLevel

if TYPE_CHECKING:
    from shoal_protocol.channels import Credentials

COORDINATOR_EPILOG: Final = (
    "[bold]Example[/bold]\n\n"
    "shoal coordinator --listen unix:/run/shoal/coordinator.sock --store /var/lib/shoal"
)
_SECURITY: Final = "Security"


class RelayChoice(StrEnum):
    """What `--relay` takes."""

    AUTO = "Auto"
    ALWAYS = "Always"


def agent(context: typer.Context) -> None:
    """Run one agent (shoal agent --help shows the agent's own options)."""
    command = [sys.executable, "-m", "shoal_agent", *context.args]
    os.execv(sys.executable, command)  # noqa: S606 - the agent takes this process's place


def coordinator(
    listen: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Where agents and clients reach it: unix:/path or HOST:PORT."
        ),
    ],
    store: Annotated[Path, typer.Option(metavar="DIR", help="The fragment store.")],
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where it notes the jobs that run, so that the next one goes on with them. "
            "[dim]Default: state/ in the store[/dim]",
        ),
    ] = None,
    relay: Annotated[
        RelayChoice,
        typer.Option(
            case_sensitive=False,
            help="Activations: from agent to agent where a route exists, or always through here.",
        ),
    ] = RelayChoice.AUTO,
    metrics_address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve /metrics, /healthz and /readyz there."),
    ] = None,
    telemetry_seconds: Annotated[
        float, typer.Option(min=0.05, help="How often agents are asked to report.")
    ] = 2.0,
    silence_seconds: Annotated[
        float, typer.Option(min=0.1, help="A device silent for so long is probed.")
    ] = 6.0,
    patience_seconds: Annotated[
        float, typer.Option(min=0.1, help="A probed device that is silent for so long is lost.")
    ] = 3.0,
    task_seconds: Annotated[
        float, typer.Option(min=0.1, help="The longest that one task may take.")
    ] = 540.0,
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The authority that all sides trust.", rich_help_panel=_SECURITY
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="This coordinator's certificate.", rich_help_panel=_SECURITY
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The certificate's key.", rich_help_panel=_SECURITY),
    ] = None,
    client: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Common name of a certificate that may submit jobs. Repeatable. "
            "[dim]Default: shoal, shoal-operator[/dim]",
            rich_help_panel=_SECURITY,
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="No TLS; refused for what is not loopback.",
            rich_help_panel=_SECURITY,
        ),
    ] = False,
    exit_with_parent: Annotated[
        bool,
        typer.Option("--exit-with-parent", help="End when the process that started it ends."),
    ] = False,
    log_level: Annotated[LogLevel, typer.Option(help="How much to log.")] = LogLevel.WARNING,
) -> None:
    """Run a coordinator: sessions with agents, dispatch, recovery, results.

    SIGTERM ends it; jobs that run go on with the next coordinator of the same state folder. A
    HOST:PORT needs mutual TLS; behind a Unix socket the file system is the identity.
    """
    import logging

    from shoal_operator.shell.coordinator import CoordinatorSettings, Relay, run_coordinator

    logging.basicConfig(
        level=log_level.value.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    settings = CoordinatorSettings(
        listen=listen,
        store=store,
        state=state or store / "state",
        relay=Relay(relay.value),
        metrics=metrics_address,
        telemetry_seconds=telemetry_seconds,
        silence_seconds=silence_seconds,
        patience_seconds=patience_seconds,
        task_seconds=task_seconds,
        credentials=_credentials(tls_ca, tls_certificate, tls_key),
        insecure=insecure,
        exit_with_parent=exit_with_parent,
    )
    if client:
        settings = replace(settings, clients=frozenset(client))
    raise typer.Exit(run_coordinator(settings))


def _credentials(
    ca: Path | None, certificate: Path | None, key: Path | None
) -> "Credentials | None":
    """All three files, or none."""
    from shoal_protocol.channels import Credentials

    if ca is None and certificate is None and key is None:
        return None
    if ca is None or certificate is None or key is None:
        raise typer.BadParameter("--tls-ca, --tls-certificate and --tls-key go together")
    for file in (ca, certificate, key):
        if not file.is_file():
            raise typer.BadParameter(f"{file} is no file")
    return Credentials(ca=ca, certificate=certificate, key=key)
