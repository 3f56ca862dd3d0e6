"""Sizes and budgets that somebody has written, with what is wrong with them; shapes as they are
shown."""

import re
from typing import Final

from shoal_protocol.partition import TensorSpec
from shoal_protocol.units import (
    QUANTITY_LENGTH,
    QUANTITY_PATTERN,
    Bytes,
    nearest_quantity,
    parse_bytes,
    parse_whole,
)

MOST_DEVICES: Final = 64
"""That one machine pretends to be, as the kind DevicePool allows it."""
_LEAST_BUDGET: Final = 1 << 20
_MOST_BUDGET: Final = 16 << 40
_MOST_MEBIBYTES: Final = 16 << 20


def size_in(text: str) -> Bytes:
    """Read a size such as `64Mi`. Raises `ValueError`."""
    if len(text) <= QUANTITY_LENGTH and not re.fullmatch(QUANTITY_PATTERN, text):
        near = nearest_quantity(text, binary=True)
        raise ValueError(f"{text!r} is no size such as 64Mi, 1.5Gi or 500M{near}")
    return parse_bytes(text)


def budget_problem(text: str, size: int) -> str:
    """Why no device has so much; empty: a device may."""
    if _LEAST_BUDGET <= size <= _MOST_BUDGET:
        return ""
    meant = f" (did you mean {text}Mi?)" if parse_whole(text, _MOST_MEBIBYTES) else ""
    return f"a device has from 1Mi to 16Ti{meant}"


def shown_shape(spec: TensorSpec) -> str:
    """`[batch, 3, ?]`; `[...]` where not even the number of axes is known."""
    axes = ("...",) if spec.shape is None else spec.shape
    return f"[{', '.join('?' if axis is None else str(axis) for axis in axes)}]"
