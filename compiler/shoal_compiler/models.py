"""A piece of a graph as an ONNX model, without its large weights: fragments and blocks are both."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from shoal_compiler.closing import closed
from shoal_compiler.graph import MIN_IR_VERSION, Graph
from shoal_compiler.nodes import all_nodes
from shoal_compiler.single_precision import in_single
from shoal_compiler.weight_files import Place
from shoal_planner.pieces import Piece
from shoal_planner.profile import Halves, Profile, Role
from shoal_protocol.partition import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceModel:
    """A model, and what it takes and gives."""

    model: onnx.ModelProto
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def make_model(
    graph: Graph, profile: Profile, piece: Piece, places: Mapping[str, Place]
) -> PieceModel:
    """The model of a piece. Weights in `places` are in files, there; others in the model."""
    model = onnx.ModelProto(ir_version=max(graph.ir_version, MIN_IR_VERSION), producer_name="shoal")
    for domain, version in sorted(graph.opsets.items()):
        model.opset_import.add(domain=domain, version=version)
    made = model.graph
    made.name = "fragment"
    inputs = tuple(profile.tensors[name].spec for name in piece.takes)
    outputs = tuple(_given(profile, name) for name in piece.gives)
    nodes = [graph.nodes[profile.nodes[position].source] for position in _in_file(profile, piece)]
    made.node.extend(in_single(graph, profile, piece, closed(graph, nodes, outputs)))
    for node in all_nodes(made.node):
        node.ClearField("doc_string")
        node.ClearField("metadata_props")
    if not piece.nodes:
        # All is handed through, and the runtime refuses a graph without any node.
        name = piece.gives[0]
        made.node.add(op_type="Identity", input=[name], output=[f"{name}/unused"])
    made.input.extend(value_info(spec) for spec in inputs)
    made.output.extend(value_info(spec) for spec in outputs)
    weights = [graph.weights[name] for name in piece.weights if name in graph.weights]
    for weight in weights:
        if (found := places.get(weight.tensor.name)) is None:
            continue
        tensor = made.initializer.add(
            name=weight.tensor.name,
            data_type=weight.tensor.data_type,
            dims=weight.tensor.dims,
            data_location=onnx.TensorProto.EXTERNAL,
        )
        where = {"location": found.file, "offset": found.offset, "length": weight.bytes}
        for key, value in where.items():
            tensor.external_data.add(key=key, value=str(value))
    made.initializer.extend(each.loaded() for each in weights if each.tensor.name not in places)
    made.sparse_initializer.extend(
        graph.sparse[name] for name in piece.weights if name in graph.sparse
    )
    return PieceModel(model=model, inputs=inputs, outputs=outputs)


def _in_file(profile: Profile, piece: Piece) -> list[int]:
    """The nodes in the order that makes the runtime run each CONSTANT one directly before its first
    use, as is reckoned with. Where it has the order of its own, it goes back from the outputs, and
    of the inputs of a node to that first whose maker is the last in the file: a chain of layers has
    to be behind all that its weights are made by, or all of these run before the first layer."""
    # With halves it is reckoned that all of them run first.
    halves = any(each.halves is not Halves.NONE for each in profile.nodes)
    if halves or piece.in_order(profile):
        return list(piece.nodes)
    return sorted(piece.nodes, key=lambda each: profile.nodes[each].role is not Role.CONSTANT)


def _given(profile: Profile, name: str) -> TensorSpec:
    """What a piece gives: as inferred, or as the model declares its output."""
    inferred = profile.tensors.get(name)
    if inferred is not None and inferred.spec.shape is not None:
        return inferred.spec
    declared = (each for each in profile.outputs if each.name == name)
    return next(declared, None) or profile.tensors[name].spec


def value_info(spec: TensorSpec) -> onnx.ValueInfoProto:
    """A tensor as an input or output of a graph."""
    data_type = onnx.TensorProto.DataType.Value(spec.dtype.upper())
    value = onnx.ValueInfoProto(name=spec.name)
    value.type.tensor_type.elem_type = data_type
    if spec.shape is not None:
        value.type.tensor_type.shape.SetInParent()
        for axis in spec.shape:
            dimension = value.type.tensor_type.shape.dim.add()
            match axis:
                case int():
                    dimension.dim_value = axis
                case str():
                    dimension.dim_param = axis
    return value
