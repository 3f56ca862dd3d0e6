"""A coordinator's volume, as those that carry files see it: what stands, and how a file comes to.

```
ROOT/fragments/HEX/{fragment.json, model.onnx, weights.bin}
ROOT/jobs/JOB/{in,out}/NAME
ROOT/incoming/...                      what is not whole yet; nobody reads it
```

A file is written below `incoming`, synced, and renamed to its place when it has the size and the
checksum that it should have; a fragment's folder when all of its files have. So whoever looks sees
whole files and whole fragments, whenever the process dies. Names come from the network: a path that
is not of the shapes above never reaches the file system.

A fragment stays until something else needs its room: then those go that no job of now and nobody
of late has used, longest unused first. A fragment's folder bears the time of its last use. What is
gone is cut and brought again when a job needs it.

Everything here blocks; nothing here is called twice at a time for one file.
"""

import errno
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Final

from shoal_coordinator.storage.volume_paths import (
    FOLDERS,
    INPUTS,
    FragmentPath,
    JobPath,
    PathRefused,
    is_checksum,
    is_job,
    is_name,
)
from shoal_protocol.durable_files import sync_folder
from shoal_protocol.files import MAXIMUM_MANIFEST_BYTES
from shoal_protocol.fragment_store import (
    MANIFEST,
    FragmentDamaged,
    FragmentMissing,
    FragmentStore,
    StoredFile,
    described_files,
)
from shoal_protocol.partition import Digest
from shoal_protocol.units import format_bytes

RESERVE_BYTES: Final = 16 << 20
"""Left free for the ledger and the journals of jobs."""
FORGOTTEN_SECONDS: Final = 24 * 3600.0
"""What has been incoming for so long without a byte is removed when a coordinator starts."""
UNUSED_SECONDS: Final = 3600.0
"""For so long a fragment stays in any case: between its arrival and its job's, for one."""

logger = logging.getLogger(__name__)

_READ_BYTES: Final = 1 << 20
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class FileRefused(Exception):
    """A file that will not be taken, and would not be if it were sent again."""


class ContentRefused(Exception):
    """Another content stands in this place, and stays."""


class WrongBytes(Exception):
    """What arrived is not what was announced; it is thrown away."""


class FileMissing(LookupError):
    """There is no such file."""


class NoRoom(Exception):
    """The volume cannot take it."""

    def __init__(self, need_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"would need {format_bytes(need_bytes)}, {format_bytes(free_bytes)} are free "
            f"on the coordinator's volume"
        )
        self.need_bytes = need_bytes
        self.free_bytes = free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A file in its place; `sha256` in hexadecimal, where it was computed."""

    name: str
    size_bytes: int
    sha256: str = ""


@dataclass(slots=True)
class Upload:
    """A file on its way. After `write` of all from `offset` on: `finish`; in any case: `close`."""

    volume: "Volume"
    path: FragmentPath | JobPath
    part: Path
    size_bytes: int
    sha256: str
    """What it must turn out to be; empty: whatever it is."""
    offset: int = 0
    _reserved: int = 0
    _file: BinaryIO | None = None
    _hash: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def open(self) -> None:
        """Take up what came before."""
        self.part.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.part.open("ab", buffering=0)
        if self._file.tell() > self.size_bytes:
            self._file.truncate(0)
        with self.part.open("rb") as before:
            while piece := before.read(_READ_BYTES):
                self._hash.update(piece)
                self.offset += len(piece)

    def reserve(self) -> None:
        """Keep room for what is still to come, and make it if need be. Raises `NoRoom`."""
        need = self.size_bytes - self.offset
        self.volume.make_room(need)
        free = self.volume.free_bytes()
        if need > free:
            raise NoRoom(need, free)
        self._reserved = need
        self.volume.promised += need

    def write(self, piece: bytes) -> None:
        """Add bytes. Raises `WrongBytes` past the announced size, `NoRoom`, `OSError`."""
        assert self._file is not None
        if self.offset + len(piece) > self.size_bytes:
            self.drop()
            raise WrongBytes(
                f"{self.path.name} has more than the announced {self.size_bytes} bytes"
            )
        view = memoryview(piece)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self.drop()
            raise NoRoom(self.size_bytes, self.volume.free_bytes()) from error
        self._hash.update(piece)
        self.offset += len(piece)
        self._reserved -= len(piece)
        self.volume.promised -= len(piece)

    def finish(self, sha256: str = "") -> Standing:
        """All bytes are here: put the file in its place. Raises `WrongBytes`, `OSError`."""
        assert self._file is not None
        if self.offset != self.size_bytes:
            raise WrongBytes(f"{self.path.name} ends at {self.offset} of {self.size_bytes} bytes")
        found = self._hash.hexdigest()
        for expected in (self.sha256, sha256):
            if expected and expected != found:
                self.drop()
                raise WrongBytes(
                    f"{self.path.name} arrived with checksum {found[:12]}, not {expected[:12]}"
                )
        os.fsync(self._file.fileno())
        self.close()
        self.volume.settle(self)
        return Standing(name=self.path.name, size_bytes=self.size_bytes, sha256=found)

    def drop(self) -> None:
        """Forget what came."""
        self.close()
        self.part.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file; what came is kept for the next try."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self.volume.promised -= self._reserved
            self._reserved = 0


class Volume:
    """The volume of one coordinator. `promised`: bytes announced by uploads and still to come;
    `in_use`: the fragments of jobs that have not ended."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._incoming = root / "incoming"
        self._store = FragmentStore(root)
        self._removing = Lock()
        self.promised = 0
        self.in_use: Callable[[], Set[Digest]] = frozenset

    # ---- what stands -----------------------------------------------------------------------------

    def job_folder(self, job: str, folder: str) -> Path:
        """Where a job's inputs or results are. Raises `PathRefused`."""
        if not is_job(job):
            raise PathRefused(f"{job[:260]!r} is no name for a job")
        return self._root / "jobs" / job / folder

    def open(self, path: FragmentPath | JobPath) -> tuple[BinaryIO, int]:
        """A file and its size. Raises `FileMissing`."""
        try:
            descriptor = os.open(self._place(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise FileMissing(f"{self._shown(path)} is not there") from error
        file = os.fdopen(descriptor, "rb")
        return file, os.fstat(descriptor).st_size

    def describe(self, path: FragmentPath | JobPath) -> Standing:
        """A file with its checksum. Raises `FileMissing`, `OSError`."""
        file, size = self.open(path)
        with file:
            found = hashlib.sha256()
            while piece := file.read(_READ_BYTES):
                found.update(piece)
        return Standing(name=path.name, size_bytes=size, sha256=found.hexdigest())

    def list(self, folder: str) -> Iterator[Standing]:
        """The files of a job's folder by name, or the digests of whole fragments. Raises
        `PathRefused`."""
        match folder.split("/"):
            case ["fragments"]:
                for digest in self._store.digests():
                    yield Standing(name=digest.removeprefix("sha256:"), size_bytes=0)
            case ["jobs", job, which] if which in FOLDERS:
                place = self.job_folder(job, which)
                names = sorted(os.listdir(place)) if place.is_dir() else []
                for name in filter(is_name, names):
                    if (place / name).is_file():
                        yield Standing(name=name, size_bytes=(place / name).stat().st_size)
            case _:
                raise PathRefused(
                    f"{folder[:300]!r} is no folder here; there are fragments, jobs/JOB/in and "
                    f"jobs/JOB/out"
                )

    def free_bytes(self) -> int:
        """What may still be written, beside what is promised already."""
        self._root.mkdir(parents=True, exist_ok=True)
        found = os.statvfs(self._root)
        return max(0, found.f_bavail * found.f_frsize - RESERVE_BYTES - self.promised)

    # ---- taking a file ---------------------------------------------------------------------------

    def begin(
        self, path: FragmentPath | JobPath, size_bytes: int, sha256: str, version: str
    ) -> Upload | Standing:
        """Take a file, or find it standing.

        Raises `FileRefused`, `ContentRefused`, `NoRoom`, `OSError`.
        """
        if sha256 and not is_checksum(sha256):
            raise FileRefused(f"{sha256[:80]!r} is no checksum")
        match path:
            case FragmentPath():
                upload = self._begin_fragment(path, size_bytes, sha256)
            case JobPath():
                upload = self._begin_input(path, size_bytes, sha256, version)
        if isinstance(upload, Standing):
            return upload
        try:
            upload.open()
            upload.reserve()
        except (OSError, NoRoom):
            upload.close()
            raise
        return upload

    def _begin_input(
        self, path: JobPath, size_bytes: int, sha256: str, version: str
    ) -> Upload | Standing:
        if path.folder != INPUTS:
            raise FileRefused("results are written by the coordinator alone")
        place = self._place(path)
        if sha256 and place.is_file() and place.stat().st_size == size_bytes:
            standing = self.describe(path)
            if standing.sha256 == sha256:
                return standing
        # What came before is of use if it is certain to be of the same content.
        same = f"{path.name}\0{size_bytes}\0{sha256}\0{version}".encode()
        part = self._staged(path) / f"{hashlib.sha256(same).hexdigest()}.part"
        if not sha256 and not version:
            part.unlink(missing_ok=True)
        return Upload(self, path, part, size_bytes, sha256)

    def _begin_fragment(
        self, path: FragmentPath, size_bytes: int, sha256: str
    ) -> Upload | Standing:
        digest = Digest(f"sha256:{path.digest}")
        self.use([digest])  # who finds it standing relies on that
        staged = self._staged(path)
        folder = self._place(path).parent if self._store.has(digest) else staged
        wanted = self._wanted(path, folder)
        if sha256 and sha256 != wanted.sha256:
            raise ContentRefused(f"{path.file} of {digest} has another checksum")
        if path.file != MANIFEST and size_bytes != wanted.size_bytes:
            raise ContentRefused(
                f"{path.file} of {digest} has {format_bytes(wanted.size_bytes)}, "
                f"not {format_bytes(size_bytes)}"
            )
        if path.file == MANIFEST and size_bytes > MAXIMUM_MANIFEST_BYTES:
            raise FileRefused(f"{MANIFEST} has at most {format_bytes(MAXIMUM_MANIFEST_BYTES)}")
        place = folder / path.file
        if place.is_file():  # it was verified before it got its name
            size = place.stat().st_size
            return Standing(name=path.file, size_bytes=size, sha256=wanted.sha256)
        return Upload(self, path, staged / f"{path.file}.part", size_bytes, wanted.sha256)

    def _wanted(self, path: FragmentPath, folder: Path) -> StoredFile:
        """What a fragment's file has to be; the manifest says so of the others."""
        if path.file == MANIFEST:
            return StoredFile(sha256=path.digest, size_bytes=0)
        try:
            files = described_files(folder / MANIFEST, Digest(f"sha256:{path.digest}"))
        except FragmentMissing as error:
            raise FileRefused(f"put {MANIFEST} of {path.digest[:12]} first") from error
        except FragmentDamaged as error:
            raise FileRefused(str(error)) from error
        if path.file not in files:
            raise FileRefused(f"fragment {path.digest[:12]} has no {path.file}")
        return files[path.file]

    def settle(self, upload: Upload) -> None:
        """Give a whole file its name; a fragment's folder, when it is the last one."""
        path = upload.path
        match path:
            case JobPath():
                place = self._place(path)
                place.parent.mkdir(parents=True, exist_ok=True)
                upload.part.rename(place)
                sync_folder(place.parent)
            case FragmentPath():
                folder = upload.part.parent
                upload.part.rename(folder / path.file)
                sync_folder(folder)
                self._publish(path.digest, folder)

    def _publish(self, digest: str, folder: Path) -> None:
        try:
            files = described_files(folder / MANIFEST, Digest(f"sha256:{digest}"))
        except FragmentDamaged as error:
            shutil.rmtree(folder)
            raise WrongBytes(str(error)) from error
        if not all((folder / name).is_file() for name in files):
            return
        place = self._root / "fragments" / digest
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():  # damaged, else nothing would have been taken
            self._take_away(place)
        folder.rename(place)
        sync_folder(place.parent)

    # ---- removing --------------------------------------------------------------------------------

    def remove_job(self, job: str) -> None:
        """Delete a job's files, those on their way too; that there are none is well. Raises
        `PathRefused`, `OSError`."""
        folder = self.job_folder(job, "")
        shutil.rmtree(self._incoming / "jobs" / job, ignore_errors=True)
        if folder.is_dir():
            self._take_away(folder)

    def use(self, digests: Iterable[Digest]) -> None:
        """Fragments are used now: those that are there stay for `UNUSED_SECONDS` at least."""
        with self._removing:
            for digest in digests:
                with suppress(FileNotFoundError):
                    os.utime(self._fragment(digest))

    def make_room(self, need_bytes: int) -> None:
        """Remove fragments that nobody uses until so much is free, or there are no more. Raises
        `OSError`."""
        with self._removing:
            if need_bytes <= self.free_bytes():
                return
            used, limit = self.in_use(), time.time() - UNUSED_SECONDS
            unused = [each for each in self._store.digests() if each not in used]
            ages = sorted((self._fragment(each).stat().st_mtime, each) for each in unused)
            for used_at, digest in ages:
                if used_at > limit or need_bytes <= self.free_bytes():
                    break
                logger.info("fragment %s gives way to what needs room", digest)
                self._take_away(self._fragment(digest))

    def discard_damaged(self, digest: Digest) -> str | None:
        """Read a fragment, and remove it where it is not what its digest says; what is wrong with
        it. None: it is right, or not there. Raises `OSError`."""
        with self._removing, suppress(FragmentMissing):
            try:
                self._store.verify(digest)
            except FragmentDamaged as error:
                self._take_away(self._fragment(digest))
                return str(error)
        return None

    def _take_away(self, folder: Path) -> None:
        self._incoming.mkdir(parents=True, exist_ok=True)
        gone = self._incoming / f"removed-{folder.name}"
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)  # at once, so that nobody sees a half of it
        shutil.rmtree(gone)

    def sweep(self) -> None:
        """Remove what was left on its way long ago."""
        limit = time.time() - FORGOTTEN_SECONDS
        for folder, _, names in os.walk(self._incoming, topdown=False):
            for name in names:
                file = Path(folder) / name
                if file.stat().st_mtime < limit:
                    file.unlink(missing_ok=True)
            if folder != str(self._incoming) and not os.listdir(folder):
                os.rmdir(folder)

    def _fragment(self, digest: Digest) -> Path:
        return self._root / "fragments" / digest.removeprefix("sha256:")

    def _place(self, path: FragmentPath | JobPath) -> Path:
        match path:
            case FragmentPath():
                return self._root / "fragments" / path.digest / path.file
            case JobPath():
                return self._root / "jobs" / path.job / path.folder / path.name

    def _staged(self, path: FragmentPath | JobPath) -> Path:
        """The folder below `incoming` that a file waits in."""
        match path:
            case FragmentPath():
                return self._incoming / "fragments" / path.digest
            case JobPath():
                return self._incoming / "jobs" / path.job

    def _shown(self, path: FragmentPath | JobPath) -> str:
        return str(self._place(path).relative_to(self._root))
