"""The command line of the agent, and the values that come out of it."""

import argparse
import os
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import grpc

from shoal_agent import __version__
from shoal_agent.enrolment.identity import Enrolment
from shoal_agent.memory.told_budgets import read_budget
from shoal_agent.telemetry.machine import Machine
from shoal_agent.transport.addresses import reached_at
from shoal_protocol.arguments import (
    LOG_LEVELS,
    Parser,
    add_security,
    checked,
    duration,
    metrics_address,
    positive_duration,
    positive_integer,
)
from shoal_protocol.arguments import credentials as credentials_of
from shoal_protocol.channels import Credentials, open_channel
from shoal_protocol.choices import Residency
from shoal_protocol.identities import COORDINATOR
from shoal_protocol.join_lines import read_join_line
from shoal_protocol.memory_folders import is_in_memory
from shoal_protocol.state_folders import HomeMissing, home_folder, state_folder
from shoal_protocol.units import Bytes, format_bytes, parse_bytes, parse_quantity

_CACHE: Final = Path("/var/cache/shoal")
_LEAST_LIMIT_BYTES: Final = 48 << 20
"""Of memory, below which no agent becomes ready: with 44 MiB it is ended while it begins."""
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")

_DESCRIPTION: Final = """\
Runs fragments of neural networks on this device, within a memory budget. The agent dials its
coordinator and does what that asks; it needs no open port. With a join line, as `shoal coordinator`
and `shoal invite` print it, it gets a certificate from that coordinator, and renews it. SIGTERM
drains: what runs is finished, then the agent leaves. A second SIGTERM, or SIGINT, ends it at once.
"""

_EPILOG: Final = """\
Examples:
  shoal agent shoal://10.0.0.1:7400/... --budget 512Mi
  shoal agent install shoal://10.0.0.1:7400/... --budget 512Mi      (a systemd unit with that)
  shoal agent --coordinator unix:/run/shoal/coordinator.sock --budget 24Mi
  shoal agent --name pi-4 --coordinator 10.0.0.1:7400 --budget 512Mi \\
      --listen 0.0.0.0:7401 --advertise 10.0.0.7:7401 \\
      --tls-ca ca.pem --tls-certificate pi-4.pem --tls-key pi-4.key"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of the agent. Sizes in bytes, rates in bits per second. `coordinator_name` is the
    name in the coordinator's certificate, None: the host that is dialled."""

    name: str
    coordinator: str
    coordinator_name: str | None
    listen: str | None
    advertise: str | None
    cache: Path
    cache_bytes: Bytes
    speed: Path | None
    budget: Bytes
    budget_file: Path | None
    single: bool
    threads: int | None
    metrics: tuple[str, int] | None
    link_rate: float
    link_latency_seconds: float
    telemetry_interval_seconds: float | None
    credentials: Credentials | None
    enrolment: Enrolment | None
    insecure: bool
    exit_with_parent: bool
    drain_seconds: float
    log_level: str
    log_format: str

    def channel(self) -> grpc.aio.Channel:
        """A channel to the coordinator. Raises `AddressRefused`, `OSError`."""
        return open_channel(
            self.coordinator,
            self.credentials,
            insecure=self.insecure,
            server_name=self.coordinator_name,
        )

    def reached_at(self) -> str:
        """Where the agent is reached, as far as that is known before it listens. Raises `OSError`
        where this machine has no way to the coordinator."""
        assert self.listen is not None, "an agent that does not listen is not reached"
        return reached_at(self.listen, self.coordinator)


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line; exits with status 2 and one clear line where it makes no sense."""
    parser = Parser(
        prog="shoal agent", description=_DESCRIPTION, epilog=_EPILOG, version=__version__
    )
    _add_place(parser)
    _add_limits(parser)
    _add_security(parser)
    _add_rest(parser)
    values = parser.parse_args(arguments)
    values.credentials = credentials_of(parser, values)
    values.coordinator_name = None
    values.enrolment = None
    if values.budget_file is not None:
        _read_budget(parser, values)
    if values.join is not None:
        _join(parser, values)
    for option in ("coordinator", "budget"):
        if getattr(values, option) is None:
            parser.error(f"the following arguments are required: --{option} (or a join line)")
    _warn_beyond_memory(parser.prog, values.budget)
    if not values.exit_with_parent:  # else the limit comes later
        _refuse_tiny_limit(parser, values.budget, Machine().memory_limit_bytes())
    values.cache = values.cache or _CACHE
    _refuse_unusable_cache(parser, values.cache)
    if not values.exit_with_parent:  # else who started this one says it
        _warn_of_memory(parser.prog, values.cache)
    values.log_level = values.log_level or "warning"
    if values.advertise is not None and values.listen is None:
        parser.error("--advertise needs --listen")
    values.single = values.residency == Residency.SINGLE
    values.enrolment = values.enrolment or _enrolment(parser, values)
    if values.enrolment is not None:
        values.credentials = values.enrolment.credentials
    return Settings(**{each.name: getattr(values, each.name) for each in fields(Settings)})


def _warn_beyond_memory(program: str, budget: Bytes) -> None:
    """On standard error: no log is kept yet."""
    if budget > (have := Machine().memory_bytes):
        text = f"{format_bytes(budget)} is more than this machine's memory, {format_bytes(have)}"
        print(f"{program}: warning: a budget of {text}; less will be there", file=sys.stderr)


def _warn_of_memory(program: str, cache: Path) -> None:
    if is_in_memory(cache):
        text = f"the cache {cache} is on a tmpfs: what is stored there is memory too, beside the"
        remedy = "budget; name a folder on a disk with --cache DIR"
        print(f"{program}: warning: {text} {remedy}", file=sys.stderr)


def _refuse_tiny_limit(parser: argparse.ArgumentParser, budget: Bytes, limit: int | None) -> None:
    """The kernel would end the agent before it has measured its floor, and says nothing."""
    if limit is not None and limit < _LEAST_LIMIT_BYTES:
        parser.error(
            f"the idle agent takes some 60 MiB, and the budget is {format_bytes(budget)} above "
            f"that; the limit of this control group is {format_bytes(Bytes(limit))}: raise it"
        )


def _refuse_unusable_cache(parser: argparse.ArgumentParser, cache: Path) -> None:
    """ONNX Runtime opens files in there, by names that are UTF-8: every load would fail."""
    try:
        str(cache).encode()
    except UnicodeEncodeError:
        parser.error(f"--cache {str(cache)!r}: the path of the cache must be UTF-8")


def _read_budget(parser: argparse.ArgumentParser, values: argparse.Namespace) -> None:
    """The budget to start with, in a file that may say another later."""
    if values.budget is not None:
        parser.error("--budget-file excludes --budget")
    try:
        text = values.budget_file.read_text()
        values.budget = read_budget(text, Machine().physical_bytes)
    except (OSError, ValueError) as error:
        parser.error(f"argument --budget-file: {values.budget_file}: {error}")


def _join(parser: argparse.ArgumentParser, values: argparse.Namespace) -> None:
    """What a join line says, and defaults for what it does not: certificate and fragments outlive
    the agent, any free port, half of the machine's memory."""
    given = (values.coordinator, values.tls_ca, values.enrol, values.enrol_ca, values.enrol_token)
    if any(given) or values.insecure:
        parser.error("a join line excludes --coordinator, --enrol..., --tls-... and --insecure")
    try:
        folder = state_folder() / "agent" / values.name
    except HomeMissing:
        folder = None
    if folder is None and not (values.identity_folder and values.cache):
        parser.error("this user has no home folder; give --identity-folder DIR and --cache DIR")
    values.cache = values.cache or folder / "cache"
    values.enrolment = Enrolment(
        target=values.join.enrolment_target,
        name=values.name,
        folder=values.identity_folder or folder / "identity",
        join=values.join,
    )
    values.coordinator, values.coordinator_name = values.join.target, COORDINATOR
    values.budget = values.budget or Bytes(Machine().memory_bytes // 2)
    values.log_level = values.log_level or "info"
    if values.listen is None:
        values.listen = "[::]:0" if values.join.host.startswith("[") else "0.0.0.0:0"


def _enrolment(parser: argparse.ArgumentParser, values: argparse.Namespace) -> Enrolment | None:
    """Where to get a certificate, if that was asked for; all of it or nothing."""
    given = (values.enrol, values.enrol_ca, values.enrol_token)
    if not any(given):
        return None
    if not all(given):
        parser.error("--enrol, --enrol-ca and --enrol-token go together")
    if values.tls_ca is not None or values.insecure:
        parser.error("--enrol excludes --tls-ca, --tls-certificate, --tls-key and --insecure")
    return Enrolment(
        target=values.enrol,
        ca=values.enrol_ca,
        token=values.enrol_token,
        name=values.name,
        folder=values.identity_folder or _identity_folder(parser),
    )


def _identity_folder(parser: argparse.ArgumentParser) -> Path:
    """In memory where the user has a folder of their own there, else in their home."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime, "shoal-identity")
    try:
        return home_folder("XDG_RUNTIME_DIR") / ".local/state/shoal-identity"
    except HomeMissing:
        parser.error("this user has no home folder for a certificate; give --identity-folder DIR")


def _add_place(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("who and where")
    group.add_argument(
        "join",
        nargs="?",
        type=checked(read_join_line),
        metavar="JOIN",
        help="a join line, or a file that holds one, in the place of --coordinator",
    )
    group.add_argument(
        "--coordinator",
        metavar="TARGET",
        help="the coordinator to dial: unix:/path or HOST:PORT",
    )
    group.add_argument(
        "--name",
        type=checked(_name),
        default=_host_name(),
        help="name of this device, a DNS label, or several with dots (default: the host's, "
        "%(default)s)",
    )
    group.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="where peers reach this agent: unix:/path or HOST:PORT, port 0 for any free one; "
        "without it activations are relayed by the coordinator",
    )
    group.add_argument(
        "--advertise",
        metavar="TARGET",
        help="what peers are to dial, if that is not the address listened on; without a port, the "
        "one listened on",
    )
    group.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help=f"folder of the disk cache (default: {_CACHE}, with a join line below ~/.local/state)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what it may use")
    group.add_argument(
        "--budget",
        type=checked(lambda text: read_budget(text, 0)),
        metavar="QUANTITY",
        help="memory for weights, activations and workspace, above the idle agent: 24Mi, 1.5G "
        "(default with a join line: half of this machine's memory)",
    )
    group.add_argument(
        "--budget-file",
        type=Path,
        metavar="FILE",
        help="the same in a file, which is read again and again: a budget that is written there is "
        "adopted while the agent runs",
    )
    group.add_argument(
        "--residency",
        choices=[each.value for each in Residency],
        default=Residency.ADAPTIVE.value,
        help="as many fragments in memory as the budget allows, or one at a time "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--cache-size",
        dest="cache_bytes",
        type=checked(_positive_bytes),
        default=Bytes(1 << 30),
        metavar="QUANTITY",
        help="disk for fragments, and for activations that memory has no room for; "
        "a quarter is for the latter (default: 1Gi)",
    )
    group.add_argument(
        "--threads",
        type=checked(positive_integer),
        metavar="N",
        help="threads of ONNX Runtime (default: the processors that this process may use)",
    )
    group.add_argument(
        "--speed",
        type=Path,
        metavar="FILE",
        help="what one thread of this machine does, as measured before; agents of one machine "
        "share it (default: measured at the first start, in some seconds, and stored in the cache)",
    )
    group.add_argument(
        "--link-rate",
        type=checked(lambda text: float(parse_quantity(text))),
        default=0.0,
        metavar="QUANTITY",
        help="pretend a link of so many bits per second: 100M (default: as fast as it goes)",
    )
    group.add_argument(
        "--link-latency-milliseconds",
        dest="link_latency_seconds",
        type=checked(lambda text: duration(text) / 1000),
        default=0.0,
        metavar="N",
        help="pretend that what this agent sends takes so long on its way (default: 0)",
    )


def _add_security(parser: argparse.ArgumentParser) -> None:
    group = add_security(
        parser, certificate="this device's certificate; its common name is the device's name"
    )
    group.add_argument(
        "--enrol",
        metavar="HOST:PORT",
        help="get a certificate there, in the place of the three above, and renew it in time",
    )
    group.add_argument(
        "--enrol-ca", type=Path, metavar="FILE", help="authority to trust while doing so"
    )
    group.add_argument(
        "--enrol-token",
        "--token-file",
        type=Path,
        metavar="FILE",
        help="token that says who this device is; read anew each time",
    )
    group.add_argument(
        "--identity-folder",
        type=Path,
        metavar="DIR",
        help="where key and certificate are kept; this user's alone, best in memory (default: "
        "shoal-identity in $XDG_RUNTIME_DIR, else in ~/.local/state)",
    )


def _add_rest(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("operation")
    group.add_argument(
        "--metrics-address",
        dest="metrics",
        type=checked(metrics_address),
        metavar="HOST:PORT",
        help="serve /metrics, /healthz and /readyz there, port 0 for any free one; or on a Unix "
        "socket, unix:/path (default: off)",
    )
    group.add_argument(
        "--telemetry-interval",
        dest="telemetry_interval_seconds",
        type=checked(positive_duration),
        metavar="SECONDS",
        help="how often to report (default: what the coordinator wishes)",
    )
    group.add_argument(
        "--drain-seconds",
        type=checked(duration),
        default=25.0,
        metavar="N",
        help="how long SIGTERM waits for what runs (default: %(default)s)",
    )
    group.add_argument(
        "--exit-with-parent",
        action="store_true",
        help="be killed when the process that started this one ends (Linux); SHOAL_PARENT may say "
        "its process id, for where it has ended already",
    )
    group.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        help="default: warning; info with a join line, where no cluster says what goes on",
    )
    group.add_argument("--log-format", choices=("text", "json"), default="text")


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(f"{text!r} is no DNS label: lower-case letters, digits, dashes and dots")
    return text


def _host_name() -> str:
    label = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().split(".")[0].lower())
    return label.strip("-")[:63].strip("-") or "device"


def _positive_bytes(text: str) -> Bytes:
    size = parse_bytes(text)
    if size <= 0:
        raise ValueError(f"{text!r} leaves nothing to work with")
    return size
