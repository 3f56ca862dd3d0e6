"""A run is stopped before the kernel would kill its process."""

import json
import subprocess
import sys
from typing import Final

import pytest

from agent.conftest import MARK_ERROR_BYTES
from shoal_agent.runtime.guard import OTHERS_BYTES, stop_bytes

MIB = 1 << 20
ROOM_BYTES = 32 * MIB
LEFT_BYTES = OTHERS_BYTES // 2
RUN: Final = """
import ctypes, json, mmap, sys, time
from shoal_agent.runtime.failures import Stopper
from shoal_agent.runtime.guard import Guard
from shoal_agent.runtime.process_memory import MemoryMeter

def is_stopped(room, size, within_seconds, planned):
    meter, stopper = MemoryMeter(), Stopper()
    meter.settle()
    with Guard(meter, room, stopper, planned_bytes=planned) as guard:
        taken = mmap.mmap(-1, size)
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(taken)), 1, len(taken))
        deadline = time.monotonic() + within_seconds
        while not guard.tripped and time.monotonic() < deadline:
            time.sleep(0.001)
    return guard.tripped and stopper.stopped

room, size, seconds, planned = json.loads(sys.argv[1])
is_stopped(room, room, 20.0, 0)  # what the guard takes for itself is there from now on
print(json.dumps(is_stopped(room, size, seconds, planned)))
"""


def is_stopped(left_bytes: int, within_seconds: float, planned_bytes: int = 0) -> bool:
    """Whether a run is that takes all of its room but so much, and then waits: in a process of its
    own, where nothing but the guard comes and goes."""
    arguments = json.dumps((ROOM_BYTES, ROOM_BYTES - left_bytes, within_seconds, planned_bytes))
    command = [sys.executable, "-c", RUN, arguments]
    return bool(json.loads(subprocess.check_output(command, text=True)))


@pytest.mark.parametrize(("left_bytes", "stopped"), [(LEFT_BYTES, True), (4 * MIB, False)])
def test_a_run_is_stopped_where_no_more_is_left_than_the_rest_of_the_process_takes(
    left_bytes: int, *, stopped: bool
) -> None:
    """The kernel never lets a process have more than the limit: there is nothing to be seen of
    that."""
    assert is_stopped(left_bytes, 20.0 if stopped else 0.2) is stopped


@pytest.mark.parametrize(
    ("planned_bytes", "stopped"),
    [(ROOM_BYTES, False), (ROOM_BYTES - OTHERS_BYTES - MARK_ERROR_BYTES, True)],
)
def test_a_run_is_not_stopped_at_what_is_planned_for_it(
    planned_bytes: int, *, stopped: bool
) -> None:
    """Work takes as much, and nobody stops that."""
    seconds = 20.0 if stopped else 0.2
    assert is_stopped(LEFT_BYTES, seconds, planned_bytes) is stopped


@pytest.mark.parametrize("left_bytes", [0, MIB // 8, MIB // 4, MIB // 2, OTHERS_BYTES, 8 * MIB])
def test_a_run_is_not_stopped_for_what_the_kernel_miscounts_if_that_is_within_the_limit(
    left_bytes: int,
) -> None:
    planned = ROOM_BYTES - left_bytes
    assert stop_bytes(ROOM_BYTES, planned) >= planned + min(left_bytes, MARK_ERROR_BYTES)
    stop = max(ROOM_BYTES - OTHERS_BYTES, min(planned + MARK_ERROR_BYTES, ROOM_BYTES))
    assert stop_bytes(ROOM_BYTES, planned) == stop
