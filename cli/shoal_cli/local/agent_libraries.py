"""The libraries that agents run, held in memory by this process.

The kernel charges a page of a file to the group that first brings it into memory. Where nobody has
run anything since the machine started, that is the group of the first agent, and the limit of that
has room for its budget, not for the code of ONNX Runtime: the kernel takes the pages back as often
as they are read from the disk, and a run takes a hundred times as long. So this process, which is
in no group of an agent, brings them there, and keeps them mapped: what is mapped is the last to be
taken back.

They are to be there in small pages. What was just installed is not, and then an agent takes more
for the code that it runs than its floor reserves.
"""

import mmap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_PACKAGES: Final = ("onnxruntime", "numpy", "grpc", "cryptography", "google", "zstandard", "lz4")
_NOT_LOADED: Final = "libonnxruntime"
"""For programs in C; the Python module has all of it in itself."""


class HeldFiles:
    """Files whose pages are in memory: those at `paths`. They are let go with this."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """What cannot be held is left out."""
        self._mappings: dict[Path, mmap.mmap] = {}
        for path in paths:
            with suppress(OSError, ValueError), path.open("rb", buffering=0) as file:
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                self._mappings[path] = mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ)

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(self._mappings)


def hold_libraries() -> HeldFiles:
    """Hold those that agents load; reads them from the disk where they are in no page cache."""
    return HeldFiles(agent_libraries())


def agent_libraries() -> Iterator[Path]:
    """Those that agents load."""
    for package in _PACKAGES:
        spec = find_spec(package)
        for folder in [] if spec is None else spec.submodule_search_locations or []:
            found = sorted(Path(folder).rglob("*.so"))
            yield from (each for each in found if not each.name.startswith(_NOT_LOADED))
