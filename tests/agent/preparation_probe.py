"""A process of a test: `python preparation_probe.py measure|prepare STORE DIGEST`.

`measure` opens and runs what was prepared, and prints how much anonymous and mapped memory that
took. `prepare` prints the process id of the child, and waits.
"""

import asyncio
import json
import re
import sys
from pathlib import Path

import numpy as np

from shoal_agent.cache.disk import FragmentCache
from shoal_agent.runtime.failures import Stopper
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.preparation import Preparation
from shoal_agent.runtime.process_memory import MemoryMeter, trim, tune_allocator

GRANTED = 256 << 20


def preparation(store: Path) -> Preparation:
    return Preparation(FragmentCache(store, 1 << 30), lambda _: True, lambda _: None, worth_bytes=0)


def memory() -> tuple[int, int]:
    trim()
    status = Path("/proc/self/status").read_text()
    return tuple(int(found) << 10 for found in re.findall(r"Rss(?:Anon|File):\s+(\d+)", status))  # type: ignore[return-value] # two fields


def measure(store: Path, digest: str) -> None:
    tune_allocator()
    folder = FragmentCache(store, 1 << 30).path(digest)
    prepared = asyncio.run(preparation(store).prepare(digest, folder, GRANTED))
    assert prepared.whole is not None
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=GRANTED)
    runtime.rehearse()
    before = memory()
    runtime.open(digest, folder, GRANTED, prepared)
    runtime.run(digest, {"x": np.ones((1, 1024), np.float32)}, Stopper())
    after = memory()
    grown = {"anonymous": after[0] - before[0], "mapped": after[1] - before[1]}
    print(json.dumps(grown))


async def prepare(store: Path, digest: str) -> None:
    folder = FragmentCache(store, 1 << 30).path(digest)
    preparing = asyncio.create_task(preparation(store).prepare(digest, folder, GRANTED))
    own = Path("/proc/self/task")
    while not (pids := "".join(path.read_text() for path in own.glob("*/children")).split()):
        await asyncio.sleep(0.002)
    print(pids[0], flush=True)
    await preparing
    await asyncio.sleep(60)


if __name__ == "__main__":
    command, store, digest = sys.argv[1:]
    if command == "measure":
        measure(Path(store), digest)
    else:
        asyncio.run(prepare(Path(store), digest))
