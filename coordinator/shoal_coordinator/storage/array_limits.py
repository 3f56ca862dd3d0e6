"""What an untrusted file of arrays may ask for."""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_ITEM_BYTES: Final = 2 * 1024**3
_SHARE_OF_MEMORY: Final = 4
_CGROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def default_item_bytes() -> int:
    """A quarter of the memory that this process may use (an item is read, put into C order and
    encoded), at most 2 GiB."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):
            memory = min(memory, int(path.read_text()))
    return min(_ITEM_BYTES, memory // _SHARE_OF_MEMORY)


class UnreadableArrays(Exception):
    """A file that is no sound `.npy` or `.npz`, or is over a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a file may ask for. `item_bytes` bounds the decoded size of one item, and of each array
    that is read whole."""

    members: int = 256
    array_bytes: int = 256 * 1024**3
    item_bytes: int = field(default_factory=default_item_bytes)
