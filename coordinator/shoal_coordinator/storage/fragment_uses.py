"""Which fragments of a store somebody uses, and which give way to what needs their room.

A fragment's last use is the time of its folder. One that no job has had since it was brought, or
found here, waits for its job, for an hour at most; one that a job has had waits for nobody.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import Final

from shoal_coordinator.storage.volume_values import Room
from shoal_protocol.digests import Digest
from shoal_protocol.fragment_store import FragmentStore

UNUSED_SECONDS: Final = 3600.0
"""A fragment that waits for its job is not removed for so long."""
SETTLED_SECONDS: Final = 60.0
"""So long after a job has come for its fragments it is among those that use them."""


class FragmentUses:
    """The uses of the fragments of a store. Nothing here takes a lock; for several threads."""

    def __init__(self, store: FragmentStore) -> None:
        self._store = store
        self._used: dict[Digest, float] = {}
        self._served: set[Digest] = set()

    def serve(self, digests: Sequence[Digest]) -> None:
        """A job has come for fragments. While it uses them they stay; then they wait for nobody."""
        self.use(digests)
        self._served.update(each for each in digests if each in self._used)

    def bring(self, digest: Digest) -> None:
        """A fragment is brought, or found here by who would bring it: it waits for its job."""
        self._served.discard(digest)
        self.use([digest])

    def use(self, digests: Iterable[Digest]) -> None:
        """Note that fragments are used now: those that are there stay."""
        now = time.time()
        for digest in digests:
            self._used[digest] = now  # before the folder is searched: see `since`
            try:
                os.utime(self._store.folder(digest))
            except OSError:
                self._used.pop(digest, None)

    def since(self, digest: Digest, limit: float) -> bool:
        """Whether a fragment whose folder was moved away just now has been used since: `use` takes
        no lock, and was called before that, or did not find the folder."""
        return self._used.get(digest, 0.0) > limit

    def forget(self, digest: Digest) -> None:
        """A fragment is gone."""
        self._used.pop(digest, None)
        self._served.discard(digest)

    def unused(
        self, there: Iterable[Digest], in_use: Set[Digest]
    ) -> Iterator[tuple[Digest, float]]:
        """Those of the fragments that may go, longest unused first, each with the time since which
        it must not have been used."""
        now = time.time()
        ages = list[tuple[float, Digest]]()
        for digest in there:
            if digest not in in_use:
                with suppress(FileNotFoundError):
                    ages.append((self._store.folder(digest).stat().st_mtime, digest))
        for used_at, digest in sorted(ages):
            limit = now - (SETTLED_SECONDS if digest in self._served else UNUSED_SECONDS)
            if used_at <= limit:
                yield digest, limit


def room_of(uses: FragmentUses, store: FragmentStore, in_use: Set[Digest], sizes: Room) -> Room:
    """What a volume of these `sizes` has room for, with its fragments."""
    there = tuple(store.digests())
    unused = frozenset(digest for digest, _ in uses.unused(there, in_use))
    return replace(
        sizes, fragments=there, unused=unused, removable_bytes=_bytes_of(store, unused, there)
    )


def _bytes_of(store: FragmentStore, gone: Set[Digest], there: Iterable[Digest]) -> int:
    """What it gives to remove fragments; a file that others have as well stays."""
    total, freed, kept = 0, dict[Digest, int](), Counter[Digest]()
    for digest in there:
        own, shared = store.file_sizes(digest)
        if digest in gone:
            total += own
            freed |= shared
        else:
            kept.update(shared.keys())
    return total + sum(size for file, size in freed.items() if file not in kept)
