"""Models of the families that ONNX Runtime packs, converts or re-orders in different ways, each
with input `x`, output `y`, and weights of an odd size or two."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from agent.fragment_making import dense_model, slow_model, tree_model

Tensor = np.ndarray[Any, np.dtype[Any]]
_OWN: Final = "com.microsoft"
WIDTH = 120
"""Packed, these matrices have sizes that are no multiple of a vector register."""


def _chance() -> np.random.Generator:
    return np.random.default_rng(7)


def _model(
    nodes: list[onnx.NodeProto],
    weights: dict[str, Tensor],
    shape: list[int],
    kind: int = TensorProto.FLOAT,
    result: int | None = None,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "family",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", result or kind, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _odd_matrices() -> onnx.ModelProto:
    return dense_model([WIDTH, 3 * WIDTH, WIDTH, 2 * WIDTH, 121, WIDTH])


def _convolutions() -> onnx.ModelProto:
    chance = _chance()
    weights: dict[str, Tensor] = {
        "w0": chance.standard_normal((24, 3, 3, 3)).astype(np.float32),
        "w1": chance.standard_normal((40, 24, 3, 3)).astype(np.float32) / 12,
        "w2": chance.standard_normal((40, 1, 3, 3)).astype(np.float32),
        "b0": chance.standard_normal(24).astype(np.float32),
    }
    weights |= {name: np.abs(chance.standard_normal(40)).astype(np.float32) for name in "smvd"}
    nodes = [
        helper.make_node("Conv", ["x", "w0", "b0"], ["c0"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c0"], ["r0"]),
        helper.make_node("Conv", ["r0", "w1"], ["c1"], strides=[2, 2]),
        helper.make_node("BatchNormalization", ["c1", "s", "d", "m", "v"], ["n1"]),
        helper.make_node("Conv", ["n1", "w2"], ["y"], group=40, pads=[1, 1, 1, 1]),
    ]
    return _model(nodes, weights, [1, 3, 30, 30])


def half_precision(width: int = WIDTH, layers: int = 2) -> onnx.ModelProto:
    """A chain of MatMul of half precision, which no processor of x86 computes with."""
    weights: dict[str, Tensor] = {
        f"w{i}": (_chance().standard_normal((width, width)) * width**-0.5).astype(np.float16)
        for i in range(layers)
    }
    names = ["x", *(f"m{i}" for i in range(1, layers)), "y"]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(layers)]
    return _model(nodes, weights, [3, width], TensorProto.FLOAT16)


def _four_bits() -> onnx.ModelProto:
    chance = _chance()
    size, block = 128, 32
    weights: dict[str, Tensor] = {
        "w": chance.integers(0, 255, (size, size // block, block // 2)).astype(np.uint8),
        "s": (chance.random(size * size // block) / 100).astype(np.float32),
    }
    sizes: dict[str, Any] = {"K": size, "N": size, "bits": 4, "block_size": block}
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **sizes)
    return _model([node], weights, [3, size])


def _embedded() -> onnx.ModelProto:
    """An encoder's first layer in the runtime's own operators."""
    chance = _chance()
    weights: dict[str, Tensor] = {
        "words": chance.standard_normal((1000, WIDTH)).astype(np.float32),
        "places": chance.standard_normal((16, WIDTH)).astype(np.float32),
        "ones": np.ones(WIDTH, np.float32),
        "w": chance.standard_normal((WIDTH, 3 * WIDTH)).astype(np.float32) / 11,
        "b": chance.standard_normal(3 * WIDTH).astype(np.float32),
    }
    embed = ["ids", "", "words", "places", "", "ones", "ones"]
    norm = ["attended", "rows", "ones", "ones"]
    nodes = [
        helper.make_node("Cast", ["x"], ["ids"], to=TensorProto.INT32),
        helper.make_node("EmbedLayerNormalization", embed, ["rows", "none"], domain=_OWN),
        helper.make_node("Attention", ["rows", "w", "b"], ["attended"], domain=_OWN, num_heads=4),
        helper.make_node("SkipLayerNormalization", norm, ["y"], domain=_OWN),
    ]
    return _model(nodes, weights, [1, 5], TensorProto.INT64, TensorProto.FLOAT)


def _dynamically_quantised() -> onnx.ModelProto:
    weights: dict[str, Tensor] = {
        "w": _chance().integers(-127, 127, (WIDTH, WIDTH)).astype(np.int8),
        "scale": np.array(0.01, np.float32),
        "zero": np.array(0, np.int8),
    }
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"]),
        helper.make_node("MatMulInteger", ["q", "w", "qz", "zero"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["qs", "scale"], ["s"]),
        helper.make_node("Mul", ["f", "s"], ["y"]),
    ]
    return _model(nodes, weights, [3, WIDTH])


def _quantised_convolution() -> onnx.ModelProto:
    weights: dict[str, Tensor] = {
        "w": _chance().integers(-127, 127, (40, 24, 3, 3)).astype(np.int8),
        "scale": np.array(0.01, np.float32),
        "zero": np.array(0, np.int8),
        "middle": np.array(128, np.uint8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "middle"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "middle"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["dw"]),
        helper.make_node("Conv", ["d", "dw"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("QuantizeLinear", ["c", "scale", "middle"], ["qc"]),
        helper.make_node("DequantizeLinear", ["qc", "scale", "middle"], ["y"]),
    ]
    return _model(nodes, weights, [1, 24, 14, 14])


def _table() -> onnx.ModelProto:
    weights: dict[str, Tensor] = {
        "table": _chance().standard_normal((1000, WIDTH)).astype(np.float32),
        "w": _chance().standard_normal((WIDTH, WIDTH)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Gather", ["table", "x"], ["rows"]),
        helper.make_node("MatMul", ["rows", "w"], ["y"]),
    ]
    return _model(nodes, weights, [1, 5], TensorProto.INT64, TensorProto.FLOAT)


def _recurrent() -> onnx.ModelProto:
    chance = _chance()
    weights: dict[str, Tensor] = {
        "w": chance.standard_normal((1, 4 * 33, WIDTH)).astype(np.float32) / 11,
        "r": chance.standard_normal((1, 4 * 33, 33)).astype(np.float32) / 6,
    }
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=33)
    return _model([node], weights, [4, 1, WIDTH])


def _resized() -> onnx.ModelProto:
    """Of a picture with its channels last. ONNX Runtime has no cubic kernel for these that makes it
    smaller, though it would leave the transpositions out."""
    weights: dict[str, Tensor] = {
        "sizes": np.array([1, WIDTH, 5, 5], np.int64),
        "w": _chance().standard_normal((WIDTH, WIDTH)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Transpose", ["x"], ["t0"], perm=[0, 3, 1, 2]),
        helper.make_node("Resize", ["t0", "", "", "sizes"], ["r"], mode="cubic"),
        helper.make_node("Transpose", ["r"], ["t1"], perm=[0, 2, 3, 1]),
        helper.make_node("MatMul", ["t1", "w"], ["y"]),
    ]
    return _model(nodes, weights, [1, 9, 9, WIDTH])


FAMILIES: Final[dict[str, Callable[[], onnx.ModelProto]]] = {
    "odd matrices": _odd_matrices,
    "convolutions": _convolutions,
    "half precision": half_precision,
    "four bits": _four_bits,
    "dynamically quantised": _dynamically_quantised,
    "quantised convolution": _quantised_convolution,
    "a table": _table,
    "embedded": _embedded,
    "recurrent": _recurrent,
    "a cubic resize": _resized,
    "a loop": lambda: slow_model(2),
    "a tree": lambda: tree_model(20),
}


def item(model: onnx.ModelProto) -> Tensor:
    """An input that suits."""
    kind = model.graph.input[0].type.tensor_type
    shape = [size.dim_value or 2 for size in kind.shape.dim]
    if kind.elem_type == TensorProto.INT64:
        return _chance().integers(0, 1000, shape)
    return _chance().standard_normal(shape).astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
