"""A graph -> `shoal_planner.profile.Profile`: what each node needs, and each tensor weighs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import onnx
from onnx import helper

from shoal_compiler.attributes import attribute_bytes
from shoal_compiler.bodies import bodies_bytes, inner_nodes
from shoal_compiler.borders import remedy
from shoal_compiler.branches import (
    smaller_branches,
    steps_of,
    within_steps,
)
from shoal_compiler.costs import flops, in_place, is_view, tables_of, touched
from shoal_compiler.errors import ModelRefused
from shoal_compiler.gathering import Tables
from shoal_compiler.graph import Graph
from shoal_compiler.halves import halves_of, made_of, made_of_bytes, neighbours
from shoal_compiler.order import choose_order, roles
from shoal_compiler.safety import CheckedModel, byte_size, element_count
from shoal_compiler.shaped import Shaped
from shoal_compiler.shapes import Shapes, infer
from shoal_compiler.single_precision import with_single
from shoal_compiler.tensor_types import (
    MADE_UP_AXIS,
    Axes,
    axes_of,
    bits_of,
    dtype_name,
)
from shoal_compiler.work import Setting, works
from shoal_compiler.workspaces import workspace
from shoal_planner.profile import Halves, NodeProfile, Profile, Role, TensorProfile
from shoal_protocol.digests import Digest
from shoal_protocol.partition import TensorSpec, Work
from shoal_protocol.seen_sizes import Sizes

STRING_BYTES: Final = 32
"""The assumed size of one string: its length is known at run time only."""
# The types that devices take and give. Those below a byte, and the 8-bit floats, the protocol does
# not carry; bfloat16 and complex numbers the runtime does not hand over.
SENDABLE: Final = frozenset(range(onnx.TensorProto.FLOAT, onnx.TensorProto.UINT64 + 1))
_MOST_VALUES: Final = 64
"""Sizes, indices and limits are fewer; what is more is data."""


@dataclass(frozen=True, slots=True)
class Profiler:
    graph: Graph
    order: tuple[int, ...]
    roles: tuple[Role, ...]
    shapes: Shapes
    makers: Mapping[str, str]
    """The operator that makes a tensor."""
    readers: Mapping[str, int]
    tables: Tables
    within_steps: frozenset[int] = frozenset()
    """Nodes of branches before which no cut is to be."""
    smaller: frozenset[int] = frozenset()
    """Nodes of branches that take less than others: nothing, as far as it counts."""

    @classmethod
    def of(
        cls,
        graph: Graph,
        sizes: Mapping[str, Sequence[int]],
        seen: Sizes | None = None,
        shapes: Shapes | None = None,
    ) -> "Profiler":
        """`shapes`: those of the graph's tensors, where they are known already."""
        node_roles = roles(graph)
        order = choose_order(graph, node_roles)
        if shapes is None:
            shapes = infer(graph, order, node_roles, sizes, seen)
        makers = {name: node.op_type for node in graph.nodes for name in node.output if name}
        readers = Counter(name for names in graph.reads for name in names)
        tables = Tables(graph, node_roles)
        profiler = cls(graph, order, node_roles, shapes, makers, readers, tables)
        steps = steps_of(graph, [each for each in order if node_roles[each] is Role.COMPUTE])
        return replace(
            profiler,
            within_steps=within_steps(steps),
            smaller=smaller_branches(steps, profiler._need),
        )

    def profile(self, model: CheckedModel, graph_digest: Digest, digest: Digest) -> Profile:
        used = {name for names in self.graph.reads for name in names}
        used |= {each.name for each in self.graph.outputs}
        weights = {name: each.bytes for name, each in self.graph.weights.items() if name in used}
        weights |= {
            name: _sparse_bytes(each) for name, each in self.graph.sparse.items() if name in used
        }
        parameters = sum(
            element_count(each.tensor)
            for name, each in self.graph.weights.items()
            if name in used and not each.whole
        )
        made = Profile(
            digest=digest,
            graph_digest=graph_digest,
            size_bytes=sum(each.stat().st_size for each in model.files),
            opset=self.graph.opsets.get("", self.graph.opsets.get("ai.onnx", 0)),
            parameters=parameters,
            inputs=tuple(self._declared(each) for each in self.graph.inputs),
            outputs=tuple(self._given(each) for each in self.graph.outputs),
            nodes=self._nodes(),
            tensors=self._tensors(),
            weights=weights,
            half_weights=frozenset(filter(self._is_half_weight, weights)),
        )
        return with_single(self.graph, made)

    def _nodes(self) -> tuple[NodeProfile, ...]:
        reckoned = works([self.setting(index) for index in self.order])
        return tuple(map(self._node, self.order, reckoned))

    def _need(self, index: int) -> int | None:
        """What a node gives and works in."""
        node = self.graph.nodes[index]
        given = _sum(self._bytes(name) for name in node.output if name)
        needed = workspace(self._shaped(node))
        return None if given is None else given + sum(needed.arena) + needed.beside_bytes

    def _node(self, index: int, work: Work | None) -> NodeProfile:
        made = self._whole_node(index, work)
        if index not in self.smaller:
            return made
        nothing = Work() if work is not None else None
        return replace(made, flops=0, work=nothing, workspaces=(), converted=(), beside_bytes=0)

    def _whole_node(self, index: int, work: Work | None) -> NodeProfile:
        node = self.graph.nodes[index]
        reads = self.graph.reads[index]
        weights = tuple(name for name in reads if self._is_constant(name))
        shaped = self._shaped(node)
        needed = workspace(shaped)
        rows_read = self._touched(shaped)
        made_bytes = _sum(self._bytes(name) for name in node.output if name)
        halves = halves_of(node, self._element_type, self.graph.opsets)
        more = made_of(node, self.graph.opsets) if halves.is_converted else None
        return NodeProfile(
            label=self.graph.labels[index],
            operator=f"{node.domain}.{node.op_type}" if node.domain else node.op_type,
            source=index,
            role=self.roles[index],
            joined=index in self.within_steps or not self.graph.together.isdisjoint(node.output),
            inputs=tuple(name for name in reads if not self._is_constant(name)),
            outputs=tuple(filter(None, node.output)),
            weights=weights,
            flops=flops(shaped),
            work=work,
            parameter_bytes=sum(self._weight_bytes(name) for name in weights),
            activation_bytes=made_bytes,
            workspaces=(
                *(needed.arena if more is None else (made_of_bytes(shaped, more),)),
                *filter(None, [bodies_bytes(node, self._sized_type, self.graph.opsets)]),
            ),
            converted=tuple(self._converted(weights)) if halves.is_converted else (),
            halves=halves,
            neighbours=neighbours(node, self.graph.opsets) if halves is Halves.TAKEN else (),
            beside_bytes=needed.beside_bytes,
            in_place=more is not None or in_place(node, same_shape=self._is_shape_known(node)),
            is_view=is_view(node),
            touched=rows_read,
            gathers=self.tables.gathered_bytes(
                index, sum(size for _, size in rows_read), made_bytes
            ),
            inner_nodes=inner_nodes(node),
            attribute_bytes=attribute_bytes(node),
        )

    def _shaped(self, node: onnx.NodeProto) -> Shaped:
        return Shaped(
            node,
            tuple(self.shapes.sizes.get(name) if name else None for name in node.input),
            tuple(self.shapes.sizes.get(name) for name in node.output if name),
            tuple(map(self._element_type, node.input)),
            tuple(self.makers.get(name, "") for name in node.input),
        )

    def setting(self, index: int) -> Setting:
        """A node among its neighbours."""
        node = self.graph.nodes[index]
        first = next(iter(node.input), "")
        output = next(filter(None, node.output), "")
        kind = self.shapes.types.get(output)
        bits = bits_of(kind.tensor_type.elem_type) if kind is not None else None
        return Setting(
            shaped=self._shaped(node),
            element_bytes=(bits or 32) / 8,
            weight_bytes=sum(
                self._weight_bytes(name)
                for name in self.graph.reads[index]
                if self._is_constant(name)
            ),
            after=self.makers.get(first, ""),
            readers=self.readers.get(output, 0),
        )

    def _sized_type(self, name: str) -> onnx.TypeProto | None:
        """A tensor's type with its sizes, as far as they are known."""
        data_type = self._element_type(name)
        if not data_type:
            return None
        return helper.make_tensor_type_proto(data_type, self.shapes.sizes.get(name))

    def _element_type(self, name: str) -> int:
        """The type of a tensor's elements; 0: it is not known."""
        if name in self.graph.weights:
            return self.graph.weights[name].tensor.data_type
        kind = self.shapes.types.get(name)
        return 0 if kind is None else kind.tensor_type.elem_type

    def _converted(self, weights: Iterable[str]) -> Iterator[int]:
        """Bytes of a node's weights in single precision, into which the runtime converts halves
        each time that it computes with them."""
        yield from (2 * self._weight_bytes(each) for each in weights if self._is_half_weight(each))

    def _is_half_weight(self, name: str) -> bool:
        return (
            name in self.graph.weights
            and self.graph.weights[name].tensor.data_type == onnx.TensorProto.FLOAT16
        )

    def _is_shape_known(self, node: onnx.NodeProto) -> bool:
        """Whether the runtime knows that the first input and output are of one shape. An axis that
        inference had to name itself has no name there."""
        before, after = (
            self.shapes.axes(next(iter(names), "")) for names in (node.input, node.output)
        )
        return (
            before is not None
            and before == after
            and not any(
                axis is None or (isinstance(axis, str) and axis.startswith(MADE_UP_AXIS))
                for axis in before
            )
        )

    def _is_constant(self, name: str) -> bool:
        return name in self.graph.weights or name in self.graph.sparse

    def _touched(self, shaped: Shaped) -> tuple[tuple[str, int], ...]:
        """The tables of which the node reads rows, with what of them it has in memory then."""
        sizes = {
            name: touched(shaped, place, self.graph.weights[name].bytes)
            for name, place in tables_of(shaped.node).items()
            if name in self.graph.weights
        }
        return tuple((name, size) for name, size in sizes.items() if size is not None)

    def _weight_bytes(self, name: str) -> int:
        if name in self.graph.weights:
            return self.graph.weights[name].bytes
        return _sparse_bytes(self.graph.sparse[name])

    def _bytes(self, name: str) -> int | None:
        """Bytes of a tensor for the profiled shapes."""
        if self.graph.producers.get(name) in self.smaller:
            return 0
        sizes, kind = self.shapes.sizes.get(name), self.shapes.types.get(name)
        if sizes is None or kind is None or not kind.HasField("tensor_type"):
            return None
        data_type, count = kind.tensor_type.elem_type, prod(sizes)
        if data_type == onnx.TensorProto.STRING:
            return count * STRING_BYTES
        bits = bits_of(data_type)
        return None if bits is None else (count * bits + 7) // 8

    def _tensors(self) -> dict[str, TensorProfile]:
        names = [each.name for each in self.graph.inputs]
        names += [name for index in self.order for name in self.graph.nodes[index].output if name]
        return {
            name: TensorProfile(
                spec=self._spec(name),
                bytes=self._bytes(name),
                obstacle=self._obstacle(name),
                sizes=self.shapes.sizes.get(name),
                values=self._values(name),
            )
            for name in names
        }

    def _values(self, name: str) -> tuple[int, ...] | None:
        """A few integers that follow from the profiled shapes."""
        known = self.shapes.values.get(name)
        if known is None or known.dtype.kind not in "iu" or known.size > _MOST_VALUES:
            return None
        return tuple(int(each) for each in known.flat)

    def _spec(self, name: str) -> TensorSpec:
        kind = self.shapes.types.get(name)
        data_type = kind.tensor_type.elem_type if kind is not None else 0
        return TensorSpec(name=name, dtype=dtype_name(data_type), shape=self._axes(name))

    def _axes(self, name: str) -> Axes | None:
        """A tensor's symbolic shape. What a branch makes may be empty: its first axis is whatever
        it is then."""
        axes = self.shapes.axes(name)
        return (None, *axes[1:]) if axes and name in self.graph.guards else axes

    def _obstacle(self, name: str) -> str:
        """Why a tensor cannot be sent."""
        kind = self.shapes.types.get(name)
        match kind.WhichOneof("value") if kind is not None else None:
            case None:
                return "its type is not known"
            case "tensor_type":
                data_type = kind.tensor_type.elem_type if kind is not None else 0
                if name in self.graph.guards and self.shapes.axes(name) is None:
                    return "it is not known what it would be, where its branch is not taken"
                if data_type in SENDABLE:
                    return ""
                return f"tensors of type {dtype_name(data_type)} are not sent"
            case value:
                return f"it is of type {str(value).removesuffix('_type')}, not a tensor"

    def _declared(self, value: onnx.ValueInfoProto) -> TensorSpec:
        """A model's input or output as the model declares it, or as inferred where it does not."""
        if not value.type.HasField("tensor_type") and value.type.WhichOneof("value"):
            kind = str(value.type.WhichOneof("value")).removesuffix("_type")
            raise ModelRefused(
                f"is an input or output of type {kind}, and only tensors can be sent: "
                f"{remedy(value.type)}",
                tensor=value.name,
            )
        tensor = value.type.tensor_type
        spec = self._declared_spec(value, tensor)
        if value.name in self.shapes.types and (obstacle := self._obstacle(value.name)):
            raise ModelRefused(
                f"is an input or output, and {obstacle}: {remedy(self.shapes.types[value.name])}",
                tensor=value.name,
            )
        return spec

    def _given(self, value: onnx.ValueInfoProto) -> TensorSpec:
        """An output. The runtime gives it whatever shape the model declares: so that counts as far
        as what is inferred agrees, and its names of axes with it."""
        spec, inferred = self._declared(value), self.shapes.axes(value.name)
        if inferred is None or spec.shape is None or len(spec.shape) != len(inferred):
            return replace(spec, shape=inferred)
        axes = zip(spec.shape, inferred, strict=True)
        shape = tuple(
            axis if isinstance(axis, str) or axis == known else known for axis, known in axes
        )
        return replace(spec, shape=shape)

    def _declared_spec(
        self, value: onnx.ValueInfoProto, tensor: onnx.TypeProto.Tensor
    ) -> TensorSpec:
        inferred = self.shapes.types.get(value.name)
        data_type = tensor.elem_type
        if inferred is not None and inferred.tensor_type.elem_type:
            data_type = inferred.tensor_type.elem_type
        axes = axes_of(value.type) if tensor.HasField("shape") else self.shapes.axes(value.name)
        return TensorSpec(name=value.name, dtype=dtype_name(data_type), shape=axes)


def declared_input(value: onnx.ValueInfoProto) -> TensorSpec | None:
    """A model's input, where the model says its type and axes itself."""
    tensor = value.type.tensor_type
    if not tensor.elem_type or not tensor.HasField("shape"):
        return None
    axes = axes_of(value.type)
    return TensorSpec(name=value.name, dtype=dtype_name(tensor.elem_type), shape=axes)


def _sparse_bytes(sparse: onnx.SparseTensorProto) -> int:
    """What a sparse weight takes while it is loaded (measured, 1.31): the runtime makes it dense,
    copies that, and has it in the model's form and in its own beside it."""
    dense = byte_size(onnx.TensorProto(data_type=sparse.values.data_type, dims=sparse.dims))
    return 2 * dense + 2 * (byte_size(sparse.values) + byte_size(sparse.indices))


def _sum(sizes: Iterable[int | None]) -> int | None:
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total
