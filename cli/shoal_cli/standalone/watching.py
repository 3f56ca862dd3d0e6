"""A watch over a coordinator that lasts longer than the certificate that it began with."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from shoal_cli.local.watch import Watch
from shoal_cli.transfer.joined import CoordinatorAway, JoinRefused, Reachable

RENEWAL_SECONDS: Final = 600.0
"""How often it is seen whether the certificate is to be renewed, which it is hours before its end.
"""


@contextlib.asynccontextmanager
async def watching(coordinator: Reachable) -> AsyncIterator[Watch]:
    """A watch, however long it lasts: its calls go over a new channel when there is a new
    certificate, since a connection that breaks after the end of the old one could not be made
    again."""
    channels = [coordinator.channel()]
    watch = Watch(channels[0])

    async def renew() -> None:
        shown = _serial(coordinator)
        while True:
            await asyncio.sleep(RENEWAL_SECONDS)
            with contextlib.suppress(JoinRefused, CoordinatorAway, OSError):  # it is tried again
                await asyncio.to_thread(coordinator.renew)
                if (now := _serial(coordinator)) != shown:
                    channels.append(coordinator.channel())
                    watch.use(channels[-1])
                    shown = now

    renewing = asyncio.create_task(renew())
    try:
        yield watch
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, *(each.close() for each in channels), return_exceptions=True)


def _serial(coordinator: Reachable) -> Path | None:
    """Where the certificate is that is shown now."""
    files = coordinator.credentials
    return None if files is None else files.certificate.resolve()
