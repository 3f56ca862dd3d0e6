"""Which budgets an agent believes that it is told while it runs. Pure."""

from typing import Final

from shoal_protocol.units import Bytes, format_bytes, parse_bytes

LEAST_BYTES: Final = 1 << 20
"""No fragment runs in less; who writes less has left a unit out."""


def read_budget(text: str, machine_bytes: int) -> Bytes:
    """The budget that a text says, but no more than the machine has. Raises `ValueError` where that
    makes no sense."""
    size = parse_bytes(text.strip())
    if size < LEAST_BYTES:
        raise ValueError(f"{text.strip()!r} is less than {format_bytes(LEAST_BYTES)}")
    return Bytes(min(size, machine_bytes or size))


def left_by(limit_bytes: int | None, floor_bytes: int, told_bytes: int) -> int:
    """What a container's limit leaves of a budget beside the idle agent."""
    if limit_bytes is None:
        return told_bytes
    return min(told_bytes, max(0, limit_bytes - floor_bytes))
