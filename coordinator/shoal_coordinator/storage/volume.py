"""A coordinator's volume: which files it holds, and how uploads add to them.

```
ROOT/fragments/HEX/{fragment.json, model.onnx, weights.bin, ...}
ROOT/shared/HEX                        files of several fragments (`shared_files`)
ROOT/jobs/JOB/{in,out}/NAME
ROOT/incoming/...                      uploads that are not complete; nobody reads them
```

An upload is written below `incoming`, read back, and renamed to its place when it has the size and
the digest that it should have; a fragment's folder when all of its files have. So readers find
whole files and whole fragments, whenever the process dies. A file that another fragment has here
already is not sent again: the two share it. Names come from the network: a path that
is not of the shapes above never reaches the file system.

Garbage collection begins when an upload or results need room (`volume_space`), or there is more
than may be: then those fragments are removed that no job uses, longest unused first
(`fragment_uses`). A job that needs a removed fragment has it cut and uploaded again.

Everything here blocks on the disk and may raise `OSError`, except `serve`, which takes no lock. The
lock of removals and publications is held in threads only. Two uploads of one file, or of one
fragment, do not run at the same time (`server.files` and the partial files ensure it).
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from typing import BinaryIO, Final

from shoal_coordinator.storage.fragment_uses import FragmentUses, room_of
from shoal_coordinator.storage.usage import taken_bytes
from shoal_coordinator.storage.volume_paths import (
    FOLDERS,
    INPUTS,
    FragmentPath,
    JobPath,
    PathRefused,
    is_job,
    is_name,
    jobs_in,
)
from shoal_coordinator.storage.volume_space import Space
from shoal_coordinator.storage.volume_values import (
    ContentRefused,
    FileMissing,
    FileRefused,
    Room,
    StoredFile,
)
from shoal_protocol.digests import Digest, digest_of, digest_of_file, from_hexadecimal, hexadecimal
from shoal_protocol.durable_files import is_disk_full, open_regular, sync_folder
from shoal_protocol.fragment_store import FragmentMissing, FragmentStore, read_manifest
from shoal_protocol.manifest import (
    MANIFEST,
    MAXIMUM_MANIFEST_BYTES,
    FileEntry,
    FragmentDamaged,
    is_shared,
)
from shoal_protocol.shared_files import SharedFiles
from shoal_protocol.transfers import PartialFile, WrongBytes
from shoal_protocol.units import format_bytes

FORGOTTEN_SECONDS: Final = 24 * 3600.0
"""Uploads that have not grown for so long are removed, when a coordinator starts, or needs room."""
_REMOVED: Final = "removed-"

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Upload:
    """A file on its way. `open`, then all bytes from `part.offset` on into `part`, then `finish`;
    in any case `close`."""

    volume: "Volume"
    path: FragmentPath | JobPath
    part: PartialFile
    expected: Digest | None
    """What the file must have; None: any."""

    def open(self) -> None:
        """Resume what came before, and reserve room for the rest. Raises `NoRoom`, `PartInUse`."""
        self.volume.reserve(self)

    def failed(self, error: OSError) -> Exception:
        """What a write that failed means: `NoRoom`, and what came is dropped; else the error."""
        if not is_disk_full(error):
            return error
        self.part.discard()
        return self.volume.space.no_room(self.part.size_bytes)

    def finish(self, announced: Digest | None = None) -> StoredFile:
        """All bytes are here: verify what is on the disk, and publish it. Raises `WrongBytes`."""
        expected = [digest for digest in (self.expected, announced) if digest is not None]
        found = self.part.verify(*expected)
        self.volume.publish(self)
        return StoredFile(name=self.path.name, size_bytes=self.part.size_bytes, digest=found)

    def close(self) -> None:
        """Let go of the file; the next upload of the same content resumes what came."""
        self.part.close()
        self.volume.release(self)


class Volume:
    """The volume of one coordinator. `in_use` gives the fragments of jobs that have not ended."""

    def __init__(self, root: Path, size: Callable[[], int] | None = None) -> None:
        """`size` gives what all of it may take, which may change; None: what its disk has."""
        self._root = root
        self._incoming = root / "incoming"
        self._store = FragmentStore(root)
        self._shared = SharedFiles(root)
        self._changing = RLock()
        self.uses = FragmentUses(self._store)
        self.space = Space(root, size)
        self.in_use: Callable[[], Set[Digest]] = frozenset

    # ---- reading ---------------------------------------------------------------------------------

    def job_folder(self, job: str, folder: str) -> Path:
        """Where a job's inputs or results are. Raises `PathRefused`."""
        if not is_job(job):
            raise PathRefused(f"{job[:260]!r} is no name for a job")
        return self._root / "jobs" / job / folder

    def open(self, path: FragmentPath | JobPath) -> tuple[BinaryIO, int]:
        """A file and its size. Raises `FileMissing`."""
        place = self._place(path)
        try:
            file = open_regular(place)
        except FileNotFoundError as error:
            raise FileMissing(f"{place.relative_to(self._root)} is not there") from error
        return file, os.fstat(file.fileno()).st_size

    def describe(self, path: FragmentPath | JobPath) -> StoredFile:
        """A file with its digest: it is read. Raises `FileMissing`."""
        file, size = self.open(path)
        with file:
            return StoredFile(name=path.name, size_bytes=size, digest=digest_of_file(file))

    def list(self, folder: str) -> Iterator[StoredFile]:
        """The files of a job's folder by name, or the digests of whole fragments. Raises
        `PathRefused`."""
        match folder.split("/"):
            case ["fragments"]:
                for digest in self._store.digests():
                    yield StoredFile(name=hexadecimal(digest), size_bytes=0)
            case ["jobs", job, which] if which in FOLDERS:
                place = self.job_folder(job, which)
                names = sorted(os.listdir(place)) if place.is_dir() else []
                for name in filter(is_name, names):
                    if (place / name).is_file():
                        yield StoredFile(name=name, size_bytes=(place / name).stat().st_size)
            case _:
                raise PathRefused(
                    f"{folder[:300]!r} is no folder here; there are fragments, jobs/JOB/in and "
                    f"jobs/JOB/out"
                )

    # ---- uploads ---------------------------------------------------------------------------------

    def begin(
        self, path: FragmentPath | JobPath, size_bytes: int, sha256: str, version: str
    ) -> Upload | StoredFile:
        """An upload of a file, to be opened; or the file, where it is there with this content.

        `sha256` is in hexadecimal, or empty where it is not known; `version` tells this content
        from another of the name. Raises `FileRefused`, `ContentRefused`.
        """
        expected = checked_digest(sha256)
        match path:
            case FragmentPath():
                return self._begin_fragment(path, size_bytes, expected)
            case JobPath():
                return self._begin_input(path, size_bytes, expected, version)

    def _begin_input(
        self, path: JobPath, size_bytes: int, expected: Digest | None, version: str
    ) -> Upload | StoredFile:
        if path.folder != INPUTS:
            raise FileRefused("results are written by the coordinator alone")
        place = self._place(path)
        if expected is not None and place.is_file() and place.stat().st_size == size_bytes:
            stored = self.describe(path)
            if stored.digest == expected:
                return stored
        # An earlier part is resumed if it is certain to be of the same content.
        same = f"{path.name}\0{size_bytes}\0{expected or ''}\0{version}".encode()
        part = self._staged(path) / f"{hexadecimal(digest_of(same))}.part"
        if expected is None and not version:
            part.unlink(missing_ok=True)
        return Upload(self, path, PartialFile(part, size_bytes, path.name), expected)

    def _begin_fragment(
        self, path: FragmentPath, size_bytes: int, expected: Digest | None
    ) -> Upload | StoredFile:
        self.uses.bring(path.digest)  # a client that finds it here relies on that
        staged = self._staged(path)
        folder = self._place(path).parent if self._store.has(path.digest) else staged
        entry = self._described(path, folder, size_bytes)
        if expected is not None and expected != entry.digest:
            raise ContentRefused(f"{path.name} of {path.digest} has another checksum")
        if size_bytes != entry.size_bytes:
            raise ContentRefused(
                f"{path.name} of {path.digest} has {format_bytes(entry.size_bytes)}, "
                f"not {format_bytes(size_bytes)}"
            )
        place = folder / path.name
        if place.is_file():  # it was verified before it got its name
            size = place.stat().st_size
            return StoredFile(name=path.name, size_bytes=size, digest=entry.digest)
        if is_shared(path.name) and self._link_shared(path, entry):
            return StoredFile(name=path.name, size_bytes=size_bytes, digest=entry.digest)
        part = PartialFile(staged / f"{path.name}.part", size_bytes, path.name)
        return Upload(self, path, part, entry.digest)

    def _link_shared(self, path: FragmentPath, entry: FileEntry) -> bool:
        """Whether another fragment has this file, and this one now too."""
        staged = self._staged(path)
        if not self._shared.link(entry, staged / path.name):
            return False
        sync_folder(staged)
        self._publish_fragment(path.digest, staged)
        return True

    def _described(self, path: FragmentPath, folder: Path, size_bytes: int) -> FileEntry:
        """What a fragment's file has to be: the manifest says it of the others."""
        if path.name == MANIFEST:
            if size_bytes > MAXIMUM_MANIFEST_BYTES:
                raise FileRefused(f"{MANIFEST} has at most {format_bytes(MAXIMUM_MANIFEST_BYTES)}")
            return FileEntry(digest=path.digest, size_bytes=size_bytes)
        name = hexadecimal(path.digest)[:12]
        try:
            files = read_manifest(folder, path.digest).files
        except FragmentMissing as error:
            raise FileRefused(f"put {MANIFEST} of {name} first") from error
        except FragmentDamaged as error:
            raise FileRefused(str(error)) from error
        if path.name not in files:
            raise FileRefused(f"fragment {name} has no {path.name}")
        return files[path.name]

    def reserve(self, upload: Upload) -> None:
        """Open an upload, reserve room for its rest, and make it if need be. Raises `NoRoom`,
        `PartInUse`."""
        with self._changing:
            upload.part.open()
            os.utime(upload.part.path)  # it is not forgotten, however old it is
            need = upload.part.size_bytes - upload.part.offset
            if not self.make_room(need):
                raise self.space.no_room(need)
            self.space.uploads.add(upload)
        self.space.look_at(self._staged(upload.path))

    def release(self, upload: Upload) -> None:
        """An upload is over, or breaks off: what came of it counts as what it is."""
        self.space.uploads.discard(upload)
        with suppress(OSError):  # it counts when everything is counted again
            self.space.look_at(self._staged(upload.path))

    def publish(self, upload: Upload) -> None:
        """Give a verified file its name; a fragment's folder too, when it is the last one. Raises
        `WrongBytes`."""
        match upload.path:
            case JobPath(job=job, folder=folder):
                place = self._place(upload.path)
                before = taken_bytes(place)
                upload.part.publish(place)
                self.space.added(f"jobs/{job}/{folder}", taken_bytes(place) - before)
            case FragmentPath():
                staged = self._staged(upload.path)
                upload.part.publish(staged / upload.path.name)
                if is_shared(upload.path.name) and upload.expected is not None:
                    self._shared.keep(upload.expected, staged / upload.path.name)
                self._publish_fragment(upload.path.digest, staged)

    def _publish_fragment(self, digest: Digest, staged: Path) -> None:
        try:
            files = read_manifest(staged, digest).files
        except FragmentDamaged as error:
            shutil.rmtree(staged)
            raise WrongBytes(str(error)) from error
        if not all((staged / name).is_file() for name in files):
            return
        for left in set(os.listdir(staged)) - {MANIFEST, *files}:
            (staged / left).unlink()  # of an upload that broke off; another fragment had the file
        place = self._store.folder(digest)
        place.parent.mkdir(parents=True, exist_ok=True)
        with self._changing:
            if place.exists():  # damaged, else nothing would have been taken
                self._remove(place)
            staged.rename(place)
            sync_folder(place.parent)
            self.space.look_at(place, staged)

    # ---- removing --------------------------------------------------------------------------------

    def remove_job(self, job: str) -> None:
        """Delete a job's files, and its uploads. Raises `PathRefused`."""
        folder, staged = self.job_folder(job, ""), self._incoming / "jobs" / job
        shutil.rmtree(staged, ignore_errors=True)
        self.space.look_at(staged)
        with self._changing:
            if folder.is_dir():
                self._remove(folder)

    def serve(self, digests: Sequence[Digest]) -> None:
        """A job has come for fragments. While it uses them they stay; then they wait for nobody."""
        self.uses.serve(digests)

    def spare_bytes(self) -> int:
        """What may still be written beside what uploads were promised; below 0: there is more than
        there may be."""
        return self.space.sizes()[1]

    def make_room(self, need_bytes: int) -> bool:
        """Remove uploads that nobody goes on with, and fragments that nobody uses, until so much is
        free, or there are no more; whether it is."""
        if need_bytes <= self.spare_bytes():
            return True
        with self._changing:
            if self.space.may_look_again:
                self.space.look_at_all()
            if need_bytes > self.spare_bytes():
                self._remove_forgotten()
            for digest, limit in self.uses.unused(self._store.digests(), self.in_use()):
                if need_bytes <= self.spare_bytes():
                    break
                self._remove_unused(digest, limit)
            return need_bytes <= self.spare_bytes()

    def room(self) -> Room:
        """What the volume has room for, and what gives way where more is needed."""
        room = room_of(self.uses, self._store, self.in_use(), self.space.room())
        return replace(room, jobs=jobs_in(self._root))

    def for_results(self, folder: Path) -> Callable[[int], None] | None:
        """What asks for room for results in a folder; None: nobody is to be asked."""
        return self.space.for_results(folder, self.make_room)

    def look_after(self, jobs: Iterable[str]) -> None:
        """Count anew what others than this volume write, of these jobs, and now and then
        everything; remove what nobody uses where there is more than may be."""
        if not self.space.is_counted:
            return
        if self.space.is_out_of_date:
            with self._changing:
                self.space.look_at_all()
        else:
            self.space.look_at_written(jobs)
        self.make_room(0)

    def _remove_unused(self, digest: Digest, limit: float) -> None:
        folder = self._store.folder(digest)
        gone = self._move_away(folder)
        if self.uses.since(digest, limit):
            gone.rename(folder)
            return
        self.uses.forget(digest)
        logger.info("fragment %s was removed to make room", digest)
        self._delete(gone, folder)

    def discard_damaged(self, digest: Digest) -> str | None:
        """Read a fragment, and remove it where it is not what its digest says; what is wrong with
        it. None: it is right, or not there."""
        folder = self._store.folder(digest)
        with suppress(FragmentMissing, FileNotFoundError):
            read = folder.stat()
            try:
                self._store.verify(digest)
            except FragmentDamaged as error:
                with self._changing:
                    if os.path.samestat(read, folder.stat()):  # else it was replaced meanwhile
                        self._remove(folder)
                return str(error)
        return None

    def _move_away(self, folder: Path) -> Path:
        """Rename a folder away, so that no reader finds half of it."""
        self._incoming.mkdir(parents=True, exist_ok=True)
        gone = self._incoming / f"{_REMOVED}{folder.name}"
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        return gone

    def _remove(self, folder: Path) -> None:
        self._delete(self._move_away(folder), folder)

    def _delete(self, gone: Path, folder: Path) -> None:
        """Delete what was moved away from a folder."""
        try:
            shutil.rmtree(gone)
        finally:
            self._shared.collect()
            self.space.look_at(gone, folder)

    def sweep(self) -> None:
        """Remove uploads that were abandoned long ago, what was being removed when another process
        ended, and shared files that no fragment has; then count what there is."""
        for folder in self._incoming.glob(f"{_REMOVED}*"):
            shutil.rmtree(folder)
        self._remove_forgotten()
        self._shared.collect()
        if self.space.is_counted:
            self.space.look_at_all()

    def _remove_forgotten(self) -> None:
        """Remove the uploads of one owner that were all abandoned long ago."""
        limit = time.time() - FORGOTTEN_SECONDS
        for place, _, names in os.walk(self._incoming, topdown=False):
            folder = Path(place)
            with suppress(FileNotFoundError):  # one was published just now
                if any((folder / name).lstat().st_mtime >= limit for name in names):
                    continue
                for name in names:
                    (folder / name).unlink()
                if folder != self._incoming and not os.listdir(folder):
                    folder.rmdir()
                if names:
                    self.space.look_at(folder)

    def _place(self, path: FragmentPath | JobPath) -> Path:
        return self._root / str(path)

    def _staged(self, path: FragmentPath | JobPath) -> Path:
        """The folder below `incoming` that a file waits in: of its fragment, or of its job."""
        kind, owner, *_ = str(path).split("/")
        return self._incoming / kind / owner


def checked_digest(sha256: str) -> Digest | None:
    """A digest as `Files` writes it: hexadecimal, or empty for none. Raises `FileRefused`."""
    try:
        return from_hexadecimal(sha256) if sha256 else None
    except ValueError as error:
        raise FileRefused(f"{sha256[:80]!r} is no checksum") from error
