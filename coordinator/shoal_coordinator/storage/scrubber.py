"""Fragments that devices found damaged: where it is the store's copy, that goes.

As long as a damaged fragment stands in the store, by name and size, nobody sends or cuts it again,
and every device that fetches it throws it away. Without it the next job that needs it is refused
with what is lacking, and whoever submits jobs puts it there anew.
"""

import asyncio
import logging

from shoal_coordinator.storage.volume import Volume
from shoal_protocol.partition import Digest

logger = logging.getLogger(__name__)


class Scrubber:
    """Looks once at each fragment that is reported, one look at a time."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._looks: dict[Digest, asyncio.Task[None]] = {}
        self._removed: dict[str, str] = {}

    def report(self, digest: Digest) -> None:
        """A device fetched the fragment, and its bytes were not what the digest says."""
        if digest not in self._looks:
            self._looks[digest] = asyncio.create_task(self._look(digest), name=f"look at {digest}")

    async def _look(self, digest: Digest) -> None:
        try:
            damage = await asyncio.to_thread(self._volume.discard_damaged, digest)
        except OSError as error:
            logger.error("fragment %s cannot be read, or not removed: %s", digest, error)
            return
        finally:
            del self._looks[digest]
        if damage is not None:
            self._removed[digest] = damage
            logger.error("fragment %s was removed from the store: %s", digest, damage)

    def why_missing(self, digest: str) -> str | None:
        """What was wrong with a fragment that was removed."""
        damage = self._removed.get(digest)
        return None if damage is None else f"it was removed, since {damage}; cut the model again"

    async def close(self) -> None:
        """Leave off."""
        looks = list(self._looks.values())
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)
