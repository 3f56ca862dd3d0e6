"""An ONNX model of what most models are made of, written by hand: the agent has no `onnx`.

A picture goes through convolutions of the usual kinds, words through one layer of attention, and
both through integers. It computes nothing of use; what counts is which kernels it reaches, in which
of their forms, and that the optimiser finds what it fuses in real models.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from shoal_protocol.tensors import Array, data_type_of

_OPSET: Final = 17
_IR_VERSION: Final = 8
_WIDTH: Final = 32
_HEADS: Final = 4

Attribute = int | str | Sequence[int]
Node = tuple[str, str, str, Mapping[str, Attribute]]
"""Operator, inputs and outputs (names with spaces between), attributes."""

_PICTURE: Final[Sequence[Node]] = (
    ("Conv", "picture k3 b16", "p1", {"pads": (1, 1, 1, 1), "strides": (2, 2)}),
    ("BatchNormalization", "p1 b16 b16 b16 one16", "p2", {}),
    ("Relu", "p2", "p3", {}),
    ("Conv", "p3 depthwise b16", "p4", {"pads": (1, 1, 1, 1), "group": 16}),
    ("HardSigmoid", "p4", "p5", {}),
    ("Mul", "p4 p5", "p6", {}),
    ("Conv", "p6 pointwise", "p7", {}),
    ("Add", "p7 p3", "p8", {}),
    ("Conv", "p8 k5 b16", "p9", {"pads": (2, 2, 2, 2)}),
    ("Clip", "p9 zero six", "p10", {}),
    ("MaxPool", "p10", "p11", {"kernel_shape": (3, 3), "strides": (2, 2)}),
    ("AveragePool", "p11", "p12", {"kernel_shape": (2, 2), "strides": (2, 2)}),
    ("Resize", "p12 none scales", "p13", {"mode": "nearest"}),
    ("Concat", "p12 p12", "p14", {"axis": 1}),
    ("GlobalAveragePool", "p13", "p15", {}),
    ("Sigmoid", "p15", "p16", {}),
    ("Mul", "p13 p16", "p17", {}),
    ("ReduceMean", "p17", "p18", {"axes": (2, 3), "keepdims": 0}),
    ("Flatten", "p15", "p19", {}),
    ("Gemm", "p19 gemm b32", "p20", {"transB": 1}),
    ("Tanh", "p20", "p21", {}),
    ("Softmax", "p21", "p22", {}),
)
_WORDS: Final[Sequence[Node]] = (
    ("Gather", "table words", "w1", {}),
    ("LayerNormalization", "w1 b32 b32", "w2", {}),
    ("MatMul", "w2 m32", "w3", {}),
    ("Add", "b32 w3", "w4", {}),
    ("Reshape", "w4 heads", "w5", {}),
    ("Transpose", "w5", "w6", {"perm": (0, 2, 1, 3)}),
    ("Transpose", "w5", "w7", {"perm": (0, 2, 3, 1)}),
    ("MatMul", "w6 w7", "w8", {}),
    ("Div", "w8 six", "w9", {}),
    ("Cast", "words", "w10", {"to": 1}),
    ("Unsqueeze", "w10 axes", "w11", {}),
    ("Sub", "six w11", "w12", {}),
    ("Add", "w9 w12", "w13", {}),
    ("Softmax", "w13", "w14", {}),
    ("MatMul", "w14 w6", "w15", {}),
    ("Transpose", "w15", "w16", {"perm": (0, 2, 1, 3)}),
    ("Reshape", "w16 flat", "w17", {}),
    ("MatMul", "w17 m32", "w18", {}),
    ("Add", "b32 w18", "w19", {}),
    ("Add", "w19 w2", "w20", {}),
    ("LayerNormalization", "w20 b32 b32", "w21", {}),
    ("Div", "w21 six", "w22", {}),
    ("Erf", "w22", "w23", {}),
    ("Add", "w23 one", "w24", {}),
    ("Mul", "w21 w24", "w25", {}),
    ("Mul", "w25 half", "w26", {}),
    ("ReduceMean", "w26", "w27", {"axes": (-1,)}),
    ("Sub", "w26 w27", "w28", {}),
    ("Pow", "w28 two", "w29", {}),
    ("Sqrt", "w29", "w30", {}),
    ("Shape", "w30", "w31", {}),
    ("Expand", "w27 w31", "w32", {}),
    ("Equal", "w30 w32", "w33", {}),
    ("Where", "w33 w30 w32", "w34", {}),
    ("Slice", "w34 from to", "w35", {}),
    ("Split", "w35", "w36 w37", {"axis": 2}),
    ("Exp", "w36", "w38", {}),
    ("ReduceSum", "w38", "w39", {}),
    ("Squeeze", "w39", "w40", {}),
)
_INTEGERS: Final[Sequence[Node]] = (
    ("DynamicQuantizeLinear", "w2", "i1 i2 i3", {}),
    ("MatMulInteger", "i1 i32 i3", "i4", {}),
    ("Cast", "i4", "i5", {"to": 1}),
    ("Mul", "i5 i2", "i6", {}),
    ("QuantizeLinear", "p3 half zero_u8", "i7", {}),
    ("QLinearConv", "i7 half zero_u8 ipoint half zero_i8 half zero_u8", "i8", {}),
    ("DequantizeLinear", "i8 half zero_u8", "i9", {}),
)
_OUTPUTS: Final = ("p14", "p18", "p22", "w37", "w40", "i6", "i9")


def feed() -> dict[str, Array]:
    return {
        "picture": np.ones((1, 3, 64, 64), np.float32),
        "words": np.arange(16, dtype=np.int64).reshape(1, 16),
    }


def model() -> bytes:
    return onnx_model((*_PICTURE, *_WORDS, *_INTEGERS), _weights(), feed(), _OUTPUTS)


def tiny_model() -> bytes:
    """The ONNX file of one operator. It makes `y`, of so many numbers as `count` says."""
    return onnx_model(
        [("ConstantOfShape", "count", "y", {})], {}, {"count": np.ones(1, np.int64)}, ["y"]
    )


def _weights() -> dict[str, Array]:
    width = _WIDTH
    numbers = {"zero": 0, "half": 0.5, "one": 1, "two": 2, "six": 6}
    return {
        **{name: np.array(value, np.float32) for name, value in numbers.items()},
        "none": np.zeros(0, np.float32),
        "scales": np.array([1, 1, 2, 2], np.float32),
        "k3": np.ones((16, 3, 3, 3), np.float32),
        "k5": np.ones((16, 16, 5, 5), np.float32),
        "depthwise": np.ones((16, 1, 3, 3), np.float32),
        "pointwise": np.ones((16, 16, 1, 1), np.float32),
        "b16": np.ones(16, np.float32),
        "one16": np.ones(16, np.float32),
        "b32": np.ones(width, np.float32),
        "gemm": np.ones((width, 16), np.float32),
        "table": np.ones((width, width), np.float32),
        "m32": np.ones((width, width), np.float32),
        "heads": np.array([1, -1, _HEADS, width // _HEADS], np.int64),
        "flat": np.array([1, -1, width], np.int64),
        "axes": np.array([1, 2], np.int64),
        "from": np.array([0, 0, 0], np.int64),
        "to": np.array([1, 8, width], np.int64),
        "i32": np.ones((width, width), np.uint8),
        "ipoint": np.ones((16, 16, 1, 1), np.int8),
        "zero_u8": np.array(0, np.uint8),
        "zero_i8": np.array(0, np.int8),
    }


# ---- ONNX's protobuf messages, by field number -------------------------------------------------


def onnx_model(
    nodes: Iterable[Node],
    weights: Mapping[str, Array],
    inputs: Mapping[str, Array],
    outputs: Iterable[str],
) -> bytes:
    graph = (
        b"".join(_field(1, _node(each)) for each in nodes)
        + _field(2, "rehearsal")
        + b"".join(_field(5, _tensor(name, array)) for name, array in weights.items())
        + b"".join(_field(11, _value(name, array)) for name, array in inputs.items())
        + b"".join(_field(12, _field(1, name)) for name in outputs)
    )
    return _field(1, _IR_VERSION) + _field(7, graph) + _field(8, _field(2, _OPSET))


def _node(node: Node) -> bytes:
    operator, inputs, outputs, attributes = node
    return (
        b"".join(_field(1, name) for name in inputs.split())
        + b"".join(_field(2, name) for name in outputs.split())
        + _field(4, operator)
        + b"".join(_field(5, _attribute(name, value)) for name, value in attributes.items())
    )


def _attribute(name: str, value: Attribute) -> bytes:
    head = _field(1, name)
    if isinstance(value, int):
        return head + _field(3, value) + _field(20, 2)
    if isinstance(value, str):
        return head + _field(4, value) + _field(20, 3)
    return head + b"".join(_field(8, each) for each in value) + _field(20, 7)


def _tensor(name: str, array: Array) -> bytes:
    dims = b"".join(_field(1, size) for size in array.shape)
    return (
        dims + _field(2, data_type_of(name, array)) + _field(8, name) + _field(9, array.tobytes())
    )


def _value(name: str, array: Array) -> bytes:
    shape = b"".join(_field(1, _field(1, size)) for size in array.shape)
    return _field(1, name) + _field(
        2, _field(1, _field(1, data_type_of(name, array)) + _field(2, shape))
    )


def _field(number: int, content: bytes | str | int) -> bytes:
    if isinstance(content, int):
        return _varint(number << 3) + _varint(content)
    data = content.encode() if isinstance(content, str) else content
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    made.append(number)
    return bytes(made)
