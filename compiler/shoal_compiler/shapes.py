"""Types and shapes of every tensor, twice: as the graph alone gives them, and for given inputs.

*Symbolic*: `onnx.shape_inference` over the whole graph, and node by node behind operators that it
does not know. Its names for axes (`batch`) are kept.
*Concrete*: node by node, with the inputs' sizes put in for dynamic axes. What the graph computes
from shapes (`Shape`, `Slice`, `Concat`, then `Reshape`) is evaluated on the way, as long as it is
small, so that shapes stay known where whole-graph inference loses them. What is not known is None.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from shoal_compiler.errors import ModelRefused
from shoal_compiler.graph import Graph
from shoal_compiler.nodes import integer_of, is_standard, subgraphs
from shoal_compiler.own_operators import outputs_of
from shoal_compiler.runtime_sizes import rank_by_length, sizes_as_run, values_as_run
from shoal_compiler.tensor_types import (
    Axes,
    axes_of,
    drop_disputed,
    of_rank,
    says_rank,
    without_sizes,
)
from shoal_compiler.wire import LARGE
from shoal_planner.profile import Role
from shoal_protocol.seen_sizes import Sizes

Dims = tuple[int, ...]
Values = npt.NDArray[np.generic]

# How onnx says that a node or a graph makes no sense to it.
INFERENCE_FAILS: Final = (
    onnx.shape_inference.InferenceError,
    onnx.checker.ValidationError,
    onnx.defs.SchemaError,
    RuntimeError,
    ValueError,
    TypeError,
)
MAX_EVALUATED: Final = 4096
"""Elements of the largest tensor that is evaluated for its part in a shape."""

# Some of ONNX Runtime's own operators give what an operator of onnx would give, of these of their
# inputs. So do some that onnx says are functions, and does not infer a node of.
_COMPUTED_AS: Final[dict[str, tuple[str, tuple[int, ...]]]] = {
    "DynamicQuantizeLSTM": ("LSTM", tuple(range(8))),
    "DynamicQuantizeMatMul": ("MatMul", (0, 1)),
    "FusedConv": ("Conv", (0, 1, 2)),
    "FusedGemm": ("Gemm", (0, 1, 2)),
    "GreaterOrEqual": ("Greater", (0, 1)),
    "GroupNormalization": ("Identity", (0,)),
    "LessOrEqual": ("Less", (0, 1)),
    "MeanVarianceNormalization": ("Identity", (0,)),
    "QLinearAdd": ("Add", (0, 3)),
    "QLinearAveragePool": ("MaxPool", (0,)),
    "QLinearMul": ("Mul", (0, 3)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """`types` are symbolic, `sizes` concrete, by tensor; one that is missing is unknown. `values`
    are those that follow from the sizes."""

    types: Mapping[str, onnx.TypeProto]
    sizes: Mapping[str, Dims]
    values: Mapping[str, Values]

    def axes(self, name: str) -> Axes | None:
        """A tensor's symbolic shape; None: not even its rank is known."""
        kind = self.types.get(name)
        return None if kind is None else axes_of(kind)


def infer(
    graph: Graph,
    order: Sequence[int],
    roles: Sequence[Role],
    shapes: Mapping[str, Sequence[int]],
    seen: Sizes | None = None,
) -> Shapes:
    """Infer types and shapes; `shapes` are sizes of inputs by name, `seen` those that tensors had
    in a run, used where they follow from nothing else.

    Raises `ModelRefused` for a name that is no input, or sizes that contradict the graph.
    """
    inputs = _concrete_inputs(graph, shapes)
    concrete = _Concrete(graph=graph, roles=roles, seen=seen or {})
    for name, kind in inputs.items():
        concrete.learn(name, kind)
        concrete.learn_seen(name)
    for index in order:
        concrete.node(index)
    types = _symbolic(graph, order)
    _go_on(graph, order, roles, types)
    for name, kind in types.items():
        drop_disputed(kind, concrete.types.get(name), graph.declared.get(name))
    _add_ranks(concrete, order, types)
    for others in (concrete.types, graph.declared):
        for name, kind in others.items():
            types.setdefault(name, without_sizes(kind))
    return Shapes(types=types, sizes=concrete.sizes, values=concrete.values)


def _symbolic(graph: Graph, order: Sequence[int]) -> dict[str, onnx.TypeProto]:
    initializers = [each.tensor for each in graph.weights.values()]
    model = onnx.ModelProto(ir_version=max(graph.ir_version, 4))
    model.opset_import.extend(_imports(graph))
    model.graph.name = "graph"
    model.graph.node.extend(graph.nodes[index] for index in order)
    model.graph.input.extend(_plain(each) for each in graph.inputs)
    model.graph.initializer.extend(initializers)
    model.graph.sparse_initializer.extend(graph.sparse.values())
    for name, kind in graph.inferred.items():
        model.graph.value_info.add(name=name).type.CopyFrom(kind)
    # The outputs' declared shapes are claims, some of them stale: what is inferred is better.
    model.graph.output.extend(onnx.ValueInfoProto(name=each.name) for each in graph.outputs)
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except INFERENCE_FAILS:
        inferred = model.graph
    known = (*inferred.value_info, *inferred.output, *model.graph.input)
    return {each.name: each.type for each in known if each.type.WhichOneof("value")}


def _go_on(
    graph: Graph, order: Sequence[int], roles: Sequence[Role], types: dict[str, onnx.TypeProto]
) -> None:
    """Add the types behind operators of which onnx knows nothing, where its own inference ends."""
    if all(onnx.defs.has(node.op_type, node.domain) for node in graph.nodes):
        return
    known = _Concrete(graph=graph, roles=roles, seen={})
    known.types.update(types)
    for index in order:
        names = [name for name in graph.nodes[index].output if name]
        if all(name in types and axes_of(types[name]) is not None for name in names):
            continue
        for name, kind in known.inferred(index).items():
            if name and kind.WhichOneof("value"):
                types[name] = known.types[name] = kind


def _add_ranks(
    concrete: "_Concrete", order: Sequence[int], types: dict[str, onnx.TypeProto]
) -> None:
    """Add what the graph alone says no shape of: its type, and its rank where that is the same for
    inputs of all sizes. How many axes a Squeeze takes away that is not told which, their sizes
    say: the rank that it gave in the concrete pass is none for others."""
    graph = concrete.graph
    unsure = [
        index
        for index in order
        if not all(says_rank(types.get(name)) for name in graph.nodes[index].output if name)
    ]
    if not unsure:
        return
    known = _Concrete(graph=graph, roles=concrete.roles, seen={})
    known.types.update(types)
    for index in unsure:
        node = graph.nodes[index]
        found = known.inferred(index)
        for place, name in enumerate(node.output):
            kind = types.get(name) or concrete.types.get(name)
            if kind is None or (name in types and says_rank(kind)):
                continue
            # Where nobody knows what a node gives, what the model says of it is all there is.
            said = found.get(name) or (None if found else graph.declared.get(name))
            ranks = (_rank_of(said), rank_by_length(node, known.types), _rank_in_loop(node, place))
            rank = next((each for each in ranks if each is not None), None)
            is_seen = rank == _rank_of(concrete.types.get(name))
            types[name] = known.types[name] = of_rank(kind, rank if is_seen else None)


def _rank_in_loop(node: onnx.NodeProto, place: int) -> int | None:
    """The rank that a loop's body says of what it takes and hands on."""
    if not is_standard(node, "Loop") or place + 2 >= len(node.input):
        return None
    body = next(subgraphs(node))
    ranks = {_rank_of(body.input[place + 2].type), _rank_of(body.output[place + 1].type)} - {None}
    return ranks.pop() if len(ranks) == 1 else None


def _rank_of(kind: onnx.TypeProto | None) -> int | None:
    axes = None if kind is None else axes_of(kind)
    return None if axes is None else len(axes)


def _imports(graph: Graph) -> list[onnx.OperatorSetIdProto]:
    return [helper.make_opsetid(domain, version) for domain, version in graph.opsets.items()]


def _plain(given: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """An input whose unknown axes (-1, `?`) say nothing at all."""
    plain = deepcopy(given)
    for dimension in plain.type.tensor_type.shape.dim if given.type.HasField("tensor_type") else ():
        if dimension.dim_value < 0 or dimension.dim_param == "?":
            dimension.Clear()
    return plain


def _concrete_inputs(
    graph: Graph, shapes: Mapping[str, Sequence[int]]
) -> dict[str, onnx.TypeProto]:
    """The inputs' types with the given sizes put in."""
    known = {each.name: _plain(each).type for each in graph.inputs}
    for name, sizes in shapes.items():
        if name not in known:
            raise ModelRefused(
                f"the model has no input {name} to give a shape; its inputs are {', '.join(known)}"
            )
        axes = axes_of(known[name])
        if axes is None:
            axes = (None,) * len(sizes)
        fits = len(axes) == len(sizes) and all(
            not isinstance(axis, int) or axis == size
            for axis, size in zip(axes, sizes, strict=True)
        )
        if not fits or any(size < 0 for size in sizes):
            raise ModelRefused(
                f"cannot have the shape {list(sizes)}: the model takes "
                f"[{', '.join('?' if axis is None else str(axis) for axis in axes)}]",
                tensor=name,
            )
        known[name] = _tensor_type(known[name].tensor_type.elem_type, tuple(sizes))
    return known


@dataclass(slots=True, kw_only=True)
class _Concrete:
    """The concrete pass: what is known so far of types, sizes and small values."""

    graph: Graph
    roles: Sequence[Role]
    seen: Sizes
    types: dict[str, onnx.TypeProto] = field(default_factory=dict)
    sizes: dict[str, Dims] = field(default_factory=dict)
    values: dict[str, Values] = field(default_factory=dict)
    opsets: list[onnx.OperatorSetIdProto] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.opsets = _imports(self.graph)
        for name, weight in self.graph.weights.items():
            self.learn(name, _tensor_type(weight.tensor.data_type, tuple(weight.tensor.dims)))
            if weight.bytes < LARGE and weight.tensor.data_type != onnx.TensorProto.STRING:
                self.values[name] = numpy_helper.to_array(weight.loaded())
        for name, sparse in self.graph.sparse.items():
            self.learn(name, _tensor_type(sparse.values.data_type, tuple(sparse.dims)))

    def learn(self, name: str, kind: onnx.TypeProto) -> None:
        self.types[name] = kind
        if (axes := axes_of(kind)) is not None:
            sizes = tuple(axis for axis in axes if isinstance(axis, int))
            if len(sizes) == len(axes):
                self.sizes[name] = sizes

    def learn_seen(self, name: str) -> None:
        """The sizes that a tensor had in a run, if they follow from nothing that is known."""
        kind = self.types.get(name)
        if name not in self.seen or name in self.sizes or kind is None:
            return
        if kind.HasField("tensor_type"):  # else it has no axes, whatever is said
            self.learn(name, _tensor_type(kind.tensor_type.elem_type, self.seen[name]))

    def node(self, index: int) -> None:
        node = self.graph.nodes[index]
        for name, kind in self.inferred(index).items():
            if name and kind.WhichOneof("value"):
                self.learn(name, kind)
        looping = node.input[2:] if node.op_type == "Loop" else ()
        for carried, name in zip(looping, node.output, strict=False):
            if name and name not in self.sizes and carried in self.sizes:
                self.learn(name, self.types[carried])  # what a loop hands on keeps its size, mostly
        if node.output[0] in self.graph.opened:
            self._choose(node)
        for name in node.output:
            if name and name not in self.types and name in self.graph.declared:
                self.learn(name, without_sizes(self.graph.declared[name]))
        for name in node.output:
            self.learn_seen(name)
        if self.roles[index] is not Role.COMPUTE:
            self._evaluate(node)

    def _choose(self, node: onnx.NodeProto) -> None:
        """What an open If gives is as large as what either branch has made."""
        branches = [[each.input[0] for each in body.node] for body in subgraphs(node)]
        for name, *made in zip(node.output, *branches, strict=True):
            sizes = [self.sizes[each] for each in made if each in self.sizes]
            if name in self.sizes or len(sizes) < len(made) or len({*map(len, sizes)}) > 1:
                continue
            largest = tuple(map(max, *sizes))
            self.learn(name, _tensor_type(self.types[made[0]].tensor_type.elem_type, largest))

    def inferred(self, index: int) -> Mapping[str, onnx.TypeProto]:
        """The types of what a node gives, from those of what it reads."""
        node, reads = self.graph.nodes[index], self.graph.reads[index]
        if any(name not in self.types for name in reads):
            return {}
        types, alike = {name: self.types[name] for name in reads}, node
        version = self.graph.opsets.get(node.domain) or self.graph.opsets.get("ai.onnx")
        if node.op_type in _COMPUTED_AS and not integer_of(node, "channels_last", 0):
            alike, version = _as_standard(node), onnx.defs.onnx_opset_version()
            first = types[node.input[0]].tensor_type.elem_type
            types = {name: _typed(types[name], first) for name in alike.input if name}
        found = self._as_run(alike, types, self._as_onnx_says(alike, types, version))
        if found or onnx.defs.has(node.op_type, node.domain):
            return found
        return outputs_of(node, [self.types.get(name) for name in node.input])

    def _as_onnx_says(
        self, node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto], version: int | None
    ) -> Mapping[str, onnx.TypeProto]:
        """Nothing where it knows no such operator, or nothing of what it gives."""
        if not version or not onnx.defs.has(node.op_type, node.domain):
            return {}
        try:
            schema = onnx.defs.get_schema(node.op_type, version, node.domain)
            return onnx.shape_inference.infer_node_outputs(
                schema,
                node,
                dict(types),
                {
                    name: numpy_helper.from_array(self.values[name], name)
                    for name in node.input
                    if name in self.values
                },
                opset_imports=self.opsets,
            )
        except INFERENCE_FAILS:
            return {}  # it stays unknown

    def _as_run(
        self,
        node: onnx.NodeProto,
        types: Mapping[str, onnx.TypeProto],
        found: Mapping[str, onnx.TypeProto],
    ) -> Mapping[str, onnx.TypeProto]:
        """What onnx says a node gives, with the sizes that the runtime gives it."""
        axes = axes_of(types[node.input[0]]) if node.input and node.input[0] else None
        if axes is None or not found:
            return found
        for kind in found.values():
            inferred = axes_of(kind)
            if inferred is None or len(inferred) != len(axes):
                continue
            dims = kind.tensor_type.shape.dim
            for axis, size in sizes_as_run(node, axes, inferred, self.values).items():
                dims[axis].dim_value = size
        return found

    def _evaluate(self, node: onnx.NodeProto) -> None:
        """The node's values, if all it needs is known and small."""
        if node.op_type == "Shape" and node.input[0] in self.sizes:
            self._know(node.output, [self._shape(node)])
            return
        outputs = [name for name in node.output if name]
        if any(name not in self.values for name in node.input if name):
            return
        if any(
            name not in self.sizes or prod(self.sizes[name]) > MAX_EVALUATED for name in outputs
        ):
            return
        read = {name: self.values[name] for name in node.input if name}
        # Not every model asks for it, and importing it lists every version of every operator.
        from onnx.reference import ReferenceEvaluator  # noqa: PLC0415

        # A graph: of a node by itself, the evaluator takes the newest operator there is.
        graph = onnx.GraphProto(name="node", node=[node])
        graph.input.extend(onnx.ValueInfoProto(name=name) for name in read)
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        try:
            feeds = values_as_run(node, read)
            results = ReferenceEvaluator(graph, opsets=dict(self.graph.opsets)).run(None, feeds)
        except Exception:  # the reference operators raise whatever they like; it stays unknown
            return
        self._know(outputs, [np.asarray(each) for each in results])

    def _shape(self, node: onnx.NodeProto) -> Values:
        sizes = self.sizes[node.input[0]]
        limits = {each.name: each.i for each in node.attribute}
        return np.array(sizes[limits.get("start", 0) : limits.get("end", len(sizes))], np.int64)

    def _know(self, names: Sequence[str], values: Sequence[Values]) -> None:
        for name, value in zip(names, values, strict=True):
            if value.size <= MAX_EVALUATED:
                self.values[name] = value
                self.sizes[name] = value.shape


def _as_standard(node: onnx.NodeProto) -> onnx.NodeProto:
    """The operator of onnx that gives tensors of the same sizes."""
    standard, positions = _COMPUTED_AS[node.op_type]
    made = deepcopy(node)
    made.op_type, made.domain = standard, ""
    known = onnx.defs.get_schema(standard).attributes
    del made.attribute[:]
    made.attribute.extend(each for each in node.attribute if each.name in known)
    del made.input[:]
    made.input.extend(node.input[at] for at in positions if at < len(node.input))
    return made


def _typed(kind: onnx.TypeProto, data_type: int) -> onnx.TypeProto:
    """The type of quantised weights that an operator of onnx takes as they were."""
    made = deepcopy(kind)
    if made.tensor_type.elem_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8):
        made.tensor_type.elem_type = data_type
    return made


def _tensor_type(data_type: int, sizes: Dims) -> onnx.TypeProto:
    return helper.make_tensor_type_proto(data_type, sizes)
