"""What processes have used of the processors, as the kernel counts it."""

import os
from pathlib import Path
from typing import Final

TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


def used_seconds(process: int) -> float:
    """Of a process, with its threads that have ended; not its children."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def loop_seconds(process: int) -> float:
    """Of its main thread, which has the event loop."""
    return int(Path(f"/proc/{process}/task/{process}/schedstat").read_text().split()[0]) / 1e9
