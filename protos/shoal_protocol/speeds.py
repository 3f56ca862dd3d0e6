"""What devices and links were measured to do, as values. None: not known.

The rates of a `Speed` are those of one thread that nothing disturbs, so that devices of one kind
share a measurement; `processors` says how much of such threads a device has.
"""

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Final

from google.protobuf.message import Message

from shoal_protocol.digests import Digest, is_digest
from shoal_protocol.v1 import session_pb2 as pb

if TYPE_CHECKING:  # an agent has no use for it
    from shoal_protocol.v1 import coordinator_pb2 as coordinator

_LEAST: Final = 1e-15
_LARGEST: Final = 1e15
"""Of operations or bytes in a second, or of seconds: no device comes near either."""


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
    """A device's link, and those to its peers by their names; the coordinator's is empty.

    `transfer_seconds_per_byte`, and `handling_seconds` of each task and transfer besides, are
    processor time of one thread that nothing disturbs.
    """

    bytes_per_second: float | None = None
    round_trip_seconds: float | None = None
    transfer_seconds_per_byte: float | None = None
    handling_seconds: float | None = None
    peers: "tuple[tuple[str, Link], ...]" = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentTime:
    """What a fragment takes on a device, in the long run under a quota of processor time: a task of
    it while all of it is in memory, and to make it resident from the disk cache. `cached`: it is
    there. `within`: a task as it ran, by the bytes that it was granted in blocks; 0: it was in
    memory as a whole."""

    digest: Digest
    task_seconds: float | None = None
    load_seconds: float | None = None
    cached: bool = False
    within: tuple[tuple[int, float], ...] = ()


FragmentTimes = tuple[FragmentTime, ...]

UNKNOWN_SPEED: Final = Speed()
UNKNOWN_LINK: Final = Link()
_NAMES: Final = tuple(each.name for each in fields(Speed))


def speed_of(message: pb.Speed) -> Speed:
    """A message from the wire; a number that no device can have is not known."""
    return Speed(**{name: sane(message, name) for name in _NAMES})


def speed_message(speed: Speed) -> pb.Speed:
    """The same for the wire; what is None is left out."""
    return pb.Speed(**asdict(speed))


def link_of(status: "coordinator.DeviceStatus") -> Link:
    """What is known of a device's link."""
    return Link(
        bytes_per_second=sane(status, "link_bytes_per_second"),
        round_trip_seconds=sane(status, "round_trip_seconds"),
        transfer_seconds_per_byte=sane(status, "transfer_seconds_per_byte"),
        handling_seconds=sane(status, "handling_seconds"),
        peers=tuple(
            (
                each.device,
                Link(
                    bytes_per_second=sane(each, "bytes_per_second"),
                    round_trip_seconds=sane(each, "round_trip_seconds"),
                ),
            )
            for each in status.links
        ),
    )


def fragment_times_of(status: "coordinator.DeviceStatus") -> FragmentTimes:
    """What fragments were measured to take on a device."""
    return tuple(
        FragmentTime(
            digest=Digest(each.digest),
            task_seconds=each.seconds if _is_sane(each.seconds) else None,
            load_seconds=sane(each, "load_seconds"),
            cached=each.cached,
            within=tuple(
                (at.granted_bytes, at.seconds) for at in each.within if _is_sane(at.seconds)
            ),
        )
        for each in status.times
        if is_digest(each.digest)
    )


def report_link(telemetry: pb.Telemetry, link: Link) -> None:
    """Put into a telemetry what is known of the device's link."""
    telemetry.MergeFrom(
        pb.Telemetry(
            link_bytes_per_second=link.bytes_per_second,
            link_round_trip_seconds=link.round_trip_seconds,
            transfer_seconds_per_byte=link.transfer_seconds_per_byte,
            handling_seconds=link.handling_seconds,
            links=[
                pb.PeerLink(
                    device=name,
                    bytes_per_second=each.bytes_per_second,
                    round_trip_seconds=each.round_trip_seconds,
                )
                for name, each in link.peers
            ],
        )
    )


def sane(message: Message, name: str) -> float | None:
    """A positive number from the wire; one that no device can have is not known."""
    value: float = getattr(message, name)
    return value if message.HasField(name) and _is_sane(value) else None


def _is_sane(value: float) -> bool:
    """Whether it can have been measured; a NaN cannot."""
    return _LEAST < value < _LARGEST
