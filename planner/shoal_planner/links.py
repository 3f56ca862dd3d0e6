"""What tensors take from one device to another: over the link between the two where its rate is
known, else over each one's own.

A message is charged to both ends. Where one of several devices is at the other end, it takes the
mean of what it takes with each.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shoal_planner.devices import COORDINATOR, PeerLink, PoolDevice
from shoal_protocol.partition import Edge
from shoal_protocol.units import NANOSECONDS_PER_SECOND, Nanoseconds

Homes = Mapping[int, Sequence[PoolDevice]]
"""The devices that serve each fragment; who serves none of them is the coordinator."""

NOWHERE: Final[Homes] = {}
"""Nothing is known of the other ends."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """How long a device's link is taken, and how long a message is on its way besides."""

    duration: Nanoseconds
    delay: Nanoseconds


def over(link: PeerLink, size: int | None) -> Transfer:
    """So many bytes over one link; None: nothing goes there."""
    if size is None:
        return Transfer(Nanoseconds(0), Nanoseconds(0))
    rate = link.bytes_per_second
    duration = -(-size * NANOSECONDS_PER_SECOND // rate) if rate else 0
    return Transfer(Nanoseconds(duration), link.latency_nanoseconds)


def between(
    device: PoolDevice,
    edges: Iterable[Edge],
    inside: Container[int],
    homes: Homes,
    *,
    inward: bool,
) -> Transfer:
    """What comes to a device over these edges or, not `inward`, goes from it; not between fragments
    that are `inside`. The last message is there when all have taken their turn."""
    duration, delay = 0, 0
    for edge in edges:
        end = edge.producer if inward else edge.consumer
        if end in inside:
            continue
        links = [link_between(device, each, inward=inward) for each in homes.get(end, ())]
        ways = [over(link, edge.bytes_per_item or 0) for link in links or [_to_coordinator(device)]]
        duration += sum(way.duration for way in ways) // len(ways)
        delay = max(delay, *(way.delay for way in ways))
    return Transfer(Nanoseconds(duration), Nanoseconds(delay))


def link_between(device: PoolDevice, other: PoolDevice, *, inward: bool) -> PeerLink:
    """The link of a device to another: as the one that sends measured it, else as the other did,
    else the device's own."""
    mine, its = _known(device, other.name), _known(other, device.name)
    return (its or mine if inward else mine or its) or device.link


def _to_coordinator(device: PoolDevice) -> PeerLink:
    return _known(device, COORDINATOR) or device.link


def _known(device: PoolDevice, name: str) -> PeerLink | None:
    return next((each for each in device.peers if each.name == name), None)
