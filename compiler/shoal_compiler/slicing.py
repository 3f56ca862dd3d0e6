"""Layers with a large weight, made several that give a part of the output each.

Neither a fragment nor a block can be smaller than a node. So a dense layer or a convolution whose
constant weight is over some size is computed in parts over its output channels, and a `Concat`
joins the parts: exactly, since no sum is split. A part's weight is a range of the file that the
whole is in, or strips of it where channels are columns: nothing is read. Each part costs a call of
a kernel and a copy of its output, so they are no smaller than they have to be: `SLICE_BYTES`.

Where the output is reshaped at once, and keeps its channels last, the parts are: reshaped when they
are joined, all of the output would be there twice more.

A weight may come from nodes that quantise, dequantise, cast or transpose an initializer: each part
has its own then, and is fused with them by the runtime as the whole is.

A product that labels describe is parted along one of them (`labels`), and one with several matrices
along the columns of all. One whose constant is on the left is parted along its rows. Of a
convolution in groups each part has whole groups, or channels of one, and the slice of the input
that these read; of a transposed one whole groups.

A transposed convolution multiplies with all places of its kernel before it adds up what is at one
place of its output. So it is parted, too, where that is much more than its output.

A recurrent layer is parted by its directions alone (`directions`).

A weight that several layers have is parted once for all of them. One that other nodes read too
stays whole, and the layer with it. One exception: the table of embeddings that a language model
also has as its output layer. Of the table only rows are read, so it stays as it is, and the parts
are ranges of it (`Weight.whole`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Final

import onnx

from shoal_compiler.costs import tables_of
from shoal_compiler.directions import in_directions
from shoal_compiler.graph import Graph, live
from shoal_compiler.layers import Layer, layer_of
from shoal_compiler.nodes import is_standard
from shoal_compiler.parting import KnownShapes, Parting

SLICE_BYTES: Final = (16 << 20, 4 << 20, 1 << 20, 256 << 10)
"""The largest weight of a part: at first, and where devices cannot hold such a part with what it
works in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reshaping:
    """The node that reshapes a layer's output, with channels last. The tensors `sizes`, joined, are
    the other sizes."""

    node: onnx.NodeProto
    sizes: tuple[str, ...]


def slice_layers(graph: Graph, most_bytes: int, shapes: KnownShapes) -> Graph:
    """The graph with every layer that has a weight of its own of more than `most_bytes` in parts of
    at most as many, where that is possible; or works in more, by the `shapes` that are known."""
    readers = Counter(name for names in graph.reads for name in names)
    readers.update(each.name for each in graph.outputs)
    tables = Counter(name for node in graph.nodes for name in tables_of(node))
    parting = Parting(graph, readers, shapes)
    reshapes = _reshapes(graph, readers)
    layers = [layer_of(node, parting, most_bytes) for node in graph.nodes]
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
        leading = None if reshape is None else _leading_sizes(parting, reshape, layer)
        if reshape is None or leading is None:
            nodes.extend(_in_parts(parting, node, layer))
        else:
            reshaping = _Reshaping(node=reshape, sizes=leading)
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
    parting: Parting, reshape: onnx.NodeProto, layer: Layer
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
    layer: Layer,
    reshaping: _Reshaping | None = None,
) -> Iterator[onnx.NodeProto]:
    """The nodes that replace one, and the one that reshapes its output, if there is one."""
    output, outputs = node.output[0], []
    operator, packed = layer.operator, layer.operator.packed
    slices: dict[tuple[int, int, int], str] = {}
    along = layer.weight.dims[layer.axis]
    inputs = {operator.weight: (layer.axis, along // layer.channels // packed)}
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
        for place, first, last in layer.slices(start, end):
            if (place, first, last) not in slices:
                maker = parting.slice(node.input[place], first, last)
                slices[place, first, last] = maker.output[0]
                yield maker
            part.input[place] = slices[place, first, last]
        _count(part, layer, start, end)
        outputs.append(part.output[0])
        yield part
        if reshaping is not None:
            reshape = _reshape(parting, reshaping, part.output[0], number, end - start)
            outputs[-1] = reshape[-1].output[0]
            yield from reshape
    if reshaping is not None:
        output = reshaping.node.output[0]
    parting.drop(node.input[operator.weight])
    axis = parting.axis_of(output, layer.joined)
    yield onnx.helper.make_node("Concat", outputs, [output], name=node.name, axis=axis)


def _count(part: onnx.NodeProto, layer: Layer, start: int, end: int) -> None:
    """Give a part the attributes that say how much of something it has."""
    for each in part.attribute:
        if each.name == layer.operator.counted:
            each.i = each.i * (end - start) // layer.channels
        if each.name == "group" and layer.grouped:
            each.i = -(-end // layer.grouped) - start // layer.grouped
