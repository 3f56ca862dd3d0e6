"""What a task of each fragment takes on this device: plans are corrected by it.

It is the median of the last runs of one item while nothing waited for the processor, such as a
load. A device under a quota of processor time computes for a while and is held for a while, and a
short run shows one of the two. So there a run counts by the processor time that it took, at the
rate at which the device gets that. A run in blocks waits for the disk besides, and maps weights
again. It counts in the same way, less what the calibration says of mapping: what is left is what it
would take with all of its weights in memory. What it took as it ran is known beside that, for the
last few grants that it ran in.

What is known is stored in the cache, and changes only when it has changed much: plans are made anew
for it.
"""

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shoal_protocol.durable_files import replace_file
from shoal_protocol.speeds import UNKNOWN_SPEED, Speed
from shoal_protocol.v1.session_pb2 import TimeWithin

_RUNS: Final = 15
_LEAST_RUNS: Final = 5
_CHANGE: Final = 1.1
_MOST: Final = 256
_GRANTS: Final = 4
_AT: Final = "@"
"""Between a digest and a grant, in what is stored."""
_HELD_BELOW: Final = 0.9
"""Of its threads: a device that has fewer processors is under a quota, or shares them."""


@dataclass(slots=True)
class _Usual:
    """The median of the last runs. 0: there were too few."""

    seconds: float = 0.0
    runs: deque[float] = field(default_factory=lambda: deque(maxlen=_RUNS))

    def add(self, took: float) -> None:
        self.runs.append(took)
        if len(self.runs) >= _LEAST_RUNS and took > 0:
            now = sorted(self.runs)[len(self.runs) // 2]
            if now and not self.seconds / _CHANGE < now < self.seconds * _CHANGE:
                self.seconds = now


@dataclass(slots=True)
class _Fragment:
    """`task`: with all of its weights in memory. `within`: as it ran, by what it was granted in
    blocks, the last grant at the end; 0: it was in memory as a whole."""

    task: _Usual = field(default_factory=_Usual)
    within: dict[int, _Usual] = field(default_factory=dict)

    def at(self, granted_bytes: int) -> _Usual:
        self.within[granted_bytes] = its = self.within.pop(granted_bytes, None) or _Usual()
        while len(self.within) > _GRANTS:
            del self.within[next(iter(self.within))]
        return its


_UNKNOWN: Final = _Fragment()


class TaskTimes:
    """Of the fragments that ran last."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._speed = UNKNOWN_SPEED
        self._known: dict[str, _Fragment] = {}
        self._stored: dict[str, float] = {}

    def measured(self, speed: Speed) -> None:
        """The calibration has found this."""
        self._speed = speed

    def note(
        self,
        digest: str,
        seconds: float,
        processor_seconds: float,
        streamed_bytes: int = 0,
        granted_bytes: int = 0,
    ) -> None:
        """An undisturbed run of a fragment, that has mapped so many bytes of weights again, in
        blocks within `granted_bytes`; 0: in memory as a whole."""
        processors, page_rate = self._speed.processors, self._speed.page_bytes_per_second
        processors = processors or float(self._threads)
        its = self._of(digest)
        took = whole = seconds
        if processors < _HELD_BELOW * self._threads:
            whole = processor_seconds / processors
            took = max(seconds, whole) if granted_bytes else whole
        its.at(granted_bytes).add(took)
        if not streamed_bytes:
            its.task.add(whole)
        elif page_rate is not None:
            its.task.add((processor_seconds - streamed_bytes / page_rate) / processors)

    def read(self, digest: str) -> float | None:
        """Seconds; None: there were too few runs."""
        return self._known.get(digest, _UNKNOWN).task.seconds or None

    def within(self, digest: str) -> list[TimeWithin]:
        """What tasks took as they ran, by what the fragment was granted."""
        return [
            TimeWithin(granted_bytes=granted, seconds=usual.seconds)
            for granted, usual in self._known.get(digest, _UNKNOWN).within.items()
            if usual.seconds
        ]

    def _of(self, digest: str) -> _Fragment:
        self._known[digest] = its = self._known.pop(digest, None) or _Fragment()
        while len(self._known) > _MOST:
            del self._known[next(iter(self._known))]
        return its

    def restore(self, path: Path, cached: Mapping[str, int]) -> None:
        """What an earlier start knew of fragments that are still in the cache."""
        try:
            stored = json.loads(path.read_bytes())
            found = {key: float(seconds) for key, seconds in dict(stored).items()}
            grants = {key: int(key.partition(_AT)[2] or -1) for key in found}
        except (OSError, ValueError, TypeError):
            return
        for key, seconds in found.items():
            digest, granted = key.partition(_AT)[0], grants[key]
            if digest in cached and seconds > 0:
                its = self._of(digest)
                (its.task if granted < 0 else its.at(granted)).seconds = seconds
        self._stored = self._flat()

    def store(self, path: Path) -> None:
        """Unless nothing has changed. Raises `OSError`."""
        if (known := self._flat()) != self._stored:
            replace_file(path, json.dumps(known).encode())
            self._stored = known

    def _flat(self) -> dict[str, float]:
        """As it is stored."""
        tasks = {digest: its.task.seconds for digest, its in self._known.items()}
        within = {
            f"{digest}{_AT}{each.granted_bytes}": each.seconds
            for digest in self._known
            for each in self.within(digest)
        }
        return {key: seconds for key, seconds in (tasks | within).items() if seconds}
