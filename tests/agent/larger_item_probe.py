"""A process of a test: `python larger_item_probe.py FOLDER LIMIT COUNT [untried]` runs a fragment
on an item that is larger than planned, or on the first when nothing is known of the fragment, then
on a small one, and prints how much memory that took, and whether the first one was stopped."""

import json
import sys
from pathlib import Path

import numpy as np

from shoal_agent.runtime.failures import Exceeded, Stopper
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.process_memory import MemoryMeter, tune_allocator

ARENA_BYTES = 64 << 20


def main(folder: Path, limit_bytes: int, count: int, *, untried: bool) -> None:
    tune_allocator()
    meter = MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=ARENA_BYTES)
    runtime.rehearse()
    meter.settle()
    runtime.open("f", folder)
    item = {"count": np.array([count, 1024])}
    try:
        result = runtime.run(
            "f",
            item,
            Stopper(),
            limit_bytes,
            is_known=not untried,
            is_tried=not untried,
            is_larger=not untried,
        )
        found = {"stopped": "", "peak": result.peak_bytes}
        del result
    except Exceeded as error:
        found = {"stopped": str(error), "peak": meter.peak_bytes()}
    small = runtime.run("f", {"count": np.array([1, 1024])}, Stopper())
    print(json.dumps(found | {"next_peak": small.peak_bytes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), untried="untried" in sys.argv[4:])
