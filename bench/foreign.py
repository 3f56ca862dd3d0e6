"""What other processes take of the machine while something is measured.

Shares of processors are held by the kernel only while the machine has them to give. So a run during
which others had more than `MOST_SHARE` of it says little, and is refused.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import Final

MOST_SHARE: Final = 0.05
"""Of all processors; an idle machine's own services take a hundredth."""
_TICK: Final = os.sysconf("SC_CLK_TCK")
_IDLE_FIELDS: Final = (3, 4)
"""Of the kernel's counts for all processors: idle, and waiting for a disk."""
_COUNTED_FIELDS: Final = 8
"""Those after are part of the others."""
_PROCESS_FIELDS: Final = slice(11, 15)
"""Of a process, after its name: in programs and in the kernel, its own and its ended children's."""


class ForeignLoad(SystemExit):
    """Others used the machine while something was measured."""

    def __init__(self, share: float) -> None:
        super().__init__(
            f"other processes took {share:.0%} of the processors during a run (at most "
            f"{MOST_SHARE:.0%}): stop them, or measure all the same with --loaded"
        )


@contextlib.contextmanager
def refused(processes: Callable[[], Iterable[int]]) -> Iterator[None]:
    """Raise `ForeignLoad` where others have used the machine while the body ran. `processes` are
    those that the run starts or talks to, at its begin and its end; this one is one of them."""
    ours, began = _seconds_of({os.getpid(), *processes()}), monotonic()
    busy = busy_seconds()
    yield
    elapsed, busy = monotonic() - began, busy_seconds() - busy
    own = _seconds_of({os.getpid(), *processes()}) - ours
    share = foreign_share(busy, own, elapsed, os.cpu_count() or 1)
    if share > MOST_SHARE:
        raise ForeignLoad(share)


def foreign_share(busy: float, own: float, elapsed: float, processors: int) -> float:
    """The share of the machine that others had: of `busy` seconds of processors `own` were ours."""
    return max(0.0, busy - own) / (elapsed * processors)


def busy_seconds(stat: str | None = None) -> float:
    """Seconds that the processors have worked since the machine started, all together."""
    line = (stat or Path("/proc/stat").read_text()).splitlines()[0]
    counts = [int(field) for field in line.split()[1:][:_COUNTED_FIELDS]]
    return (sum(counts) - sum(counts[index] for index in _IDLE_FIELDS)) / _TICK


def _seconds_of(processes: Iterable[int]) -> float:
    """What processes have used, with their children that have ended."""
    return sum(map(_seconds, processes))


def _seconds(process: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[_PROCESS_FIELDS])) / _TICK
    return 0.0
