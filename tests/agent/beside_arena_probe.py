"""A process of a test: `python beside_arena_probe.py FOLDER LIMIT ROWS [disk]` runs a fragment of
which nothing is known on an item of few rows, then on one of so many, which lies on the disk, or in
memory, and prints what the second one took, and whether it was stopped."""

import json
import mmap
import sys
import tempfile
from pathlib import Path

import numpy as np

from shoal_agent.runtime.failures import Exceeded, Stopper
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.process_memory import MemoryMeter, tune_allocator
from shoal_protocol.tensors import Array

WIDTH = 1024
FEW = 512
"""Rows whose outputs are large enough for a place of their own."""


def main(folder: Path, limit_bytes: int, rows: int, *, on_disk: bool) -> None:
    tune_allocator()
    meter = MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=limit_bytes)
    runtime.rehearse()
    meter.settle()
    runtime.open("f", folder)

    def run(x: Array) -> int:
        told = runtime.run("f", {"x": x}, Stopper(), limit_bytes, is_known=False, is_tried=False)
        return told.peak_bytes

    run(np.ones((FEW, WIDTH), np.float32))
    x = mapped(rows) if on_disk else np.ones((rows, WIDTH), np.float32)
    try:
        found = {"stopped": "", "peak": run(x)}
    except Exceeded as error:
        found = {"stopped": str(error), "peak": meter.peak_bytes()}
    print(json.dumps(found))


def mapped(rows: int) -> Array:
    """As the agent keeps what memory has no room for."""
    size = rows * WIDTH * 4
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    return np.frombuffer(mapping, np.uint8).view(np.float32).reshape(rows, WIDTH)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), on_disk="disk" in sys.argv[4:])
