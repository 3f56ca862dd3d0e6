"""How often a status says anew what was measured, or predicted with it. Pure.

Devices that work measure something else every few seconds. Each write of a status is several on the
disk of the API server's etcd, which may be an SD card. So numbers of what stays follow once a
minute. What there is, and who gets what, is written at once.
"""

from dataclasses import fields, is_dataclass
from typing import Final

from shoal_operator.reconcile.times import seconds_since

FOLLOW_SECONDS: Final = 60.0


def seconds_left(written: str | None, now: str) -> float:
    """For how long numbers that were written then stay."""
    return 0.0 if written is None else max(0.0, FOLLOW_SECONDS - seconds_since(written, now))


def without_numbers(value: object) -> object:
    """A part of a status with all that is measured or predicted left out, but for whether it is
    known. Counts and bytes are no measurements: they are whole."""
    if isinstance(value, float):
        return float
    if isinstance(value, tuple):
        return tuple(map(without_numbers, value))
    if is_dataclass(value):
        its = (getattr(value, each.name) for each in fields(value))
        return (type(value), *map(without_numbers, its))
    return value
