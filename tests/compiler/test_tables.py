"""Tables that a model dequantises or casts: their rows are gathered first."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from chaining import Tensors, run_chained, run_whole
from compiler.layers import integers, scales
from compiler.test_resident_estimate import MIB, measured
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_planner.cuts import CutRequest, choose_cuts

WORDS, WIDTH = 16384, 256
ITEM: Tensors = {"ids": np.array([[3, 0, WORDS - 1, 77]])}
DEQUANTISED = helper.make_node("DequantizeLinear", ["w", "s", "z"], ["table"], name="table")
CAST = helper.make_node("Cast", ["w"], ["table"], to=TensorProto.FLOAT)
GATHER = helper.make_node("Gather", ["table", "ids"], ["rows"], name="rows")
TIED = (
    helper.make_node("Transpose", ["table"], ["turned"], perm=[1, 0]),
    helper.make_node("MatMul", ["rows", "turned"], ["logits"]),
    helper.make_node("ReduceMax", ["logits"], ["y"], axes=[2]),
)
LAST = helper.make_node("Tanh", ["rows"], ["y"])


def in_bytes() -> dict[str, Any]:
    return {"w": integers(WORDS, WIDTH), "s": np.float32(0.01), "z": np.uint8(120)}


def in_halves() -> dict[str, Any]:
    return {"w": np.random.default_rng(0).standard_normal((WORDS, WIDTH)).astype(np.float16)}


def saved(folder: Path, weights: dict[str, Any], *nodes: onnx.NodeProto) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, 4])],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


@pytest.mark.parametrize(
    ("weights", "maker"), [(in_bytes, DEQUANTISED), (in_halves, CAST)], ids=["dequantised", "cast"]
)
def test_no_more_than_the_rows_that_are_read_become_numbers(
    weights: Callable[[], dict[str, Any]], maker: onnx.NodeProto, tmp_path: Path
) -> None:
    path = saved(tmp_path, weights(), maker, GATHER, LAST)
    document = cut_model(path, profile_model(path), (), tmp_path)
    (fragment,) = document.fragments
    given = run_chained(tmp_path, document, ITEM)
    np.testing.assert_array_equal(given["y"], run_whole(path, ITEM)["y"])
    place = tmp_path / "fragments" / fragment.digest.removeprefix("sha256:")
    assert measured(place, ITEM, tmp_path) <= fragment.resident_bytes < 6 * MIB


def test_a_table_that_is_the_output_layer_too_is_computed_in_parts(tmp_path: Path) -> None:
    path = saved(tmp_path, in_bytes(), DEQUANTISED, GATHER, *TIED)
    profile = profile_model(path)
    cuts = choose_cuts(profile, CutRequest(fragments=2))
    assert isinstance(cuts, tuple)
    given = run_chained(tmp_path, cut_model(path, profile, cuts, tmp_path), ITEM)["y"]
    wanted = run_whole(path, ITEM)["y"]
    np.testing.assert_allclose(given.astype(float), wanted.astype(float), rtol=1e-5)


UNLIKE = {
    "a scale for each row": [
        helper.make_node("DequantizeLinear", ["w", "ss", "zz"], ["table"], axis=0),
        GATHER,
    ],
    "columns": [DEQUANTISED, helper.make_node("Gather", ["table", "ids"], ["rows"], axis=1)],
    "what is computed": [
        helper.make_node("ReduceMax", ["ids"], ["most"], keepdims=0),
        helper.make_node("Cast", ["most"], ["scale"], to=TensorProto.FLOAT),
        helper.make_node("DequantizeLinear", ["w", "scale"], ["table"]),
        GATHER,
    ],
}


@pytest.mark.parametrize("name", UNLIKE)
def test_others_stay_as_they_are(name: str, tmp_path: Path) -> None:
    each = {"ss": scales(WORDS), "zz": integers(WORDS)}
    path = saved(tmp_path, in_bytes() | each, *UNLIKE[name], LAST)
    item = {"ids": ITEM["ids"] % WIDTH}
    operators = [node.operator for node in profile_model(path).nodes]
    assert operators.index("DequantizeLinear") < operators.index("Gather")
    given = run_chained(tmp_path, cut_model(path, profile_model(path), (), tmp_path), item)
    np.testing.assert_array_equal(given["y"], run_whole(path, item)["y"])
