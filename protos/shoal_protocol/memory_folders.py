"""Folders whose files are memory: those on a tmpfs, as /tmp is on many machines."""

import os
from pathlib import Path
from typing import Final

_IN_MEMORY: Final = frozenset({b"tmpfs", b"ramfs"})


def is_in_memory(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Does memory hold the files of this folder, or of the one that it will be made in? The kernel
    cannot take such pages back. False where this system does not tell."""
    try:
        place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        device = place.stat().st_dev
        listed = mounts.read_bytes().splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}".encode()
    for line in listed:
        mount, _, kind = line.partition(b" - ")
        if mount.split()[2:3] == [number]:
            return kind.partition(b" ")[0] in _IN_MEMORY
    return False
