"""`tmp_path` in memory, for folders of tests that import it into their `conftest.py`.

What their tests write is small and synced again and again: on a disk they wait for that, and the
kernel works as long as they do. Not for tests of an agent: a file in memory is memory, and what
maps its weights from there neither takes nor gives back what it would with a disk.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOM_BYTES = 1 << 30
"""A container may have no more than 64 MiB of it."""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Removed also if the test fails."""
    memory = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it
    has_room = memory.is_dir() and shutil.disk_usage(memory).free >= _ROOM_BYTES
    with tempfile.TemporaryDirectory(
        prefix="shoal-test-", dir=memory if has_room else None, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)
