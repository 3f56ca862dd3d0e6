"""What is in the folder of one fragment: the inodes, bytes and times of its files."""

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR
from typing import Final

from shoal_protocol.digests import Digest, digest_of_mapped
from shoal_protocol.durable_files import is_transient, open_regular
from shoal_protocol.manifest import MANIFEST, Manifest, is_shared
from shoal_protocol.page_cache import uncache

PART: Final = ".part"
PREPARED_FOLDER: Final = "prepared"

Stamps = tuple[tuple[int, int, int, int], ...]
"""Inode, size and times of change of a fragment's files."""


def inodes(folder: Path, names: Iterable[str]) -> dict[int, int]:
    """The files in a folder that may be of several fragments, by inode, with their bytes."""
    found = {}
    for name in filter(is_shared, names):
        with suppress(FileNotFoundError):
            status = (folder / name).lstat()
            found[status.st_ino] = status.st_size
    return found


def folders_in(folder: Path) -> list[tuple[int, Path]]:
    """The folders in one and when they changed, in nanoseconds since 1970, the oldest first. A disk
    that was switched off may have lost one, and say nothing of it but an error: that is of 1970."""
    found = []
    for path in folder.iterdir():
        try:
            status = path.stat()
        except OSError as error:
            if is_transient(error):
                raise
            found.append((0, path))
        else:
            if S_ISDIR(status.st_mode):
                found.append((status.st_mtime_ns, path))
    return sorted(found)


def drop_cached_pages(folder: Path) -> None:
    """Have the kernel drop a folder's files from its page cache, which earlier processes filled.

    Pages stay charged to the control group that brought them there, which may be gone. This
    process's own group is to be charged with the fragments that it runs.
    """
    for inside, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError), open_regular(Path(inside, name)) as file:
                uncache(file.fileno())


def prepared_bytes(folder: Path) -> int:
    """Bytes of what was prepared of a fragment; what was not finished is removed."""
    size = 0
    for inside, _, names in os.walk(folder / PREPARED_FOLDER):
        if inside.endswith(PART):
            shutil.rmtree(inside, ignore_errors=True)
            continue
        for name in names:
            with suppress(OSError):  # it was removed meanwhile
                size += os.stat(os.path.join(inside, name)).st_size
    return size


def stamps_of(folder: Path, manifest: Manifest) -> Stamps | None:
    """None where a file cannot be read."""
    try:
        states = [(folder / name).stat() for name in (MANIFEST, *manifest.files)]
    except OSError as error:
        if is_transient(error):
            raise
        return None
    return tuple((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in states)


def file_digest(path: Path) -> Digest:
    """The digest of a file. Raises `OSError`."""
    with path.open("rb") as file:
        return digest_of_mapped(file)
