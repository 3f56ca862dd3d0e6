"""What is known of the outputs of operators that ONNX Runtime has of its own is what it gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import helper, numpy_helper

from chaining import run_whole
from made_models import weight
from shoal_compiler.profile import profile_model
from shoal_compiler.tensor_types import dtype_name

Values = npt.NDArray[np.generic]
BATCH, LENGTH, WIDTH, HEADS, HEAD, PAST = 2, 5, 32, 4, 8, 3


@dataclass(frozen=True, slots=True)
class Used:
    """An operator with what it reads by position ("" is left out), its outputs, and attributes.
    What begins with `w` is a weight."""

    inputs: Mapping[str, Values | None]
    outputs: Sequence[str] = ("y",)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = "com.microsoft"


def floats(*shape: int) -> npt.NDArray[np.float32]:
    return weight(*shape, seed=sum(shape))


def numbers(*shape: int, below: int = 10, kind: type = np.int32) -> Values:
    return np.random.default_rng(0).integers(0, below, shape).astype(kind)


X = floats(BATCH, LENGTH, WIDTH)
CACHE = floats(BATCH, HEADS, PAST, HEAD)
ONES = np.ones(WIDTH, np.float32)
ANGLES = floats(64, 8)
GROUPED = {"num_heads": 2, "kv_num_heads": 1}
LENGTHS: dict[str, Values | None] = {
    "seqlens": np.full(BATCH, LENGTH - 1, np.int32),
    "total": np.array(LENGTH, np.int32),
}
NO_CACHE = floats(BATCH, 1, 0, 16)
EXPERTS = {"k": 1, "activation_type": "relu"}

HALF: Values = np.array(0.5, np.float32)
ZERO: Values = np.array(0, np.uint8)
IMAGE = numbers(BATCH, 3, 6, 7, kind=np.uint8)
PRODUCT: dict[str, Values | None] = {
    "x": numbers(LENGTH, WIDTH, kind=np.uint8),
    "wxs": HALF,
    "wxz": ZERO,
    "w": numbers(7, WIDTH, kind=np.uint8),
    "ws": HALF,
    "wz": ZERO,
}

USED: dict[str, Used] = {
    "Attention": Used(
        {"x": X, "w": floats(WIDTH, 3 * WIDTH), "wb": floats(3 * WIDTH)},
        attributes={"num_heads": HEADS},
    ),
    "Attention with a cache": Used(
        {
            "x": X,
            "w": floats(WIDTH, 3 * WIDTH),
            "wb": floats(3 * WIDTH),
            "mask": None,
            "past": np.stack([CACHE, CACHE]),
        },
        ["y", "present"],
        {"num_heads": HEADS, "unidirectional": 1},
    ),
    "Attention with values of another width": Used(
        {"x": X, "w": floats(WIDTH, 2 * WIDTH + 16), "wb": floats(2 * WIDTH + 16)},
        attributes={"num_heads": HEADS, "qkv_hidden_sizes": [WIDTH, WIDTH, 16]},
    ),
    "MultiHeadAttention": Used(
        {"x": X, "k": floats(BATCH, 7, WIDTH), "v": floats(BATCH, 7, 16)},
        attributes={"num_heads": HEADS},
    ),
    "MultiHeadAttention of heads that are apart": Used(
        {"x": X, "k": floats(BATCH, HEADS, 7, HEAD), "v": floats(BATCH, HEADS, 7, HEAD)},
        attributes={"num_heads": HEADS},
    ),
    "MultiHeadAttention with a cache": Used(
        {
            "x": X,
            "k": X,
            "v": X,
            **dict.fromkeys(("bias", "mask", "more"), None),
            "past_k": CACHE,
            "past_v": CACHE,
        },
        ["y", "present_k", "present_v"],
        {"num_heads": HEADS, "unidirectional": 1},
    ),
    "GroupQueryAttention": Used(
        {
            "x": X,
            "k": floats(BATCH, LENGTH, 16),
            "v": floats(BATCH, LENGTH, 16),
            "past_k": NO_CACHE,
            "past_v": NO_CACHE,
            **LENGTHS,
        },
        ["y", "present_k", "present_v"],
        GROUPED,
    ),
    "GroupQueryAttention, packed": Used(
        {
            "x": floats(BATCH, LENGTH, WIDTH + 32),
            **dict.fromkeys(("k", "v")),
            "past_k": NO_CACHE,
            "past_v": NO_CACHE,
            **LENGTHS,
            "wc": ANGLES,
            "ws": ANGLES,
        },
        ["y", "present_k", "present_v"],
        {**GROUPED, "do_rotary": 1},
    ),
    "SkipLayerNormalization": Used(
        {"x": X, "skip": X, "wg": ONES, "wb": ONES, "wc": ONES}, ["y", "", "", "sum"]
    ),
    "SkipSimplifiedLayerNormalization": Used({"x": X, "skip": X, "wg": ONES}, ["y", "", "", "sum"]),
    "SimplifiedLayerNormalization": Used({"x": X, "wg": ONES}, domain=""),
    "EmbedLayerNormalization": Used(
        {
            "ids": numbers(BATCH, LENGTH),
            "segments": numbers(BATCH, LENGTH, below=2),
            "w": floats(10, WIDTH),
            "wp": floats(16, WIDTH),
            "ws": floats(2, WIDTH),
            "wg": ONES,
            "wb": ONES,
            "mask": np.ones((BATCH, LENGTH), np.int32),
        },
        ["y", "lengths", "sum"],
    ),
    "RotaryEmbedding": Used(
        {
            "x": X,
            "at": numbers(BATCH, LENGTH, kind=np.int64),
            "wc": floats(64, 16),
            "ws": floats(64, 16),
        }
    ),
    "FusedConv": Used(
        {"x": floats(BATCH, 3, 6, 7), "w": floats(4, 3, 3, 3)},
        attributes={"activation": "Relu", "pads": [1, 1, 0, 0]},
    ),
    "FusedGemm": Used(
        {"x": floats(LENGTH, WIDTH), "w": floats(7, WIDTH), "wb": floats(7)},
        attributes={"activation": "Relu", "transB": 1},
    ),
    "FusedMatMul": Used({"x": X, "k": X}, attributes={"transB": 1, "alpha": 0.5}),
    "FusedMatMul, the first transposed": Used({"x": X, "k": X}, attributes={"transA": 1}),
    "FusedMatMul of batches": Used({"x": floats(3, 5, 7), "k": floats(2, 3, 7, 4)}),
    "QuickGelu": Used({"x": X}),
    "BiasGelu": Used({"x": X, "wb": ONES}),
    "GatherBlockQuantized": Used(
        {
            "w": numbers(10, WIDTH, below=200, kind=np.uint8),
            "ids": numbers(BATCH, LENGTH),
            "ws": floats(10, 4),
        },
        attributes={"bits": 4, "block_size": 16, "quantize_axis": 1, "gather_axis": 0},
    ),
    "GatherBlockQuantized of bytes": Used(
        {
            "w": numbers(10, WIDTH, below=200, kind=np.uint8),
            "ids": numbers(BATCH, LENGTH),
            "ws": floats(10, 2),
        },
        attributes={"bits": 8, "block_size": 16, "quantize_axis": 1, "gather_axis": 0},
    ),
    "MatMulIntegerToFloat": Used(
        {
            "x": numbers(LENGTH, WIDTH, kind=np.uint8),
            "w": numbers(WIDTH, 7, kind=np.uint8),
            "one": np.array(0.5, np.float32),
            "two": np.array(0.5, np.float32),
        }
    ),
    "QAttention": Used(
        {
            "x": numbers(BATCH, LENGTH, WIDTH, kind=np.uint8),
            "w": numbers(WIDTH, 3 * WIDTH, kind=np.uint8),
            "wb": floats(3 * WIDTH),
            "one": np.array(0.5, np.float32),
            "two": np.array(0.5, np.float32),
        },
        attributes={"num_heads": HEADS},
    ),
    "QLinearAdd": Used(
        {"x": IMAGE, "wxs": HALF, "wxz": ZERO, "k": IMAGE[:, :1], "wks": HALF, "wkz": ZERO}
        | {"wys": HALF, "wyz": ZERO}
    ),
    "QLinearConcat": Used(
        {"wys": HALF, "wyz": ZERO, "x": IMAGE, "wxs": HALF, "wxz": ZERO, "k": IMAGE[:, :1]}
        | {"wks": HALF, "wkz": ZERO},
        attributes={"axis": 1},
    ),
    "QLinearAveragePool": Used(
        {"x": IMAGE, "wxs": HALF, "wxz": ZERO, "wys": HALF, "wyz": ZERO},
        attributes={"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 1, 1, 0]},
    ),
    "QLinearGlobalAveragePool": Used(
        {"x": IMAGE, "wxs": HALF, "wxz": ZERO, "wys": HALF, "wyz": ZERO}
    ),
    "QLinearGlobalAveragePool, channels last": Used(
        {"x": IMAGE, "wxs": HALF, "wxz": ZERO, "wys": HALF, "wyz": ZERO},
        attributes={"channels_last": 1},
    ),
    "QLinearWhere": Used(
        {"c": np.ones((1, 3, 1, 1), bool), "x": IMAGE, "wxs": HALF, "wxz": ZERO, "k": IMAGE[:, :1]}
        | {"wks": HALF, "wkz": ZERO, "wys": HALF, "wyz": ZERO},
    ),
    "QGemm": Used({**PRODUCT, "wb": None, "wys": HALF, "wyz": ZERO}, attributes={"transB": 1}),
    "QGemm that gives numbers": Used(PRODUCT, attributes={"transB": 1}),
    "FusedMatMul, items second": Used(
        {"x": floats(LENGTH, BATCH, WIDTH), "k": floats(7, BATCH, WIDTH)},
        attributes={"transBatchA": 1, "transBatchB": 1, "transB": 1},
    ),
    "STFT": Used({"x": floats(BATCH, 64, 1), "wstep": np.array(4), "wwindow": ONES}, domain=""),
    "STFT of both sides": Used(
        {"x": floats(BATCH, 64, 1), "wstep": np.array(4), "wwindow": ONES},
        attributes={"onesided": 0},
        domain="",
    ),
    "MoE": Used(
        {
            "x": floats(6, WIDTH),
            "router": floats(6, 3),
            "w": floats(3, 16, WIDTH),
            "wb": floats(3, 16),
            "wt": floats(3, WIDTH, 16),
        },
        attributes=EXPERTS,
    ),
}


def made(name: str) -> tuple[onnx.ModelProto, dict[str, Values]]:
    used = USED[name]
    operator = name.partition(" ")[0].rstrip(",")
    given = {each: value for each, value in used.inputs.items() if value is not None}
    reads = [each if each in given else "" for each in used.inputs]
    node = helper.make_node(operator, reads, used.outputs, domain=used.domain, **used.attributes)
    feeds = {each: value for each, value in given.items() if not each.startswith("w")}
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info(
                each, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
            )
            for each, value in feeds.items()
        ],
        [helper.make_empty_tensor_value_info(each) for each in used.outputs if each],
        [numpy_helper.from_array(given[each], each) for each in given if each not in feeds],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9), feeds


@pytest.mark.parametrize("name", USED)
def test_outputs_have_the_type_and_the_sizes_that_are_known(tmp_path: Path, name: str) -> None:
    model, feeds = made(name)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    outputs = run_whole(path, feeds)
    profile = profile_model(path)
    for each, value in outputs.items():
        known = profile.tensors[each]
        assert known.spec.dtype == dtype_name(helper.np_dtype_to_tensor_dtype(value.dtype))
        assert known.sizes == value.shape


@pytest.mark.parametrize("operator", ["QLinearAdd", "QLinearAveragePool"])
def test_the_age_of_a_model_does_not_matter_to_them(tmp_path: Path, operator: str) -> None:
    """Before opset 14 onnx knows no sums of bytes, and before opset 12 no pooling."""
    model, feeds = made(operator)
    model.opset_import[0].version = 11
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    known = profile_model(path).tensors["y"]
    assert (known.spec.dtype, known.sizes) == ("uint8", run_whole(path, feeds)["y"].shape)


def test_sizes_with_channels_last_are_not_taken_for_others(tmp_path: Path) -> None:
    model, _ = made("QLinearAveragePool")
    model.graph.node[0].attribute.append(helper.make_attribute("channels_last", 1))
    onnx.save(model, tmp_path / "model.onnx")
    known = profile_model(tmp_path / "model.onnx").tensors["y"]
    assert (known.spec.dtype, known.sizes) == ("uint8", None)


AXES = ["items", "words"]


def test_axes_keep_their_names_behind_them(tmp_path: Path) -> None:
    """So an agent knows the sizes of what leaves a fragment before it runs."""
    ids = helper.make_tensor_value_info("ids", onnx.TensorProto.INT32, AXES)
    weights = {"t": floats(9, WIDTH), "p": floats(LENGTH, WIDTH), "k": floats(WIDTH, 6)}
    weights |= {"g": ONES, "b": ONES, "shape": np.array([0, 0, 2, 3])}
    own = "com.microsoft"
    read = ["ids", "", "t", "p", "", "g", "b"]
    graph = helper.make_graph(
        [
            helper.make_node("EmbedLayerNormalization", read, ["e", "m"], domain=own),
            helper.make_node("FusedMatMul", ["e", "k"], ["f"], domain=own),
            helper.make_node("Reshape", ["f", "shape"], ["r"]),
            helper.make_node("Relu", ["r"], ["y"]),
        ],
        "g",
        [ids],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(own, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "m.onnx")
    known = profile_model(tmp_path / "m.onnx").tensors
    assert known["e"].spec.shape == (*AXES, WIDTH)
    assert known["f"].spec.shape == (*AXES, 6)
    assert known["y"].spec.shape == (*AXES, 2, 3)


FUNCTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "GreaterOrEqual": (12, {}),
    "LessOrEqual": (15, {}),
    "MeanVarianceNormalization": (13, {}),
    "GroupNormalization": (21, {"num_groups": 1}),
}
"""Operators of onnx that are functions, for which it has no rule of their own."""


@pytest.mark.parametrize("operator", FUNCTIONS)
def test_sizes_are_known_of_what_functions_of_onnx_give(tmp_path: Path, operator: str) -> None:
    opset, attributes = FUNCTIONS[operator]
    image, two = floats(BATCH, 3, 6, 7), operator.endswith("OrEqual")
    reads = {"x": image} | ({"k": image[:, :1]} if two else {})
    weights = {"wg": ONES[:3], "wb": ONES[:3]} if attributes else {}
    node = helper.make_node(operator, [*reads, *weights], ["z"], **attributes)
    graph = helper.make_graph(
        [node, helper.make_node("Cast", ["z"], ["y"], to=onnx.TensorProto.INT32)],
        "g",
        [helper.make_tensor_value_info(name, 1, each.shape) for name, each in reads.items()],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    known = profile_model(path).tensors
    assert known["z"].spec.dtype == ("bool" if two else "float")
    assert known["z"].sizes == known["y"].sizes == run_whole(path, reads)["y"].shape


def test_attributes_that_make_no_sense_leave_the_sizes_unknown(tmp_path: Path) -> None:
    model, _ = made("Attention")
    for number in (0, -1, 1 << 62):
        model.graph.node[0].attribute[0].i = number
        onnx.save(model, tmp_path / "model.onnx")
        assert profile_model(tmp_path / "model.onnx").tensors["y"].spec.dtype == "float"
