"""From the command line and the file of settings, which the chart writes, to a running operator."""

import argparse
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml

from shoal_api.schema import Object
from shoal_api.shapes import Errors, Invalid
from shoal_operator import __version__
from shoal_operator.controller.login import LoginRefused
from shoal_operator.controller.operator import OperatorConfig, run_operator
from shoal_operator.reconcile.settings import OperatorSettings
from shoal_protocol.arguments import (
    Parser,
    add_log_level,
    checked,
    duration_from,
    host_port,
    positive_integer,
    set_up_logs,
)
from shoal_protocol.visible import visible

_DESCRIPTION: Final = """\
Runs the operator: it watches the kinds of shoal.dev, and makes the cluster be as they say. In a pod
it uses that pod's service account; elsewhere give a kubeconfig. Of several operators one leads, as
the Lease shoal-operator says. SIGTERM ends it; running jobs continue."""

_EPILOG: Final = """\
Example:
  shoal operator --settings operator.yaml --kubeconfig ~/.kube/config --namespace default"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM; the exit status: 0 ended, 1 failed, 2 not startable as asked."""
    parser = operator_parser()
    values = parser.parse_args(arguments)
    coordinators = _targets(parser, values.coordinator)
    set_up_logs(values.log_level)
    # kopf logs every object and every reconnection.
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
    try:
        config = OperatorConfig(
            settings=read_settings(values.settings),
            identity=values.identity or f"{socket.gethostname()}-{os.getpid()}",
            kubeconfig=values.kubeconfig,
            namespaces=tuple(values.namespace or ()),
            metrics=values.metrics_address,
            enrolment=values.enrolment_address,
            coordinators=coordinators,
            resync_seconds=values.resync_seconds,
            watch_seconds=values.watch_seconds,
        )
        return run_operator(config)
    except (LoginRefused, SettingsRefused, OSError) as error:
        print(visible(f"shoal operator: {error}"), file=sys.stderr)
        return 2


class SettingsRefused(ValueError):
    """A settings file that cannot be used: which file, and why, naming its fields."""

    def __init__(self, file: Path, problem: str) -> None:
        super().__init__(f"{file}: {problem}")
        self.file = file
        self.problem = problem


def read_settings(file: Path) -> OperatorSettings:
    """Read a settings file. Raises `SettingsRefused`."""
    try:
        with file.open(encoding="utf-8") as content:  # the errors of YAML name an open file
            document: object = yaml.safe_load(content)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsRefused(file, str(error)) from error
    errors: Errors = []
    settings = Object(OperatorSettings).read(document, (), errors)
    if isinstance(settings, Invalid):
        raise SettingsRefused(file, "; ".join(map(str, errors)))
    return settings


def operator_parser() -> argparse.ArgumentParser:
    """The options of `shoal operator`."""
    parser = Parser(
        prog="shoal operator", description=_DESCRIPTION, epilog=_EPILOG, version=__version__
    )
    group = parser.add_argument_group("the cluster")
    group.add_argument(
        "--settings",
        type=Path,
        required=True,
        metavar="FILE",
        help="how it is installed, as the chart writes it",
    )
    group.add_argument(
        "--kubeconfig",
        type=Path,
        default=os.environ.get("KUBECONFIG") or None,
        metavar="FILE",
        help="whose rights it has outside of a cluster (default: $KUBECONFIG, else the pod's "
        "service account)",
    )
    group.add_argument(
        "--namespace",
        action="append",
        metavar="NAME",
        help="reconcile this namespace only; repeatable (default: all)",
    )
    group.add_argument(
        "--identity", metavar="NAME", help="its name in the Lease (default: host and process)"
    )
    group.add_argument(
        "--coordinator",
        action="append",
        metavar="NAMESPACE/POOL=TARGET",
        help="reach a pool's coordinator there and not by its Service; repeatable",
    )
    _add_operation(parser)
    return parser


def _add_operation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("operation")
    for name, default, text in (
        ("--metrics-address", "0.0.0.0:8080", "serve /metrics, /healthz and /readyz there"),
        ("--enrolment-address", "0.0.0.0:8443", "where agents get their certificates"),
    ):
        group.add_argument(
            name,
            type=checked(host_port),
            default=default,
            metavar="HOST:PORT",
            help=f"{text} (default: %(default)s)",
        )
    group.add_argument(
        "--resync-seconds",
        type=duration_from(1.0),
        default=600.0,
        metavar="SECONDS",
        help="how often everything is listed and reconciled again (default: %(default)s)",
    )
    group.add_argument(
        "--watch-seconds",
        type=checked(positive_integer),
        default=45,
        metavar="SECONDS",
        help="how long a watch lasts before it is asked for anew; when one has been silent for 2.5 "
        "times this, /readyz fails (default: %(default)s)",
    )
    add_log_level(group, default="info")


def _targets(parser: argparse.ArgumentParser, texts: list[str] | None) -> dict[str, str]:
    """`NAMESPACE/POOL=TARGET`, each pool once."""
    targets: dict[str, str] = {}
    for text in texts or []:
        pool, separator, target = text.partition("=")
        if not (separator and target and pool.count("/") == 1):
            parser.error(f"--coordinator {text}: write NAMESPACE/POOL=TARGET")
        if pool in targets:
            parser.error(f"--coordinator {pool} is given twice")
        targets[pool] = target
    return targets
