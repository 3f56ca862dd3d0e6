"""What `test_trials` and `test_one_region` measure in a process of their own."""

import asyncio
from pathlib import Path

import numpy as np

from agent.in_process import Thread, make_fragments
from shoal_agent.runtime.failures import Stopper
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.prepared import NOTHING_PREPARED
from shoal_agent.runtime.process_memory import LIBRARY_RESERVE_BYTES, MemoryMeter

MIB = 1 << 20


def takes_in_a_trial_and_in_a_run(folder: Path, *, chooses: bool) -> tuple[int | None, int]:
    """Bytes in a trial, and for an item of 8 MiB that takes one branch or the other."""
    meter = MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=64 * MIB)
    meter.settle()
    _, tried = runtime.open_and_try("f", folder, 60 * MIB, NOTHING_PREPARED, 64 * MIB)
    item = {"x": np.ones((2048, 1024), np.float32), "long": np.array(chooses)}
    return tried.taken_bytes, runtime.run("f", item, Stopper()).peak_bytes


def runs_within_what_is_planned(folder: Path) -> tuple[bool, bool]:
    """Whether a trial does and an item, where it leaves an eighth of a MiB."""
    meter = MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=64 * MIB)
    meter.settle(LIBRARY_RESERVE_BYTES)
    given = folder, 64 * MIB, NOTHING_PREPARED
    _, tried = runtime.open_and_try("f", *given, 64 * MIB)
    assert tried.taken_bytes is not None
    runtime.close("f")
    planned = tried.taken_bytes + MIB // 2
    limit = meter.used_bytes() + planned + MIB // 8
    _, again = runtime.open_and_try("f", folder, planned, NOTHING_PREPARED, limit)
    item = {"x": np.ones((1024, 1024), np.float32)}
    planned = runtime.run("f", item, Stopper(), 64 * MIB).peak_bytes + MIB // 2
    result = runtime.run("f", item, Stopper(), planned + MIB // 8, planned_bytes=planned)
    return not again.stopped, bool(result.outputs)


def peaks_of_items(folder: Path, digest: str, budget: int) -> tuple[list[int], int]:
    """Of some items after a trial, and of a run that nothing bounds."""

    async def measure() -> tuple[list[int], int]:
        item = {"x": np.ones((1, 262144), np.float32)}
        with Thread(1) as thread:
            fragments = make_fragments(folder, thread, budget)
            await fragments.load(digest, budget - 4 * MIB, [])
            peaks = [(await fragments.run(digest, item)).peak_bytes for _ in range(4)]
            free = thread.submit(fragments._runtime.run, digest, item, Stopper()).result()
            await fragments.close()
        return peaks, free.peak_bytes

    return asyncio.run(measure())


def peak_of_a_trial(folder: Path, granted: int, limit: int) -> tuple[bool, int]:
    """Whether it was stopped, and the most that the process has taken."""
    meter = MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=limit)
    runtime.rehearse()
    meter.settle(LIBRARY_RESERVE_BYTES)
    _, tried = runtime.open_and_try("f", folder, granted, NOTHING_PREPARED, limit)
    return tried.stopped, meter.peak_bytes()
