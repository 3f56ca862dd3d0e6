"""When a certificate expires: for metrics, read from the file at every scrape, so that a renewed
one counts at once; and of a caller's, whose session may end with it.

The `cryptography` package could say it too, but it takes 10 MiB of an agent's memory, and the
coordinator has no other use for it. Only this field is read (RFC 5280, section 4.1); nothing is
verified.
"""

import re
import time
from binascii import a2b_base64
from calendar import timegm
from pathlib import Path
from typing import Final

_FIRST: Final = re.compile("-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_OF_ANOTHER_TIME: Final = re.compile(r"certificate[ _](has[ _])?expired|not yet valid", re.I)
_VERSION: Final = 0xA0
_TIMES: Final = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
"""UTCTime and GeneralizedTime."""


def expiration_seconds(path: Path) -> float | None:
    """When the first certificate of a PEM file expires, in seconds since 1970; None: the file
    cannot be read, or is no certificate."""
    try:
        return expiration_of(path.read_text())
    except (OSError, ValueError):
        return None


def expiration_of(pem: str) -> float | None:
    """The same of a text."""
    try:
        found = _FIRST.search(pem)
        return None if found is None else _not_after(a2b_base64(found[1]))
    except (ValueError, LookupError):
        return None


def with_clock(problem: str, now: float) -> str:
    """Why a handshake failed, with what to look at where a certificate is of another time. `now` in
    seconds since 1970."""
    if not _OF_ANOTHER_TIME.search(problem):
        return problem
    here = f"the clock here says {minute(now)}: is it right, and that of the coordinator?"
    return f"{problem} ({here})"


def minute(seconds: float) -> str:
    """A time for people, from seconds since 1970: certificates of devices are valid for a day."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _not_after(der: bytes) -> float:
    """Certificate > TBSCertificate > [version], serial number, algorithm, issuer, validity."""
    _, certificate = _element(der)
    _, rest = _element(certificate)
    tag, _ = _element(rest)
    for _ in range(4 if tag == _VERSION else 3):
        rest = _after(rest)
    _, validity = _element(rest)
    tag, text = _element(_after(validity))
    return float(timegm(time.strptime(text.decode(), _TIMES[tag])))


def _element(der: bytes) -> tuple[int, bytes]:
    """Tag and content of the first element."""
    start, end = _bounds(der)
    return der[0], der[start:end]


def _after(der: bytes) -> bytes:
    """What follows the first element."""
    return der[_bounds(der)[1] :]


def _bounds(der: bytes) -> tuple[int, int]:
    """Where the content of the first element begins and ends."""
    length, start = der[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[2:start])
    return start, start + length
