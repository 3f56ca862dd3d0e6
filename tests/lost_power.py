"""A disk whose power fails: what was written and not synced is gone, in whole or in part."""

import contextlib
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from shoal_coordinator.storage.folders import Folder

Tear = Callable[[int, int], tuple[int, int]]
"""Of a file of which so much was synced and so much written: how much of that is found again, and
how long the file is then. What is longer is zeros."""


class PowerLost(BaseException):
    """No code of the store runs on after this."""


def synced_alone(synced: int, _written: int) -> tuple[int, int]:
    """Nothing is found but what was synced."""
    return synced, synced


def all_written(_synced: int, written: int) -> tuple[int, int]:
    """Everything is found: the process was killed, and the machine went on."""
    return written, written


class Disk:
    """A disk that loses power at its n-th operation, and with it all content that was not synced.
    Names that were not synced survive, or do not."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, fails_at: int) -> None:
        self._one_by_one = Lock()
        self.begin(folder, fails_at)
        for name in ("pwrite", "replace", "unlink", "fsync", "fdatasync"):
            patch.setattr(os, name, self._counted(getattr(os, name)))
        patch.setattr(Folder, "sync_file_system", self._counted(Folder.sync_file_system))

    def begin(self, folder: Path, fails_at: int) -> None:
        """There is power; all that is in the folder is durable."""
        self._folder = folder
        self.fails_at = fails_at
        self._sizes: Counter[int] = Counter()
        self._names: set[str] = set()
        self.operations: list[str] = []
        self._sync_all()

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.operations.append(operation.__name__)
            if len(self.operations) >= self.fails_at:
                raise PowerLost
            # What is synced is put down, and not synced: no power is lost, and a sync of a file
            # system waits for all that other processes have written.
            if operation.__name__ == "sync_file_system":
                return self._sync_all()
            if operation.__name__ in ("fsync", "fdatasync"):
                return self._sync(os.readlink(f"/proc/self/fd/{arguments[0]}"))
            return operation(*arguments, **keywords)

        return counted

    def _sync_all(self) -> None:
        for folder, _, files in os.walk(self._folder):
            for path in (folder, *(f"{folder}/{name}" for name in files)):
                with contextlib.suppress(FileNotFoundError):  # removed by another thread meanwhile
                    self._sync(path)

    def _sync(self, path: str) -> None:
        with self._one_by_one:  # else what another thread has seen before would undo this
            status = os.stat(path)
            if stat.S_ISDIR(status.st_mode):
                self._names.update(f"{path}/{name}" for name in os.listdir(path))
            else:
                self._sizes[status.st_ino] = status.st_size

    def copy_durable(self, target: Path, *, names_survive: bool, tear: Tear = synced_alone) -> None:
        """What is found when there is power again."""
        shutil.copytree(self._folder, target)
        for path in filter(Path.is_file, self._folder.rglob("*")):
            found, status = target / path.relative_to(self._folder), path.stat()
            if names_survive or str(path) in self._names:
                for size in tear(self._sizes[status.st_ino], status.st_size):
                    os.truncate(found, size)
            else:
                found.unlink()
