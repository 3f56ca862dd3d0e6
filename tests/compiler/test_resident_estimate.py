"""What a fragment is reckoned with, against what a process like an agent's takes to run it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from chaining import Tensors, run_chained
from real_models import MODELS, find
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_planner.cuts import CutRequest, Refusal, choose_cuts

MIB = 1 << 20
RUN = """
import json, sys
from pathlib import Path
import numpy as np
from shoal_agent.runtime.process_memory import MemoryMeter, tune_allocator
from shoal_agent.runtime.failures import Stopper
from shoal_agent.runtime.onnx_runtime import Runtime
tune_allocator()
meter = MemoryMeter()
runtime = Runtime(meter, threads=1, limit_bytes=256 << 20)
with np.load(sys.argv[2]) as file:
    dict(file)  # what reading takes is no part of what running takes
meter.settle()
runtime.open("it", Path(sys.argv[1]))
for _ in range(3):
    with np.load(sys.argv[2]) as file:
        runtime.run("it", dict(file), Stopper())
print(json.dumps(meter.peak_bytes()))
"""


def measured(folder: Path, tensors: Tensors, scratch: Path) -> int:
    """Peak bytes above the floor, over three items."""
    np.savez(scratch / "tensors.npz", **tensors)  # type: ignore[arg-type]
    made = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), str(scratch / "tensors.npz")],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return int(json.loads(made.stdout))


@pytest.mark.parametrize(
    "name",
    [
        "ppocr_rec",
        pytest.param("minilm_l6", marks=pytest.mark.slow),
        pytest.param("resnet18", marks=pytest.mark.slow),
        pytest.param("mobilenet_v2", marks=pytest.mark.slow),
    ],
)
def test_the_estimate_is_near_what_is_measured(name: str, tmp_path: Path) -> None:
    model, path = MODELS[name], find(name)
    item = model.inputs(0)
    profile = profile_model(path, model.shapes())
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
        peak = measured(folder, tensors, tmp_path)
        print(
            f"{name} {fragment.index}: {fragment.resident_bytes / MIB:.1f} MiB reckoned, "
            f"{peak / MIB:.1f} MiB measured"
        )
        assert peak * 0.75 < fragment.resident_bytes < peak * 1.4 + 2 * MIB


def test_without_shapes_the_estimate_has_a_floor(tmp_path: Path) -> None:
    path = find("resnet18")
    profile = profile_model(path)
    (fragment,) = cut_model(path, profile, (), tmp_path).fragments
    assert fragment.activation_bytes is None
    assert fragment.resident_bytes >= fragment.weight_bytes + 3 * MIB
