"""Bytes and nanoseconds as integers, and how people write and read them."""

import math
import re
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal
from typing import Final, NewType

Bytes = NewType("Bytes", int)
Nanoseconds = NewType("Nanoseconds", int)

NANOSECONDS_PER_SECOND: Final = 1_000_000_000
LONGEST_SECONDS: Final = 86_400_000
"""What a command line takes as a time: a thousand days."""

QUANTITY_PATTERN: Final = (
    r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[munkMGTPE]|[eE][+-]?[0-9]{1,2})?$"
)
"""Two digits of exponent: an unbounded one is a number that fills the memory when written out."""
QUANTITY_LENGTH: Final = 32
MOST_BYTES: Final = 2**63 - 1
"""As in Kubernetes; what a signed number of 64 bits holds."""

_EXACT: Final = Context(prec=2 * QUANTITY_LENGTH)
_WHOLE: Final = re.compile("[0-9]{1,19}")
"""As many digits as `MOST_BYTES` has."""
_SHOWN: Final = 40
_MOST_DIGITS: Final = 14
"""After the point: a byte of a TiB has twelve."""
_NEARLY: Final = re.compile(r"([0-9.]+) *([kKmMgGtTpPeE])(i?b?|I?B?|ib|iB)", re.ASCII)
_BINARY: Final[dict[str, int]] = {
    f"{prefix}i": 1024**power for power, prefix in enumerate("KMGTPE", start=1)
}
_DECIMAL: Final[dict[str, Decimal]] = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(10**3),
    **{prefix: Decimal(1000**power) for power, prefix in enumerate("MGTPE", start=2)},
}


def shortened(text: str) -> str:
    """The beginning of a text that may be long, for a message."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def nearest_quantity(text: str, *, binary: bool) -> str:
    """` (did you mean 64Mi?)` for `64Mb` and `64 mib`, or nothing where no guess is good."""
    match = _NEARLY.fullmatch(text)
    if match is None:
        return ""
    prefix = match[2].upper()
    meant = f"{match[1]}{'k' if prefix == 'K' and not binary else prefix}{'i' if binary else ''}"
    known = meant != text and re.fullmatch(QUANTITY_PATTERN, meant)
    return f" (did you mean {meant}?)" if known else ""


def parse_whole(text: str, most: int = MOST_BYTES) -> int | None:
    """Read ASCII digits as a number from 0 to `most`; None for any other text, however long."""
    value = int(text) if _WHOLE.fullmatch(text) else None
    return None if value is None or value > most else value


def parse_quantity(text: str) -> Decimal:
    """Read a Kubernetes quantity (`64Mi`, `0.5`, `250m`, `1e3`), exactly; `ValueError` says what is
    off.
    """
    shown = shortened(text)
    if len(text) > QUANTITY_LENGTH:
        raise ValueError(f"{shown!r} is longer than any quantity ({QUANTITY_LENGTH} characters)")
    match = re.fullmatch(QUANTITY_PATTERN, text)
    if match is None:
        near = nearest_quantity(text, binary=True)
        raise ValueError(f"{shown!r} is not a quantity such as 64Mi, 1G, 0.5 or 250m{near}")
    number, suffix = Decimal(match[1]), match[3] or ""
    if suffix in _BINARY:
        return _EXACT.multiply(number, _BINARY[suffix])
    if suffix in _DECIMAL:
        return _EXACT.multiply(number, _DECIMAL[suffix])
    return _EXACT.multiply(number, Decimal(f"1{suffix}"))


def parse_bytes(text: str) -> Bytes:
    """Read a quantity of bytes, rounded up to a whole byte; `ValueError` says what is off."""
    size = math.ceil(parse_quantity(text))
    if size > MOST_BYTES:
        raise ValueError(f"{text!r} is more bytes than any machine has; the most is 2^63 - 1")
    return Bytes(size)


def format_bytes(count: int) -> str:
    """Write a number of bytes for people: `41.2 MiB`, `24 MiB`, `512 B`."""
    return _format_bytes(count, ROUND_HALF_EVEN)


def format_upwards(count: int) -> str:
    """The same for a limit or budget that suffices: what is written suffices as well."""
    return _format_bytes(count, ROUND_CEILING)


def format_downwards(count: int) -> str:
    """The same for what there is: as much is there. So it never reads as a need that is larger."""
    return _format_bytes(count, ROUND_FLOOR)


def format_apart(one: int, other: int) -> tuple[str, str]:
    """Two numbers of bytes, for people, with as many digits as it takes to tell them apart."""
    for digits in range(1, _MOST_DIGITS):
        texts = (
            _format_bytes(one, ROUND_HALF_EVEN, digits),
            _format_bytes(other, ROUND_HALF_EVEN, digits),
        )
        if texts[0] != texts[1]:
            return texts
    return format_bytes(one), format_bytes(other)


def _format_bytes(count: int, rounding: str, digits: int = 1) -> str:
    size = Decimal(count)
    unit, *larger = ("B", "KiB", "MiB", "GiB", "TiB")
    while abs(size) >= 1024 and larger:
        size /= 1024
        unit = larger.pop(0)
    rounded = size.quantize(Decimal(1).scaleb(-digits), rounding)
    return f"{rounded}".rstrip("0").removesuffix(".") + f" {unit}"


def format_number(value: float) -> str:
    """Three significant digits for people: `0.0512`, `38.2`, and `1490` in place of `1.49e+03`."""
    digits = f"{value:.3g}"
    return f"{float(digits):.0f}" if "e+" in digits else digits


def format_need(least_bytes: int, resident_bytes: int) -> str:
    """What a fragment needs, for people: `41.2 MiB resident`, or, where it can run in blocks, `at
    least 10 MiB in blocks, 41.2 MiB to be resident`."""
    if least_bytes == resident_bytes:
        return f"{format_upwards(resident_bytes)} resident"
    least, resident = format_upwards(least_bytes), format_upwards(resident_bytes)
    return f"at least {least} in blocks, {resident} to be resident"


def seconds(duration: Nanoseconds) -> float:
    """Nanoseconds as a float of seconds, for people and for metrics."""
    return duration / NANOSECONDS_PER_SECOND


def nanoseconds(duration_seconds: float) -> Nanoseconds:
    """Seconds as whole nanoseconds, rounded to the nearest."""
    return Nanoseconds(round(duration_seconds * NANOSECONDS_PER_SECOND))


def counted(number: int, noun: str) -> str:
    """`1 item`, `3 items`, `2 retries`: a regular noun with its number."""
    if number == 1:
        return f"1 {noun}"
    plural = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"
    return f"{number} {plural}"


def listed(words: Sequence[str], most: int, between: str = ", ") -> str:
    """`pi-4, pi-5 and 3 more`."""
    more = len(words) - most
    return between.join(words[:most]) + f" and {more} more" * (more > 0)
