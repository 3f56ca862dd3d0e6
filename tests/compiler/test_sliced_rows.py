"""Products in parts of their rows, where the constant is on the left, and how large parts are."""

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from compiler.layers import MICROSOFT, Layer, integers, profile_of, scales
from compiler.test_slicing import LIMIT, cut_everywhere, model, profiled, small_limit
from made_models import weight

__all__ = ["small_limit"]

ROWS = weight(400, 70)
INTEGERS = integers(400, 70)
BYTES = integers(70, 3, seed=1)
ZERO = np.array(100, np.uint8)


def product(*x: int, w: np.ndarray = ROWS) -> Layer:
    return Layer(helper.make_node("MatMul", ["w", "x"], ["y"]), weight(*x, seed=1), {"w": w})


PARTED = {
    "of a matrix": product(70, 3),
    "of several matrices": product(2, 5, 70, 3),
    "of a vector": product(70),
    "several for several": product(4, 70, 3, w=weight(4, 100, 70)),
    "several for one": product(70, 3, w=weight(4, 100, 70)),
    "several for a vector": product(70, w=weight(4, 100, 70)),
    "one of integers": Layer(
        helper.make_node("MatMulInteger", ["w", "x", "zero", "zero"], ["y"]),
        BYTES,
        {"w": INTEGERS, "zero": ZERO},
    ),
    "one that is quantised": Layer(
        helper.make_node(
            "QLinearMatMul", ["w", "one", "zero", "x", "one", "zero", "one", "zero"], ["y"]
        ),
        BYTES,
        {"w": INTEGERS, "one": scales(), "zero": ZERO},
    ),
    "one that the runtime has joined": Layer(
        helper.make_node("FusedMatMul", ["w", "x"], ["y"], domain=MICROSOFT, transB=1, alpha=0.5),
        weight(3, 70, seed=1),
        {"w": ROWS},
    ),
    "a weight that is transposed": Layer(
        helper.make_node("MatMul", ["v", "x"], ["y"]),
        weight(70, 3, seed=1),
        {"w": weight(70, 400)},
        before=[helper.make_node("Transpose", ["w"], ["v"])],
    ),
}
KINDS = {
    "one of integers": TensorProto.INT32,
    "one that is quantised": TensorProto.UINT8,
}


@pytest.mark.parametrize("name", PARTED)
def test_a_product_of_a_constant_on_the_left_is_parted(tmp_path: Path, name: str) -> None:
    layer = PARTED[name]
    profile = profile_of(layer, tmp_path, KINDS.get(name, TensorProto.FLOAT))
    parted = {each.partition(".")[0] for each in profile.weights if each.endswith(".0")}
    assert parted == {"w"}
    parts = [size for each, size in profile.weights.items() if each.startswith("w.")]
    assert len(parts) > 1
    assert sum(parts) == layer.weights["w"].nbytes
    cut_everywhere(tmp_path, profile, layer.x)


WHOLE = {
    "a vector": product(70, 3, w=weight(70)),
    "rows that are turned": Layer(
        helper.make_node("FusedMatMul", ["w", "x"], ["y"], domain=MICROSOFT, transA=1),
        weight(70, 3, seed=1),
        {"w": weight(70, 400)},
    ),
    "something of which not even the number of axes is known": Layer(
        helper.make_node("MatMul", ["w", "r"], ["y"]),
        weight(70, 3, seed=1),
        {"w": ROWS, "none": np.zeros(1, np.int64)},
        before=[
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("NonZero", ["s"], ["n"]),
            helper.make_node("Squeeze", ["n", "none"], ["i"]),
            helper.make_node("Gather", ["s", "i"], ["t"]),
            helper.make_node("Reshape", ["x", "t"], ["r"]),
        ],
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_has_no_rows_that_are_known_stays_whole(tmp_path: Path, name: str) -> None:
    layer = WHOLE[name]
    profile = profile_of(layer, tmp_path)
    assert "w" in profile.weights
    assert not [each for each in profile.weights if each.startswith("w.")]
    cut_everywhere(tmp_path, profile, layer.x)


def test_parts_are_of_one_size_so_that_one_has_room_where_the_last_one_worked(
    tmp_path: Path,
) -> None:
    columns = LIMIT // (4 * 40) // 32 * 32
    made = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], (1, 40), {"w": (40, columns + 32)}
    )
    profile = profiled(made, tmp_path)
    sizes = [profile.weights[f"w.{number}"] // (4 * 40) for number in range(2)]
    assert sum(sizes) == columns + 32
    assert abs(sizes[0] - sizes[1]) <= 32
