"""Large outputs of a fragment that runs as a whole, and of one whose blocks give parts of them;
`test_blocks` has others of blocks."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from agent.fragment_making import dense_model, write_fragment
from agent.own_process import in_own_process
from agent.test_larger_items import tried
from made_models import Made, vocabulary, weight
from shoal_agent.runtime.failures import Exceeded, Stopper
from shoal_agent.runtime.onnx_runtime import Runtime
from shoal_agent.runtime.process_memory import LIBRARY_RESERVE_BYTES, MemoryMeter
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model

MIB = 1 << 20


def peaks_of(folder: Path, x: np.ndarray) -> list[int]:
    """Peak bytes of three items, one after the other."""
    meter = MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=256 * MIB)
    meter.settle(LIBRARY_RESERVE_BYTES)
    runtime.open("f", folder)
    return [runtime.run("f", {"x": x}, Stopper()).peak_bytes for _ in range(3)]


def test_large_outputs_are_in_memory_once(tmp_path: Path) -> None:
    """They are written where they are to be, and not copied: 16 MiB, made of as many."""
    made = write_fragment(tmp_path, dense_model([64, 4096]), 256 * MIB)
    peaks = in_own_process(peaks_of, made.folder, np.zeros((1024, 64), np.float32))
    assert max(peaks) < 40 * MIB


TWO = Made(
    text="""g (float[1024,64] x) => (float[1024,1024] y, float[1,8192] most) {
        y = MatMul(x, a) wide = Concat<axis = 1>(y, y, y, y, y, y, y, y)
        most = ReduceMax<axes = [0]>(wide) }""",
    weights={"a": weight(64, 1024)},
    shapes={"x": (1024, 64)},
)
"""A large output, and then more than the arena's first region has beside it."""


def test_an_item_works_where_the_one_before_has_worked(tmp_path: Path) -> None:
    made = write_fragment(tmp_path, onnx.load(TWO.save(tmp_path)), 256 * MIB)
    first, *others = in_own_process(peaks_of, made.folder, np.ones((1024, 64), np.float32))
    assert max(others) < first + MIB


TURNED = Made(
    text="""g (float[1,64,128,256] x) => (float[1,64,128,256] y) { y = Softmax<axis = 1>(x) }""",
    weights={},
    shapes={"x": (1, 64, 128, 256)},
)
"""8 MiB that come in and go out, and twice as much that the node works in."""


def test_a_trial_takes_what_it_writes_outside_of_the_arena_for_taken(tmp_path: Path) -> None:
    """Beside 8 MiB of something else."""
    model, limit = onnx.load(TURNED.save(tmp_path)), 36 * MIB
    made = write_fragment(tmp_path, model, 30 * MIB, largest=TURNED.shapes)
    found = tried(made, limit, limit)
    assert found["stopped"]
    assert found["peak"] <= limit


def test_an_output_that_leaves_nothing_is_refused_before_its_parts_are_made(tmp_path: Path) -> None:
    """16 MiB of 18: what else a run takes has no room."""
    onnx.save(vocabulary(), tmp_path / "model.onnx")
    profile = profile_model(tmp_path / "model.onnx", {"x": (1, 64, 256)})
    (fragment,) = cut_model(tmp_path / "model.onnx", profile, (), tmp_path).fragments
    meter = MemoryMeter()
    runtime = Runtime(meter, threads=1, limit_bytes=64 * MIB)
    folder = tmp_path / "fragments" / fragment.digest.removeprefix("sha256:")
    runtime.open("f", folder, fragment.least_bytes)
    meter.settle(LIBRARY_RESERVE_BYTES)
    x = {"x": np.ones((1, 64, 256), np.float32)}
    with pytest.raises(Exceeded):
        runtime.run("f", x, Stopper(), 18 * MIB, is_tried=False)
    assert meter.peak_bytes() < 4 * MIB
    result = runtime.run("f", x, Stopper(), 64 * MIB, is_tried=False)
    assert result.outputs["y"].nbytes == 16 * MIB
