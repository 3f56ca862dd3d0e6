"""Which budgets an agent believes that it is told. Pure."""

from typing import Final

from shoal_protocol.units import Bytes, format_bytes, parse_bytes

LEAST_BYTES: Final = 1 << 20
"""No fragment runs in less; who writes less has left a unit out."""


def read_budget(text: str, machine_bytes: int) -> Bytes:
    """The budget that a text says, but no more than the machine has. Raises `ValueError` where that
    makes no sense."""
    text = text.strip()
    if (size := parse_bytes(text)) < LEAST_BYTES:
        meant = f" (did you mean {text}Mi?)" if size > 0 and text.isdecimal() else ""
        raise ValueError(f"{text!r} is less than {format_bytes(LEAST_BYTES)}{meant}")
    return Bytes(min(size, machine_bytes or size))


def left_by(limit_bytes: int | None, floor_bytes: int, told_bytes: int) -> int:
    """What a container's limit leaves of a budget beside the idle agent."""
    if limit_bytes is None:
        return told_bytes
    return min(told_bytes, max(0, limit_bytes - floor_bytes))
