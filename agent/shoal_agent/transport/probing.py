"""Probes of links: what they carry, measured where no large transfer has shown it of late.

A probe is a ping with a payload. The coordinator's answer has one as well, since inputs come from
there. It is small, and leaves only while nothing else goes over the link; who calls sees to it that
the device computes nothing either, since the processor's time is measured too.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import process_time
from typing import Final

from shoal_agent.telemetry.link import LARGE_BYTES, LinkMeters
from shoal_protocol.bulk.link import BulkLink, Undelivered

_PINGS: Final = 3
"""Before a probe. Under a quota of processor time one may find an end that is held for a while. Of
a probe that would be subtracted, and a slow link look like a fast one."""
PROBES: Final = 2
"""In a row: the second finds the connection awake."""
_EVERY_SECONDS: Final = 1.0
"""How often links are looked for that should be measured."""
_LEAST_SHARE: Final = 0.1
"""Of a probe's time, what its bytes take at the least: round trips vary."""


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


async def probe_idle(
    links: Callable[[], Mapping[str, BulkLink]], meters: LinkMeters, idle: Callable[[], bool]
) -> None:
    """Measure links, by peer, that no large transfer has measured of late, one at a time, while
    there is nothing to do; for ever."""
    while True:
        await asyncio.sleep(_EVERY_SECONDS)
        for name, link in links().items():
            if link.probed and meters.to(name).ages and idle():
                with suppress(Undelivered):
                    await probe(link, meters, name, 0 if name else LARGE_BYTES)
