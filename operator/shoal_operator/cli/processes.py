"""`shoal agent` and `shoal coordinator`: what a pool is made of, each a process of its own."""

import os
import sys
from dataclasses import replace
from typing import Final

import typer

from shoal_operator.cli import options, serving_options

COORDINATOR_EPILOG: Final = (
    "[bold]Example[/bold]\n\n"
    "shoal coordinator --listen unix:/run/shoal/coordinator.sock --store /var/lib/shoal"
)


def agent(context: typer.Context) -> None:
    """Run one agent (shoal agent --help shows the agent's own options)."""
    command = [sys.executable, "-m", "shoal_agent", *context.args]
    os.execv(sys.executable, command)  # noqa: S606 - the agent takes this process's place


def coordinator(
    listen: serving_options.Listen,
    store: serving_options.Store,
    state: serving_options.State = None,
    relay: serving_options.Relay = serving_options.RelayChoice.AUTO,
    metrics_address: serving_options.MetricsAddress = None,
    telemetry_seconds: serving_options.TelemetrySeconds = 2.0,
    silence_seconds: serving_options.SilenceSeconds = 6.0,
    patience_seconds: serving_options.PatienceSeconds = 3.0,
    task_seconds: serving_options.TaskSeconds = 540.0,
    tls_ca: options.TlsCa = None,
    tls_certificate: options.TlsCertificate = None,
    tls_key: options.TlsKey = None,
    client: serving_options.Clients = None,
    insecure: options.Insecure = False,
    exit_with_parent: serving_options.ExitWithParent = False,
    log_level: serving_options.HowMuchLog = options.LogLevel.WARNING,
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
        credentials=options.credentials(tls_ca, tls_certificate, tls_key),
        insecure=insecure,
        exit_with_parent=exit_with_parent,
    )
    if client:
        settings = replace(settings, clients=frozenset(client))
    raise typer.Exit(run_coordinator(settings))
