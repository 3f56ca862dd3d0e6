"""The scrubber: reads fragments that devices found damaged, and removes those that are.

As long as a damaged fragment is in the store, with the right names and sizes, nobody uploads or
cuts it again, and every device that fetches it throws it away. Once it is removed, the next job
that needs it is refused as lacking it, and whoever submits jobs uploads it anew.
"""

import asyncio
import logging

from shoal_coordinator.storage.volume import Volume
from shoal_protocol.digests import Digest
from shoal_protocol.threads import in_thread

logger = logging.getLogger(__name__)


class Scrubber:
    """Verifies each reported fragment, one task per fragment."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._tasks: dict[Digest, asyncio.Task[None]] = {}
        self._removed: dict[str, str] = {}

    def report(self, digest: Digest) -> None:
        if digest not in self._tasks:
            task = asyncio.create_task(self._verify(digest), name=f"verify {digest}")
            self._tasks[digest] = task

    async def _verify(self, digest: Digest) -> None:
        try:
            damage = await in_thread(self._volume.discard_damaged, digest)
        except OSError as error:
            logger.error("fragment %s cannot be read, or not removed: %s", digest, error)
            return
        finally:
            del self._tasks[digest]
        if damage is not None:
            self._removed[digest] = damage
            logger.error("fragment %s was removed from the store: %s", digest, damage)

    def why_missing(self, digest: str) -> str | None:
        damage = self._removed.get(digest)
        return None if damage is None else f"it was removed, since {damage}; cut the model again"

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
