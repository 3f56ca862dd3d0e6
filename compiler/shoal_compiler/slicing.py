"""Layers with a large weight, made several that give a part of the output each.

Neither a fragment nor a block can be smaller than a node. So a dense layer or a convolution whose
constant weight is over `LIMIT_BYTES` is computed in parts over its output channels, and a `Concat`
joins the parts: exactly, since no sum is split. A part's weight is a range of the file that the
whole is in, or strips of it where channels are columns: nothing is read.

A weight that other nodes read too stays whole, and the layer with it. One exception: the table of
embeddings that a language model also has as its output layer. Of the table only rows are read, so
it stays as it is, and the parts are ranges of it (`Weight.whole`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import onnx

from shoal_compiler.graph import Graph, Weight
from shoal_compiler.safety import Range, all_nodes, bits_of

LIMIT_BYTES: Final = 16 << 20
CHANNELS: Final = 32
"""Parts have a multiple of so many channels where they can: the widest kernels' steps, and whole
pages of most weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A node that can be parted. `weight_axis` and `output_axis` are those of the channels; `bias`
    is the input that is parted with them, if there is one."""

    weight: str
    weight_axis: int
    output_axis: int
    bias: str


def slice_layers(graph: Graph) -> Graph:
    """The graph with every layer that has a large weight of its own in parts."""
    readers = Counter(name for names in graph.reads for name in names)
    readers.update(each.name for each in graph.outputs)
    tables = Counter(node.input[0] for node in graph.nodes if _reads_rows(node))
    taken = {*graph.weights, *graph.sparse, *(each.name for each in graph.inputs)}
    taken.update(name for node in all_nodes(graph.nodes) for name in (*node.input, *node.output))
    nodes: list[onnx.NodeProto] = []
    weights = dict(graph.weights)
    for node in graph.nodes:
        layer = _layer(node, graph.weights)
        others = 0 if layer is None else readers[layer.weight] - 1
        if layer is None or others > (tables[layer.weight] if layer.weight_axis == 0 else 0):
            nodes.append(node)
            continue
        output, axis = node.output[0], layer.weight_axis
        outputs = []
        whole = weights[layer.weight] if others else weights.pop(layer.weight)
        for number, (start, end) in enumerate(_parts(whole, axis)):
            part = onnx.NodeProto()
            part.CopyFrom(node)
            part.name = f"{node.name or node.op_type}.{number}"
            part.output[0] = _fresh(f"{output}.{number}", taken)
            part.input[1] = _fresh(f"{layer.weight}.{number}", taken)
            made = _part(whole, part.input[1], axis, start, end)
            weights[part.input[1]] = replace(made, whole=layer.weight if others else "")
            if layer.bias:
                bias = graph.weights[layer.bias]
                part.input[2] = _fresh(f"{layer.bias}.{number}", taken)
                last = len(bias.tensor.dims) - 1
                weights[part.input[2]] = _part(bias, part.input[2], last, start, end)
            outputs.append(part.output[0])
            nodes.append(part)
        nodes.append(
            onnx.helper.make_node(
                "Concat", outputs, [output], name=node.name, axis=layer.output_axis
            )
        )
    return replace(graph, nodes=tuple(nodes), weights=weights)


def _layer(node: onnx.NodeProto, weights: Mapping[str, Weight]) -> _Layer | None:
    """A node as a layer that can be parted, and whose weight is so large that it is to be."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("Conv", "Gemm", "MatMul"):
        return None
    name = node.input[1]
    weight = weights.get(name)
    if weight is None or weight.bytes <= LIMIT_BYTES or weight.contents is None:
        return None
    attributes = {each.name: each.i for each in node.attribute}
    dims, rank = weight.tensor.dims, len(weight.tensor.dims)
    match node.op_type:
        case "Conv" if attributes.get("group", 1) == 1:
            weight_axis, output_axis = 0, 1
        case "Gemm" if rank == 2:
            weight_axis, output_axis = 0 if attributes.get("transB", 0) else 1, 1
        case "MatMul" if rank == 2:
            weight_axis, output_axis = 1, -1
        case _:
            return None
    bias = node.input[2] if len(node.input) > 2 else ""
    if bias and not _is_per_channel(weights.get(bias), dims[weight_axis]):
        return None
    if (bits_of(weight.tensor.data_type) or 1) % 8 or list(node.input).count(name) > 1:
        return None
    return _Layer(weight=name, weight_axis=weight_axis, output_axis=output_axis, bias=bias)


def _reads_rows(node: onnx.NodeProto) -> bool:
    """Whether a node reads rows of its first input, and nothing else of it."""
    axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
    rows = node.op_type == "Gather" and node.domain in ("", "ai.onnx") and axis == 0
    return rows and node.input[0] != node.input[1]


def _is_per_channel(bias: Weight | None, channels: int) -> bool:
    """Whether a bias is constant, with one element for each channel."""
    if bias is None or not bias.tensor.dims or (bits_of(bias.tensor.data_type) or 1) % 8:
        return False
    return bias.tensor.dims[-1] == channels == prod(bias.tensor.dims)


def _parts(weight: Weight, axis: int) -> Iterator[tuple[int, int]]:
    """The channels of each part."""
    channels = weight.tensor.dims[axis]
    most = max(1, LIMIT_BYTES * channels // weight.bytes)
    if most > CHANNELS:
        most -= most % CHANNELS
    for start in range(0, channels, most):
        yield start, min(start + most, channels)


def _part(weight: Weight, name: str, axis: int, start: int, end: int) -> Weight:
    """The channels `[start, end)` of a weight, along its first axis or its last."""
    dims = list(weight.tensor.dims)
    rows = prod(dims[:axis])
    stride = weight.bytes // rows
    channel = stride // dims[axis]
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


def _fresh(name: str, taken: set[str]) -> str:
    """A name that nothing has, near to the one given."""
    while name in taken:
        name = f"{name}'"
    taken.add(name)
    return name
