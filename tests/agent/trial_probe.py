"""A process of a test: `python trial_probe.py FOLDER LIMIT [BEGAN]` opens a fragment and tries it
beside 8 MiB of something else, and prints how much memory the fragment and all took, and whether
the trial was stopped. `BEGAN` is the budget that the process began with."""

import json
import sys
from pathlib import Path

from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.prepared import NOTHING_PREPARED
from shoal_agent.runtime.process_memory import (
    LIBRARY_RESERVE_BYTES,
    MemoryMeter,
    tune_allocator,
)

BESIDE_BYTES = 8 << 20


def main(folder: Path, limit_bytes: int, began_bytes: int) -> None:
    tune_allocator()
    meter = MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=began_bytes)
    runtime.rehearse()
    meter.settle(LIBRARY_RESERVE_BYTES)
    beside = bytearray(b"x" * BESIDE_BYTES)
    _, tried = runtime.open_and_try("f", folder, limit_bytes, NOTHING_PREPARED, limit_bytes)
    del beside
    found = {"stopped": tried.stopped, "taken": tried.taken_bytes, "peak": meter.peak_bytes()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[-1]))
