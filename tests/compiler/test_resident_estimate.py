"""What a fragment is reckoned with, against what a process like an agent's takes to run it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.transformers.float16 import convert_float_to_float16

from chaining import Tensors, run_chained
from made_models import Made
from real_models import MODELS, find, image
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_planner.cuts import CutRequest, Refusal, choose_cuts

MIB = 1 << 20
RUN = """
import json, sys
from pathlib import Path
from typing import Any
import numpy as np
from shoal_agent.runtime.process_memory import MemoryMeter, tune_allocator
from shoal_agent.runtime.failures import Stopper
from shoal_agent.runtime.onnx_runtime import Runtime
tune_allocator()
meter = MemoryMeter()
runtime = Runtime(meter, threads=1, limit_bytes=int(sys.argv[3]))
with np.load(sys.argv[2]) as file:
    dict(file)  # what reading takes is no part of what running takes
meter.settle()
runtime.open("it", Path(sys.argv[1]))
for _ in range(3):
    with np.load(sys.argv[2]) as file:
        runtime.run("it", dict(file), Stopper())
print(json.dumps(meter.peak_bytes()))
"""


def measured(folder: Path, tensors: Tensors, scratch: Path, *, limit_bytes: int = 256 * MIB) -> int:
    """Peak bytes above the floor, over three items, where the arena has so many at most."""
    np.savez(scratch / "tensors.npz", **tensors)  # type: ignore[arg-type]
    made = subprocess.run(
        [sys.executable, "-c", RUN, folder, scratch / "tensors.npz", str(limit_bytes)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return int(json.loads(made.stdout))


def as_it_is(path: Path, _folder: Path) -> Path:
    return path


def in_half_precision(path: Path, folder: Path) -> Path:
    """The same model with weights and activations of 16 bits; its inputs and outputs stay."""
    half = folder / "half.onnx"
    onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), half)
    return half


CASES: tuple[tuple[str, tuple[int, ...] | None], ...] = (
    ("ppocr_rec", (1, 3, 48, 320)),
    ("ppocr_rec", (6, 3, 48, 320)),
    ("ppocr_det", (1, 3, 640, 640)),
    ("minilm_l6", None),
    ("resnet18", None),
    ("mobilenet_v2", None),
)
OFTEN = (("minilm_l6", None),)
HALVED = (("ppocr_rec", (1, 3, 48, 320)),)
"""In every check one as it is, the other in half precision; the rest when there are minutes."""


def cases() -> list[object]:
    """Each model as it is, and in half precision."""
    made: list[object] = []
    for change, often in ((as_it_is, OFTEN), (in_half_precision, HALVED)):
        for case in CASES:
            marks = () if case in often else (pytest.mark.minutes,)
            made.append(pytest.param(*case, change, marks=marks))
    return made


@pytest.mark.parametrize(("name", "shape", "change"), cases())
def test_the_estimate_is_near_what_is_measured(
    name: str, shape: tuple[int, ...] | None, change: Callable[[Path, Path], Path], tmp_path: Path
) -> None:
    path = change(find(name), tmp_path)
    item = MODELS[name].inputs(0) if shape is None else image("x", *shape)(0)
    profile = profile_model(path, {key: value.shape for key, value in item.items()})
    cuts = choose_cuts(profile, CutRequest(fragments=3))
    assert not isinstance(cuts, Refusal)
    document = cut_model(path, profile, cuts, tmp_path)
    kept: dict[int, Tensors] = {}
    run_chained(tmp_path, document, item, kept)
    for fragment in document.fragments:
        tensors = {
            tensor: kept[edge.producer][tensor]
            for edge in document.into(fragment.index)
            for tensor in edge.tensors
        }
        folder = tmp_path / "fragments" / fragment.digest.removeprefix("sha256:")
        # The table of the arena is as large as the budget asks for.
        limit = fragment.resident_bytes + fragment.resident_bytes // 5
        peak = measured(folder, tensors, tmp_path, limit_bytes=limit)
        print(
            f"{name} {fragment.index}: {fragment.resident_bytes / MIB:.1f} MiB reckoned, "
            f"{peak / MIB:.1f} MiB measured"
        )
        assert peak * 0.85 < fragment.resident_bytes < peak * 1.4 + 2 * MIB


WIDE = Made(
    text="""g (float[1,512,7,7] x) => (float[1,512,7,7] y) {
        b = DequantizeLinear(B, scale, none) w = DequantizeLinear(W, scale, zero)
        y = Conv<pads = [1, 1, 1, 1]>(x, w, b) }""",
    weights={
        "W": np.ones((512, 512, 3, 3), np.int8),
        "B": np.ones(512, np.int32),
        "scale": np.array(0.01, np.float32),
        "zero": np.array(0, np.int8),
        "none": np.array(0, np.int32),
    },
    shapes={"x": (1, 512, 7, 7)},
)
"""A weight that is 9 MiB in single precision, and a little more besides."""


def test_an_arena_with_just_enough_takes_no_more_than_one_with_plenty(tmp_path: Path) -> None:
    path, item = WIDE.save(tmp_path), WIDE.inputs()
    (fragment,) = cut_model(path, profile_model(path), (), tmp_path).fragments
    folder = tmp_path / "fragments" / fragment.digest.removeprefix("sha256:")
    limit = fragment.resident_bytes
    assert measured(folder, item, tmp_path, limit_bytes=limit) <= fragment.resident_bytes


def test_without_shapes_the_estimate_has_a_floor(tmp_path: Path) -> None:
    path = find("resnet18")
    profile = profile_model(path)
    (fragment,) = cut_model(path, profile, (), tmp_path).fragments
    assert fragment.activation_bytes is None
    assert fragment.resident_bytes >= fragment.weight_bytes + 3 * MIB
