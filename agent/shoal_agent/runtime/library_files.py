"""Files of libraries and modules in the page cache: charged to the control group that reads them
first, for as long as they stay there.

They take up what a container's limit leaves beside floor and budget, and a limit cannot be lowered
below what is charged (the kubelet refuses that), though all of it could be read again.
"""

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

_PATH_FIELD: Final = 5


def library_files() -> frozenset[str]:
    """Paths of mapped files and of modules' code. While no fragment is open, all mapped files are
    of libraries. No `Path` for any: that keeps the names of all folders for ever."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        fields = [line.rstrip("\n").split(maxsplit=_PATH_FIELD) for line in maps]
    mapped = {each[_PATH_FIELD] for each in fields if len(each) > _PATH_FIELD}
    modules = {getattr(module, "__cached__", None) for module in tuple(sys.modules.values())}
    return frozenset(path for path in mapped | modules if path and os.path.isfile(path))


def uncache(paths: Iterable[str]) -> None:
    """Have the kernel drop files from its page cache, but for pages that a process has mapped: they
    are read again when they are used."""
    for path in paths:
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
