"""Command lines of processes: a parser with one-line errors, and the options that they share."""

import argparse
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn, TypeVar

from shoal_protocol.channels import MOST_PORT, Credentials
from shoal_protocol.units import LONGEST_SECONDS, parse_quantity, parse_whole, shortened
from shoal_protocol.visible import OneLine, visible

LOG_LEVELS: Final = ("debug", "info", "warning", "error")

Value = TypeVar("Value")


class Parser(argparse.ArgumentParser):
    """Exits with status 2 and one line where a command line makes no sense."""

    def __init__(self, *, prog: str, description: str, epilog: str, version: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("--version", action="version", version=f"{prog} {version}")

    def error(self, message: str) -> NoReturn:
        """One line, without the usage before it."""
        self.exit(2, f"{self.prog}: {visible(message)} (--help says more)\n")


def checked(convert: Callable[[str], Value]) -> Callable[[str], Value]:
    """A `type=` for argparse that shows the text of the `ValueError` that `convert` raises."""

    def converted(text: str) -> Value:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return converted


def add_security(parser: argparse.ArgumentParser, certificate: str) -> argparse._ArgumentGroup:
    """`--tls-ca`, `--tls-certificate` (`certificate` is its help), `--tls-key`, `--insecure`."""
    group = parser.add_argument_group("security: a HOST:PORT needs mutual TLS")
    group.add_argument("--tls-ca", type=Path, metavar="FILE", help="authority that all sides trust")
    group.add_argument("--tls-certificate", type=Path, metavar="FILE", help=certificate)
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="the certificate's key")
    group.add_argument(
        "--insecure", action="store_true", help="no TLS; refused for what is not loopback"
    )
    return group


def credentials(parser: argparse.ArgumentParser, values: argparse.Namespace) -> Credentials | None:
    """The three files that `add_security` asks for, or none; exits where some are missing."""
    given = (values.tls_ca, values.tls_certificate, values.tls_key)
    if any(given) and not all(given):
        parser.error("--tls-ca, --tls-certificate and --tls-key go together")
    for path in filter(None, given):
        if not path.is_file():
            parser.error(f"{path} is no file")
    ca, certificate, key = given
    return Credentials(ca=ca, certificate=certificate, key=key) if all(given) else None


def add_log_level(group: argparse._ActionsContainer, default: str) -> None:
    """The option `--log-level`, one of `LOG_LEVELS`."""
    group.add_argument(
        "--log-level", choices=LOG_LEVELS, default=default, help="default: %(default)s"
    )


def set_up_logs(level: str) -> None:
    """One line for each record on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def collector_url(text: str) -> str:
    """Where an OpenTelemetry collector takes traces. `ValueError` says what is off."""
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", text):
        raise ValueError(f"{text!r} is not a URL such as http://localhost:4318")
    return text


def positive_integer(text: str) -> int:
    """A number from 1 on. Raises `ValueError`, as all below do."""
    value = parse_whole(text)
    if not value:
        raise ValueError(f"{shortened(text)!r} is no number from 1 on")
    return value


def duration(text: str) -> float:
    """Seconds (or another unit of time) from 0 on."""
    value = float(parse_quantity(text))
    if value > LONGEST_SECONDS:
        raise ValueError(f"{text!r} is too long")
    return value


def duration_from(least: float) -> Callable[[str], float]:
    """A converter to seconds from `least` on."""

    def convert(text: str) -> float:
        if (value := duration(text)) < least:
            raise ValueError(f"{text!r} is shorter than {least} s")
        return value

    return checked(convert)


def positive_duration(text: str) -> float:
    """Seconds, more than 0."""
    if (value := duration(text)) <= 0:
        raise ValueError(f"{text!r} is no time to wait")
    return value


def metrics_address(text: str) -> tuple[str, int]:
    """HOST:PORT, or `unix:/path` with the port 0."""
    return (text, 0) if text.startswith("unix:/") else host_port(text)


def host_port(text: str) -> tuple[str, int]:
    """HOST:PORT; an IPv6 address in brackets."""
    host, colon, digits = text.rpartition(":")
    port = parse_whole(digits, MOST_PORT)
    if not (colon and host) or port is None:
        raise ValueError(f"{shortened(text)!r} is not HOST:PORT")
    return host.strip("[]"), port
