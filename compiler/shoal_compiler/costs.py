"""What one node costs to run: floating-point operations, rows that it reads of tables.

FLOPs count a multiplication and an addition as two, as papers on partitioning do. Where a shape
that matters is unknown, or the cost depends on data (loops, branches), the answer is None.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Final

import onnx

from shoal_compiler.nodes import integer_of, subgraphs
from shoal_compiler.shaped import Shaped, Unknown
from shoal_protocol.row_readers import ROW_READERS

_VIEWS: Final = frozenset(("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"))
"""Operators whose output is their input, with another shape at most, also where others need it."""
_SAME_BUFFER: Final = _VIEWS | {"Dropout"}
_IN_PLACE_NAMES: Final = (
    "Cast Celu Clip Elu HardSigmoid LeakyRelu LogSoftmax Relu Selu Sigmoid Softmax Softplus "
    "Softsign Tanh ThresholdedRelu"
)
_IN_PLACE: Final = frozenset(_IN_PLACE_NAMES.split(" "))
"""Operators whose output takes the input's place where both have one shape. Measured: those of two
operands never do, nor do Abs, Erf, Exp, Gelu, Sqrt and their like."""


def flops(shaped: Shaped) -> int | None:
    """FLOPs of one run of the node."""
    count = _COUNTS.get(shaped.node.op_type, _elementwise)
    try:
        return count(shaped)
    except Unknown:
        return None


def _nothing(shaped: Shaped) -> int:
    return 0


def _unknown(shaped: Shaped) -> int:
    raise Unknown


def _elementwise(shaped: Shaped) -> int:
    return sum(prod(shaped.output(index)) for index in range(len(shaped.outputs)))


def _per_element(factor: int) -> Callable[[Shaped], int]:
    return lambda shaped: factor * prod(shaped.output(0))


def _over_input(shaped: Shaped) -> int:
    return prod(shaped.input(0))


def _convolution(weights: int) -> Callable[[Shaped], int]:
    """Each output element is a sum over the kernel and the channels of its group."""
    return lambda shaped: 2 * prod(shaped.output(0)) * prod(shaped.input(weights)[1:])


def _transposed_convolution(shaped: Shaped) -> int:
    return 2 * prod(shaped.input(0)) * prod(shaped.input(1)[1:])


def _choice(shaped: Shaped) -> int:
    """Nothing, if the branches do no more than to hand on what others have made."""
    if not hands_on(shaped.node):
        raise Unknown
    return 0


def _matmul(shaped: Shaped) -> int:
    return 2 * prod(shaped.output(0)) * (shaped.input(0) or (1,))[-1]


def _gemm(shaped: Shaped) -> int:
    rows_first = integer_of(shaped.node, "transA", 0) == 0
    return 2 * prod(shaped.output(0)) * shaped.input(0)[1 if rows_first else 0]


def _pooling(shaped: Shaped) -> int:
    return prod(shaped.output(0)) * prod(shaped.integers("kernel_shape") or [1])


def _recurrent(gates: int) -> Callable[[Shaped], int]:
    """Per step and direction: every gate multiplies the input and the state."""

    def count(shaped: Shaped) -> int:
        steps, batch = shaped.input(0)[:2]
        directions, _, width = shaped.input(1)
        hidden = shaped.input(2)[2]
        return 2 * steps * batch * directions * gates * hidden * (width + hidden)

    return count


def _einsum(shaped: Shaped) -> int:
    """One multiplication and addition for each combination of indices."""
    equation = shaped.text("equation")
    terms = equation.replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, range(len(terms)), strict=True):
        dims = shaped.input(operand)
        if "." in term or len(term) != len(dims):
            raise Unknown
        sizes.update(zip(term, dims, strict=True))
    return 2 * prod(sizes.values())


_MOVES: Final = (
    "Reshape Flatten Squeeze Unsqueeze Transpose Identity Shape Size Concat Split Slice Gather "
    "GatherElements GatherND ScatterND ScatterElements Expand Tile Pad Cast CastLike Constant "
    "ConstantOfShape DepthToSpace SpaceToDepth OneHot NonZero Range ReverseSequence EyeLike Trilu"
)
_COUNTS: Final[Mapping[str, Callable[[Shaped], int]]] = {
    **dict.fromkeys(_MOVES.split(" "), _nothing),
    **dict.fromkeys(("Loop", "Scan", "SequenceMap"), _unknown),
    "If": _choice,
    **dict.fromkeys(("Conv", "FusedConv", "ConvInteger"), _convolution(1)),
    "QLinearConv": _convolution(3),
    "ConvTranspose": _transposed_convolution,
    **dict.fromkeys(("MatMul", "MatMulInteger", "FusedMatMul", "QLinearMatMul"), _matmul),
    **dict.fromkeys(("Gemm", "FusedGemm"), _gemm),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pooling),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"), _over_input),
    **dict.fromkeys(
        ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd"), _over_input
    ),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceSumSquare", "ArgMax", "ArgMin"), _over_input),
    **dict.fromkeys(("Softmax", "LogSoftmax", "LayerNormalization"), _per_element(5)),
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization"), _per_element(5)),
    **dict.fromkeys(("Gelu", "FastGelu", "BiasGelu", "Erf", "Tanh", "Sigmoid"), _per_element(5)),
    **dict.fromkeys(("BatchNormalization", "Resize", "Upsample"), _per_element(2)),
    "LSTM": _recurrent(4),
    "GRU": _recurrent(3),
    "RNN": _recurrent(1),
    "Einsum": _einsum,
    **dict.fromkeys(("Attention", "MultiHeadAttention", "GroupQueryAttention"), _unknown),
}


def hands_on(node: onnx.NodeProto) -> bool:
    """Whether an If does no more than to hand on what others have made."""
    return all(inner.op_type == "Identity" for body in subgraphs(node) for inner in body.node)


def moves(node: onnx.NodeProto) -> bool:
    """Whether a node moves values, whatever their type, and computes nothing with them."""
    return _COUNTS.get(node.op_type) is _nothing and node.op_type not in ("Cast", "CastLike")


def in_place(node: onnx.NodeProto, *, same_shape: bool) -> bool:
    """Whether an output may take the place of an input of the same size; `same_shape`: the runtime
    can see that it has that size, before any input is known."""
    if node.op_type == "If":
        return hands_on(node)
    return node.op_type in _SAME_BUFFER or (same_shape and node.op_type in _IN_PLACE)


def is_view(node: onnx.NodeProto) -> bool:
    """Whether an output is an input, with another shape at most, whoever else needs that."""
    return node.op_type in _VIEWS


WINDOW_BYTES: Final = 64 << 10
"""What the kernel maps around one touched byte of a file that it has in memory."""


def tables_of(node: onnx.NodeProto) -> Mapping[str, int]:
    """The inputs of which a node reads rows, and nothing else of them, by their positions."""
    reader = ROW_READERS.get(node.op_type)
    if reader is None or (reader.axis and integer_of(node, reader.axis, 0) != 0):
        return {}
    places = (place for place in reader.tables if place < len(node.input) and node.input[place])
    return {
        node.input[place]: place
        for place in places
        if list(node.input).count(node.input[place]) == 1
    }


def touched(shaped: Shaped, place: int, table_bytes: int) -> int | None:
    """Bytes of memory that a table takes, mapped from a file, when the node reads rows of it for
    one item; `place` is that of the table, as `tables_of` says. None: it is not known how many rows
    the node reads.
    """
    try:
        rows = shaped.input(place)[0]
        count = prod(shaped.input(ROW_READERS[shaped.node.op_type].rows))
    except (Unknown, IndexError):
        return None
    windows = -(-table_bytes // (rows * WINDOW_BYTES)) if rows else 1
    return min(table_bytes, count * windows * WINDOW_BYTES)
