"""The line that lets a machine join a standalone coordinator: one word, safe in any shell.

    shoal://HOST:PORT/FINGERPRINT/TOKEN

HOST:PORT is the coordinator's. Its enrolment service, which serves callers without a certificate,
is at the next port. FINGERPRINT is the SHA-256 of the certificate that this service shows, in
hexadecimal: whatever shows another one is not believed. TOKEN is good for one key.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal_protocol.visible import visible_line

DEFAULT_PORT: Final = 7400
_HOST: Final = r"\[(?=.*:.*:)[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+"
"""An address of IPv6 has two colons at least; with one, it is a host with its port."""
_LINE: Final = re.compile(
    rf"shoal://(?P<host>{_HOST}):(?P<port>[0-9]{{1,5}})"
    r"/(?P<fingerprint>[0-9a-f]{64})/(?P<token>[A-Za-z0-9_-]{16,128})"
)
_MOST: Final = 65534
"""The next port is one too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinLine:
    """What a join line says. `host` is as in a target: an IPv6 address has its brackets."""

    host: str
    port: int
    fingerprint: str
    token: str

    def __post_init__(self) -> None:
        """Raises `ValueError` for a host or a port that no coordinator can have."""
        check_host(self.host)
        if not 0 < self.port <= _MOST:
            raise ValueError(f"port {self.port}: a coordinator has one from 1 to {_MOST}")

    @property
    def target(self) -> str:
        """Of the coordinator."""
        return f"{self.host}:{self.port}"

    @property
    def enrolment_target(self) -> str:
        """Of its enrolment service."""
        return f"{self.host}:{self.port + 1}"

    def __str__(self) -> str:
        return f"shoal://{self.target}/{self.fingerprint}/{self.token}"


def check_host(host: str) -> None:
    """Raise `ValueError` for what no join line can name."""
    if not re.fullmatch(_HOST, host):
        raise ValueError(
            f"{host!r} is no host such as 192.168.1.10, shelf.local or, in brackets, [fd00::10]"
        )


def read_join_line(text: str) -> JoinLine:
    """A join line, or the one in the file of that name. `ValueError` says what is off."""
    if "://" in text or not text:
        return parse_join_line(text)
    try:
        return parse_join_line(Path(text).read_text())
    except OSError as error:
        name = visible_line(text)
        raise ValueError(f"{name}: {error.strerror}; a join line begins with shoal://") from error


def parse_join_line(text: str) -> JoinLine:
    """Raises `ValueError`; the text does not repeat the token."""
    match = _LINE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            "this is no join line; it is shoal://HOST:PORT/FINGERPRINT/TOKEN, as "
            "`shoal coordinator` and `shoal invite` print it"
        )
    values = match.groupdict()
    return JoinLine(
        host=values["host"],
        port=int(values["port"]),
        fingerprint=values["fingerprint"],
        token=values["token"],
    )
