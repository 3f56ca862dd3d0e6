"""Layers with a large weight, made several that give a part of the output each.

Neither a fragment nor a block can be smaller than a node. So a dense layer or a convolution whose
constant weight is over some size is computed in parts over its output channels, and a `Concat`
joins the parts: exactly, since no sum is split. A part's weight is a range of the file that the
whole is in, or strips of it where channels are columns: nothing is read. Each part costs a call of
a kernel and a copy of its output, so they are no smaller than they have to be: `SLICE_BYTES`.

Where the output is reshaped at once, and keeps its channels last, the parts are: reshaped when they
are joined, all of the output would be there twice more.

A weight may come from nodes that dequantise, cast or transpose an initializer: each part has its
own then, and is fused with them by the runtime as the whole is.

A product that labels describe is parted along one of them (`labels`), and one with several matrices
along the columns of all.

A recurrent layer is parted by its directions alone (`directions`).

A weight that several layers have is parted once for all of them. One that other nodes read too
stays whole, and the layer with it. One exception: the table of embeddings that a language model
also has as its output layer. Of the table only rows are read, so it stays as it is, and the parts
are ranges of it (`Weight.whole`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Final

import onnx

from shoal_compiler.costs import tables_of
from shoal_compiler.directions import in_directions
from shoal_compiler.graph import Graph, Weight, live
from shoal_compiler.labels import labelled
from shoal_compiler.parting import Constant, Parting
from shoal_compiler.safety import integer_of, is_standard

SLICE_BYTES: Final = (16 << 20, 4 << 20, 1 << 20, 256 << 10)
"""The largest weight of a part: at first, and where devices cannot hold such a part with what it
works in."""
CHANNELS: Final = 32
"""Parts have a multiple of so many channels where they can: the widest kernels' steps, and whole
pages of most weights. They have as many where channels are columns, since each part is read out of
all rows."""
MOST_PARTS: Final = 1024


@dataclass(frozen=True, slots=True)
class _Operator:
    """What a layer is made of, by the positions of its inputs. `biases` have an element for each
    channel; `scales` too, or one for all. With `blocks` they have several for each channel, one
    channel after the other. The attribute `counted` grows with the number of channels. So many
    layers are `packed` in one, whose channels are one behind the other."""

    weight: int
    biases: tuple[int, ...] = ()
    scales: tuple[int, ...] = ()
    blocks: bool = False
    counted: str = ""
    packed: int = 1


_CONVOLUTIONS: Final[Mapping[tuple[str, str], _Operator]] = {
    ("", "Conv"): _Operator(1, biases=(2,)),
    ("", "ConvTranspose"): _Operator(1, biases=(2,)),
    ("", "ConvInteger"): _Operator(1, scales=(3,)),
    ("", "QLinearConv"): _Operator(3, biases=(8,), scales=(4, 5)),
    ("com.microsoft", "FusedConv"): _Operator(1, biases=(2,)),
}
_DENSE: Final[Mapping[tuple[str, str], _Operator]] = {
    ("", "Gemm"): _Operator(1, biases=(2,)),
    ("", "MatMul"): _Operator(1),
    ("", "MatMulInteger"): _Operator(1, scales=(3,)),
    ("", "QLinearMatMul"): _Operator(3, scales=(4, 5)),
    ("com.microsoft", "FusedGemm"): _Operator(1, biases=(2,)),
    ("com.microsoft", "FusedMatMul"): _Operator(1),
    ("com.microsoft", "QGemm"): _Operator(3, biases=(6,), scales=(4, 5)),
    ("com.microsoft", "DynamicQuantizeMatMul"): _Operator(1, biases=(4,), scales=(2, 3)),
    ("com.microsoft", "MatMulIntegerToFloat"): _Operator(1, biases=(6,), scales=(3, 5)),
    ("com.microsoft", "MatMulNBits"): _Operator(
        1, biases=(5,), scales=(2, 3), blocks=True, counted="N"
    ),
    ("com.microsoft", "Attention"): _Operator(1, biases=(2,), counted="num_heads", packed=3),
    ("com.microsoft", "QAttention"): _Operator(
        1, biases=(2,), scales=(4, 7), counted="num_heads", packed=3
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A node that can be parted. `axis` is that of the channels in its weight, `joined` that in
    its output; `others` are the inputs that are parted with it."""

    operator: _Operator
    weight: Constant
    axis: int
    channels: int
    parts: Sequence[tuple[int, int]]
    others: tuple[int, ...]
    channels_last: bool
    joined: int

    @property
    def initializer(self) -> tuple[str, int, int]:
        """What is parted, along which of its axes, and how much is packed there."""
        return self.weight.name, self.weight.axes[self.axis], self.operator.packed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reshaping:
    """The node that reshapes a layer's output, with channels last. The tensors `sizes`, joined, are
    the other sizes."""

    node: onnx.NodeProto
    sizes: tuple[str, ...]


def slice_layers(graph: Graph, most_bytes: int) -> Graph:
    """The graph with every layer that has a weight of its own of more than `most_bytes` in parts of
    at most as many, where that is possible."""
    readers = Counter(name for names in graph.reads for name in names)
    readers.update(each.name for each in graph.outputs)
    tables = Counter(name for node in graph.nodes for name in tables_of(node))
    parting = Parting(graph, readers)
    reshapes = _reshapes(graph, readers)
    layers = [_layer(node, parting, most_bytes) for node in graph.nodes]
    alike = Counter(each.initializer for each in layers if each is not None)
    nodes: list[onnx.NodeProto] = []
    waiting: dict[str, Iterator[onnx.NodeProto]] = {}
    for node, layer in zip(graph.nodes, layers, strict=True):
        if node.input and node.input[0] in waiting:
            nodes.extend(waiting.pop(node.input[0]))
            continue
        if (directions := in_directions(parting, node, most_bytes)) is not None:
            nodes.extend(directions)
            continue
        if layer is None:
            nodes.append(node)
            continue
        weight, axis, _ = layer.initializer
        others = readers[weight] - alike[layer.initializer]
        if others > (tables[weight] if axis == 0 else 0):
            nodes.append(node)
            continue
        if others:
            parting.tables.add(weight)
        reshape = reshapes.get(node.output[0]) if layer.channels_last else None
        sizes = None if reshape is None else _leading_sizes(parting, reshape, layer)
        if reshape is None or sizes is None:
            nodes.extend(_in_parts(parting, node, layer))
        else:
            reshaping = _Reshaping(node=reshape, sizes=sizes)
            waiting[node.output[0]] = _in_parts(parting, node, layer, reshaping)
    kept = live(nodes, {each.name for each in graph.outputs})
    nodes = [node for node, each in zip(nodes, kept, strict=True) if each]
    return replace(graph, nodes=tuple(nodes), weights=parting.left())


def _reshapes(graph: Graph, readers: Mapping[str, int]) -> dict[str, onnx.NodeProto]:
    """The nodes that reshape what an earlier node makes and no other reads, by its name."""
    made: set[str] = set()
    found = {}
    for node in graph.nodes:
        reshapes = is_standard(node, "Reshape")
        two = len(node.input) == 2
        if reshapes and two and node.input[0] in made and readers[node.input[0]] == 1:
            found[node.input[0]] = node
        made.update(node.output)
    return found


def _leading_sizes(
    parting: Parting, reshape: onnx.NodeProto, layer: _Layer
) -> tuple[str, ...] | None:
    """Tensors that, joined, are the sizes of a reshaped output but for its channels, which are
    last; None: they are not last, or it is not known."""
    shape = reshape.input[1]
    maker = parting.makers.get(shape)
    joined = list(maker.input) if maker is not None and maker.op_type == "Concat" else [shape]
    known = {name: values for name in joined if (values := parting.integers(name)) is not None}
    end = known.get(joined[-1]) if joined else None
    # A size of 0 stands for that of the layer's output, which a part does not have.
    if not end or end[-1] != layer.channels or any(0 in each for each in known.values()):
        return None
    return (*joined[:-1], parting.add_integers(f"{shape}.leading", end[:-1]))


def _reshape(
    parting: Parting, reshaping: _Reshaping, output: str, number: int, channels: int
) -> list[onnx.NodeProto]:
    """The node that reshapes a part's output, after the one that makes the shape."""
    node = deepcopy(reshaping.node)
    node.name = parting.name(node, number)
    last = parting.add_integers(f"{output}.channels", [channels])
    node.input[0] = output
    node.input[1], makers = parting.joined(f"{output}.shape", (*reshaping.sizes, last))
    node.output[0] = parting.fresh(f"{output}.reshaped")
    return [*makers, node]


def _in_parts(
    parting: Parting,
    node: onnx.NodeProto,
    layer: _Layer,
    reshaping: _Reshaping | None = None,
) -> Iterator[onnx.NodeProto]:
    """The nodes that replace one, and the one that reshapes its output, if there is one."""
    output, outputs = node.output[0], []
    operator, packed = layer.operator, layer.operator.packed
    inputs = {operator.weight: (layer.axis, 1)}
    for place in layer.others:
        other = parting.constant(node.input[place])
        assert other is not None
        along = other.dims[other.only_axis]
        inputs[place] = other.only_axis, along // layer.channels // packed
    for number, (start, end) in enumerate(layer.parts):
        part = deepcopy(node)
        part.name = parting.name(node, number)
        part.output[0] = parting.fresh(f"{output}.{number}")
        for place, (axis, each) in inputs.items():
            name = node.input[place]
            part.input[place], makers = parting.cut(
                name, axis, start * each, end * each, number, packed=packed
            )
            yield from makers
        if operator.counted:
            count = next(each for each in part.attribute if each.name == operator.counted)
            count.i = count.i * (end - start) // layer.channels
        outputs.append(part.output[0])
        yield part
        if reshaping is not None:
            reshape = _reshape(parting, reshaping, part.output[0], number, end - start)
            outputs[-1] = reshape[-1].output[0]
            yield from reshape
    if reshaping is not None:
        output = reshaping.node.output[0]
    parting.drop(node.input[operator.weight])
    yield onnx.helper.make_node("Concat", outputs, [output], name=node.name, axis=layer.joined)


def _layer(node: onnx.NodeProto, parting: Parting, most_bytes: int) -> _Layer | None:
    """A node as a layer that can be parted, and whose weight is so large that it is to be."""
    kind = ("" if node.domain == "ai.onnx" else node.domain, node.op_type)
    by_labels = labelled(node, parting, most_bytes) if is_standard(node, "Einsum") else None
    operator = _CONVOLUTIONS.get(kind) or _DENSE.get(kind)
    if by_labels is not None:
        operator = _Operator(by_labels.weight)
    if operator is None or len(node.input) <= operator.weight or len(node.output) != 1:
        return None
    name = node.input[operator.weight]
    weight = parting.constant(name)
    if weight is None or weight.weight.bytes <= most_bytes or weight.weight.contents is None:
        return None
    axis = by_labels.axis if by_labels else _channel_axis(node, weight.dims)
    if axis is None or list(node.input).count(name) > 1:
        return None
    channels = weight.dims[axis] // operator.packed
    whole = channels // integer_of(node, "num_heads", 0) if operator.packed > 1 else 1
    in_strips = weight.axes[axis] > 0 and not (by_labels and axis + 1 < len(weight.dims))
    least = CHANNELS if in_strips else 1
    parts = list(_parts(weight.weight, least, channels, whole, most_bytes))
    step = gcd(channels, parts[0][1])
    if len(parts) == 1 or not parting.can_cut(weight, axis, step, packed=operator.packed):
        return None
    others = _others(node, operator, parting, channels, step)
    if others is None:
        return None
    return _Layer(
        operator=operator,
        weight=weight,
        axis=axis,
        channels=channels,
        parts=parts,
        others=others,
        channels_last=kind in _DENSE,
        joined=by_labels.joined if by_labels else -1 if kind in _DENSE else 1,
    )


def _channel_axis(node: onnx.NodeProto, dims: Sequence[int]) -> int | None:
    """The axis of the output channels in a layer's weight of that shape."""
    rank, grouped = len(dims), integer_of(node, "group", 1) != 1
    match node.op_type:
        case "Conv" | "ConvInteger" | "FusedConv" | "QLinearConv":
            adds = node.op_type == "FusedConv" and any(node.input[3:])
            axis, fits = 0, rank > 2 and not grouped and not adds
        case "ConvTranspose":
            axis, fits = 1, rank > 2 and not grouped
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
    node: onnx.NodeProto, operator: _Operator, parting: Parting, channels: int, step: int
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
        if elements == 1 and place in operator.scales:
            continue
        along = other.dims[other.only_axis] if other.dims else 0
        several = operator.blocks and place in operator.scales and along and along % channels == 0
        whole = several or elements == along == channels * operator.packed
        step_along = step * (along // channels // operator.packed)
        if not whole or not parting.can_cut(
            other, other.only_axis, step_along, packed=operator.packed
        ):
            return None
        found.append(place)
    return tuple(found)


def _parts(
    weight: Weight, least: int, channels: int, whole: int, most_bytes: int
) -> Iterator[tuple[int, int]]:
    """The channels of each part, `least` or more; so many stay together as are one `whole`."""
    most = max(least, most_bytes * channels // weight.bytes, -(-channels // MOST_PARTS))
    if whole > 1:
        most = max(whole, most - most % whole)
    elif most > CHANNELS:
        most -= most % CHANNELS
    for start in range(0, channels, most):
        yield start, min(start + most, channels)
