"""Bytes and nanoseconds as integers, and how people write and read them."""

import re
from decimal import Decimal
from typing import Final, NewType

Bytes = NewType("Bytes", int)
Nanoseconds = NewType("Nanoseconds", int)

NANOSECONDS_PER_SECOND: Final = 1_000_000_000

_QUANTITY = re.compile(
    r"(?P<number>\d+(?:\.\d*)?|\.\d+)(?P<suffix>[KMGTPE]i|[munkMGTPE]|[eE][+-]?\d+)?"
)
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


def parse_quantity(text: str) -> Decimal:
    """Read a Kubernetes quantity (`64Mi`, `0.5`, `250m`, `1e3`); `ValueError` says what is off."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity such as 64Mi, 1G, 0.5 or 250m")
    number, suffix = Decimal(match["number"]), match["suffix"] or ""
    if suffix in _BINARY:
        return number * _BINARY[suffix]
    if suffix in _DECIMAL:
        return number * _DECIMAL[suffix]
    return number * Decimal(f"1{suffix}" if suffix else 1)


def parse_bytes(text: str) -> Bytes:
    """Read a quantity of bytes, rounded up to a whole byte."""
    return Bytes(int(parse_quantity(text).to_integral_value(rounding="ROUND_CEILING")))


def format_bytes(count: int) -> str:
    """Write a number of bytes for people: `41.2 MiB`, `24 MiB`, `512 B`."""
    size = Decimal(count)
    unit, *larger = ("B", "KiB", "MiB", "GiB", "TiB")
    while abs(size) >= 1024 and larger:
        size /= 1024
        unit = larger.pop(0)
    return f"{size:.1f}".removesuffix(".0") + f" {unit}"


def seconds(duration: Nanoseconds) -> float:
    """Nanoseconds as a float of seconds, for people and for metrics."""
    return duration / NANOSECONDS_PER_SECOND


def nanoseconds(duration_seconds: float) -> Nanoseconds:
    """Seconds as whole nanoseconds."""
    return Nanoseconds(round(duration_seconds * NANOSECONDS_PER_SECOND))
