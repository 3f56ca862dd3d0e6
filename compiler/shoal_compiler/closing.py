"""A piece of a graph whose nodes depend on branches (`branches`), as a model: inside of Ifs again.

What a piece gives, and the branch that is not taken would have made, is an empty tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import onnx
from onnx import helper

from shoal_compiler.branches import BRANCHES, bodies
from shoal_compiler.graph import Graph, read_names, rename
from shoal_compiler.parting import unlike
from shoal_compiler.tensor_types import bits_of
from shoal_protocol.partition import TensorSpec


def closed(
    graph: Graph, nodes: Sequence[onnx.NodeProto], gives: Sequence[TensorSpec]
) -> list[onnx.NodeProto]:
    """The nodes of a piece, in order, with those inside an If that depend on a branch."""
    if not graph.guards:
        return list(nodes)
    return _Closing.of(graph, nodes, gives).level(nodes, 0)


@dataclass(slots=True)
class _Group:
    """What depends on one If, by the branch."""

    condition: str
    nodes: Mapping[bool, list[onnx.NodeProto]] = field(
        default_factory=lambda: {True: [], False: []}
    )


@dataclass(frozen=True, slots=True)
class _Closing:
    graph: Graph
    gives: Mapping[str, TensorSpec]
    taken: set[str]

    @classmethod
    def of(
        cls, graph: Graph, nodes: Sequence[onnx.NodeProto], gives: Sequence[TensorSpec]
    ) -> "_Closing":
        taken = {name for node in nodes for name in (*node.output, *read_names(node))}
        return cls(graph, {each.name: each for each in gives}, taken)

    def level(self, nodes: Sequence[onnx.NodeProto], depth: int) -> list[onnx.NodeProto]:
        """The nodes, all of which depend on the same `depth` branches."""
        made: list[onnx.NodeProto] = []
        groups: dict[str, _Group] = {}
        for node in nodes:
            path = self.graph.path(node)
            if len(path) > depth:
                guard = path[depth]
                group = groups.setdefault(guard.key, _Group(guard.condition))
                group.nodes[guard.taken].append(node)
            elif node.output[0] in self.graph.opened:
                group = groups.pop(node.output[0], _Group(node.input[0]))
                made.append(self._if(group, depth, node))
            else:
                made.append(node)
        return [*made, *(self._if(group, depth) for group in groups.values())]

    def _if(
        self, group: _Group, depth: int, choice: onnx.NodeProto | None = None
    ) -> onnx.NodeProto:
        """A group's nodes inside an If, which gives what `choice` does, and all that the piece
        gives of what they make."""
        given = {
            name: taken
            for taken, nodes in group.nodes.items()
            for node in nodes
            for name in node.output
            if name in self.gives
        }
        chosen = {} if choice is None else {taken: body for body, taken in bodies(choice)}
        outputs = [*([] if choice is None else choice.output), *given]
        made = helper.make_node("If", [group.condition], outputs, name=outputs[0])
        for name, taken in BRANCHES:
            body = self._body(group.nodes[taken], depth + 1, chosen.get(taken))
            for each, made_in in given.items():
                if made_in is taken:
                    self._hand_on(body, each)
                else:
                    self._leave_out(body, self.gives[each])
            made.attribute.append(helper.make_attribute(name, body))
        return made

    def _body(
        self, nodes: Sequence[onnx.NodeProto], depth: int, choice: onnx.GraphProto | None
    ) -> onnx.GraphProto:
        body = onnx.GraphProto(name="branch", node=self.level(nodes, depth))
        if choice is not None:
            body.node.extend(choice.node)
            body.output.extend(choice.output)
        return body

    def _hand_on(self, body: onnx.GraphProto, name: str) -> None:
        """Give a tensor that a node of the branch makes, and which has another name inside."""
        inside = unlike(f"{name}/inside", self.taken)
        for node in body.node:
            node.output[:] = [inside if each == name else each for each in node.output]
        rename(body, {name: inside})
        body.output.append(_typed(inside, self.gives[name]))

    def _leave_out(self, body: onnx.GraphProto, spec: TensorSpec) -> None:
        """Give an empty tensor; of one without axes, zero."""
        absent = unlike(f"{spec.name}/absent", self.taken)
        axes = (None,) if spec.shape is None else spec.shape
        dims = [axis if isinstance(axis, int) else 0 for axis in axes]
        data_type = _data_type(spec)
        tensor = onnx.TensorProto(data_type=data_type, dims=dims)
        if data_type == onnx.TensorProto.STRING:
            tensor.string_data.extend([b""] * prod(dims))
        else:
            tensor.raw_data = bytes(prod(dims) * (bits_of(data_type) or 0) // 8)
        body.node.append(helper.make_node("Constant", [], [absent], value=tensor))
        body.output.append(_typed(absent, spec))


def _typed(name: str, spec: TensorSpec) -> onnx.ValueInfoProto:
    """What a branch gives, of whatever shape: that of the other branch is another."""
    value = onnx.ValueInfoProto(name=name)
    value.type.tensor_type.elem_type = _data_type(spec)
    return value


def _data_type(spec: TensorSpec) -> int:
    return onnx.TensorProto.DataType.Value(spec.dtype.upper())
