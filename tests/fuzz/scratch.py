"""What targets share: folders in memory, as a disk would be worn out, and one event loop."""

import asyncio
import atexit
import functools
import shutil
import tempfile
from pathlib import Path


@functools.cache
def scratch_folder() -> Path:
    """This process's own; removed when it ends."""
    memory = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it
    path = Path(tempfile.mkdtemp(prefix="shoal-fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def event_loop() -> asyncio.Runner:
    """A loop for all inputs: to make one takes longer than most of them."""
    return asyncio.Runner()


def empty_folder(name: str) -> Path:
    """A folder in it, without anything."""
    folder = scratch_folder() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
