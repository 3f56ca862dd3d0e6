"""Trials that have ended their process, known to the next one.

A node may take memory faster than the guard looks, and beside the arena, whose limit holds it back.
The kernel then ends the agent, and would do so in each trial that follows. So a mark is on the disk
for as long as a trial runs. What the process that begins finds was ended in it, a moment ago: that
fragment is taken to need more than there is. Who marked it long ago may have been switched off; it
is tried again, and so it is by the process after this one.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import time
from typing import Final

_LASTS_SECONDS: Final = 600.0


class TrialMarks:
    """One trial runs at a time."""

    def __init__(self, path: Path) -> None:
        """`path` is a file of this agent's. What it says is taken from it."""
        self._path = path
        self._ended = _read(path)
        self._write(None)

    def ended_its_process(self, trial: str) -> bool:
        """Whether the process before this one was ended while the trial ran."""
        return self._ended == trial

    @contextmanager
    def running(self, trial: str) -> Iterator[None]:
        """A trial runs."""
        self._write(trial)
        try:
            yield
        finally:
            self._write(None)

    def _write(self, trial: str | None) -> None:
        """What the kernel has of it outlives this process: nothing waits for the disk. Without a
        mark all is as if the process had not been ended."""
        with suppress(OSError):
            if trial is None:
                self._path.unlink(missing_ok=True)
                return
            part = self._path.with_suffix(".part")
            with open(part, "w", encoding="utf-8", opener=_open_no_link) as file:
                json.dump({"trial": trial, "began": time()}, file)
            part.replace(self._path)


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _read(path: Path) -> str | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        mark = json.loads(path.read_bytes())
        if 0 <= time() - float(mark["began"]) < _LASTS_SECONDS:
            return str(mark["trial"])
    return None
