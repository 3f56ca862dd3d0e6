"""An agent's memory over time, seen from outside: the agent itself does nothing for it.

The kernel's counters of a process are read every few milliseconds in a thread: anonymous pages, and
pages of mapped files, which beyond the floor are the weights. A child is what prepares fragments;
of its memory only what is its own counts, since its libraries are the agent's too. What happens
between two samples is missed, so a peak is taken from the kernel's mark, not from these.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Final

SECONDS_BETWEEN_SAMPLES: Final = 0.002
_FIELDS: Final = re.compile(r"^Rss(Anon|File|Shmem):\s+(\d+) kB", re.MULTILINE)
_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Resident bytes at one moment, by `time.monotonic`."""

    seconds: float
    anonymous_bytes: int
    file_bytes: int
    child_bytes: int = 0

    @property
    def agent_bytes(self) -> int:
        return self.anonymous_bytes + self.file_bytes


@dataclass(slots=True)
class ResidencySampler:
    """Samples a process for as long as it is used as a context; `process_id` says which one, anew
    each time: an agent that died is started again. A moment without a process has no sample."""

    process_id: Callable[[], int | None]
    samples: list[Sample] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def sample(self) -> Sample | None:
        """What is resident now."""
        process = self.process_id()
        found = None if process is None else _read(process)
        if found is not None:
            self.samples.append(found)
        return found

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample while the body runs."""
        self._ended.clear()
        thread = threading.Thread(target=self._sample_until_ended, name="residency", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _sample_until_ended(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_SAMPLES):
            self.sample()


def mapped_bytes(process: int, folder: Path) -> int:
    """What a process has in memory of the files in a folder, which it has mapped."""
    resident, inside = 0, False
    with contextlib.suppress(OSError):
        for line in (_PROC / str(process) / "smaps").read_text(errors="replace").splitlines():
            key, _, rest = line.partition(" ")
            if not key.endswith(":"):
                inside = rest.split(None, 4)[-1].startswith(f"{folder}/")
            elif inside and key == "Rss:":
                resident += int(rest.split()[0]) << 10
    return resident


def _read(process: int) -> Sample | None:
    try:
        sizes = _sizes(process)
        children = (_PROC / str(process) / "task" / str(process) / "children").read_text().split()
    except OSError:
        return None
    child_bytes = 0
    for child in children:
        with contextlib.suppress(OSError):
            child_bytes += _sizes(int(child))["Anon"]
    return Sample(
        seconds=monotonic(),
        anonymous_bytes=sizes["Anon"],
        file_bytes=sizes["File"] + sizes["Shmem"],
        child_bytes=child_bytes,
    )


def _sizes(process: int) -> dict[str, int]:
    text = (_PROC / str(process) / "status").read_text()
    sizes = dict.fromkeys(("Anon", "File", "Shmem"), 0)  # one that has just ended has none
    return sizes | {name: int(size) << 10 for name, size in _FIELDS.findall(text)}
