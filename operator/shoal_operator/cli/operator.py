"""`shoal operator`: the control plane on a cluster, in a pod or beside it."""

import os
import socket
from pathlib import Path
from typing import Final

import typer

from shoal_operator.cli import options, serving_options

EPILOG: Final = (
    "[bold]Examples[/bold]\n\n"
    "shoal operator --settings operator.yaml --kubeconfig ~/.kube/config --namespace default"
)


def operator(
    settings: serving_options.OperatorSettingsFile,
    kubeconfig: serving_options.Kubeconfig = None,
    namespace: serving_options.Namespaces = None,
    identity: serving_options.Identity = None,
    metrics_address: serving_options.OperatorMetricsAddress = "0.0.0.0:8080",
    enrolment_address: serving_options.EnrolmentAddress = "0.0.0.0:8443",
    coordinator: serving_options.CoordinatorTargets = None,
    resync_seconds: serving_options.ResyncSeconds = 600.0,
    watch_seconds: serving_options.WatchSeconds = 45,
    log_level: serving_options.HowMuchLog = options.LogLevel.INFO,
) -> None:
    """Run the operator: watches the kinds of shoal.dev, and has come true what they say.

    In a pod it is that pod's service account; elsewhere give a kubeconfig. Of several operators one
    leads, as the Lease shoal-operator says. SIGTERM ends it; running jobs go on.
    """
    import logging

    from shoal_operator.shell.cluster.health import HealthLimits
    from shoal_operator.shell.cluster.operator import OperatorConfig, run_operator
    from shoal_operator.shell.cluster.settings import read_settings
    from shoal_operator.shell.cluster.watches import WatchTimes

    level = log_level.value.upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # kopf tells of every object and every reconnection.
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
    config = OperatorConfig(
        settings=read_settings(settings),
        identity=identity or f"{socket.gethostname()}-{os.getpid()}",
        kubeconfig=_kubeconfig(kubeconfig),
        namespaces=tuple(namespace or ()),
        metrics=_host_and_port(metrics_address),
        enrolment=_host_and_port(enrolment_address),
        coordinators=serving_options.parse_targets(coordinator),
        resync_seconds=resync_seconds,
        watch=WatchTimes.every(watch_seconds),
        limits=HealthLimits(watch_age=watch_seconds * 2.5),
    )
    raise typer.Exit(run_operator(config))


def _kubeconfig(given: Path | None) -> Path | None:
    """What was said, else what KUBECONFIG says; a pod has neither."""
    named = os.environ.get("KUBECONFIG", "")
    return given or (Path(named) if named else None)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise typer.BadParameter(f"{address!r} is no HOST:PORT")
    return host.strip("[]"), int(port)
