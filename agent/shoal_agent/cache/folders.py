"""What is in the folder of one fragment: the inodes, bytes and times of its files."""

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
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


def drop_cached_pages(folder: Path) -> None:
    """Have the kernel drop a folder's files from its page cache, which earlier processes filled.

    Pages stay charged to the control group that brought them there, which may be gone. This
    process's own group is to be charged with the fragments that it runs.
    """
    for path in folder.rglob("*"):
        with suppress(OSError), open_regular(path) as file:
            uncache(file.fileno())


def prepared_bytes(folder: Path) -> int:
    """Bytes of what was prepared of a fragment; what was not finished is removed."""
    for part in (folder / PREPARED_FOLDER).glob(f"*{PART}"):
        shutil.rmtree(part, ignore_errors=True)
    files = (path for path in (folder / PREPARED_FOLDER).rglob("*") if path.is_file())
    size = 0
    for path in files:
        with suppress(OSError):  # it was removed meanwhile
            size += path.stat().st_size
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
