"""What devices and links were measured to do, as values. None: not known.

The rates of a `Speed` are those of one thread that nothing disturbs, so that devices of one kind
share a measurement; `processors` says how much of such threads a device has.
"""

from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Final

from google.protobuf.message import Message

from shoal_protocol.v1 import session_pb2 as pb

_LARGEST: Final = 1e15
"""Of operations or bytes in a second: no device comes near it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A device. The fields are those of the message `Speed` (session.proto)."""

    processors: float | None = None
    convolution_flops_per_second: float | None = None
    product_flops_per_second: float | None = None
    memory_bytes_per_second: float | None = None
    page_bytes_per_second: float | None = None
    disk_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A device's link."""

    bytes_per_second: float | None = None
    round_trip_seconds: float | None = None


UNKNOWN_SPEED: Final = Speed()
UNKNOWN_LINK: Final = Link()
_NAMES: Final = tuple(each.name for each in fields(Speed))


def speed_of(message: pb.Speed) -> Speed:
    """A message from the wire; a number that no device can have is not known."""
    return Speed(**{name: sane(message, name) for name in _NAMES})


def speed_message(speed: Speed) -> pb.Speed:
    return pb.Speed(**asdict(speed))


def sane(message: Message, name: str) -> float | None:
    """A positive number from the wire; one that no device can have is not known."""
    value: float = getattr(message, name)
    return value if message.HasField(name) and isfinite(value) and 0 < value < _LARGEST else None
