"""Weights that a model has in one tensor, and picks by constants: each is a weight of its own.

Exporters stack the weights of experts, heads or layers in one tensor, and take them out by a
`Gather` of one index, or a `Split`. Such a node copies its weight in each run, into memory that is
never given back to the file; the runtime fuses the `Gather`s of a tensor into one `Split`, and all
copies are there at once; and no cut, no block and no part is smaller than the stack. What is picked
is a range of the stack's file, so it becomes an initializer: nothing is read, and nothing copied.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod
from typing import Final

import onnx
from onnx import TensorProto, numpy_helper

from shoal_compiler.graph import Graph, Weight, live
from shoal_compiler.nodes import integer_of, integers_of, is_standard
from shoal_compiler.parting import has_whole_bytes, part_of

LEAST_BYTES: Final = 1 << 20
"""Of a stack for which that is worth a change."""
_INTEGERS: Final = (TensorProto.INT32, TensorProto.INT64)
_MOST_INTEGERS: Final = 1 << 16
_NO_WEIGHTS: Final[Mapping[str, Weight]] = {}


def pick_weights(graph: Graph) -> Graph:
    """The graph with what such nodes pick as initializers. A stack that other nodes read too stays
    as it is: what is picked would be there twice."""
    weights, made = dict(graph.weights), set[str]()
    outputs = {each.name for each in graph.outputs}
    stacks = _stacks(graph, outputs)
    nodes: list[onnx.NodeProto] = []
    for node in graph.nodes:
        stack = node.input[0] if node.input else ""
        can_be = (stack in stacks or stack in made) and outputs.isdisjoint(node.output)
        picked = _picked(node, weights) if can_be else _NO_WEIGHTS
        if not picked:
            nodes.append(node)
        weights.update(picked)
        made.update(picked)
    if not made:
        return graph
    kept = live(nodes, outputs)
    nodes = [node for node, each in zip(nodes, kept, strict=True) if each]
    changed = replace(graph, nodes=tuple(nodes))
    needed = outputs.union(*changed.reads)
    gone = {name for name in stacks | made if name not in needed}
    left = {name: each for name, each in weights.items() if name not in gone}
    declared = {name: kind for name, kind in graph.declared.items() if name not in made}
    return replace(changed, weights=left, declared=declared)


def _stacks(graph: Graph, outputs: set[str]) -> set[str]:
    """The large initializers of which nothing reads anything but what a constant picks."""
    readers = Counter(name for names in graph.reads for name in names)
    readers.update(outputs)
    picking = Counter(
        node.input[0]
        for node in graph.nodes
        if node.input and outputs.isdisjoint(node.output) and _picked(node, graph.weights)
    )
    return {
        name
        for name, count in picking.items()
        if count == readers[name] and graph.weights[name].bytes >= LEAST_BYTES
    }


def _picked(node: onnx.NodeProto, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """What a node makes of an initializer that is a range of its content, by name; nothing: it is
    not known, or more than that."""
    stack = weights.get(node.input[0]) if node.input else None
    if stack is None or stack.tensor.data_type == TensorProto.STRING:
        return {}
    if is_standard(node, "Gather"):
        return dict(_gathered(node, stack, weights))
    if is_standard(node, "Split"):
        return dict(_split(node, stack, weights))
    if is_standard(node, "Squeeze"):
        return dict(_squeezed(node, stack, weights))
    return {}


def _gathered(
    node: onnx.NodeProto, stack: Weight, weights: Mapping[str, Weight]
) -> Iterator[tuple[str, Weight]]:
    dims, axis = list(stack.tensor.dims), integer_of(node, "axis", 0)
    indices = _integers(weights, node.input[1])
    if indices is None or len(indices) != 1 or not _is_in_one_piece(stack, axis, 1):
        return
    axis, start = axis % len(dims), indices[0]
    if not -dims[axis] <= start < dims[axis]:
        return
    start %= dims[axis]
    part = part_of(stack, node.output[0], axis, start, start + 1)
    shape = weights[node.input[1]].tensor.dims
    yield node.output[0], _with_dims(part, [*dims[:axis], *shape, *dims[axis + 1 :]])


def _split(
    node: onnx.NodeProto, stack: Weight, weights: Mapping[str, Weight]
) -> Iterator[tuple[str, Weight]]:
    dims, axis = list(stack.tensor.dims), integer_of(node, "axis", 0)
    sizes = _said(node, "split", weights)
    # Without sizes all are alike, or as an opset says.
    if not sizes or len(sizes) != len(node.output) or min(sizes) < 0 or not all(node.output):
        return
    if not all(_is_in_one_piece(stack, axis, size) for size in sizes):
        return
    axis %= len(dims)
    if sum(sizes) != dims[axis]:
        return
    for name, (start, end) in zip(node.output, pairwise(accumulate(sizes, initial=0)), strict=True):
        yield name, part_of(stack, name, axis, start, end)


def _squeezed(
    node: onnx.NodeProto, stack: Weight, weights: Mapping[str, Weight]
) -> Iterator[tuple[str, Weight]]:
    dims = list(stack.tensor.dims)
    axes = _said(node, "axes", weights)
    if not axes or not all(-len(dims) <= axis < len(dims) for axis in axes):
        return
    gone = {axis % len(dims) for axis in axes}
    if all(dims[axis] == 1 for axis in gone):
        left = [size for axis, size in enumerate(dims) if axis not in gone]
        yield node.output[0], _with_dims(stack, left, node.output[0])


def _is_in_one_piece(stack: Weight, axis: int, step: int) -> bool:
    """Whether a part along an axis is whole bytes, one after the other: one in strips could not be
    parted again."""
    dims = stack.tensor.dims
    if not -len(dims) <= axis < len(dims):
        return False
    axis %= len(dims)
    return prod(dims[:axis]) == 1 and has_whole_bytes(stack, axis, step)


def _said(node: onnx.NodeProto, name: str, weights: Mapping[str, Weight]) -> list[int] | None:
    """Integers that an attribute says in old opsets, and the second input in newer ones."""
    if len(node.input) > 1:
        return _integers(weights, node.input[1])
    return integers_of(node, name) or None


def _integers(weights: Mapping[str, Weight], name: str) -> list[int] | None:
    weight = weights.get(name)
    if weight is None or weight.tensor.data_type not in _INTEGERS:
        return None
    if prod(weight.tensor.dims) > _MOST_INTEGERS:
        return None
    return [int(each) for each in numpy_helper.to_array(weight.loaded()).reshape(-1)]


def _with_dims(weight: Weight, dims: list[int], name: str = "") -> Weight:
    """The same content in another shape."""
    tensor = TensorProto()
    tensor.CopyFrom(weight.tensor)
    tensor.name = name or tensor.name
    del tensor.dims[:]
    tensor.dims.extend(dims)
    return replace(weight, tensor=tensor)
