"""A control group whose memory is limited, of whichever version there is."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT = 600 << 20
"""What it begins with."""
ROOTS = {
    Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes",
    Path("/sys/fs/cgroup"): "memory.max",
}


@contextlib.contextmanager
def control_group() -> Iterator[Path]:
    """One to put processes in; the test is skipped where none can be made."""
    for root, name in ROOTS.items():
        folder = root / f"shoal-test-{os.getpid()}"
        try:
            folder.mkdir()
            if (folder / name).exists():
                limit(folder, LIMIT)
                yield folder
                folder.rmdir()
                return
            folder.rmdir()
        except OSError:
            continue
    pytest.skip("no control group for memory can be made here: not root, or no controller")


def limit(group: Path, size: int) -> None:
    (group / ROOTS[group.parent]).write_text(str(size))


def charged(group: Path) -> int:
    usage = {"memory.limit_in_bytes": "memory.usage_in_bytes", "memory.max": "memory.current"}
    return int((group / usage[ROOTS[group.parent]]).read_text())
