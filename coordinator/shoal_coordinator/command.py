"""From the command line to a running coordinator."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from shoal_coordinator import __version__
from shoal_coordinator.server import CoordinatorSettings, Relay, run_coordinator
from shoal_coordinator.server.traces import TracesUnavailable
from shoal_coordinator.storage.store_size import ToldSize, read_size
from shoal_protocol.arguments import (
    Parser,
    add_log_level,
    add_security,
    checked,
    collector_url,
    credentials,
    duration_from,
    set_up_logs,
)
from shoal_protocol.channels import AddressRefused
from shoal_protocol.open_files import allow_open_files
from shoal_protocol.visible import visible

_DESCRIPTION: Final = """\
Runs a coordinator: sessions with agents, dispatch, recovery, results. SIGTERM ends it; running jobs
go on with the next coordinator of the same state folder. A HOST:PORT needs mutual TLS; behind a
Unix socket the file system is the identity."""

_EPILOG: Final = """\
Example:
  shoal coordinator --listen unix:/run/shoal/coordinator.sock --store /var/lib/shoal"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM; the exit status: 0 ended, 1 failed, 2 not startable as asked."""
    parser = _parser()
    values = parser.parse_args(arguments)
    settings = _settings(parser, values)
    set_up_logs(values.log_level)
    allow_open_files()  # some four for each device
    try:
        return run_coordinator(settings)
    except (AddressRefused, TracesUnavailable, OSError) as error:
        print(visible(f"shoal coordinator: {error}"), file=sys.stderr)
        return 2


def _settings(parser: argparse.ArgumentParser, values: argparse.Namespace) -> CoordinatorSettings:
    settings = CoordinatorSettings(
        listen=values.listen,
        store=values.store,
        store_size=_store_size(parser, values),
        state=values.state or values.store / "state",
        relay=Relay(values.relay),
        metrics=values.metrics_address,
        otlp=values.otlp,
        telemetry_seconds=values.telemetry_seconds,
        silence_seconds=values.silence_seconds,
        patience_seconds=values.patience_seconds,
        task_seconds=values.task_seconds,
        credentials=credentials(parser, values),
        insecure=values.insecure,
        exit_with_parent=values.exit_with_parent,
        sessions_expire=values.sessions_expire,
    )
    return replace(settings, clients=frozenset(values.client)) if values.client else settings


def _store_size(
    parser: argparse.ArgumentParser, values: argparse.Namespace
) -> Callable[[], int] | None:
    """What says how large the store may become."""
    if values.store_size_file is None:
        size: int | None = values.store_size
        return None if size is None else lambda: size
    if values.store_size is not None:
        parser.error("--store-size-file excludes --store-size")
    try:
        return ToldSize(values.store_size_file)
    except (OSError, ValueError) as error:
        parser.error(f"argument --store-size-file: {values.store_size_file}: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="shoal coordinator", description=_DESCRIPTION, epilog=_EPILOG, version=__version__
    )
    _add_place(parser)
    _add_times(parser)
    group = add_security(parser, certificate="the coordinator's certificate")
    group.add_argument(
        "--client",
        action="append",
        metavar="NAME",
        help="common name of a certificate that may submit jobs; repeatable "
        "(default: shoal, shoal-operator)",
    )
    group.add_argument(
        "--sessions-expire",
        action="store_true",
        help="end a device's session when the certificate expires that it was opened with "
        "(default: it goes on, and what comes after it needs another one)",
    )
    group = parser.add_argument_group("operation")
    group.add_argument(
        "--metrics-address",
        metavar="HOST:PORT",
        help="serve /metrics, /healthz and /readyz there, port 0 for any free one; or on a Unix "
        "socket, unix:/path (default: off)",
    )
    group.add_argument(
        "--otlp",
        type=checked(collector_url),
        metavar="URL",
        help="export a trace of each item to an OpenTelemetry collector there, http://HOST:4318 "
        "(default: off; needs the extra shoal[otlp])",
    )
    group.add_argument(
        "--exit-with-parent",
        action="store_true",
        help="end when the process that started this one ends (Linux); SHOAL_PARENT may say its "
        "process id, for where it has ended already",
    )
    add_log_level(group, default="warning")
    return parser


def _add_place(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where")
    group.add_argument(
        "--listen",
        required=True,
        metavar="ADDRESS",
        help="where agents and clients reach it: unix:/path or HOST:PORT",
    )
    group.add_argument(
        "--store", type=Path, required=True, metavar="DIR", help="the fragment store"
    )
    group.add_argument(
        "--store-size",
        type=checked(read_size),
        metavar="QUANTITY",
        help="what all in that folder may take: 5Gi; fragments that no job uses are removed before "
        "there is more (default: what its disk has)",
    )
    group.add_argument(
        "--store-size-file",
        type=Path,
        metavar="FILE",
        help="the same in a file, which is read again and again",
    )
    group.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="where it records the jobs that run, so that the next one resumes them "
        "(default: state/ in the store)",
    )
    group.add_argument(
        "--relay",
        choices=[each.value for each in Relay],
        default=Relay.AUTO.value,
        help="activations: from agent to agent where a route exists, or always through here "
        "(default: %(default)s)",
    )


def _add_times(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how long")
    for name, default, least, text in (
        ("--telemetry-seconds", 2.0, 0.05, "how often agents are asked to report"),
        ("--silence-seconds", 6.0, 0.1, "a device silent for so long is probed"),
        ("--patience-seconds", 3.0, 0.1, "a probed device that is silent for so long is lost"),
        (
            "--task-seconds",
            540.0,
            0.1,
            "the longest that one task may take on a device, its wait for another one there "
            "included",
        ),
    ):
        group.add_argument(
            name,
            type=duration_from(least),
            default=default,
            metavar="SECONDS",
            help=f"{text} (default: %(default)s)",
        )
