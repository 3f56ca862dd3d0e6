"""Probes of links: what they carry, measured where no large transfer has shown it of late.

A probe is a ping with a payload. The coordinator's answer has one as well, since inputs come from
there. It is small, and leaves only while nothing else goes over the link; who calls sees to it that
the device computes nothing either, since the processor's time is measured too.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import process_time
from typing import Final, Protocol

from shoal_agent.telemetry.link import COORDINATOR, LARGE_BYTES, LinkMeters
from shoal_protocol.bulk.link import BulkLink, Undelivered
from shoal_protocol.v1 import session_pb2 as pb

_PINGS: Final = 3
"""Before a probe. Under a quota of processor time one may find an end that is held for a while. Of
a probe that would be subtracted, and a slow link look like a fast one."""
PROBES: Final = 2
"""In a row: the second finds the connection awake."""
_EVERY_SECONDS: Final = 1.0
"""How often links that should be measured are searched for."""
_MOST_WAITING: Final = 64
"""Expected peers whose links were not measured yet."""
_LEAST_SHARE: Final = 0.1
"""Of a probe's time, what its bytes take at the least: round trips vary."""


class PeerLinks(Protocol):
    """As in `links`."""

    def link(self, device: str, address: str) -> "PeerLink": ...
    def open(self) -> Mapping[str, BulkLink]: ...


class PeerLink(Protocol):
    """As in `links`."""

    def open(self) -> BulkLink: ...


async def probe(link: BulkLink, meters: LinkMeters, peer: str, answer_bytes: int = 0) -> None:
    """Measure the link to a peer. Raises `Undelivered`."""
    meter, size = meters.to(peer), LARGE_BYTES + answer_bytes
    round_trip = min([await link.ping() for _ in range(_PINGS)])
    meter.pinged(round_trip)
    for _ in range(PROBES):
        if not link.probed:
            return
        used = process_time()
        took = await link.ping(LARGE_BYTES, answer_bytes)
        meters.handled(size, process_time() - used)
        meter.transferred(size, max(took - round_trip, _LEAST_SHARE * took))


class Neighbours:
    """The links to peers: those that there are, and one that has to be opened to be measured.

    A plan counts on links over which nothing went yet. The coordinator says which, and each is
    opened once for a probe, where nothing is known of it."""

    def __init__(self, links: PeerLinks, meters: LinkMeters) -> None:
        self._links, self._meters = links, meters
        self._waiting: dict[str, str] = {}

    def expect(self, message: pb.Neighbours) -> None:
        """Peers that this device will send to, as the coordinator says."""
        for each in message.devices[:_MOST_WAITING]:
            self._waiting.pop(each.device, None)
            self._waiting[each.device] = each.address
        while len(self._waiting) > _MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def open(self) -> Mapping[str, BulkLink]:
        """The streams that there are, with one more if any is to be measured first."""
        while self._waiting:
            name = next(iter(self._waiting))
            address = self._waiting.pop(name)
            if self._meters.to(name).ages:
                with suppress(Undelivered):
                    self._links.link(name, address).open()
                break
        return self._links.open()


async def probe_idle(
    own: BulkLink, neighbours: Neighbours, meters: LinkMeters, idle: Callable[[], bool]
) -> None:
    """Measure the link to the coordinator and those to peers that no large transfer has measured of
    late, one at a time, while there is nothing to do; for ever."""
    while True:
        await asyncio.sleep(_EVERY_SECONDS)
        for name, link in {COORDINATOR: own, **(neighbours.open() if idle() else {})}.items():
            if link.probed and meters.to(name).ages and idle():
                with suppress(Undelivered):
                    await probe(link, meters, name, 0 if name else LARGE_BYTES)
