"""What a task of each fragment takes on this device: plans are corrected by it.

It is the median of the last runs of one item while nothing waited for the processor, such as a
load. A device under a quota of processor time computes for a while and is held for a while, and a
short run shows one of the two. So there a run counts by the processor time that it took, at the
rate at which the device gets that. A run in blocks waits for the disk besides, and maps weights
again. It counts in the same way, less what the calibration says of mapping: what is left is what it
would take with all of its weights in memory.

What is known is stored in the cache, and changes only when it has changed much: plans are made anew
for it.
"""

import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shoal_protocol.durable_files import replace_file
from shoal_protocol.speeds import UNKNOWN_SPEED, Speed

_RUNS: Final = 15
_LEAST_RUNS: Final = 5
_CHANGE: Final = 1.1
_MOST: Final = 256
_HELD_BELOW: Final = 0.9
"""Of its threads: a device that has fewer processors is under a quota, or shares them."""


class TaskTimes:
    """By fragment."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._speed = UNKNOWN_SPEED
        self._runs: dict[str, deque[float]] = {}
        self._known: dict[str, float] = {}
        self._stored: dict[str, float] = {}

    def measured(self, speed: Speed) -> None:
        """The calibration has found this."""
        self._speed = speed

    def note(
        self, digest: str, seconds: float, processor_seconds: float, streamed_bytes: int = 0
    ) -> None:
        """An undisturbed run of a fragment, that has mapped so many bytes of weights again."""
        processors, page_rate = self._speed.processors, self._speed.page_bytes_per_second
        processors = processors or float(self._threads)
        took = seconds
        if streamed_bytes:
            if page_rate is None:
                return
            took = (processor_seconds - streamed_bytes / page_rate) / processors
        elif processors < _HELD_BELOW * self._threads:
            took = processor_seconds / processors
        runs = self._runs.setdefault(digest, deque(maxlen=_RUNS))
        runs.append(took)
        while len(self._runs) > _MOST:
            del self._runs[next(iter(self._runs))]
        if len(runs) >= _LEAST_RUNS and took > 0:
            now, known = sorted(runs)[len(runs) // 2], self._known.get(digest, 0.0)
            if now and not known / _CHANGE < now < known * _CHANGE:
                self._known[digest] = now

    def read(self, digest: str) -> float | None:
        """Seconds; None: there were too few runs."""
        return self._known.get(digest)

    def restore(self, path: Path, cached: Mapping[str, int]) -> None:
        """What an earlier start knew of fragments that are still in the cache."""
        try:
            stored = json.loads(path.read_bytes())
            found = {digest: float(stored[digest]) for digest in cached if digest in stored}
        except (OSError, ValueError, TypeError):
            return
        self._known = {digest: seconds for digest, seconds in found.items() if seconds > 0}
        self._stored = dict(self._known)

    def store(self, path: Path) -> None:
        """Unless nothing has changed. Raises `OSError`."""
        if self._known != self._stored:
            replace_file(path, json.dumps(self._known).encode())
            self._stored = dict(self._known)
