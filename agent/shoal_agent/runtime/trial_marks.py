"""Trials that have ended their process, known to the next one.

A node may take memory faster than the guard looks, and beside the arena, whose limit holds it back.
The kernel then ends the agent, and would do so in each trial that follows. So a mark is on the disk
for as long as a trial runs. The process that begins and finds one takes that fragment to need more
than there is, in the form that was tried. Where another form ends it as well, the next one knows of
both. One that has passed with what there is of the arena, and has ended its process with all of it,
is tried with that only. The process after it tries all again, and so does one that was started by
another parent or since the machine was, or that finds an old mark: who made it was ended with its
parent, or switched off. (The first process of a container, or of a machine, has always the same.)
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import time
from typing import Final, NamedTuple

_LASTS_SECONDS: Final = 600.0
_NOISE_BYTES: Final = 512 << 10
"""What two processes measure of the same differs by less."""
_MOST: Final = 16
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class MarkedTrial(NamedTuple):
    """Of a fragment, prepared if it could be, or `as_cut`; within what, and what all had.
    `as_work`: it runs with all of the arena, and has passed with less."""

    digest: str
    as_cut: bool
    granted_bytes: int
    budget_bytes: int
    as_work: bool = False

    def ends_as(self, ended: "MarkedTrial") -> bool:
        """Whether it gets no less than one that has ended its process, of no more: grants follow
        from what was measured, and so may budgets."""
        return (
            (self.digest, self.as_cut, self.as_work) == (ended.digest, ended.as_cut, ended.as_work)
            and self.granted_bytes > ended.granted_bytes - _NOISE_BYTES
            and self.budget_bytes < ended.budget_bytes + _NOISE_BYTES
        )


class TrialMarks:
    """One trial runs at a time."""

    def __init__(self, path: Path, parent: int | None = None, boot: Path = _BOOT) -> None:
        """`path` is a file of this agent's. What it says is taken from it. `parent` starts this
        process, and starts it again when it has ended (None: who does). `boot` says since when the
        machine has run, as an id."""
        self._path = path
        self._parent = os.getppid() if parent is None else parent
        self._boot = ""
        with suppress(OSError):
            self._boot = boot.read_text().strip()
        self._ended = self._read()
        self._write(None)

    def ended_its_process(self, trial: MarkedTrial) -> bool:
        """Whether a process before this one was ended while such a trial ran."""
        return any(map(trial.ends_as, self._ended))

    @contextmanager
    def running(self, trial: MarkedTrial) -> Iterator[Callable[[], None]]:
        """A trial runs; what to call when it goes on as work does."""
        self._write(trial)
        try:
            yield lambda: self._write(trial._replace(as_work=True))
        finally:
            self._write(None)

    def _write(self, trial: MarkedTrial | None) -> None:
        """What the kernel has of it outlives this process: nothing waits for the disk. Without a
        mark all is as if the process had not been ended."""
        with suppress(OSError):
            if trial is None:
                self._path.unlink(missing_ok=True)
                return
            part = self._path.with_suffix(".part")
            with open(part, "w", encoding="utf-8", opener=_open_no_link) as file:
                trials = [*self._ended, trial][-_MOST:]
                mark = {"trials": trials, "began": time()}
                json.dump(mark | {"parent": self._parent, "boot": self._boot}, file)
            part.replace(self._path)

    def _read(self) -> tuple[MarkedTrial, ...]:
        with suppress(OSError, ValueError, KeyError, TypeError):
            mark = json.loads(self._path.read_bytes())
            is_new = 0 <= time() - float(mark["began"]) < _LASTS_SECONDS
            if is_new and (mark["parent"], mark["boot"]) == (self._parent, self._boot):
                return tuple(
                    MarkedTrial(str(digest), bool(as_cut), int(granted), int(budget), bool(as_work))
                    for digest, as_cut, granted, budget, as_work in mark["trials"]
                )
        return ()


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
