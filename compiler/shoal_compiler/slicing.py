"""Layers with a large weight, made several that give a part of the output each.

Neither a fragment nor a block can be smaller than a node. So a dense layer or a convolution whose
constant weight is over some size is computed in parts over its output channels, and a `Concat`
joins the parts: exactly, since no sum is split. A part's weight is a range of the file that the
whole is in, or strips of it where channels are columns: nothing is read. Each part costs a call of
a kernel and a copy of its output, so they are no smaller than they have to be: `SLICE_BYTES`.

Where the output is reshaped at once, and keeps its channels last, the parts are: reshaped when they
are joined, all of the output would be there twice more.

A weight may come from a node that dequantises or casts an initializer: each part has one of its own
then, and is fused with it by the runtime as the whole is.

A weight that other nodes read too stays whole, and the layer with it. One exception: the table of
embeddings that a language model also has as its output layer. Of the table only rows are read, so
it stays as it is, and the parts are ranges of it (`Weight.whole`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import numpy as np
import onnx
from onnx import numpy_helper

from shoal_compiler.graph import Graph, Weight, live
from shoal_compiler.safety import Range, all_nodes, bits_of

SLICE_BYTES: Final = (16 << 20, 4 << 20, 1 << 20)
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
    channel after the other, and an attribute N has the number of channels."""

    weight: int
    biases: tuple[int, ...] = ()
    scales: tuple[int, ...] = ()
    blocks: bool = False


_CONVOLUTIONS: Final[Mapping[tuple[str, str], _Operator]] = {
    ("", "Conv"): _Operator(1, biases=(2,)),
    ("", "ConvTranspose"): _Operator(1, biases=(2,)),
    ("", "ConvInteger"): _Operator(1, scales=(3,)),
    ("", "QLinearConv"): _Operator(3, biases=(8,), scales=(4, 5)),
}
_DENSE: Final[Mapping[tuple[str, str], _Operator]] = {
    ("", "Gemm"): _Operator(1, biases=(2,)),
    ("", "MatMul"): _Operator(1),
    ("", "MatMulInteger"): _Operator(1, scales=(3,)),
    ("", "QLinearMatMul"): _Operator(3, scales=(4, 5)),
    ("com.microsoft", "DynamicQuantizeMatMul"): _Operator(1, biases=(4,), scales=(2, 3)),
    ("com.microsoft", "MatMulIntegerToFloat"): _Operator(1, biases=(6,), scales=(3, 5)),
    ("com.microsoft", "MatMulNBits"): _Operator(1, biases=(5,), scales=(2, 3), blocks=True),
}


@dataclass(frozen=True, slots=True)
class _Constant:
    """What a layer reads that is known: an initializer, or what `maker` makes of it."""

    weight: Weight
    maker: onnx.NodeProto | None

    @property
    def dims(self) -> Sequence[int]:
        return self.weight.tensor.dims

    @property
    def only_axis(self) -> int:
        """The first axis that is more than one long."""
        return next((axis for axis, size in enumerate(self.dims) if size > 1), len(self.dims) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A node that can be parted. `axis` is that of the channels in its weight; `others` are the
    inputs that are parted with it."""

    operator: _Operator
    weight: str
    axis: int
    channels: int
    parts: Sequence[tuple[int, int]]
    others: tuple[int, ...]
    channels_last: bool


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
    tables = Counter(node.input[0] for node in graph.nodes if _reads_rows(node))
    parting = _Parting(graph, readers)
    reshapes = _reshapes(graph, readers)
    nodes: list[onnx.NodeProto] = []
    waiting: dict[str, Iterator[onnx.NodeProto]] = {}
    for node in graph.nodes:
        if node.input and node.input[0] in waiting:
            nodes.extend(waiting.pop(node.input[0]))
            continue
        layer = _layer(node, parting, most_bytes)
        others = readers[layer.weight] - 1 if layer is not None else 0
        if layer is None or others > (tables[layer.weight] if layer.axis == 0 else 0):
            nodes.append(node)
            continue
        reshape = reshapes.get(node.output[0]) if layer.channels_last else None
        sizes = None if reshape is None else parting.leading_sizes(reshape, layer)
        if reshape is None or sizes is None:
            nodes.extend(parting.parts(node, layer, keep_whole=others > 0))
        else:
            reshaping = _Reshaping(node=reshape, sizes=sizes)
            parts = parting.parts(node, layer, keep_whole=others > 0, reshaping=reshaping)
            waiting[node.output[0]] = parts
    kept = live(nodes, {each.name for each in graph.outputs})
    nodes = [node for node, each in zip(nodes, kept, strict=True) if each]
    return replace(graph, nodes=tuple(nodes), weights=parting.weights)


def _reshapes(graph: Graph, readers: Mapping[str, int]) -> dict[str, onnx.NodeProto]:
    """The nodes that reshape what an earlier node makes and no other reads, by its name."""
    made: set[str] = set()
    found = {}
    for node in graph.nodes:
        reshapes = node.op_type == "Reshape" and node.domain in ("", "ai.onnx")
        two = len(node.input) == 2
        if reshapes and two and node.input[0] in made and readers[node.input[0]] == 1:
            found[node.input[0]] = node
        made.update(node.output)
    return found


class _Parting:
    """Makes parts of layers, and their weights."""

    def __init__(self, graph: Graph, readers: Mapping[str, int]) -> None:
        self.weights = dict(graph.weights)
        self._readers = readers
        self._makers = {name: node for node in graph.nodes for name in node.output}
        self._taken = {*graph.sparse, *graph.weights, *(each.name for each in graph.inputs)}
        self._names: set[str] = set()
        for node in all_nodes(graph.nodes):
            self._taken.update((*node.input, *node.output))
            self._names.add(node.name)

    def constant(self, name: str) -> _Constant | None:
        """What a node reads by that name, if it is known."""
        if (weight := self.weights.get(name)) is not None:
            return _Constant(weight, None)
        maker = self._makers.get(name)
        if maker is None or maker.domain not in ("", "ai.onnx") or self._readers[name] > 1:
            return None
        inputs = [self.weights.get(each) for each in maker.input if each]
        if not inputs or inputs[0] is None or self._readers[maker.input[0]] > 1:
            return None
        if None in inputs or maker.op_type not in ("DequantizeLinear", "Cast"):
            return None
        return _Constant(inputs[0], maker)

    def can_cut(self, constant: _Constant, axis: int) -> bool:
        """Whether a constant can be parted along an axis."""
        if _has_split_bytes(constant.weight):
            return False
        maker = constant.maker
        if maker is None or maker.op_type == "Cast":
            return True
        scales = [self.weights[each] for each in maker.input[1:] if each]
        return all(self._along(constant, each, axis) is not None for each in scales)

    def _along(self, constant: _Constant, scale: Weight, axis: int) -> int | None:
        """The axis along which the scale, or the zero point, of a constant is parted with it; -1:
        it is not; None: nothing can be parted."""
        assert constant.maker is not None
        attributes = {each.name: each.i for each in constant.maker.attribute}
        rank, dims = len(constant.dims), scale.tensor.dims
        if _has_split_bytes(scale):
            return None
        if prod(dims) == 1:
            return -1
        if rank == 0:
            return None
        if attributes.get("block_size", 0):
            fits = len(dims) == rank and dims[axis] == constant.dims[axis]
            return axis if fits else None
        if attributes.get("axis", 1) % rank != axis:
            return -1
        return 0 if list(dims) == [constant.dims[axis]] else None

    def cut(
        self, name: str, axis: int, start: int, end: int, number: int
    ) -> tuple[str, list[onnx.NodeProto]]:
        """The name of a part of a constant, `[start, end)` along an axis, and the node that makes
        it, if there is one."""
        constant = self.constant(name)
        assert constant is not None
        maker = constant.maker
        if maker is None:
            part = self._fresh(f"{name}.{number}")
            self.weights[part] = _part(constant.weight, part, axis, start, end)
            return part, []
        node = onnx.NodeProto()
        node.CopyFrom(maker)
        node.name = self._name(maker, number)
        node.input[0], _ = self.cut(maker.input[0], axis, start, end, number)
        for place, scale in enumerate(maker.input[1:], 1):
            along = self._along(constant, self.weights[scale], axis) if scale else -1
            assert along is not None
            if along >= 0:
                node.input[place], _ = self.cut(scale, along, start, end, number)
        node.output[0] = self._fresh(f"{name}.{number}")
        return node.output[0], [node]

    def leading_sizes(self, reshape: onnx.NodeProto, layer: _Layer) -> tuple[str, ...] | None:
        """Tensors that, joined, are the sizes of a reshaped output but for its channels, which are
        last; None: they are not last, or it is not known."""
        shape = reshape.input[1]
        maker = self._makers.get(shape)
        joined = list(maker.input) if maker is not None and maker.op_type == "Concat" else [shape]
        known = {name: self._integers(name) for name in joined if self._is_shape(name)}
        end = known.get(joined[-1]) if joined else None
        # A size of 0 stands for that of the layer's output, which a part does not have.
        if not end or end[-1] != layer.channels or any(0 in each for each in known.values()):
            return None
        return (*joined[:-1], self._add_integers(f"{shape}.leading", end[:-1]))

    def _reshape(
        self, reshaping: _Reshaping, output: str, number: int, channels: int
    ) -> tuple[onnx.NodeProto, onnx.NodeProto]:
        """The nodes that reshape a part's output."""
        node = onnx.NodeProto()
        node.CopyFrom(reshaping.node)
        node.name = self._name(node, number)
        last = self._add_integers(f"{output}.channels", [channels])
        node.input[0], node.input[1] = output, self._fresh(f"{output}.shape")
        node.output[0] = self._fresh(f"{output}.reshaped")
        sizes = [*reshaping.sizes, last]
        return onnx.helper.make_node("Concat", sizes, [node.input[1]], axis=0), node

    def _is_shape(self, name: str) -> bool:
        weight = self.weights.get(name)
        return weight is not None and weight.tensor.data_type == onnx.TensorProto.INT64

    def _integers(self, name: str) -> list[int]:
        values = numpy_helper.to_array(self.weights[name].loaded())
        return [int(each) for each in values.reshape(-1)]

    def _add_integers(self, name: str, values: Sequence[int]) -> str:
        name = self._fresh(name)
        tensor = numpy_helper.from_array(np.array(values, np.int64), name)
        self.weights[name] = Weight(tensor, None)
        return name

    def parts(
        self,
        node: onnx.NodeProto,
        layer: _Layer,
        *,
        keep_whole: bool,
        reshaping: _Reshaping | None = None,
    ) -> Iterator[onnx.NodeProto]:
        """The nodes that replace one, and the one that reshapes its output, if there is one."""
        output, outputs = node.output[0], []
        inputs = {layer.operator.weight: (layer.axis, 1)}
        for place in layer.others:
            other = self.constant(node.input[place])
            assert other is not None
            inputs[place] = other.only_axis, other.dims[other.only_axis] // layer.channels
        for number, (start, end) in enumerate(layer.parts):
            part = onnx.NodeProto()
            part.CopyFrom(node)
            part.name = self._name(node, number)
            part.output[0] = self._fresh(f"{output}.{number}")
            for place, (axis, each) in inputs.items():
                name = node.input[place]
                part.input[place], makers = self.cut(name, axis, start * each, end * each, number)
                yield from makers
            if keep_whole:
                name = part.input[layer.operator.weight]
                self.weights[name] = replace(self.weights[name], whole=layer.weight)
            if layer.operator.blocks:
                next(each for each in part.attribute if each.name == "N").i = end - start
            outputs.append(part.output[0])
            yield part
            if reshaping is not None:
                reshape = self._reshape(reshaping, part.output[0], number, end - start)
                outputs[-1] = reshape[-1].output[0]
                yield from reshape
        if reshaping is not None:
            output = reshaping.node.output[0]
        if not keep_whole and (whole := self.constant(layer.weight)) is not None:
            del self.weights[whole.weight.tensor.name]
        axis = -1 if layer.channels_last else 1
        yield onnx.helper.make_node("Concat", outputs, [output], name=node.name, axis=axis)

    def _name(self, node: onnx.NodeProto, number: int) -> str:
        """A name for a part of a node."""
        return _unlike(f"{node.name or node.output[0]}.{number}", self._names)

    def _fresh(self, name: str) -> str:
        """A name for a tensor."""
        return _unlike(name, self._taken)


def _unlike(name: str, taken: set[str]) -> str:
    """A name that nothing has, near to the one given."""
    while name in taken:
        name = f"{name}'"
    taken.add(name)
    return name


def _layer(node: onnx.NodeProto, parting: _Parting, most_bytes: int) -> _Layer | None:
    """A node as a layer that can be parted, and whose weight is so large that it is to be."""
    kind = ("" if node.domain == "ai.onnx" else node.domain, node.op_type)
    operator = _CONVOLUTIONS.get(kind) or _DENSE.get(kind)
    if operator is None or len(node.input) <= operator.weight or len(node.output) != 1:
        return None
    name = node.input[operator.weight]
    weight = parting.constant(name)
    if weight is None or weight.weight.bytes <= most_bytes or weight.weight.contents is None:
        return None
    axis = _channel_axis(node, len(weight.dims))
    if axis is None or not parting.can_cut(weight, axis) or list(node.input).count(name) > 1:
        return None
    others = _others(node, operator, parting, weight.dims[axis])
    parts = list(_parts(weight.weight, axis, most_bytes))
    if others is None or len(parts) == 1:
        return None
    return _Layer(
        operator=operator,
        weight=name,
        axis=axis,
        channels=weight.dims[axis],
        parts=parts,
        others=others,
        channels_last=kind in _DENSE,
    )


def _channel_axis(node: onnx.NodeProto, rank: int) -> int | None:
    """The axis of the output channels in a layer's weight of that rank."""
    attributes = {each.name: each.i for each in node.attribute}
    match node.op_type:
        case "Conv" | "ConvInteger" | "QLinearConv" if attributes.get("group", 1) == 1:
            return 0 if rank > 2 else None
        case "ConvTranspose" if attributes.get("group", 1) == 1:
            return 1 if rank > 2 else None
        case "MatMulNBits":
            return 0 if rank == 3 and "N" in attributes else None
        case "Gemm" if rank == 2 and attributes.get("transB", 0):
            return 0
        case _ if rank == 2:
            return 1
    return None


def _others(
    node: onnx.NodeProto, operator: _Operator, parting: _Parting, channels: int
) -> tuple[int, ...] | None:
    """The inputs that are parted with the weight; None: some input should be and cannot."""
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
        whole = several or elements == along == channels
        if not whole or not parting.can_cut(other, other.only_axis):
            return None
        found.append(place)
    return tuple(found)


def _reads_rows(node: onnx.NodeProto) -> bool:
    """Whether a node reads rows of its first input, and nothing else of it."""
    if node.op_type != "Gather" or node.domain not in ("", "ai.onnx"):
        return False
    axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
    return axis == 0 and len(set(node.input)) == 2


def _has_split_bytes(weight: Weight) -> bool:
    """Whether elements are no whole number of bytes."""
    return (bits_of(weight.tensor.data_type) or 1) % 8 != 0


def _parts(weight: Weight, axis: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """The channels of each part."""
    channels = weight.tensor.dims[axis]
    most = max(1, most_bytes * channels // weight.bytes, -(-channels // MOST_PARTS))
    if axis > 0:
        most = max(most, CHANNELS)
    if most > CHANNELS:
        most -= most % CHANNELS
    for start in range(0, channels, most):
        yield start, min(start + most, channels)


def _channel_bytes(weight: Weight, axis: int) -> int:
    """Bytes of a channel that lie together in the weight."""
    return weight.bytes // prod(weight.tensor.dims[: axis + 1])


def _part(weight: Weight, name: str, axis: int, start: int, end: int) -> Weight:
    """The channels `[start, end)` of a weight, along an axis."""
    dims = list(weight.tensor.dims)
    rows, channel = prod(dims[:axis]), _channel_bytes(weight, axis)
    stride = channel * dims[axis]
    dims[axis] = end - start
    tensor = onnx.TensorProto(name=name, data_type=weight.tensor.data_type, dims=dims)
    strip = channel * (end - start)
    if weight.contents is None:
        content = weight.loaded().raw_data
        tensor.raw_data = b"".join(
            content[row * stride + start * channel :][:strip] for row in range(rows)
        )
        return Weight(tensor, None)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    place = weight.contents
    assert place.strip == 0, "a weight is parted once"
    contents = Range(
        place.path,
        place.offset + start * channel,
        strip * rows,
        strip=strip if rows > 1 else 0,
        stride=stride if rows > 1 else 0,
    )
    return Weight(tensor, contents)
