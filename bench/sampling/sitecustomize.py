"""Samples of what the main thread of each process of a pool does, for `item_rows`.

Python imports this when a process starts whose PYTHONPATH has the folder. A timer counts the main
thread's own processor time; each time that it ends is a sample of the file that ran. SIGUSR1 has a
process write what it has since the last time: its samples, and the processor time of its threads.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Final

FOLDER: Final = Path(__file__).parent
_THREAD_CLOCK: Final = 3
_PERIOD_NANOSECONDS: Final = 1_000_000
"""As often as the kernel looks, where that is less often."""
_PARTS: Final = ("shoal_", "/asyncio/", "/selectors.py", "/grpc/", "/onnxruntime/", "/protobuf/")
"""Of the paths of files that samples count for. What others do, they do for who called them."""
_samples: Counter[str] = Counter()
_used: dict[int, int] = {}


def _sample(_: int, frame: FrameType | None) -> None:
    while frame is not None:
        path = frame.f_code.co_filename
        if any(each in path for each in _PARTS):
            _samples[path] += 1
            return
        frame = frame.f_back


def _write(*_: object) -> None:
    python = {each.native_id for each in threading.enumerate()}
    used = {"main": 0, "native": 0}
    for task in Path("/proc/self/task").iterdir():
        thread, nanoseconds = int(task.name), int((task / "schedstat").read_text().split()[0])
        kind = "main" if thread == os.getpid() else "native"
        if kind == "main" or thread not in python:
            used[kind] += nanoseconds - _used.get(thread, 0)
        _used[thread] = nanoseconds
    # Also of threads that have ended since.
    everything, _used[0] = time.process_time_ns() - _used.get(0, 0), time.process_time_ns()
    used["python"] = max(0, everything - sum(used.values()))
    part = FOLDER / f"{os.getpid()}.part"
    part.write_text(json.dumps({"samples": _samples, "used": used}))
    part.rename(part.with_suffix(".json"))
    _samples.clear()


def _start() -> None:
    """Have the timer send SIGALRM."""
    library, timer = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
    period = (ctypes.c_long * 4)(0, _PERIOD_NANOSECONDS, 0, _PERIOD_NANOSECONDS)
    failed = library.timer_create(_THREAD_CLOCK, None, ctypes.byref(timer))
    if failed or library.timer_settime(timer, 0, period, None):
        raise OSError(ctypes.get_errno(), "there is no timer of a thread's processor time")


if any(each in sys.orig_argv for each in ("shoal_agent", "shoal_coordinator")):
    signal.signal(signal.SIGALRM, _sample)
    signal.signal(signal.SIGUSR1, _write)
    _start()
