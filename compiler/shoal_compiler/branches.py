"""The branches of an If that hold large weights: nodes among the others, until a model is written.

A node is the smallest thing that a cut can part, and some exporters put a whole decoder into each
branch of one If: with the keys and values of earlier words, and without. So such an If is *opened*:
the nodes of its branches stand in the graph, where they are profiled, parted and cut as all are.
What is left of the If chooses between what the two have made.

No node runs that would not have run before. `find_guards` says on which branches each node depends,
and `closed` puts the nodes of a piece back into an If each time that a piece becomes a model. What
such a piece gives, and the branch that is not taken would have made, is an empty tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import Final

import onnx
from onnx import helper

from shoal_compiler.graph import (
    Graph,
    Guard,
    Weight,
    constant_tensor,
    defined,
    read_names,
    rename,
)
from shoal_compiler.order import file_order
from shoal_compiler.parting import unlike
from shoal_compiler.safety import bits_of, is_standard, subgraphs
from shoal_compiler.wire import LARGE
from shoal_protocol.partition import TensorSpec

LEAST_BYTES: Final = 1 << 20
"""Of the weights that the branches of an If read, for which it is opened."""
_BRANCHES: Final = (("then_branch", True), ("else_branch", False))


# ---- opening -------------------------------------------------------------------------------------


def open_branches(graph: Graph) -> Graph:
    """The graph with each If open whose branches read large weights, those inside of others too."""
    while (place := _next(graph)) is not None:
        graph = _opened(graph, place)
    return graph


def _next(graph: Graph) -> int | None:
    places = (place for place, node in enumerate(graph.nodes) if _is_to_open(graph, node))
    return next(places, None)


def _is_to_open(graph: Graph, node: onnx.NodeProto) -> bool:
    if not is_standard(node, "If") or not all(node.output) or node.output[0] in graph.opened:
        return False
    bodies = list(_bodies(node))
    if len(bodies) != len(_BRANCHES) or any(
        body.input or body.sparse_initializer or len(body.output) != len(node.output)
        for body, _ in bodies
    ):
        return False  # the runtime is to say what is wrong with it
    read = {name for body, _ in bodies for name in _read(body)}
    return sum(graph.weights[name].bytes for name in read & graph.weights.keys()) >= LEAST_BYTES


def _bodies(node: onnx.NodeProto) -> Iterator[tuple[onnx.GraphProto, bool]]:
    """The two graphs of an If, and whether it runs where the condition is true."""
    for name, taken in _BRANCHES:
        yield from ((each.g, taken) for each in node.attribute if each.name == name)


def _read(body: onnx.GraphProto) -> Iterator[str]:
    for node in body.node:
        yield from read_names(node)
    yield from (each.name for each in body.output)


def _opened(graph: Graph, place: int) -> Graph:
    """The graph with one If open."""
    node = deepcopy(graph.nodes[place])
    taken = graph.weights.keys() | graph.sparse.keys() | {each.name for each in graph.inputs}
    for each in (*graph.nodes[:place], *graph.nodes[place + 1 :]):
        taken.update(each.output)
        taken.update(name for inner in subgraphs(each) for name in _all_defined(inner))
    for body, _ in _bodies(node):
        for inner in body.node:
            taken.update(name for deeper in subgraphs(inner) for name in _all_defined(deeper))
    weights, declared = dict(graph.weights), dict(graph.declared)
    inside = [_taken_out(body, taken, weights, declared) for body, _ in _bodies(node)]
    nodes = (*graph.nodes[:place], *chain.from_iterable(inside), node)
    return replace(
        graph,
        nodes=(*nodes, *graph.nodes[place + 1 :]),
        weights=weights,
        declared=declared,
        opened=graph.opened | {node.output[0]},
    )


def _all_defined(graph: onnx.GraphProto) -> Iterator[str]:
    yield from defined(graph)
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _all_defined(inner)


def _taken_out(
    body: onnx.GraphProto,
    taken: set[str],
    weights: dict[str, Weight],
    declared: dict[str, onnx.TypeProto],
) -> list[onnx.NodeProto]:
    """The nodes of a branch, with names that nothing else has. What is left of it hands on what
    they make, under other names."""
    names = {name: unlike(name, taken) for name in defined(body) if name}
    for node in body.node:
        node.output[:] = [names.get(name, name) for name in node.output]
    rename(body, names)
    constants = [(names[each.name], each) for each in body.initializer]
    kept: list[onnx.NodeProto] = []
    for node in body.node:
        if (constant := constant_tensor(node)) is None:
            kept.append(deepcopy(node))
        else:
            constants.append((node.output[0], constant))
    for name, constant in constants:
        weights[name] = Weight(deepcopy(constant), None)
        weights[name].tensor.name = name
    for value in (*body.value_info, *body.output):
        declared[names.get(value.name, value.name)] = value.type
    results = [names.get(each.name, each.name) for each in body.output]
    del body.node[:], body.initializer[:], body.value_info[:]
    for value, result in zip(body.output, results, strict=True):
        value.name = unlike(result, taken)
        body.node.append(helper.make_node("Identity", [result], [value.name], name=value.name))
    return kept


# ---- what runs when ------------------------------------------------------------------------------


def find_guards(graph: Graph) -> Graph:
    """The graph with the branches on which its nodes depend: those of which all that reads their
    outputs is part. What depends on no input runs always. The nodes of two branches stand side by
    side, as far as they read the same weights."""
    if not graph.opened:
        return graph
    chosen = {
        name: [(node.output[0], node.input[0], taken) for node, taken in users]
        for name, users in _chosen(graph).items()
    }
    order = file_order(graph)
    always = _always(graph, order)
    readers: dict[str, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        plain = node.input if node.output[0] in graph.opened else graph.reads[place]
        for name in dict.fromkeys(filter(None, plain)):
            readers.setdefault(name, []).append(place)
    outputs = {each.name for each in graph.outputs}
    found: dict[int, tuple[Guard, ...]] = {}
    for place in reversed(order):
        node = graph.nodes[place]
        paths: list[tuple[Guard, ...]] = []
        for name in filter(None, node.output):
            paths += [()] * (name in outputs)
            paths += [found[reader] for reader in readers.get(name, ())]
            paths += [
                (*found[graph.producers[key]], Guard(key=key, condition=condition, taken=taken))
                for key, condition, taken in chosen.get(name, ())
            ]
        found[place] = () if place in always else _common(paths)
    guards = {
        name: path
        for place, path in found.items()
        if path
        for name in graph.nodes[place].output
        if name
    }
    guarded = replace(graph, guards=guards)
    return replace(guarded, nodes=tuple(_arranged(guarded, graph.nodes, 0)))


def _arranged(graph: Graph, nodes: Sequence[onnx.NodeProto], depth: int) -> list[onnx.NodeProto]:
    """The nodes, all of which depend on the same `depth` branches: at the places of those that
    depend on one more If are the same nodes, side by side."""
    places: dict[str, list[int]] = {}
    branches: dict[tuple[str, bool], list[onnx.NodeProto]] = {}
    for place, node in enumerate(nodes):
        if len(path := graph.path(node)) > depth:
            guard = path[depth]
            places.setdefault(guard.key, []).append(place)
            branches.setdefault((guard.key, guard.taken), []).append(node)
    made = list(nodes)
    for key, own in places.items():
        then, otherwise = (
            _arranged(graph, branches.get((key, taken), ()), depth + 1) for taken in (True, False)
        )
        for place, node in zip(own, _side_by_side(then, otherwise, graph.weights), strict=True):
            made[place] = node
    return made


def _side_by_side(
    then: Sequence[onnx.NodeProto],
    otherwise: Sequence[onnx.NodeProto],
    weights: Mapping[str, Weight],
) -> list[onnx.NodeProto]:
    """The nodes of both branches, each in its order, with those next to one another that read the
    same large weights: so a cut gives them to one device. Where the branches have no weight in
    common, they are where equal shares of their own have been read."""
    sizes = {name: each.bytes for name, each in weights.items() if each.bytes >= LARGE}
    own = [{name for node in nodes for name in read_names(node)} for nodes in (then, otherwise)]
    common = own[0] & own[1] & sizes.keys()
    merged: list[tuple[float, onnx.NodeProto]] = []
    for nodes, read in zip((then, otherwise), own, strict=True):
        counted = common or read & sizes.keys()
        total = sum(sizes[name] for name in counted) or 1
        seen, bytes_seen = set[str](), 0
        for node in nodes:
            for name in counted.intersection(read_names(node)) - seen:
                seen.add(name)
                bytes_seen += sizes[name]
            merged.append((bytes_seen / total, node))
    return [node for _, node in sorted(merged, key=lambda each: each[0])]


def _chosen(graph: Graph) -> dict[str, list[tuple[onnx.NodeProto, bool]]]:
    """The open Ifs that choose each tensor, and in which case."""
    users: dict[str, list[tuple[onnx.NodeProto, bool]]] = {}
    for node in graph.nodes:
        if node.output[0] in graph.opened:
            for body, taken in _bodies(node):
                for name in dict.fromkeys(_captured(body)):
                    users.setdefault(name, []).append((node, taken))
    return users


def _captured(body: onnx.GraphProto) -> Iterator[str]:
    yield from (name for node in body.node for name in node.input)


def _always(graph: Graph, order: Sequence[int]) -> set[int]:
    """The nodes that depend on no input: what they give may be made again anywhere."""
    fixed, found = graph.weights.keys() | graph.sparse.keys(), set[int]()
    for place in order:
        node = graph.nodes[place]
        if fixed.issuperset(read_names(node)) and not any(True for _ in subgraphs(node)):
            found.add(place)
            fixed.update(node.output)
    return found


def _common(paths: Sequence[tuple[Guard, ...]]) -> tuple[Guard, ...]:
    """What all paths begin with."""
    first, *others = paths or [()]
    length = len(first)
    for path in others:
        same = (at for at, (one, two) in enumerate(zip(first, path, strict=False)) if one != two)
        length = min(next(same, min(len(first), len(path))), length)
    return first[:length]


# ---- closing -------------------------------------------------------------------------------------


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
        chosen = {} if choice is None else {taken: body for body, taken in _bodies(choice)}
        outputs = [*([] if choice is None else choice.output), *given]
        made = helper.make_node("If", [group.condition], outputs, name=outputs[0])
        for name, taken in _BRANCHES:
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
        dims = [axis if isinstance(axis, int) else 0 for axis in spec.shape or ()]
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
