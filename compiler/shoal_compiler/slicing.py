"""Layers with a large weight, made several that give a part of the output each.

Neither a fragment nor a block can be smaller than a node. So a dense layer or a convolution whose
constant weight is over `LIMIT_BYTES` is computed in parts over its output channels, and a `Concat`
joins the parts: exactly, since no sum is split. A part's weight is a range of the file that the
whole is in, or strips of it where channels are columns: nothing is read.

Where the output is reshaped at once, and keeps its channels last, the parts are: reshaped when they
are joined, all of the output would be there twice more.

A weight that other nodes read too stays whole, and the layer with it. One exception: the table of
embeddings that a language model also has as its output layer. Of the table only rows are read, so
it stays as it is, and the parts are ranges of it (`Weight.whole`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import numpy as np
import onnx
from onnx import numpy_helper

from shoal_compiler.graph import Graph, Weight, live
from shoal_compiler.safety import Range, all_nodes, bits_of, integer_of, is_standard

LIMIT_BYTES: Final = 16 << 20
CHANNELS: Final = 32
"""Parts have a multiple of so many channels where they can: the widest kernels' steps, and whole
pages of most weights."""
MOST_PARTS: Final = 1024
LEAST_STRIP_BYTES: Final = 1 << 10
"""Columns in shorter strips take too long to read: such a weight stays whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A node that can be parted. `weight_axis` and `output_axis` are those of the channels; `bias`
    is the input that is parted with them, if there is one."""

    weight: str
    weight_axis: int
    output_axis: int
    bias: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reshaping:
    """The node that reshapes a layer's output, with channels last. The tensors `sizes`, joined, are
    the other sizes."""

    node: onnx.NodeProto
    sizes: tuple[str, ...]


def slice_layers(graph: Graph) -> Graph:
    """The graph with every layer that has a large weight of its own in parts."""
    readers = Counter(name for names in graph.reads for name in names)
    readers.update(each.name for each in graph.outputs)
    tables = Counter(node.input[0] for node in graph.nodes if _reads_rows(node))
    parting = _Parting(graph, dict(graph.weights))
    reshapes = _reshapes(graph, readers)
    nodes: list[onnx.NodeProto] = []
    waiting: dict[str, Iterator[onnx.NodeProto]] = {}
    for node in graph.nodes:
        if node.input and node.input[0] in waiting:
            nodes.extend(waiting.pop(node.input[0]))
            continue
        layer = _layer(node, graph.weights)
        others = readers[layer.weight] - 1 if layer is not None else 0
        if layer is None or others > (tables[layer.weight] if layer.weight_axis == 0 else 0):
            nodes.append(node)
            continue
        reshape = reshapes.get(node.output[0]) if node.op_type != "Conv" else None
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
        reshapes = is_standard(node, "Reshape")
        two = len(node.input) == 2
        if reshapes and two and node.input[0] in made and readers[node.input[0]] == 1:
            found[node.input[0]] = node
        made.update(node.output)
    return found


class _Parting:
    """Makes parts of layers, and their weights."""

    def __init__(self, graph: Graph, weights: dict[str, Weight]) -> None:
        self.weights = weights
        self._makers = {name: node for node in graph.nodes for name in node.output}
        self._taken = {*graph.sparse, *weights, *(each.name for each in graph.inputs)}
        for node in all_nodes(graph.nodes):
            self._taken.update((*node.input, *node.output))

    def leading_sizes(self, reshape: onnx.NodeProto, layer: _Layer) -> tuple[str, ...] | None:
        """Tensors that, joined, are the sizes of a reshaped output but for its channels, which are
        last; None: they are not last, or it is not known."""
        shape = reshape.input[1]
        maker = self._makers.get(shape)
        joined = list(maker.input) if maker is not None and maker.op_type == "Concat" else [shape]
        known = {name: self._integers(name) for name in joined if self._is_shape(name)}
        end = known.get(joined[-1]) if joined else None
        channels = self.weights[layer.weight].tensor.dims[layer.weight_axis]
        # A size of 0 stands for that of the layer's output, which a part does not have.
        if not end or end[-1] != channels or any(0 in each for each in known.values()):
            return None
        return (*joined[:-1], self._add_integers(f"{shape}.leading", end[:-1]))

    def _reshape(
        self, reshaping: _Reshaping, output: str, number: int, channels: int
    ) -> tuple[onnx.NodeProto, onnx.NodeProto]:
        """The nodes that reshape a part's output."""
        node = deepcopy(reshaping.node)
        node.name = f"{node.name or node.op_type}.{number}"
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
        whole, output = self.weights[layer.weight], node.output[0]
        bias = self.weights[layer.bias] if layer.bias else None
        if not keep_whole:
            del self.weights[layer.weight]
        outputs = []
        for number, (start, end) in enumerate(_parts(whole, layer.weight_axis)):
            part = deepcopy(node)
            part.name = f"{node.name or node.op_type}.{number}"
            part.output[0] = self._fresh(f"{output}.{number}")
            part.input[1] = self._fresh(f"{layer.weight}.{number}")
            made = _part(whole, part.input[1], layer.weight_axis, start, end)
            self.weights[part.input[1]] = replace(made, whole=layer.weight if keep_whole else "")
            if bias is not None:
                part.input[2] = self._fresh(f"{layer.bias}.{number}")
                last = len(bias.tensor.dims) - 1
                self.weights[part.input[2]] = _part(bias, part.input[2], last, start, end)
            outputs.append(part.output[0])
            yield part
            if reshaping is not None:
                reshape = self._reshape(reshaping, part.output[0], number, end - start)
                outputs[-1] = reshape[-1].output[0]
                yield from reshape
        if reshaping is not None:
            output = reshaping.node.output[0]
        axis = layer.output_axis if reshaping is None else -1
        yield onnx.helper.make_node("Concat", outputs, [output], name=node.name, axis=axis)

    def _fresh(self, name: str) -> str:
        """A name that nothing has, near to the one given."""
        while name in self._taken:
            name = f"{name}'"
        self._taken.add(name)
        return name


def _layer(node: onnx.NodeProto, weights: Mapping[str, Weight]) -> _Layer | None:
    """A node as a layer that can be parted, and whose weight is so large that it is to be."""
    inputs = list(node.input)
    if len(inputs) < 2 or len(node.output) != 1 or inputs.count(inputs[1]) > 1:
        return None
    weight = weights.get(inputs[1])
    if weight is None or weight.bytes <= LIMIT_BYTES or weight.contents is None:
        return None
    axes = _channel_axes(node, len(weight.tensor.dims))
    if axes is None or _has_split_bytes(weight):
        return None
    weight_axis, output_axis = axes
    bias = inputs[2] if len(inputs) > 2 else ""
    if bias and not _is_per_channel(weights.get(bias), weight.tensor.dims[weight_axis]):
        return None
    start, end = next(_parts(weight, weight_axis))
    if weight_axis == 1 and _channel_bytes(weight, 1) * (end - start) < LEAST_STRIP_BYTES:
        return None
    return _Layer(weight=inputs[1], weight_axis=weight_axis, output_axis=output_axis, bias=bias)


def _channel_axes(node: onnx.NodeProto, rank: int) -> tuple[int, int] | None:
    """The axes of the output channels, in a layer's weight of that rank and in its output."""
    if is_standard(node, "Conv") and rank > 2 and integer_of(node, "group", 1) == 1:
        return 0, 1
    if is_standard(node, "Gemm") and rank == 2:
        return 0 if integer_of(node, "transB", 0) else 1, 1
    return (1, -1) if is_standard(node, "MatMul") and rank == 2 else None


def _reads_rows(node: onnx.NodeProto) -> bool:
    """Whether a node reads rows of its first input, and nothing else of it."""
    rows = is_standard(node, "Gather") and integer_of(node, "axis", 0) == 0
    return rows and len(set(node.input)) == 2


def _is_per_channel(bias: Weight | None, channels: int) -> bool:
    """Whether a bias is constant, with one element for each channel."""
    if bias is None or not bias.tensor.dims or _has_split_bytes(bias):
        return False
    return bias.tensor.dims[-1] == channels == prod(bias.tensor.dims)


def _has_split_bytes(weight: Weight) -> bool:
    """Whether elements are no whole number of bytes."""
    return (bits_of(weight.tensor.data_type) or 1) % 8 != 0


def _parts(weight: Weight, axis: int) -> Iterator[tuple[int, int]]:
    """The channels of each part."""
    channels = weight.tensor.dims[axis]
    most = max(1, LIMIT_BYTES * channels // weight.bytes, -(-channels // MOST_PARTS))
    if most > CHANNELS:
        most -= most % CHANNELS
    for start in range(0, channels, most):
        yield start, min(start + most, channels)


def _channel_bytes(weight: Weight, axis: int) -> int:
    """Bytes of a channel that lie together in the weight."""
    return weight.bytes // prod(weight.tensor.dims[: axis + 1])


def _part(weight: Weight, name: str, axis: int, start: int, end: int) -> Weight:
    """The channels `[start, end)` of a weight, along its first axis or its last."""
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
