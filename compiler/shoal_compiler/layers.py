"""Which nodes are layers that can be computed in parts, and how each is.

A layer has a constant weight, and channels: output channels of a convolution, columns of a product,
or rows of one whose weight is on its left. A part has some of the channels, and of each other input
what these need.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Final

import onnx

from shoal_compiler.labels import labelled
from shoal_compiler.nodes import integer_of, is_standard
from shoal_compiler.parting import Constant, Parting

CHANNELS: Final = 32
"""Parts have a multiple of so many channels where they can: the widest kernels' steps, and whole
pages of most weights. They have as many where channels are columns, since each part is read out of
all rows."""
MOST_PARTS: Final = 1024
_FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Operator:
    """What a layer is made of, by the positions of its inputs. `biases` have an element for each
    channel; `scales` too, or one for all. With `blocks` they have several for each channel, one
    channel after the other. `added` has all that the output has. The attribute `counted` grows with
    the number of channels. So many layers are `packed` in one, whose channels are one behind the
    other."""

    weight: int
    biases: tuple[int, ...] = ()
    scales: tuple[int, ...] = ()
    blocks: bool = False
    added: int | None = None
    counted: str = ""
    packed: int = 1


_CONVOLUTIONS: Final[Mapping[tuple[str, str], Operator]] = {
    ("", "Conv"): Operator(1, biases=(2,)),
    ("", "ConvTranspose"): Operator(1, biases=(2,)),
    ("", "ConvInteger"): Operator(1, scales=(3,)),
    ("", "QLinearConv"): Operator(3, biases=(8,), scales=(4, 5)),
    ("com.microsoft", "FusedConv"): Operator(1, biases=(2,), added=3),
}
_DENSE: Final[Mapping[tuple[str, str], Operator]] = {
    ("", "Gemm"): Operator(1, biases=(2,)),
    ("", "MatMul"): Operator(1),
    ("", "MatMulInteger"): Operator(1, scales=(3,)),
    ("", "QLinearMatMul"): Operator(3, scales=(4, 5)),
    ("com.microsoft", "FusedGemm"): Operator(1, biases=(2,)),
    ("com.microsoft", "FusedMatMul"): Operator(1),
    ("com.microsoft", "QGemm"): Operator(3, biases=(6,), scales=(4, 5)),
    ("com.microsoft", "DynamicQuantizeMatMul"): Operator(1, biases=(4,), scales=(2, 3)),
    ("com.microsoft", "MatMulIntegerToFloat"): Operator(1, biases=(6,), scales=(3, 5)),
    ("com.microsoft", "MatMulNBits"): Operator(
        1, biases=(5,), scales=(2, 3), blocks=True, counted="N"
    ),
    ("com.microsoft", "Attention"): Operator(1, biases=(2,), counted="num_heads", packed=3),
    ("com.microsoft", "QAttention"): Operator(
        1, biases=(2,), scales=(4, 7), counted="num_heads", packed=3
    ),
}
_TRANSPOSED_GROUPS: Final = Operator(1, scales=(2,), blocks=True)
"""A transposed convolution of several groups: those are its channels, and each has several."""
_ON_THE_LEFT: Final[Mapping[tuple[str, str], Operator]] = {
    ("", "MatMul"): Operator(0),
    ("", "MatMulInteger"): Operator(0),
    ("", "QLinearMatMul"): Operator(0),
    ("com.microsoft", "FusedMatMul"): Operator(0),
}
"""Products whose weight may be the first operand, too; its rows are channels then, and the runtime
takes one scale and one zero point for all of them."""
_SPREADING: Final = frozenset(("Gemm", "FusedGemm"))
"""They take a bias of one element for all channels as well."""
_RIGHT: Final[Mapping[str, int]] = {"QLinearMatMul": 3}
"""The second operand, where it is not the second input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A node that can be parted. `axis` is that of the channels in its weight, `joined` that in
    its output; `others` are the inputs that are parted with it. Each `grouped` channels read
    `depth` channels of the input; 0: all read all."""

    operator: Operator
    weight: Constant
    axis: int
    channels: int
    parts: Sequence[tuple[int, int]]
    others: tuple[int, ...]
    channels_last: bool
    joined: int
    grouped: int = 0
    depth: int = 0

    @property
    def initializer(self) -> tuple[str, int, int]:
        """What is parted, along which of its axes, and how much is packed there."""
        return self.weight.name, self.weight.axes[self.axis], self.operator.packed

    def slices(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The inputs of which a part reads some channels, those of the second axis, and which."""
        if self.grouped:
            first, last = start // self.grouped, -(-end // self.grouped)
            yield 0, first * self.depth, last * self.depth
        if self.operator.added is not None:
            yield self.operator.added, start, end


@dataclass(frozen=True, slots=True)
class _Way:
    """How a node may be parted: along which axis of its weight, and of its output."""

    operator: Operator
    axis: int
    joined: int
    channels_last: bool = False


def layer_of(node: onnx.NodeProto, parting: Parting, most_bytes: int) -> Layer | None:
    """A node as a layer that can be parted, and that is so large that it is to be."""
    way = _way(node, parting, most_bytes) if len(node.output) == 1 else None
    if way is None:
        return None
    operator, axis = way.operator, way.axis
    weight = parting.constant(node.input[operator.weight])
    assert weight is not None
    groups = integer_of(node, "group", 1)
    transposed = operator is _TRANSPOSED_GROUPS
    channels = groups if transposed else weight.dims[axis] // operator.packed
    whole = channels // integer_of(node, "num_heads", 0) if operator.packed > 1 else 1
    if groups < 1 or channels % groups:
        return None
    grouped = channels // groups if groups > 1 else 0
    most = max(1, most_bytes * channels // _size(node, weight, parting))
    parts = list(_parts(weight, axis, channels, whole, grouped, most))
    step = gcd(*(end for _, end in parts))
    each = weight.dims[axis] // channels // operator.packed
    if len(parts) == 1 or not parting.can_cut(weight, axis, step * each, packed=operator.packed):
        return None
    others = _others(node, operator, parting, channels, step)
    if others is None:
        return None
    has_added = operator.added is not None and any(node.input[operator.added :][:1])
    return Layer(
        operator=operator if has_added else replace(operator, added=None),
        weight=weight,
        axis=axis,
        channels=channels,
        parts=parts,
        others=others,
        channels_last=way.channels_last,
        joined=way.joined,
        grouped=grouped,
        depth=each if transposed or not grouped else weight.dims[1],
    )


def _way(node: onnx.NodeProto, parting: Parting, most_bytes: int) -> _Way | None:
    """How a node whose weight is large may be parted; None: it has none, or it may not be."""
    kind = ("" if node.domain == "ai.onnx" else node.domain, node.op_type)
    if is_standard(node, "Einsum"):
        by_labels = labelled(node, parting, most_bytes)
        if by_labels is None:
            return None
        way = _Way(Operator(by_labels.weight), by_labels.axis, by_labels.joined)
        return way if _large(node, way.operator, parting, most_bytes) else None
    operator = _CONVOLUTIONS.get(kind) or _DENSE.get(kind)
    if operator and node.op_type == "ConvTranspose" and integer_of(node, "group", 1) > 1:
        operator = _TRANSPOSED_GROUPS
    if operator and (weight := _large(node, operator, parting, most_bytes)):
        axis, last = _channel_axis(node, weight.dims), kind in _DENSE
        return None if axis is None else _Way(operator, axis, -1 if last else 1, last)
    operator = _ON_THE_LEFT.get(kind)
    if operator and (weight := _large(node, operator, parting, most_bytes)):
        return _by_rows(node, operator, weight, parting)
    return None


def _large(
    node: onnx.NodeProto, operator: Operator, parting: Parting, most_bytes: int
) -> Constant | None:
    """The weight of a node, if that or what it works in is large, and nothing else of it reads
    that."""
    name = next(iter(node.input[operator.weight :]), "")
    weight = parting.constant(name)
    if weight is None or weight.weight.contents is None:
        return None
    if _size(node, weight, parting) <= most_bytes or list(node.input).count(name) > 1:
        return None
    return weight


def _size(node: onnx.NodeProto, weight: Constant, parting: Parting) -> int:
    """Bytes of what parts have less of: the weight, or what a transposed convolution multiplies
    before it adds that up, as far as that is more than its output: to join parts takes another. Of
    groups, it has that of one after the other."""
    if node.op_type != "ConvTranspose" or integer_of(node, "group", 1) > 1:
        return weight.weight.bytes
    taken, given = (parting.sizes(name) for name in (node.input[0], node.output[0]))
    if taken is None or given is None:
        return weight.weight.bytes
    numbers = prod(taken[2:]) * prod(weight.dims[1:]) - prod(given)
    return max(weight.weight.bytes, _FLOAT_BYTES * numbers)


def _by_rows(
    node: onnx.NodeProto, operator: Operator, weight: Constant, parting: Parting
) -> _Way | None:
    """A product whose weight is on the left, if it is known where its rows are in the output."""
    turned = any(integer_of(node, each, 0) for each in ("transA", "transBatchA", "transBatchB"))
    right = node.input[_RIGHT.get(node.op_type, 1) :]
    axes = parting.rank(right[0]) if right and len(weight.dims) > 1 and not turned else None
    if not axes:
        return None
    return _Way(operator, len(weight.dims) - 2, -1 if axes == 1 else -2)


def _channel_axis(node: onnx.NodeProto, dims: Sequence[int]) -> int | None:
    """The axis of the output channels in a layer's weight of that shape."""
    rank = len(dims)
    match node.op_type:
        case "Conv" | "ConvInteger" | "FusedConv" | "QLinearConv":
            axis, fits = 0, rank > 2
        case "ConvTranspose":
            groups = integer_of(node, "group", 1)
            axis, fits = int(groups == 1), rank > 2 and groups > 0 and dims[0] % groups == 0
        case "Attention" | "QAttention":
            heads = integer_of(node, "num_heads", 0)
            axis, fits = 1, rank == 2 and heads > 0 and dims[1] % (3 * heads) == 0
            fits = fits and _projects_alone(node)
        case "MatMul":
            axis, fits = rank - 1, rank > 1
        case "MatMulNBits":
            axis, fits = 0, rank == 3 and integer_of(node, "N", 0) == dims[0]
        case _:
            axis = 0 if integer_of(node, "transB", 0) else 1
            fits = rank == 2 and not integer_of(node, "transBatchB", 0)
    return axis if fits else None


def _projects_alone(node: onnx.NodeProto) -> bool:
    """Whether each head of an attention comes from its columns of the weight, and from what all
    heads have alike: there is no cache, nothing is added to products, and values are as wide."""
    cached_from = 8 if node.op_type == "QAttention" else 4
    differs = any(each.name in ("qkv_hidden_sizes", "do_rotary") for each in node.attribute)
    return not any(node.input[cached_from:]) and not differs


def _others(
    node: onnx.NodeProto, operator: Operator, parting: Parting, channels: int, step: int
) -> tuple[int, ...] | None:
    """The inputs that are parted with the weight; None: some input should be and cannot. Parts are
    multiples of `step` channels."""
    found = []
    for place in (*operator.biases, *operator.scales):
        if place >= len(node.input) or not node.input[place]:
            continue
        other = parting.constant(node.input[place])
        if other is None:
            return None
        elements = prod(other.dims)
        if elements == 1 and (place in operator.scales or node.op_type in _SPREADING):
            continue
        along = other.dims[other.only_axis] if other.dims else 0
        several = operator.blocks and place in operator.scales and along and along % channels == 0
        if place in operator.biases and other.only_axis != len(other.dims) - 1:
            return None  # it has an element for each row
        whole = several or elements == along == channels * operator.packed
        step_along = step * (along // channels // operator.packed)
        if not whole or not parting.can_cut(
            other, other.only_axis, step_along, packed=operator.packed
        ):
            return None
        found.append(place)
    return tuple(found)


def _parts(
    weight: Constant, axis: int, channels: int, whole: int, grouped: int, most: int
) -> Iterator[tuple[int, int]]:
    """The channels of each part: at most `most`, if that can be, and of one size as nearly as that
    can be, so that what one works in has room for the next. So many stay together as are one
    `whole`; those that are `grouped` do, or are parted by themselves."""
    tensor, along = weight.weight.tensor, weight.axes[axis]
    in_one_piece = prod(tensor.dims[along + 1 :])
    least = max(1, CHANNELS // in_one_piece) if along and in_one_piece else 1
    most, within = max(least, most, -(-channels // MOST_PARTS)), channels
    if most < grouped:
        within = grouped
    elif grouped:
        whole = grouped
    together = whole if whole > 1 else CHANNELS if most >= CHANNELS else 1
    most = max(together, most - most % together)
    parts = -(-within // most)
    size = min(most, -(-within // (parts * together)) * together)
    for first in range(0, channels, within):
        end = first + within
        yield from ((start, min(start + size, end)) for start in range(first, end, size))
