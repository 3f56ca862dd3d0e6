"""Files and names that survive a crash: written whole, renamed into place, synced."""

import os
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that at any moment either the old or the new one stands there, whole."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
