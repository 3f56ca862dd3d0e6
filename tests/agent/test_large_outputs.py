"""Large outputs of a fragment that runs as a whole; `test_blocks` has those of blocks."""

from pathlib import Path

import numpy as np

from agent.fragment_making import dense_model, write_fragment
from shoal_agent.runtime.failures import Stopper
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.process_memory import MemoryMeter

MIB = 1 << 20


def test_once_it_is_known_that_outputs_are_large_they_are_in_memory_once(tmp_path: Path) -> None:
    """They are written where they are to be, and not copied."""
    runtime = Runtime(MemoryMeter(), threads=1, limit_bytes=64 * MIB)
    made = write_fragment(tmp_path, dense_model([64, 4096]), 64 * MIB)
    runtime.open("f", made.folder)
    x = {"x": np.zeros((1024, 64), np.float32)}
    peaks = []
    for _ in range(3):
        peaks.append(runtime.run("f", x, Stopper()).peak_bytes)
        runtime.shrink()
    first, *others = peaks
    assert max(others) < first - 12 * MIB
    runtime.close("f")
