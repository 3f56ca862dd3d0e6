"""What the tests of the Python interface share: inputs, and the processes of a pool."""

import os
from pathlib import Path

import numpy as np
import onnxruntime

from cli.local.workbench import WIDTH

SHAPES = {"x": (4, WIDTH)}
"""The largest that is planned for: the model leaves the batch open."""


def batch(seed: int, rows: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float32)


def check(whole: onnxruntime.InferenceSession, x: np.ndarray, result: object) -> None:
    """A result is what the whole model gives."""
    assert isinstance(result, dict), result
    (expected,) = whole.run(None, {"x": x})
    np.testing.assert_allclose(result["y"], expected, atol=1e-4)


def processes(program: str = "shoal_", parent: int | None = None) -> list[int]:
    """The processes of pools that `parent` has started, by default this process."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            started_by = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            command = (path / "cmdline").read_text()
        except (OSError, IndexError):
            continue  # it has ended just now
        if started_by == (parent or os.getpid()) and f"\0{program}" in command:
            found.append(int(path.name))
    return found
