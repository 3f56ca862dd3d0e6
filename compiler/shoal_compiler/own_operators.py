"""What the operators give that ONNX Runtime has of its own: onnx knows nothing of them.

Of each output, the table says which input it has its type from, and a rule its sizes. An operator
or an output that is not there stays unknown, and so do sizes that the runtime refuses or that
depend on values. An axis that the graph names keeps its name where it stays as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

import onnx
from onnx import helper

from shoal_compiler.nodes import integer_of, integers_of
from shoal_compiler.safety import MAX_ELEMENTS


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis whose size is not known; its name, if it has one. What is worked out from it is not
    known either."""

    name: str = ""

    def __add__(self, other: object) -> "_Axis":
        return self if other == 0 else _Axis()

    def __mul__(self, other: object) -> "_Axis":
        return self if other == 1 else _Axis()

    __radd__, __rmul__, __floordiv__ = __add__, __mul__, __mul__


Size = int | _Axis
Dims = tuple[Size, ...]


class _Unknown(Exception):
    """Sizes do not follow from those of the inputs."""


@dataclass(frozen=True, slots=True)
class _Reads:
    """A node, and the types of what it reads by position; None: it reads nothing there."""

    node: onnx.NodeProto
    kinds: Sequence[onnx.TypeProto | None]

    def has(self, place: int) -> bool:
        """Whether there is such an input, and it is a tensor."""
        kind = self.kinds[place] if place < len(self.kinds) else None
        return kind is not None and kind.HasField("tensor_type")

    def kind(self, place: int) -> onnx.TypeProto.Tensor:
        """An input's type. Raises `_Unknown`."""
        kind = self.kinds[place] if self.has(place) else None
        if kind is None:
            raise _Unknown
        return kind.tensor_type

    def dims(self, place: int) -> Dims:
        """An input's sizes. Raises `_Unknown`."""
        kind = self.kind(place)
        if not kind.HasField("shape"):
            raise _Unknown
        return tuple(
            each.dim_value if each.HasField("dim_value") else _Axis(each.dim_param)
            for each in kind.shape.dim
        )

    def integer(self, name: str, default: int = 0) -> int:
        """An attribute that is an integer."""
        return integer_of(self.node, name, default)


_Sizes = Callable[[_Reads], Sequence[Dims | None]]


def _nothing(reads: _Reads) -> Sequence[Dims | None]:
    return ()


def _first(reads: _Reads) -> Sequence[Dims | None]:
    return [reads.dims(0)]


def _normalised(reads: _Reads) -> Sequence[Dims | None]:
    """The sum, which is the fourth, has the sizes of the first."""
    return [reads.dims(0), None, None, reads.dims(0)]


def _columns(reads: _Reads) -> Sequence[Dims | None]:
    return [(*reads.dims(0)[:-1], reads.integer("N"))]


def _matrix(dims: Dims, *, transposed: int, items_second: int = 0) -> Dims:
    """With items second, the first axis is what the last but one is else."""
    if len(dims) < 2:
        raise _Unknown
    if items_second:
        dims = (*dims[1:-1], dims[0], dims[-1])
    return (*dims[:-2], dims[-1], dims[-2]) if transposed else dims


def _joined(*shapes: Dims) -> Dims:
    """What tensors of these sizes are together, where the shorter ones have no first axes."""
    return tuple(map(_common, zip_longest(*map(reversed, shapes), fillvalue=1)))[::-1]


def _common(sizes: Sequence[Size]) -> Size:
    """The size of an axis that several tensors have; what has one element is repeated."""
    first, *others = {each for each in sizes if each != 1} or {1}
    if not others and first != _Axis():
        return first
    numbers = [each for each in (first, *others) if isinstance(each, int)]
    if len(numbers) > 1:
        raise _Unknown
    return next(iter(numbers), _Axis())  # a size that is not known is 1, or the same


def _product(reads: _Reads) -> Sequence[Dims | None]:
    one, two = (
        _matrix(
            reads.dims(place),
            transposed=reads.integer(f"trans{operand}"),
            items_second=reads.integer(f"transBatch{operand}"),
        )
        for place, operand in enumerate("AB")
    )
    return [(*_joined(one[:-2], two[:-2]), one[-2], two[-1])]


def _quantised_product(reads: _Reads) -> Sequence[Dims | None]:
    one = _matrix(reads.dims(0), transposed=reads.integer("transA"))
    two = _matrix(reads.dims(3), transposed=reads.integer("transB"))
    return [(one[0], two[1])]


def _concatenated(reads: _Reads) -> Sequence[Dims | None]:
    """Each input has a scale and a zero point behind it."""
    first, *others = (reads.dims(place) for place in range(2, len(reads.kinds), 3))
    axis = reads.integer("axis") % len(first)
    joined = first[axis] + sum(other[axis] for other in others)
    return [(*first[:axis], joined, *first[axis + 1 :])]


def _pooled(reads: _Reads) -> Sequence[Dims | None]:
    """Every axis but those of items and channels."""
    items, *sizes = reads.dims(0)
    if reads.integer("channels_last"):
        return [(items, *[1] * (len(sizes) - 1), sizes[-1])]
    return [(items, sizes[0], *[1] * (len(sizes) - 1))]


def _chosen(reads: _Reads) -> Sequence[Dims | None]:
    return [_joined(reads.dims(0), reads.dims(1), reads.dims(4))]


def _embedded(reads: _Reads) -> Sequence[Dims | None]:
    ids = reads.dims(0)
    rows = (*ids, reads.dims(2)[1])
    return [rows, ids[:1], rows]


def _gathered(reads: _Reads) -> Sequence[Dims | None]:
    """Rows of a table that is quantised in blocks; of several numbers to a byte, last axes are
    longer than they are stored."""
    table, bits = reads.dims(0), reads.integer("bits", 4)
    packed = 8 // bits if reads.kind(0).elem_type == onnx.TensorProto.UINT8 else 1
    axis = reads.integer("gather_axis") % len(table)
    table = (*table[:-1], table[-1] * packed)
    return [(*table[:axis], *reads.dims(1), *table[axis + 1 :])]


def _attention(past: int) -> _Sizes:
    """Queries, keys and values come from one product; `past` is the input of the cache."""

    def sizes(reads: _Reads) -> Sequence[Dims | None]:
        (batch, length, _), heads = reads.dims(0), reads.integer("num_heads")
        widths = integers_of(reads.node, "qkv_hidden_sizes")
        width = widths[2] if widths else reads.dims(1)[1] // 3
        cached = reads.dims(past)[3] if reads.has(past) else 0
        cached += 0 if reads.integer("past_present_share_buffer") else length
        present = (2, batch, heads, cached, width // heads)
        return [(batch, length, width), present]

    return sizes


def _heads(reads: _Reads) -> Sequence[Dims | None]:
    """Keys and values of several heads may be packed, or have an axis for heads already."""
    query, heads = reads.dims(0), reads.integer("num_heads")
    if len(query) == 5 or (reads.has(1) and len(reads.dims(1)) == 5):
        return [(*query[:2], query[2] * (query[4] if len(query) == 5 else 1))]
    key, value = reads.dims(1), reads.dims(2)
    width = value[-1] if len(value) == 3 else heads * value[-1]
    length = key[1] if len(key) == 3 else key[2]
    if reads.has(6):
        length += reads.dims(6)[2]
    caches = [(query[0], heads, length, each // heads) for each in (query[-1], width)]
    return [(*query[:2], width), *caches]


def _grouped(reads: _Reads) -> Sequence[Dims | None]:
    """Several heads of queries have keys and values together; without these, all are packed."""
    (batch, length, width), heads = reads.dims(0), reads.integer("num_heads")
    groups = reads.integer("kv_num_heads")
    head = width // (heads if reads.has(1) else heads + 2 * groups)
    past = reads.dims(3)[2] if reads.has(3) else 0
    cache = (batch, groups, past + length, head)
    return [(batch, length, heads * head), cache, cache]


_OUTPUTS: Final[Mapping[str, tuple[Sequence[int], _Sizes]]] = {
    **dict.fromkeys(("BiasGelu", "FastGelu", "Gelu", "QuickGelu"), ((0,), _first)),
    **dict.fromkeys(("QLinearLeakyRelu", "QLinearSigmoid", "QLinearSoftmax"), ((0,), _first)),
    **dict.fromkeys(("Inverse", "MoE", "QMoE", "RotaryEmbedding", "Trilu"), ((0,), _first)),
    **dict.fromkeys(
        ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
        ((0, -1, -1, 0), _normalised),
    ),
    "SimplifiedLayerNormalization": ((1,), _first),
    "DequantizeLinear": ((1,), _first),
    "QuantizeLinear": ((2,), _first),
    "QLinearGlobalAveragePool": ((0,), _pooled),
    **dict.fromkeys(("NhwcMaxPool", "QLinearAveragePool", "QLinearReduceMean"), ((0,), _nothing)),
    "QLinearConcat": ((2,), _concatenated),
    "QLinearWhere": ((1,), _chosen),
    "QGemm": ((8,), _quantised_product),
    **dict.fromkeys(("FusedMatMul", "TransposeMatMul"), ((0,), _product)),
    "MatMulIntegerToFloat": ((2,), _product),
    **dict.fromkeys(("MatMulBnb4", "MatMulNBits"), ((0,), _columns)),
    "EmbedLayerNormalization": ((2, 0, 2), _embedded),
    "GatherBlockQuantized": ((2,), _gathered),
    "Attention": ((0, 0), _attention(4)),
    "QAttention": ((3, 3), _attention(8)),
    "MultiHeadAttention": ((0, 0, 0), _heads),
    "DecoderMaskedMultiHeadAttention": ((0, 0, 0), _nothing),
    "GroupQueryAttention": ((0, 3, 4), _grouped),
    "SparseAttention": ((0, 3, 4), _nothing),
    "LinearAttention": ((0, 3), _nothing),
    "CausalConvWithState": ((0, 0), _nothing),
}
"""For each output the input that it has its type from (-1: it is not said), and all their sizes."""
_OTHERWISE: Final = {"QGemm": 1}
"""Which input that is where the other is not there: the first, but for these."""


def outputs_of(
    node: onnx.NodeProto, kinds: Sequence[onnx.TypeProto | None]
) -> Mapping[str, onnx.TypeProto]:
    """What is known of a node's outputs. `kinds` are the types of its inputs by position."""
    origins, rule = _OUTPUTS.get(node.op_type, ((), _nothing))
    reads = _Reads(node, kinds)
    try:
        sizes = rule(reads)
    except (_Unknown, LookupError, ValueError, ArithmeticError):
        sizes = ()
    found = {}
    for place, (name, origin) in enumerate(zip(node.output, origins, strict=False)):
        # A cache that begins empty, or a product that is given as numbers.
        given = origin if reads.has(origin) else _OTHERWISE.get(node.op_type, 0)
        if not name or origin < 0 or not reads.has(given):
            continue
        known = sizes[place] if place < len(sizes) else None
        if known is not None and not all(map(_makes_sense, known)):
            known = None
        axes = None
        if known is not None:
            axes = [each.name or None if isinstance(each, _Axis) else each for each in known]
        found[name] = helper.make_tensor_type_proto(reads.kind(given).elem_type, axes)
    return found


def _makes_sense(size: Size) -> bool:
    """Attributes may say anything."""
    return isinstance(size, _Axis) or 0 <= size < MAX_ELEMENTS
