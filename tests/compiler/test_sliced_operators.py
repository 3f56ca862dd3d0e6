"""Quantised layers and transposed convolutions in parts, with all that is for each channel."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from chaining import run_chained, run_whole
from compiler.layers import MICROSOFT, Layer, integers, profile_of, scales
from compiler.test_slicing import cut_everywhere, small_limit
from made_models import weight
from shoal_compiler.cutting import cut_model
from shoal_compiler.errors import ModelRefused

__all__ = ["small_limit"]


COLUMNS = 400
MATRIX = integers(70, COLUMNS)
KERNELS = integers(200, 60, 3, 3)
IMAGE = integers(1, 60, 5, 6, seed=1)
ROWS = integers(2, 70, seed=1)
ONE = scales()
ZERO = np.array(100, np.uint8)

QUANTISED: dict[str, Layer] = {
    "MatMulInteger": Layer(
        helper.make_node("MatMulInteger", ["x", "w", "zero", "z"], ["y"]),
        ROWS,
        {"w": MATRIX, "zero": ZERO, "z": integers(COLUMNS, seed=2)},
        ["z"],
    ),
    "MatMulInteger with one zero": Layer(
        helper.make_node("MatMulInteger", ["x", "w", "zero", "z"], ["y"]),
        ROWS,
        {"w": MATRIX, "zero": ZERO, "z": ZERO},
    ),
    "QLinearMatMul": Layer(
        helper.make_node(
            "QLinearMatMul", ["x", "one", "zero", "w", "s", "z", "one", "zero"], ["y"]
        ),
        ROWS,
        {
            "one": ONE,
            "zero": ZERO,
            "w": integers(70, COLUMNS, kind=np.int8),
            "s": scales(COLUMNS),
            "z": np.zeros(COLUMNS, np.int8),
        },
        ["s", "z"],
    ),
    "ConvInteger": Layer(
        helper.make_node("ConvInteger", ["x", "w", "zero", "z"], ["y"]),
        IMAGE,
        {"w": KERNELS, "zero": ZERO, "z": ZERO},
    ),
    "QLinearConv": Layer(
        helper.make_node(
            "QLinearConv", ["x", "one", "zero", "w", "s", "z", "one", "zero", "b"], ["y"]
        ),
        IMAGE,
        {
            "one": ONE,
            "zero": ZERO,
            "w": integers(200, 60, 3, 3, kind=np.int8),
            "s": scales(200),
            "z": np.zeros(200, np.int8),
            "b": integers(200, kind=np.int32) // (1 << 20),
        },
        ["s", "z", "b"],
    ),
    "ConvTranspose": Layer(
        helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], strides=[2, 2]),
        weight(1, 60, 5, 6),
        {"w": weight(60, 100, 3, 3), "b": weight(100)},
        ["b"],
    ),
    "DynamicQuantizeMatMul": Layer(
        helper.make_node(
            "DynamicQuantizeMatMul", ["x", "w", "s", "z", "b"], ["y"], domain=MICROSOFT
        ),
        weight(2, 70),
        {"w": MATRIX, "s": ONE, "z": ZERO, "b": weight(COLUMNS)},
        ["b"],
    ),
    "MatMulIntegerToFloat": Layer(
        helper.make_node(
            "MatMulIntegerToFloat",
            ["x", "w", "one", "s", "zero", "z", "b"],
            ["y"],
            domain=MICROSOFT,
        ),
        ROWS,
        {
            "w": MATRIX,
            "one": ONE,
            "s": scales(COLUMNS),
            "zero": ZERO,
            "z": integers(COLUMNS, seed=2),
            "b": weight(COLUMNS),
        },
        ["s", "z", "b"],
    ),
    "FusedConv": Layer(
        helper.make_node(
            "FusedConv", ["x", "w", "b"], ["y"], domain=MICROSOFT, activation="Relu", strides=[2, 2]
        ),
        weight(1, 60, 5, 6),
        {"w": weight(100, 60, 3, 3), "b": weight(100)},
        ["b"],
    ),
    "FusedGemm": Layer(
        helper.make_node(
            "FusedGemm", ["x", "w", "b"], ["y"], domain=MICROSOFT, activation="Tanh", transB=1
        ),
        weight(2, 70),
        {"w": weight(COLUMNS, 70), "b": weight(COLUMNS)},
        ["b"],
    ),
    "FusedMatMul": Layer(
        helper.make_node("FusedMatMul", ["x", "w"], ["y"], domain=MICROSOFT, alpha=0.5, transA=1),
        weight(70, 2),
        {"w": weight(70, COLUMNS)},
    ),
    "FusedMatMul, transposed": Layer(
        helper.make_node("FusedMatMul", ["x", "w"], ["y"], domain=MICROSOFT, transB=1),
        weight(2, 70),
        {"w": weight(COLUMNS, 70)},
    ),
    "QGemm": Layer(
        helper.make_node(
            "QGemm",
            ["x", "one", "zero", "w", "s", "z", "b"],
            ["y"],
            domain=MICROSOFT,
            transB=1,
        ),
        ROWS,
        {
            "one": ONE,
            "zero": ZERO,
            "w": integers(COLUMNS, 70, kind=np.int8),
            "s": scales(COLUMNS),
            "z": np.zeros(COLUMNS, np.int8),
            "b": integers(COLUMNS, kind=np.int32) // (1 << 20),
        },
        ["s", "z", "b"],
    ),
    "MatMulNBits": Layer(
        helper.make_node(
            "MatMulNBits",
            ["x", "w", "s", "z"],
            ["y"],
            domain=MICROSOFT,
            K=64,
            N=800,
            bits=4,
            block_size=32,
        ),
        weight(2, 64),
        {"w": integers(800, 2, 16), "s": scales(1600), "z": integers(800, seed=3)},
        ["s", "z"],
    ),
    "attention, by heads": Layer(
        helper.make_node(
            "Attention", ["x", "w", "b"], ["y"], domain=MICROSOFT, num_heads=5, unidirectional=1
        ),
        weight(2, 7, 60),
        {"w": weight(60, 3 * 120), "b": weight(3 * 120)},
        ["b"],
    ),
    "quantised attention, by heads": Layer(
        helper.make_node(
            "QAttention",
            ["x", "w", "b", "one", "s", "", "zero", "z"],
            ["y"],
            domain=MICROSOFT,
            num_heads=5,
        ),
        integers(2, 7, 60, seed=1),
        {
            "w": integers(60, 3 * 120, kind=np.int8),
            "b": weight(3 * 120),
            "one": ONE,
            "s": scales(3 * 120),
            "zero": ZERO,
            "z": integers(3 * 120, kind=np.int8, seed=2),
        },
        ["b", "s", "z"],
    ),
}


DEQUANTISE = helper.make_node("DequantizeLinear", ["w", "s", "z"], ["v"], axis=1)
MULTIPLY = helper.make_node("MatMul", ["x", "v"], ["y"])
VALUES = weight(2, 70)

MADE: dict[str, Layer] = {
    "scales for each column": Layer(
        MULTIPLY,
        VALUES,
        {"w": MATRIX, "s": scales(COLUMNS), "z": integers(COLUMNS, seed=2)},
        ["s", "z"],
        [DEQUANTISE],
    ),
    "one scale": Layer(MULTIPLY, VALUES, {"w": MATRIX, "s": ONE, "z": ZERO}, before=[DEQUANTISE]),
    "scales for each row": Layer(
        MULTIPLY,
        VALUES,
        {"w": MATRIX, "s": scales(70), "z": integers(70, seed=2)},
        before=[helper.make_node("DequantizeLinear", ["w", "s", "z"], ["v"], axis=-2)],
    ),
    "scales for blocks of rows": Layer(
        MULTIPLY,
        VALUES,
        {"w": MATRIX, "s": scales(2, COLUMNS), "z": integers(2, COLUMNS, seed=2)},
        ["s", "z"],
        [helper.make_node("DequantizeLinear", ["w", "s", "z"], ["v"], axis=0, block_size=35)],
        opset=21,
    ),
    "a convolution with its bias": Layer(
        helper.make_node("Conv", ["x", "v", "c"], ["y"]),
        weight(1, 60, 5, 6),
        {
            "w": integers(200, 60, 3, 3, kind=np.int8),
            "s": scales(200),
            "b": integers(200, kind=np.int32) // (1 << 20),
        },
        ["s", "b"],
        [
            helper.make_node("DequantizeLinear", ["w", "s"], ["v"], axis=0),
            helper.make_node("DequantizeLinear", ["b", "s"], ["c"], axis=0),
        ],
    ),
    "transposed": Layer(
        MULTIPLY,
        VALUES,
        {"w": weight(COLUMNS, 70)},
        before=[helper.make_node("Transpose", ["w"], ["v"])],
    ),
    "transposed, and read as columns": Layer(
        helper.make_node("Gemm", ["x", "v", "b"], ["y"], transB=1),
        VALUES,
        {"w": weight(70, COLUMNS), "b": weight(COLUMNS)},
        ["b"],
        [helper.make_node("Transpose", ["w"], ["v"], perm=[1, 0])],
    ),
    "a convolution that keeps channels last": Layer(
        helper.make_node("Conv", ["x", "v"], ["y"]),
        weight(1, 60, 5, 6),
        {"w": weight(3, 3, 60, 100)},
        before=[helper.make_node("Transpose", ["w"], ["v"], perm=[3, 2, 0, 1])],
    ),
    "dequantised and transposed": Layer(
        MULTIPLY,
        VALUES,
        {"w": integers(COLUMNS, 70), "s": scales(COLUMNS), "z": integers(COLUMNS, seed=2)},
        ["s", "z"],
        [
            helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"], axis=0),
            helper.make_node("Transpose", ["d"], ["v"]),
        ],
    ),
    "transposed and dequantised": Layer(
        MULTIPLY,
        VALUES,
        {"w": integers(COLUMNS, 70), "s": scales(COLUMNS), "z": integers(COLUMNS, seed=2)},
        ["s", "z"],
        [
            helper.make_node("Transpose", ["w"], ["t"]),
            helper.make_node("DequantizeLinear", ["t", "s", "z"], ["v"], axis=1),
        ],
    ),
    "quantised and dequantised": Layer(
        MULTIPLY,
        VALUES,
        {"w": weight(70, COLUMNS), "s": scales(COLUMNS), "z": np.zeros(COLUMNS, np.int8)},
        ["s", "z"],
        [
            helper.make_node("QuantizeLinear", ["w", "s", "z"], ["q"], axis=1),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["v"], axis=1),
        ],
    ),
    "half precision that is cast": Layer(
        helper.make_node("Gemm", ["x", "v"], ["y"], transB=1),
        VALUES,
        {"w": weight(COLUMNS, 70).astype(np.float16)},
        before=[helper.make_node("Cast", ["w"], ["v"], to=TensorProto.FLOAT)],
    ),
}

STAY: dict[str, Layer] = {
    "a dequantised weight that others read": Layer(
        helper.make_node("MatMul", ["t", "v"], ["y"]),
        weight(2, 200),
        {"w": integers(200, 200), "s": ONE, "z": ZERO},
        before=[DEQUANTISE, helper.make_node("MatMul", ["x", "v"], ["t"])],
    ),
    "attention with values of another width": Layer(
        helper.make_node(
            "Attention",
            ["x", "w", "b"],
            ["y"],
            domain=MICROSOFT,
            num_heads=4,
            qkv_hidden_sizes=[100, 100, 40],
        ),
        weight(2, 7, 60),
        {"w": weight(60, 240), "b": weight(240)},
    ),
    "scales that are computed": Layer(
        MULTIPLY,
        VALUES,
        {"w": MATRIX, "z": ZERO},
        before=[helper.make_node("ReduceMax", ["x"], ["s"], keepdims=0), DEQUANTISE],
    ),
}


OUTPUTS = {
    "MatMulInteger": TensorProto.INT32,
    "MatMulInteger with one zero": TensorProto.INT32,
    "QLinearMatMul": TensorProto.UINT8,
    "ConvInteger": TensorProto.INT32,
    "QLinearConv": TensorProto.UINT8,
}


@pytest.mark.parametrize("name", [*QUANTISED, *MADE])
def test_layers_of_other_kinds_are_parted_with_all_that_they_have_for_each_channel(
    tmp_path: Path, name: str
) -> None:
    layer = QUANTISED.get(name) or MADE[name]
    profile = profile_of(layer, tmp_path, OUTPUTS.get(name, TensorProto.FLOAT))
    parted = {name.partition(".")[0] for name in profile.weights if name.endswith((".0", ".0'"))}
    assert parted == {"w", *layer.with_it}
    assert sum(size for name, size in profile.weights.items() if name.startswith("w.")) == (
        layer.weights["w"].nbytes
    )
    cut_everywhere(tmp_path, profile, layer.x)


@pytest.mark.parametrize("name", ["attention, by heads", "quantised attention, by heads"])
def test_heads_in_parts_give_the_very_same(tmp_path: Path, name: str) -> None:
    layer = QUANTISED[name]
    profile = profile_of(layer, tmp_path)
    document = cut_model(tmp_path / "model.onnx", profile, (), tmp_path / "store")
    want = run_whole(tmp_path / "model.onnx", {"x": layer.x})
    got = run_chained(tmp_path / "store", document, {"x": layer.x})
    assert np.array_equal(got["y"], want["y"])


def test_a_product_that_says_another_number_of_columns_is_left_to_the_runtime_to_refuse(
    tmp_path: Path,
) -> None:
    layer = QUANTISED["MatMulNBits"]
    node = deepcopy(layer.node)
    next(each for each in node.attribute if each.name == "N").i = 400
    profile = profile_of(replace(layer, node=node), tmp_path)
    assert set(profile.weights) == set(layer.weights)


UINT4 = helper.tensor_dtype_to_np_dtype(TensorProto.UINT4)
FOUR_BITS = {
    "columns": (
        (64, 1000),
        (2, 1000),
        [helper.make_node("DequantizeLinear", ["w", "s", "z"], ["v"], axis=0, block_size=32)],
    ),
    "rows": (
        (1000, 64),
        (1000, 2),
        [
            helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"], axis=1, block_size=32),
            helper.make_node("Transpose", ["d"], ["v"]),
        ],
    ),
    "an odd number of columns": (
        (64, 999),
        (2, 999),
        [helper.make_node("DequantizeLinear", ["w", "s", "z"], ["v"], axis=0, block_size=32)],
    ),
}
"""The shapes of a weight and of its scales, and what makes `v` of them."""


@pytest.mark.parametrize("name", FOUR_BITS)
def test_weights_of_four_bits_are_parted_where_the_parts_are_whole_bytes(
    tmp_path: Path, name: str
) -> None:
    shape, scaled, before = FOUR_BITS[name]
    weights = {
        "w": integers(*shape).astype(UINT4),
        "s": scales(*scaled),
        "z": integers(*scaled, seed=2).astype(UINT4),
    }
    layer = Layer(MULTIPLY, weight(2, 64), weights, before=before, opset=21)
    profile = profile_of(layer, tmp_path)
    parts = [size for each, size in profile.weights.items() if each.startswith("w.")]
    if name.startswith("an odd"):
        assert not parts
    else:
        assert len(parts) > 1
        assert sum(parts) == 32 * 1000
    cut_everywhere(tmp_path, profile, layer.x)


def test_a_weight_that_is_transposed_in_an_order_that_there_is_not_is_left_to_the_runtime(
    tmp_path: Path,
) -> None:
    transpose = helper.make_node("Transpose", ["w"], ["v"], perm=[1, 1])
    layer = Layer(MULTIPLY, VALUES, {"w": weight(COLUMNS, 70)}, before=[transpose])
    assert set(profile_of(layer, tmp_path).weights) == {"w"}


def test_nodes_that_transpose_what_each_other_makes_are_refused(tmp_path: Path) -> None:
    before = [
        helper.make_node("Transpose", ["t"], ["v"]),
        helper.make_node("Transpose", ["v"], ["t"]),
    ]
    with pytest.raises(ModelRefused):
        profile_of(Layer(MULTIPLY, VALUES, {}, before=before), tmp_path)


@pytest.mark.parametrize("name", STAY)
def test_what_others_read_or_is_computed_stays_whole(tmp_path: Path, name: str) -> None:
    layer = STAY[name]
    profile = profile_of(layer, tmp_path)
    assert set(profile.weights) == set(layer.weights)
    cut_everywhere(tmp_path, profile, layer.x)
