"""The disk cache of fragments, addressed by digest (layout: docs/ARCHITECTURE.md).

A fragment is *cached* when its folder has its final name; until then it is `DIGEST.part`, and a
fetch resumes the files in it where they end. What is verified when:

- at start-up: manifests by their digest, the other files by their sizes;
- when it is fetched, and on the first load in this process: every file by its digest;
- on every later load: the files are the same as then by inode, size, and times of change;
- a fragment that does not match is removed, and fetched again when it is asked for.

Not noticed: bytes that the medium itself lost or changed after they were verified, since that
leaves no time of change (the next process notices it); and changes to a fragment while it is
resident.

A file that several fragments have is on the disk once (`shared_files`), and counts once. Who links
or unlinks it changes its times, so that the next load of a fragment that has it reads it again.

The cache is bounded. The least recently used fragments are dropped first; what is resident or in
use stays. What was prepared of a fragment (`runtime/prepared.py`) is in its folder, counts, and
goes with it; that of fragments in use goes too where a fetch would not fit otherwise. For what is
prepared only such fragments go as nobody has used for `KEPT_SECONDS`: those of a job may take
turns, and would be fetched for each.

Two locks. `_memory` guards the entries; it is never held over disk work, so the event loop may take
it: `cached`, `in`, `pin`, `unpin`, `take_dropped`, `total_bytes`. `_disk` orders what renames and
removes folders; only threads take it, and nobody syncs or reads a file under it.
"""

import os
import shutil
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import nlargest
from pathlib import Path
from threading import Lock
from time import monotonic, time_ns
from typing import BinaryIO, Final

from shoal_agent.cache.folders import (
    PART,
    PREPARED_FOLDER,
    Stamps,
    drop_cached_pages,
    file_digest,
    folders_in,
    inodes,
    prepared_bytes,
    stamps_of,
)
from shoal_agent.memory.demands import NoRoom
from shoal_protocol.digests import Digest, hexadecimal, is_digest
from shoal_protocol.disk_shares import MORE_DISK
from shoal_protocol.durable_files import is_transient, sync_folder
from shoal_protocol.fragment_store import MAXIMUM_LISTED, FragmentMissing, FragmentStore
from shoal_protocol.manifest import MANIFEST, FragmentDamaged, Manifest, is_shared
from shoal_protocol.page_cache import cache_in_small_pages
from shoal_protocol.shared_files import SharedFiles
from shoal_protocol.units import format_bytes

KEPT_SECONDS: Final = 3600.0


class CacheFull(NoRoom):
    """A fragment does not fit on the disk, even with everything dropped that may be."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a fragment takes on the disk: files of its own, and by inode those that may be of
    several fragments."""

    own_bytes: int
    shared: Mapping[int, int] = field(default_factory=dict)


_UNKNOWN: Final = Footprint(0)
"""Of a fragment whose manifest is still being fetched."""


def _disk_bytes(footprints: Iterable[Footprint]) -> int:
    """What fragments take together."""
    own, shared = 0, dict[int, int]()
    for each in footprints:
        own += each.own_bytes
        shared |= each.shared
    return own + sum(shared.values())


@dataclass(slots=True)
class _Entry:
    """`verified`: the files' stamps when their bytes were right; None: nobody has read them.
    `used_at` is a time of `monotonic`."""

    manifest: Manifest
    verified: Stamps | None
    used_at: float
    shared: Mapping[int, int]
    prepared_bytes: int = 0

    @property
    def footprint(self) -> Footprint:
        own = self.manifest.total_bytes - sum(self.shared.values())
        return Footprint(own + self.prepared_bytes, self.shared)


class FragmentCache:
    """The fragments on this device's disk."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Scans the folder; makes it where it is missing. Raises `OSError`."""
        self.limit_bytes = limit_bytes
        self.folder = folder / "fragments"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._store = FragmentStore(folder)
        self.shared = SharedFiles(folder)
        self._memory = Lock()
        self._disk = Lock()
        self._entries: dict[str, _Entry] = {}
        self._pinned: dict[str, int] = {}
        self._expected: dict[str, Footprint] = {}
        self._given_up: list[str] = []
        self._dropped: list[str] = []
        self.dropped_at_start: list[str] = []
        self._scan()

    @property
    def total_bytes(self) -> int:
        """Bytes of cached fragments and of what was prepared, those in parts not counted."""
        with self._memory:
            return _disk_bytes(entry.footprint for entry in self._entries.values())

    def cached(self) -> dict[str, int]:
        with self._memory:
            return {digest: entry.manifest.total_bytes for digest, entry in self._entries.items()}

    def listed(self) -> dict[str, int]:
        """Those that a coordinator is told of: as many as a message may name, the ones used last.
        Of the others it learns nothing, and where they are asked for, they are here."""
        with self._memory:
            last = nlargest(MAXIMUM_LISTED, self._entries.items(), key=lambda each: each[1].used_at)
            return {digest: entry.manifest.total_bytes for digest, entry in last}

    def __contains__(self, digest: str) -> bool:
        with self._memory:
            return digest in self._entries

    def take_dropped(self) -> list[str]:
        """What has gone since the last call, and has not come back."""
        with self._memory:
            dropped, self._dropped = self._dropped, []
            return [digest for digest in dropped if digest not in self._entries]

    def path(self, digest: str) -> Path:
        """The folder of a fragment, cached or not. Raises `ValueError` for what is no digest."""
        return self.folder / hexadecimal(digest)

    def pin(self, digest: str) -> None:
        """Keep a fragment from being dropped; call `unpin` as often."""
        with self._memory:
            self._pinned[digest] = self._pinned.get(digest, 0) + 1

    def unpin(self, digest: str) -> None:
        with self._memory:
            if self._pinned.get(digest, 0) <= 1:
                self._pinned.pop(digest, None)
            else:
                self._pinned[digest] -= 1

    # ---- reading -----------------------------------------------------------------------------

    def verify(self, digest: str) -> Path:
        """The folder of a cached fragment, its bytes read if they were not before, or its files
        have changed since.

        Raises `FragmentDamaged` when they are wrong (it is not cached any more then), `KeyError`
        when it is not cached, `OSError`.
        """
        entry = self._use(digest)
        folder = self.path(digest)
        # Before the bytes: a change meanwhile is noticed.
        stamps = stamps_of(folder, entry.manifest)
        if stamps is not None and stamps == entry.verified:
            return folder
        files = {name: each.digest for name, each in entry.manifest.files.items()}
        for name, expected in {MANIFEST: digest, **files}.items():
            try:
                right = file_digest(folder / name) == expected
            except OSError as error:
                if is_transient(error):
                    raise
                right = False
            if not right:
                self.drop(digest)
                raise FragmentDamaged(f"{folder / name} does not match its digest")
        entry.verified = stamps
        return folder

    def open(self, digest: str, name: str) -> tuple[BinaryIO, int]:
        """A file of a cached fragment, and its size; it can be read also after the fragment was
        dropped. Raises `FragmentMissing`, `OSError`."""
        try:
            entry = self._use(digest)
        except KeyError as error:
            raise FragmentMissing(f"{digest} is not cached here") from error
        if name != MANIFEST and name not in entry.manifest.files:
            raise FragmentMissing(f"{digest} has no {name}")
        file, size = self._store.open(digest, name)
        cache_in_small_pages(file)
        return file, size

    def _use(self, digest: str) -> _Entry:
        with self._memory:
            entry = self._entries[digest]
            entry.used_at = monotonic()
        with suppress(OSError):  # for the order of the next process
            os.utime(self.path(digest))
        return entry

    # ---- fetching ----------------------------------------------------------------------------

    def part(self, digest: str) -> Path:
        """The folder in which a fragment is put together: from now on nobody removes it to make
        room. Raises `OSError`."""
        folder = self.path(digest).with_suffix(PART)
        with self._disk:
            with self._memory:
                self._take_up(digest)
                self._expected.setdefault(digest, _UNKNOWN)
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may remove it
            folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def give_up(self, digest: str) -> None:
        """A fetch has ended. Where it came to know what the fragment takes, its part is kept for
        the next one, as long as nothing else needs the room."""
        with self._memory:
            self._take_up(digest)
            if self._expected.get(digest) is _UNKNOWN:
                del self._expected[digest]
            elif digest in self._expected:
                self._given_up.append(digest)

    def link_shared(self, manifest: Manifest) -> Set[str]:
        """Give a part the files that fragments here have already; their names. Raises `OSError`."""
        part = self.part(manifest.digest)
        return {
            name
            for name, entry in manifest.files.items()
            if is_shared(name) and self.shared.link(entry, part / name)
        }

    def make_room(self, manifest: Manifest, linked: Set[str] = frozenset()) -> None:
        """Drop the least recently used until a fragment fits, of which the files `linked` are in
        its part already. Raises `CacheFull` where that cannot be."""
        digest, shared = manifest.digest, inodes(self.part(manifest.digest), linked)
        need = Footprint(manifest.total_bytes - sum(shared.values()), shared)
        with self._disk:
            with self._memory:
                self._expected.pop(digest, None)
                victims, stripped = self._victims(digest, need)
                kept = set(self._expected)
            for folder in self.folder.glob(f"*{PART}"):
                if f"sha256:{folder.stem}" not in kept:  # nobody fetches it any more
                    shutil.rmtree(folder, ignore_errors=True)
            for each in victims:
                self._remove(each)
            for each in stripped:
                shutil.rmtree(self.path(each) / PREPARED_FOLDER, ignore_errors=True)
        self.shared.collect()

    def _victims(self, digest: str, need: Footprint) -> tuple[list[str], list[str]]:
        """Decide what goes for a fragment, and expect it: other fragments, and what was prepared of
        those in use. Raises `CacheFull`."""
        used = {key: entry for key, entry in self._entries.items() if key in self._pinned}
        staying = [entry.footprint for entry in used.values()]
        prepared = sum(entry.prepared_bytes for entry in used.values())
        staying += self._fetched()
        stay_bytes = _disk_bytes(staying) - prepared
        have = max(0, self.limit_bytes - stay_bytes)
        need_bytes = _disk_bytes([*staying, need]) - prepared - stay_bytes
        if need_bytes > have:
            raise CacheFull(
                need_bytes,
                have,
                f"{digest} needs {format_bytes(need_bytes)} on disk, have {format_bytes(have)} "
                f"of a cache of {format_bytes(self.limit_bytes)} beside what is in use; "
                f"{MORE_DISK}",
            )
        self._expected[digest] = need
        self._forget_parts(0)
        victims: list[str] = []
        for other in self._oldest_first():
            if _disk_bytes(self._footprints()) <= self.limit_bytes:
                break
            self._forget(other)
            victims.append(other)
        excess = _disk_bytes(self._footprints()) - self.limit_bytes
        stripped: list[str] = []
        for other, entry in used.items():
            if excess > 0 and entry.prepared_bytes:
                excess -= entry.prepared_bytes
                entry.prepared_bytes = 0
                stripped.append(other)
        return victims, stripped

    # ---- what was prepared -------------------------------------------------------------------

    def make_room_to_prepare(self, need_bytes: int) -> int:
        """Drop fragments that nobody has used for long until so much fits; the room that there is,
        where that is less: nothing is dropped then."""
        free = shutil.disk_usage(self.folder).free // 2
        with self._disk:
            with self._memory:
                entries, since = self._entries, monotonic() - KEPT_SECONDS
                unused = [each for each in self._oldest_first() if entries[each].used_at < since]
                staying = [entries[each].footprint for each in entries.keys() - unused]
                have = self.limit_bytes - _disk_bytes([*staying, *self._fetched()])
                if (room := max(0, min(have, free))) < need_bytes:
                    return room
                parts = self._forget_parts(need_bytes)
                gone = []
                while _disk_bytes(self._footprints()) + need_bytes > self.limit_bytes:
                    gone.append(unused.pop(0))
                    self._forget(gone[-1])
            for each in parts:
                shutil.rmtree(self.path(each).with_suffix(PART), ignore_errors=True)
            for each in gone:
                self._remove(each)
        if gone:
            self.shared.collect()
        return need_bytes

    def count_prepared(self, digest: str) -> None:
        """Reckon with what there is now of a fragment that was prepared."""
        size = prepared_bytes(self.path(digest))
        with self._memory:
            if (entry := self._entries.get(digest)) is not None:
                entry.prepared_bytes = size

    def drop_oldest(self) -> str | None:
        """Drop one fragment, or what is left of a fetch, because the disk is full; None if none may
        be dropped."""
        with self._disk:
            with self._memory:
                part = self._given_up.pop(0) if self._given_up else None
                if part is not None:
                    del self._expected[part]
            if part is not None:
                shutil.rmtree(self.path(part).with_suffix(PART), ignore_errors=True)
                return part
            with self._memory:
                digest = next(iter(self._oldest_first()), None)
                if digest is None:
                    return None
                self._forget(digest)
            self._remove(digest)
        self.shared.collect()
        return digest

    def admit(self, manifest: Manifest) -> Path:
        """Give a part whose files were verified its final name, durably. Raises `OSError`."""
        part, folder = self.part(manifest.digest), self.path(manifest.digest)
        sync_folder(part)
        with self._disk:
            if folder.exists():
                shutil.rmtree(folder)
            part.rename(folder)
        sync_folder(self.folder)
        stamps, shared = stamps_of(folder, manifest), inodes(folder, manifest.files)
        with self._memory:
            self._entries[manifest.digest] = _Entry(manifest, stamps, monotonic(), shared)
            self._expected.pop(manifest.digest, None)
        return folder

    def discard_part(self, digest: str) -> None:
        with self._memory:
            self._take_up(digest)
            self._expected.pop(digest, None)
        shutil.rmtree(self.path(digest).with_suffix(PART), ignore_errors=True)

    def drop(self, digest: str) -> None:
        with self._disk:
            with self._memory:
                self._forget(digest)
            self._remove(digest)
        self.shared.collect()

    # ---- inside ------------------------------------------------------------------------------

    def _fetched(self) -> list[Footprint]:
        """Of what is being fetched."""
        return [size for key, size in self._expected.items() if key not in self._given_up]

    def _forget_parts(self, more_bytes: int) -> list[str]:
        """Expect no longer what was given up, until so much more fits, or there is none left."""
        gone: list[str] = []
        while self._given_up and _disk_bytes(self._footprints()) + more_bytes > self.limit_bytes:
            gone.append(self._given_up.pop(0))
            del self._expected[gone[-1]]
        return gone

    def _take_up(self, digest: str) -> None:
        if digest in self._given_up:
            self._given_up.remove(digest)

    def _forget(self, digest: str) -> None:
        if self._entries.pop(digest, None) is not None:
            self._dropped.append(digest)

    def _remove(self, digest: str) -> None:
        folder = self.path(digest)
        with suppress(OSError):
            # First out of the way as a whole: a half-removed folder must not look complete.
            gone = folder.with_suffix(".gone")
            shutil.rmtree(gone, ignore_errors=True)
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _footprints(self) -> list[Footprint]:
        """Of what is cached or expected."""
        return [*(entry.footprint for entry in self._entries.values()), *self._expected.values()]

    def _oldest_first(self) -> list[str]:
        free = [digest for digest in self._entries if digest not in self._pinned]
        return sorted(free, key=lambda digest: self._entries[digest].used_at)

    def _scan(self) -> None:
        for changed_at, folder in folders_in(self.folder):
            digest = Digest(f"sha256:{folder.name}")
            if folder.suffix == PART and is_digest(f"sha256:{folder.stem}"):
                continue  # a fetch may resume it
            if is_digest(digest) and self._store.has(digest):
                drop_cached_pages(folder)
                manifest = self._store.manifest(digest)
                used_at = monotonic() - max(0, time_ns() - changed_at) / 1e9
                shared = inodes(folder, manifest.files)
                entry = _Entry(manifest, None, used_at, shared, prepared_bytes(folder))
                self._entries[digest] = entry
                continue
            self.dropped_at_start.append(folder.name)
            shutil.rmtree(folder, ignore_errors=True)
        self.shared.collect()
