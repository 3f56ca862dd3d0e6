"""What the graphs inside a node (of If, Loop, Scan) take in memory while they run.

Within a body nothing is reckoned to be let go: bodies are small beside what is around them. What
its nodes work in counts once, as much as the one that needs the most. Weights count where the graph
outside counts them.
"""

from collections.abc import Callable, Iterator, Mapping
from math import prod

import onnx
from onnx import helper

from shoal_compiler.nodes import all_nodes, integer_of, subgraphs
from shoal_compiler.shaped import Dims, Shaped
from shoal_compiler.shapes import INFERENCE_FAILS
from shoal_compiler.tensor_types import bits_of
from shoal_compiler.workspaces import workspace

TypeOf = Callable[[str], onnx.TypeProto | None]
"""The type of a tensor of the graph outside, with its sizes."""


def bodies_bytes(node: onnx.NodeProto, type_of: TypeOf, opsets: Mapping[str, int]) -> int:
    """Bytes besides the node's outputs; sizes that are not known count nothing."""
    made = (_made_bytes(node, body, type_of, opsets) for body in subgraphs(node))
    return max(made, default=0)


def inner_nodes(node: onnx.NodeProto) -> int:
    """How many nodes there are in the graphs inside a node, at any depth."""
    return sum(1 for body in subgraphs(node) for _ in all_nodes(body.node))


def _made_bytes(
    node: onnx.NodeProto, body: onnx.GraphProto, type_of: TypeOf, opsets: Mapping[str, int]
) -> int:
    """Bytes of all that a body's nodes make in one run."""
    graph = onnx.GraphProto(name="body", node=body.node, initializer=body.initializer)
    outside = {name: kind for name in _captured(body) if (kind := type_of(name)) is not None}
    inputs = outside | dict(_inputs(node, body, type_of))
    graph.input.extend(helper.make_value_info(name, kind) for name, kind in inputs.items())
    graph.output.extend(onnx.ValueInfoProto(name=each.name) for each in body.output)
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    model = helper.make_model(graph, opset_imports=imports)
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except INFERENCE_FAILS:
        return 0
    handed = {name for inner in body.node if inner.op_type == "Identity" for name in inner.output}
    if node.op_type == "If":  # what a branch gives is the node's output
        handed |= {each.name for each in body.output}
    # An output of unknown type is among the values as well.
    made = {each.name: each.type for each in (*inferred.value_info, *inferred.output)}
    types = {each.name: each.type for each in graph.input} | made
    types |= {each.name: _type_of_weight(each) for each in body.initializer}

    def inside(name: str) -> onnx.TypeProto | None:
        return types.get(name) or type_of(name)

    halves = sum(_single_bytes(kind) for kind in (*inputs.values(), *made.values()))
    working = max(
        (_working_bytes(inner, types) + bodies_bytes(inner, inside, opsets) for inner in body.node),
        default=0,
    )
    numbers = sum(_bytes(kind) for name, kind in made.items() if name not in handed)
    return working + halves + numbers


def _working_bytes(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto]) -> int:
    """What a node works in, in the arena and beside it."""
    needed = workspace(
        Shaped(
            node,
            tuple(_sizes(types.get(name)) for name in node.input),
            tuple(_sizes(types.get(name)) for name in node.output if name),
            tuple(types[name].tensor_type.elem_type if name in types else 0 for name in node.input),
        )
    )
    return sum(needed.arena) + needed.beside_bytes


def _type_of_weight(weight: onnx.TensorProto) -> onnx.TypeProto:
    return helper.make_tensor_type_proto(weight.data_type, list(weight.dims))


def _sizes(kind: onnx.TypeProto | None) -> Dims | None:
    """None where one is not known."""
    if kind is None or not kind.tensor_type.HasField("shape"):
        return None
    axes = kind.tensor_type.shape.dim
    known = all(axis.HasField("dim_value") for axis in axes)
    return tuple(axis.dim_value for axis in axes) if known else None


def _captured(body: onnx.GraphProto) -> Iterator[str]:
    """What a body reads of the graph outside."""
    own = {each.name for each in body.input} | {each.name for each in body.initializer}
    own |= {name for node in body.node for name in node.output}
    yield from dict.fromkeys(
        name for node in body.node for name in node.input if name and name not in own
    )


def _inputs(
    node: onnx.NodeProto, body: onnx.GraphProto, type_of: TypeOf
) -> Iterator[tuple[str, onnx.TypeProto]]:
    """A body's own inputs: what is handed on. A Loop gives the number of the run and a condition
    before it, a Scan slices behind it; those are as the body declares them."""
    slices = integer_of(node, "num_scan_inputs", 0)
    states = node.input[: len(node.input) - slices]
    given = (*states, *[""] * slices) if node.op_type == "Scan" else ("", "", *node.input[2:])
    for each, name in zip(body.input, given, strict=False):
        kind = type_of(name) if name else None
        yield each.name, each.type if kind is None else kind


def _single_bytes(kind: onnx.TypeProto) -> int:
    """What it takes as numbers, if it is of half precision: the nodes of a body are converted as
    those outside are. Then as such it counts nothing."""
    halved = kind.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    return 2 * _shape_bytes(kind) if halved else 0


def _bytes(kind: onnx.TypeProto | None) -> int:
    halved = kind is not None and kind.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    return 0 if halved else _shape_bytes(kind)


def _shape_bytes(kind: onnx.TypeProto | None) -> int:
    if kind is None or not kind.tensor_type.HasField("shape"):
        return 0
    count = prod(axis.dim_value for axis in kind.tensor_type.shape.dim)
    return count * (bits_of(kind.tensor_type.elem_type) or 0) // 8
