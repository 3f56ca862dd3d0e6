"""What one node costs to run: floating-point operations, working memory, rows read of tables.

FLOPs count a multiplication and an addition as two, as papers on partitioning do. Where a shape
that matters is unknown, or the cost depends on data (loops, branches), the answer is None.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import Final

import onnx

from shoal_compiler.safety import integer_of
from shoal_protocol.row_readers import ROW_READERS

Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shaped:
    """A node with the sizes of its inputs and outputs; None where unknown or absent."""

    node: onnx.NodeProto
    inputs: Sequence[Dims | None]
    outputs: Sequence[Dims | None]

    def integers(self, name: str) -> list[int] | None:
        """An attribute that is a list of integers."""
        return next((list(each.ints) for each in self.node.attribute if each.name == name), None)


STRIP_BYTES: Final = 1 << 18
"""A strip of a convolution's input, spread out, for the two threads that the estimate assumes."""
_SAME_BUFFER_NAMES: Final = "Dropout Flatten Identity Reshape Squeeze Unsqueeze"
_SAME_BUFFER: Final = frozenset(_SAME_BUFFER_NAMES.split(" "))
"""Operators whose output is their input, with another shape at most."""
_IN_PLACE_NAMES: Final = (
    "Cast Celu Clip Elu HardSigmoid LeakyRelu LogSoftmax Relu Selu Sigmoid Softmax Softplus "
    "Softsign Tanh ThresholdedRelu"
)
_IN_PLACE: Final = frozenset(_IN_PLACE_NAMES.split(" "))
"""Operators whose output takes the input's place where both have one shape. Measured: those of two
operands never do, nor do Abs, Erf, Exp, Gelu, Sqrt and their like."""
_LARGEST_ELEMENT: Final = 4
"""Bytes of an element of what models compute with, mostly."""


class _Unknown(Exception):
    """The cost depends on a size that is unknown."""


def flops(shaped: Shaped) -> int | None:
    """FLOPs of one run of the node."""
    count = _COUNTS.get(shaped.node.op_type, _elementwise)
    try:
        return count(shaped)
    except _Unknown:
        return None


def _size(sizes: Sequence[Dims | None], index: int) -> Dims:
    found = sizes[index] if index < len(sizes) else None
    if found is None:
        raise _Unknown
    return found


def _nothing(shaped: Shaped) -> int:
    return 0


def _unknown(shaped: Shaped) -> int:
    raise _Unknown


def _elementwise(shaped: Shaped) -> int:
    return sum(prod(_size(shaped.outputs, index)) for index in range(len(shaped.outputs)))


def _per_element(factor: int) -> Callable[[Shaped], int]:
    return lambda shaped: factor * prod(_size(shaped.outputs, 0))


def _over_input(shaped: Shaped) -> int:
    return prod(_size(shaped.inputs, 0))


def _convolution(weights: int) -> Callable[[Shaped], int]:
    """Each output element is a sum over the kernel and the channels of its group."""
    return lambda shaped: (
        2 * prod(_size(shaped.outputs, 0)) * prod(_size(shaped.inputs, weights)[1:])
    )


def _transposed_convolution(shaped: Shaped) -> int:
    return 2 * prod(_size(shaped.inputs, 0)) * prod(_size(shaped.inputs, 1)[1:])


def _matmul(shaped: Shaped) -> int:
    return 2 * prod(_size(shaped.outputs, 0)) * (_size(shaped.inputs, 0) or (1,))[-1]


def _gemm(shaped: Shaped) -> int:
    rows_first = integer_of(shaped.node, "transA", 0) == 0
    return 2 * prod(_size(shaped.outputs, 0)) * _size(shaped.inputs, 0)[1 if rows_first else 0]


def _pooling(shaped: Shaped) -> int:
    return prod(_size(shaped.outputs, 0)) * prod(shaped.integers("kernel_shape") or [1])


def _recurrent(gates: int) -> Callable[[Shaped], int]:
    """Per step and direction: every gate multiplies the input and the state."""

    def count(shaped: Shaped) -> int:
        steps, batch = _size(shaped.inputs, 0)[:2]
        directions, _, width = _size(shaped.inputs, 1)
        hidden = _size(shaped.inputs, 2)[2]
        return 2 * steps * batch * directions * gates * hidden * (width + hidden)

    return count


def _einsum(shaped: Shaped) -> int:
    """One multiplication and addition for each combination of indices."""
    equation = next(each.s.decode() for each in shaped.node.attribute if each.name == "equation")
    terms = equation.replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, range(len(terms)), strict=True):
        dims = _size(shaped.inputs, operand)
        if "." in term or len(term) != len(dims):
            raise _Unknown
        sizes.update(zip(term, dims, strict=True))
    return 2 * prod(sizes.values())


_MOVES: Final = (
    "Reshape Flatten Squeeze Unsqueeze Transpose Identity Shape Size Concat Split Slice Gather "
    "GatherElements GatherND ScatterND ScatterElements Expand Tile Pad Cast CastLike Constant "
    "ConstantOfShape DepthToSpace SpaceToDepth OneHot NonZero Range ReverseSequence EyeLike Trilu"
)
_COUNTS: Final[Mapping[str, Callable[[Shaped], int]]] = {
    **dict.fromkeys(_MOVES.split(" "), _nothing),
    **dict.fromkeys(("If", "Loop", "Scan", "SequenceMap"), _unknown),
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


def moves(node: onnx.NodeProto) -> bool:
    """Whether a node moves values, whatever their type, and computes nothing with them."""
    return _COUNTS.get(node.op_type) is _nothing and node.op_type not in ("Cast", "CastLike")


def _selected(shaped: Shaped, operand: int) -> int:
    """Elements of what `Where` selects from an operand: its shape and the condition's, joined."""
    condition, values = _size(shaped.inputs, 0), _size(shaped.inputs, operand)
    axes = zip_longest(reversed(condition), reversed(values), fillvalue=1)
    return prod(max(pair) for pair in axes)


def _spread(shaped: Shaped) -> int:
    output, kernel = _size(shaped.outputs, 0), _size(shaped.inputs, 1)
    if prod(kernel[2:]) == 1 and set(shaped.integers("strides") or [1]) == {1}:
        return 0
    filters, places = kernel[0] // integer_of(shaped.node, "group", 1), prod(output[2:])
    return 4 * places * prod(kernel[1:]) if filters > places else STRIP_BYTES


def _attended(shaped: Shaped) -> int:
    """Bytes of what attention works in: the queries, keys and values of each head by themselves,
    and the products of all queries with all keys, but where nothing masks these and the runtime
    makes them piece by piece."""
    node, query = shaped.node, _size(shaped.inputs, 0)
    if node.op_type != "MultiHeadAttention" and node.domain == "com.microsoft":
        (batch, length, _), heads = query, integer_of(node, "num_heads", 1)
        apart = length * _size(shaped.inputs, 1)[1]
        past = 8 if node.op_type == "QAttention" else 4
        keys = length + (_size(shaped.inputs, past)[3] if any(node.input[past : past + 1]) else 0)
        return 4 * batch * (apart + heads * length * keys)
    key = _size(shaped.inputs, 1)
    if len(query) == 3 and len(key) == 3:
        batch, length, width = query
        keys, heads = key[1], integer_of(node, "num_heads", integer_of(node, "q_num_heads", 1))
        apart = length * width + 2 * keys * key[2]
    elif len(query) == len(key) == 4:
        (batch, heads, length, _), keys, apart = query, key[2], 0
    else:
        raise _Unknown
    is_masked = any(node.input[4:]) or integer_of(node, "unidirectional", 0)
    if node.op_type == "MultiHeadAttention" and not is_masked:
        return 4 * batch * apart
    return 4 * batch * (apart + heads * length * keys)


def _transposed_product(shaped: Shaped) -> int:
    return 4 * prod(_size(shaped.inputs, 0)[2:]) * prod(_size(shaped.inputs, 1)[1:])


_WORKSPACES: Final[Mapping[str, Callable[[Shaped], int]]] = {
    **dict.fromkeys(("Conv", "FusedConv"), _spread),
    "ConvTranspose": _transposed_product,
    "Where": lambda shaped: _LARGEST_ELEMENT * sum(_selected(shaped, each) for each in (1, 2)),
    **dict.fromkeys(("HardSwish", "Mish"), lambda shaped: 4 * prod(_size(shaped.outputs, 0))),
    **dict.fromkeys(("Attention", "MultiHeadAttention", "QAttention"), _attended),
    "GroupQueryAttention": lambda shaped: 8 * prod(_size(shaped.inputs, 0)),
    **dict.fromkeys(
        ("MatMulNBits", "MatMulBnb4"),
        lambda shaped: 4 * _size(shaped.inputs, 0)[-1] * _size(shaped.outputs, 0)[-1],
    ),
}


def workspace(shaped: Shaped) -> int:
    """Bytes that ONNX Runtime's CPU kernels need while the node runs; 0 where none are known.

    A convolution whose kernel is more than one element is made a matrix product. With more filters
    than output positions, the input is spread out whole; else in strips of a fixed size per thread.
    A transposed one makes the product first, whole, and gathers from it. `Where` selects from each
    operand before it joins the two; `HardSwish` and `Mish` are made of several nodes. Of weights of
    a few bits, unless they were packed, all are made numbers at once.
    """
    try:
        return _WORKSPACES.get(shaped.node.op_type, _nothing)(shaped)
    except (_Unknown, LookupError, ValueError, ArithmeticError):
        return 0


def in_place(node: onnx.NodeProto, *, same_shape: bool) -> bool:
    """Whether an output may take the place of an input of the same size; `same_shape`: the runtime
    can see that it has that size, before any input is known."""
    return node.op_type in _SAME_BUFFER or (same_shape and node.op_type in _IN_PLACE)


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
        rows = _size(shaped.inputs, place)[0]
        count = prod(_size(shaped.inputs, ROW_READERS[shaped.node.op_type].rows))
    except (_Unknown, IndexError):
        return None
    windows = -(-table_bytes // (rows * WINDOW_BYTES)) if rows else 1
    return min(table_bytes, count * windows * WINDOW_BYTES)
