"""The disk cache of fragments, addressed by digest (layout: docs/ARCHITECTURE.md).

A fragment is *cached* when its folder has its final name; until then it is `DIGEST.part`, whose
files are continued where they end. What is believed when:

- at start-up: manifests by their digest, the other files by their sizes;
- when it is fetched, and on the first load in this process: every file by its digest;
- on every later load: files that are the same as then by inode, size, and times of change;
- what does not match is removed, and is fetched again when it is asked for.

What is not seen: bytes that the medium itself lost or changed after they were verified, since that
leaves no time of change (the next process sees it); and changes to a fragment while it is resident.

The cache is bounded. What was used longest ago goes first; what is resident or in use stays. All
methods do disk work and are called from a thread; a lock makes them safe from several.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Final

from shoal_agent.cache.manifest import MANIFEST, Manifest, ManifestError, is_digest, parse_manifest
from shoal_protocol.files import MAXIMUM_MANIFEST_BYTES
from shoal_protocol.units import format_bytes

_PART: Final = ".part"
_CHUNK_BYTES: Final = 1 << 20


class CacheFull(Exception):
    """No room for a fragment, even with everything dropped that may go."""

    def __init__(self, need_bytes: int, have_bytes: int, reason: str) -> None:
        super().__init__(reason)
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes


class CorruptFragment(Exception):
    """Bytes on disk that do not match their digest; they have been removed."""


_Stamps = tuple[tuple[int, int, int, int], ...]
"""Inode, size and times of change of a fragment's files."""


@dataclass(slots=True)
class _Entry:
    """`verified`: the files' stamps when their bytes were right; None: nobody has looked."""

    manifest: Manifest
    verified: _Stamps | None
    used_at: int


class FragmentCache:
    """The fragments on this device's disk."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Scans the folder; makes it where it is missing. Raises `OSError`."""
        self.limit_bytes = limit_bytes
        self.folder = folder / "fragments"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = RLock()
        self._entries: dict[str, _Entry] = {}
        self._pinned: dict[str, int] = {}
        self._expected: dict[str, int] = {}
        self._clock = 0
        self.dropped_at_start: list[str] = []
        self._scan()

    @property
    def total_bytes(self) -> int:
        """Bytes of cached fragments, those in parts not counted."""
        with self._lock:
            return sum(entry.manifest.total_bytes for entry in self._entries.values())

    def cached(self) -> dict[str, int]:
        """Digests of cached fragments with their bytes."""
        with self._lock:
            return {digest: entry.manifest.total_bytes for digest, entry in self._entries.items()}

    def __contains__(self, digest: str) -> bool:
        with self._lock:
            return digest in self._entries

    def path(self, digest: str) -> Path:
        """The folder of a fragment, cached or not. Only a well-formed digest has one."""
        assert is_digest(digest), digest
        return self.folder / digest.removeprefix("sha256:")

    def pin(self, digest: str) -> None:
        """Keep a fragment from being dropped; as often as `unpin` will be called."""
        with self._lock:
            self._pinned[digest] = self._pinned.get(digest, 0) + 1

    def unpin(self, digest: str) -> None:
        """Undo one `pin`."""
        with self._lock:
            if self._pinned.get(digest, 0) <= 1:
                self._pinned.pop(digest, None)
            else:
                self._pinned[digest] -= 1

    def verify(self, digest: str) -> Path:
        """The folder of a cached fragment, its bytes checked if they were not before, or its files
        have changed since.

        Raises `CorruptFragment` when they are wrong (it is not cached any more then), `KeyError`
        when it is not cached.
        """
        with self._lock:
            entry = self._entries[digest]
            self._touch(digest, entry)
        folder = self.path(digest)
        stamps = _stamps(folder, entry.manifest)  # before the bytes: a change meanwhile is seen
        if stamps is not None and stamps == entry.verified:
            return folder
        for name, expected in entry.manifest.files.items():
            try:
                actual = file_sha256(folder / name)
            except OSError as error:
                actual = str(error)
            if actual != expected.sha256:
                self.drop(digest)
                raise CorruptFragment(f"{folder / name} does not match its digest")
        entry.verified = stamps
        return folder

    def open_for_peer(self, digest: str, file: str) -> tuple[Path, int] | None:
        """Path and size of a cached file that a peer asks for; None if there is no such."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None:
                return None
            self._touch(digest, entry)
            path = self.path(digest) / file
            if file == MANIFEST:
                return path, path.stat().st_size
            listed = entry.manifest.files.get(file)
            return None if listed is None else (path, listed.bytes)

    # ---- fetching ----------------------------------------------------------------------------

    def part(self, digest: str) -> Path:
        """The folder in which a fragment is put together."""
        folder = self.path(digest).with_suffix(_PART)
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def make_room(self, digest: str, need_bytes: int) -> list[str]:
        """Drop what was used longest ago until a fragment fits; the digests dropped.

        Raises `CacheFull` where that cannot be.
        """
        dropped: list[str] = []
        with self._lock:
            self._expected.pop(digest, None)
            self._discard_idle_parts(digest)
            staying = sum(self._expected.values()) + sum(
                entry.manifest.total_bytes
                for key, entry in self._entries.items()
                if key in self._pinned
            )
            have = max(0, self.limit_bytes - staying)
            if need_bytes > have:
                raise CacheFull(
                    need_bytes,
                    have,
                    f"{digest} needs {format_bytes(need_bytes)} on disk, have {format_bytes(have)} "
                    f"of a cache of {format_bytes(self.limit_bytes)} beside what is in use; "
                    "raise --cache-size",
                )
            self._expected[digest] = need_bytes
            for other in self._oldest_first():
                if self.total_bytes + sum(self._expected.values()) <= self.limit_bytes:
                    break
                self.drop(other)
                dropped.append(other)
        return dropped

    def drop_oldest(self) -> str | None:
        """Drop one fragment because the disk is full; None if none may go."""
        with self._lock:
            for digest in self._oldest_first():
                self.drop(digest)
                return digest
        return None

    def admit(self, manifest: Manifest) -> Path:
        """Give a verified part its final name."""
        part, folder = self.part(manifest.digest), self.path(manifest.digest)
        with self._lock:
            for name in (MANIFEST, *manifest.files):
                _sync(part / name)
            _sync(part)
            if folder.exists():
                shutil.rmtree(folder)
            part.rename(folder)
            _sync(self.folder)
            entry = _Entry(manifest, verified=_stamps(folder, manifest), used_at=0)
            self._entries[manifest.digest] = entry
            self._expected.pop(manifest.digest, None)
            self._touch(manifest.digest, entry)
        return folder

    def discard_part(self, digest: str) -> None:
        """Remove what was fetched of a fragment."""
        with self._lock:
            self._expected.pop(digest, None)
        shutil.rmtree(self.path(digest).with_suffix(_PART), ignore_errors=True)

    def drop(self, digest: str) -> None:
        """Remove a cached fragment."""
        with self._lock:
            self._entries.pop(digest, None)
            folder = self.path(digest)
            with suppress(OSError):
                # First out of the way as a whole: a half-removed folder must not look complete.
                gone = folder.with_suffix(".gone")
                shutil.rmtree(gone, ignore_errors=True)
                folder.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)

    # ---- inside ------------------------------------------------------------------------------

    def _touch(self, digest: str, entry: _Entry) -> None:
        self._clock += 1
        entry.used_at = self._clock
        with suppress(OSError):
            os.utime(self.path(digest))

    def _discard_idle_parts(self, digest: str) -> None:
        """Remove parts that nobody is fetching, so that they do not add up beside the limit."""
        for folder in self.folder.glob(f"*{_PART}"):
            if f"sha256:{folder.stem}" not in (digest, *self._expected):
                shutil.rmtree(folder, ignore_errors=True)

    def _oldest_first(self) -> list[str]:
        free = [digest for digest in self._entries if digest not in self._pinned]
        return sorted(free, key=lambda digest: self._entries[digest].used_at)

    def _scan(self) -> None:
        folders = [path for path in self.folder.iterdir() if path.is_dir()]
        for folder in sorted(folders, key=lambda path: path.stat().st_mtime_ns):
            digest = f"sha256:{folder.name}"
            if folder.suffix == _PART and is_digest(f"sha256:{folder.stem}"):
                continue  # to be continued
            manifest = _read_cached(digest, folder) if is_digest(digest) else None
            if manifest is None:
                self.dropped_at_start.append(folder.name)
                shutil.rmtree(folder, ignore_errors=True)
                continue
            self._clock += 1
            self._entries[digest] = _Entry(manifest, verified=None, used_at=self._clock)


def _read_cached(digest: str, folder: Path) -> Manifest | None:
    """The manifest of a folder whose files have the right sizes; None for any other folder."""
    try:
        with (folder / MANIFEST).open("rb") as file:
            manifest = parse_manifest(digest, file.read(MAXIMUM_MANIFEST_BYTES))
        for name, entry in manifest.files.items():
            path = folder / name
            if path.is_symlink() or path.stat().st_size != entry.bytes:
                return None
    except (OSError, ManifestError):
        return None
    return manifest


def _stamps(folder: Path, manifest: Manifest) -> _Stamps | None:
    """None where a file cannot be looked at."""
    try:
        states = [(folder / name).stat() for name in manifest.files]
    except OSError:
        return None
    return tuple((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in states)


def file_sha256(path: Path) -> str:
    """sha256 of a file in hexadecimal."""
    sha256 = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            sha256.update(chunk)
    return sha256.hexdigest()


def is_disk_full(error: OSError) -> bool:
    """Whether an error says that there is no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def free_names(names: Iterable[str]) -> str:
    """Digests for a log line."""
    return ", ".join(name.removeprefix("sha256:")[:12] for name in names)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
