"""Models above protobuf's 2 GiB, and how little memory they are profiled and cut in."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from shoal_compiler.layers import CHANNELS

LAYERS, SIDE = 9, 8192
LAYER_BYTES = SIDE * SIDE * 4
LIMIT_BYTES = 32 << 20
SMALL = 3072

CUT = """
import json, resource, sys
from pathlib import Path
from shoal_compiler.profile import profile_model
from shoal_compiler.cutting import cut_model
from shoal_planner.cuts import CutRequest, choose_cuts
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
path, store = Path(sys.argv[1]), Path(sys.argv[2])
profile = profile_model(path, {"x": (1, %d)})
cuts = choose_cuts(profile, CutRequest(fragments=3))
document = cut_model(path, profile, cuts, store)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({
    "kib": peak - before, "weights": profile.weight_bytes,
    "fragments": [each.digest for each in document.fragments],
}))
"""


def large_model(folder: Path) -> Path:
    """2.25 GiB of external data, nearly all of it a hole in the file."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", SIDE])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", SIDE])
    nodes, tensors = [], []
    for layer in range(LAYERS):
        name = "y" if layer == LAYERS - 1 else f"a{layer}"
        nodes.append(
            helper.make_node("MatMul", [f"a{layer - 1}" if layer else "x", f"W{layer}"], [name])
        )
        tensor = TensorProto(name=f"W{layer}", data_type=TensorProto.FLOAT, dims=[SIDE, SIDE])
        tensor.data_location = TensorProto.EXTERNAL
        place = {"location": "data.bin", "offset": layer * LAYER_BYTES, "length": LAYER_BYTES}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        tensors.append(tensor)
    graph = helper.make_graph(nodes, "g", [x], [y], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with (folder / "data.bin").open("wb") as file:
        for layer in range(LAYERS):
            file.seek(layer * LAYER_BYTES)
            file.write(np.full(1024, layer + 1, np.float32).tobytes())
        file.truncate(LAYERS * LAYER_BYTES)
    return folder / "model.onnx"


@pytest.mark.slow
@pytest.mark.minutes
def test_a_model_above_two_gibibytes_is_cut_without_loading_its_weights(tmp_path: Path) -> None:
    path, store = large_model(tmp_path), tmp_path / "store"
    made = subprocess.run(
        [sys.executable, "-c", CUT % SIDE, str(path), str(store)],
        check=True,
        capture_output=True,
        text=True,
        timeout=170,
    )
    told = json.loads(made.stdout)
    print(f"peak above imports {told['kib'] / 1024:.1f} MiB for {told['weights'] >> 20} MiB")
    assert told["weights"] == LAYERS * LAYER_BYTES > 2**31
    assert told["kib"] << 10 < LIMIT_BYTES
    first = np.fromfile(
        store / "fragments" / told["fragments"][1].removeprefix("sha256:") / "weights.bin",
        np.float32,
        CHANNELS,  # a layer in parts begins with so many columns of its first row at least
    )
    assert set(first.tolist()) == {4.0}
    shutil.rmtree(tmp_path)  # pytest would keep four gigabytes


def test_large_inline_weights_are_not_loaded_either(tmp_path: Path) -> None:
    """Two matrices of 36 MiB each inside the protobuf."""
    values = np.random.default_rng(0).random((SMALL, SMALL), np.float32)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", SMALL])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", SMALL])
    nodes = [helper.make_node("MatMul", ["x", name], [to]) for name, to in (("W", "a"), ("V", "b"))]
    nodes.append(helper.make_node("Add", ["a", "b"], ["y"]))
    tensors = [onnx.numpy_helper.from_array(values, name) for name in ("W", "V")]
    graph = helper.make_graph(nodes, "g", [x], [y], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    made = subprocess.run(
        [sys.executable, "-c", CUT % SMALL, str(path), str(tmp_path / "store")],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert json.loads(made.stdout)["kib"] << 10 < LIMIT_BYTES
