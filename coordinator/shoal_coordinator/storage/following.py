"""Scans of a followed folder, and the items that it has given so far.

Each scan takes the files whose size and time of change are as at an earlier scan, then lists the
folder. A file that is being written changes from scan to scan; one that was renamed into place is
whole, and waits for the second scan too. Empty files wait until they are not.

A listing costs in proportion to the folder, so one is skipped where the folder's own time of change
says that no name has come. That time may be coarse: after a change the next scans list as well, and
so does every `_EVERY`th.

So many files are taken that at most `LIVE_FILES` have not ended; the others wait on disk.
"""

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from shoal_coordinator.storage.contents import FileContents
from shoal_coordinator.storage.file_names import is_file, is_unreachable
from shoal_coordinator.storage.followed import LATEST, FollowedFiles, Retaken, Waiting
from shoal_coordinator.storage.inputs import (
    SUFFIXES,
    FolderLimits,
    InputFile,
    InputSet,
    contents_of,
)
from shoal_protocol.partition import TensorSpec

LIVE_FILES: Final = 1024
PATIENCE_SCANS: Final = 10
"""After the end, files that still change are waited for during so many scans."""
_EVERY: Final = 60
_AGAIN: Final = 2
_EXAMINED: Final = 4 * LIVE_FILES
"""Files that one scan examines, at most."""


class FollowedInputs(InputSet):
    """The items of the files that were taken and have not ended; `len` counts those before too."""

    def __init__(
        self,
        folder: Path,
        files: FollowedFiles,
        model_inputs: tuple[TensorSpec, ...],
        fixed: Collection[str] = (),
    ) -> None:
        super().__init__(folder, (), model_inputs, "", FolderLimits(), fixed)
        self.catalogue = files
        self._items = files.items
        self._table.add(files.live)

    def __len__(self) -> int:
        return self._items

    def extend(self, files: list[tuple[int, InputFile]], items: int) -> None:
        """More files were taken; now there are so many items."""
        self._table.add(files)
        self._items = items

    def retain(self) -> None:
        """Forget the files that have ended."""
        live = self.catalogue.files
        if ended := frozenset(number for number in self._table if number not in live):
            self._table.remove(ended)


class FollowedFolder:
    """A folder that files come to. Not for several threads; any method may raise `OSError`."""

    def __init__(
        self,
        folder: Path,
        files: FollowedFiles,
        model_inputs: tuple[TensorSpec, ...],
        fixed: Collection[str] = (),
    ) -> None:
        self.folder = folder
        self.waiting = 0
        """Files that were listed and not taken."""
        self.settled = False
        """After the last listing: no file waits that could be taken."""
        self._files = files
        self._model_inputs = model_inputs
        self._fixed = fixed
        self._limits = FolderLimits()
        self._changed = -1
        self._scans = self._listings = 0
        self._last = False
        self._patience = PATIENCE_SCANS

    def scan(self, *, last: bool) -> list[tuple[int, InputFile]]:
        """Take files, then list the folder. `last`: what this scan does not list is not taken."""
        room = LIVE_FILES - len(self._files.files)
        taken = self._take(room) if room > 0 else []
        if not self._last and self._is_due(last):
            for names in self._files.unknown(self._names()):
                self._files.wait(filter(None, map(self._stat, names)))
        self._last = self._last or last
        self.waiting = self._files.count_waiting()
        if self._last:
            self._patience -= not taken and room > 0
            self.settled = not self.waiting or self._patience < 0
        return taken

    def retry(self, number: int, items: Collection[int]) -> Retaken:
        """Let files wait again of which items failed."""
        return self._files.retry(number, items, self._stat)

    def _take(self, room: int) -> list[tuple[int, InputFile]]:
        """Number the files that are as they were."""
        ready: list[tuple[str, FileContents]] = []
        changed: list[Waiting] = []
        gone: list[str] = []
        for known in self._files.waiting(_EXAMINED):
            if len(ready) == room:
                break
            now = self._stat(known.name)
            if now is None:
                gone.append(known.name)
            elif now != known:
                changed.append(now)
            elif now.size:
                ready.append((known.name, self._contents(self.folder / known.name)))
        if changed:
            self._files.wait(changed)
        if gone:
            self._files.drop(gone)
        return self._files.take(ready) if ready else []

    def _contents(self, path: Path) -> FileContents:
        return contents_of(path, self._model_inputs, self._limits, self._fixed)

    def _stat(self, name: str) -> Waiting | None:
        try:
            status = os.stat(self.folder / name)
        except OSError as error:
            if is_unreachable(error):
                return None
            raise
        return Waiting(name, status.st_size, min(status.st_mtime_ns, LATEST))

    def _is_due(self, last: bool) -> bool:
        try:
            changed = os.stat(self.folder).st_mtime_ns
        except FileNotFoundError:
            return False
        self._scans += 1
        if changed != self._changed:
            self._changed, self._listings = changed, _AGAIN + 1
        self._listings -= 1
        return last or self._listings >= 0 or self._scans % _EVERY == 0

    def _names(self) -> Iterator[str]:
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name[0] != "." and entry.name.endswith(SUFFIXES) and is_file(entry):
                    yield entry.name
