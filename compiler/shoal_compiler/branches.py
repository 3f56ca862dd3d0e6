"""The branches of an If that hold large weights: nodes among the others, until a model is written.

A node is the smallest thing that a cut can part, and some exporters put a whole decoder into each
branch of one If: with the keys and values of earlier words, and without. So such an If is *opened*:
the nodes of its branches stand in the graph, where they are profiled, parted and cut as all are.
What is left of the If chooses between what the two have made.

No node runs that would not have run before. `find_guards` says on which branches each node depends,
and each time that a piece becomes a model its nodes are put back into an If (`closing`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from math import inf
from operator import le
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
from shoal_compiler.nodes import is_standard, subgraphs
from shoal_compiler.order import file_order, roles
from shoal_compiler.parting import unlike
from shoal_compiler.wire import LARGE
from shoal_planner.profile import Role

LEAST_BYTES: Final = 4 << 20
"""Of the weights that the branches of an If read, for which it is opened: with less, it is small
beside an agent."""
BRANCHES: Final = (("then_branch", True), ("else_branch", False))


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
    if not is_standard(node, "If") or node.output[0] in graph.opened:
        return False
    if len(node.input) != 1 or not all((*node.input, *node.output)):
        return False
    found = list(bodies(node))
    if len(found) != len(BRANCHES) or any(
        body.input or body.sparse_initializer or len(body.output) != len(node.output)
        for body, _ in found
    ):
        return False  # the runtime is to say what is wrong with it
    read = {name for body, _ in found for name in _read(body)}
    return sum(graph.weights[name].bytes for name in read & graph.weights.keys()) >= LEAST_BYTES


def bodies(node: onnx.NodeProto) -> Iterator[tuple[onnx.GraphProto, bool]]:
    """The two graphs of an If, and whether it runs where the condition is true."""
    for name, taken in BRANCHES:
        yield from ((each.g, taken) for each in node.attribute if each.name == name)


def _read(body: onnx.GraphProto) -> Iterator[str]:
    for node in body.node:
        yield from read_names(node)
    yield from (each.name for each in body.output)


def _opened(graph: Graph, place: int) -> Graph:
    """The graph with one If open."""
    node = deepcopy(graph.nodes[place])
    taken = graph.weights.keys() | graph.sparse.keys() | {each.name for each in graph.inputs}
    # A branch may call what it gives as the If does, which is a tensor of its own here.
    taken.update(name for each in graph.nodes for name in each.output)
    for each in (*graph.nodes[:place], *graph.nodes[place + 1 :]):
        taken.update(name for inner in subgraphs(each) for name in _all_defined(inner))
    for body, _ in bodies(node):
        for inner in body.node:
            taken.update(name for deeper in subgraphs(inner) for name in _all_defined(deeper))
    weights, declared = dict(graph.weights), dict(graph.declared)
    inside = [_taken_out(body, taken, weights, declared) for body, _ in bodies(node)]
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
    kinds: dict[bool, list[onnx.NodeProto]] = {False: [], True: []}
    for node, role in zip(graph.nodes, roles(guarded), strict=True):
        kinds[role is Role.COMPUTE].append(node)
    # The others run directly behind what they need, whatever their place is here (`order`).
    return replace(guarded, nodes=(*kinds[False], *_arranged(guarded, kinds[True], 0)))


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
    same large weights: so a cut gives them to one device."""
    shares = chain.from_iterable(_shares(then, otherwise, weights))
    merged = sorted(zip(shares, (*then, *otherwise), strict=True), key=lambda each: each[0])
    return [node for _, node in merged]


def _shares(
    then: Sequence[onnx.NodeProto],
    otherwise: Sequence[onnx.NodeProto],
    weights: Mapping[str, Weight],
) -> list[list[float]]:
    """How far each node of two branches is: the bytes of large weights that have been read, of
    those that both read; where they have none in common, the share of the branch's nodes."""
    sizes = {name: each.bytes for name, each in weights.items() if each.bytes >= LARGE}
    own = [{name for node in nodes for name in read_names(node)} for nodes in (then, otherwise)]
    common = own[0] & own[1] & sizes.keys()
    shares: list[list[float]] = []
    for nodes in (then, otherwise):
        seen, bytes_seen = set[str](), 0
        shares.append([])
        for at, node in enumerate(nodes):
            for name in common.intersection(read_names(node)) - seen:
                seen.add(name)
                bytes_seen += sizes[name]
            shares[-1].append(bytes_seen if common else at / len(nodes))
    return shares


def _chosen(graph: Graph) -> dict[str, list[tuple[onnx.NodeProto, bool]]]:
    """The open Ifs that choose each tensor, and in which case."""
    users: dict[str, list[tuple[onnx.NodeProto, bool]]] = {}
    for node in graph.nodes:
        if node.output[0] in graph.opened:
            for body, taken in bodies(node):
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


# ---- what they take ------------------------------------------------------------------------------


Step = Sequence[tuple[int, bool]]
"""Nodes next to one another, and whether they run where the condition is true."""


def steps_of(graph: Graph, order: Sequence[int]) -> list[list[Step]]:
    """Of each open If the steps in which its branches go side by side: in each, both read the same
    large weights, or equal shares of their own."""
    members: dict[str, list[tuple[int, bool]]] = {}
    for index in order:
        for guard in graph.path(graph.nodes[index]):
            members.setdefault(guard.key, []).append((index, guard.taken))
    return [_in_steps(graph, each) for each in members.values()]


def _in_steps(graph: Graph, members: Step) -> list[Step]:
    indices = {side: [index for index, taken in members if taken is side] for side in (True, False)}
    then, otherwise = ([graph.nodes[index] for index in indices[side]] for side in (True, False))
    shares = _shares(then, otherwise, graph.weights)
    share = dict(zip((*indices[True], *indices[False]), chain.from_iterable(shares), strict=True))
    least = {True: inf, False: inf}  # of what is to come
    coming: list[Mapping[bool, float]] = []
    for index, taken in reversed(members):
        least = {**least, taken: min(least[taken], share[index])}
        coming.append(least)
    steps: list[list[tuple[int, bool]]] = [[]]
    most = {True: -inf, False: -inf}
    for (index, taken), left in zip(members, reversed(coming), strict=True):
        if steps[-1] and all(most[side] < left[not side] for side in (True, False)):
            steps.append([])
        steps[-1].append((index, taken))
        most[taken] = max(most[taken], share[index])
    return list(steps)


def within_steps(steps: Sequence[Sequence[Step]]) -> frozenset[int]:
    """The nodes before which no cut is to be: it would part a step."""
    return frozenset(index for own in steps for step in own for index, _ in step[1:])


def smaller_branches(
    steps: Sequence[Sequence[Step]], need: Callable[[int], int | None]
) -> frozenset[int]:
    """The nodes of branches that in no step take more than the other branch of their If: one of the
    two runs, so it is enough to reckon with that one. `need` is what a node gives and works in, in
    bytes; where one is not known, or either branch takes more somewhere, both count."""
    found = set[int]()
    for own in steps:
        needs = {
            side: [_need([need(index) for index, taken in step if taken is side]) for step in own]
            for side in (True, False)
        }
        for side in (True, False):
            if all(map(_is_at_most, needs[side], needs[not side])):
                found.update(index for step in own for index, taken in step if taken is side)
                break
    return frozenset(found)


def _need(needs: Sequence[int | None]) -> tuple[int, int] | None:
    """The largest and the sum of what nodes need, if all of it is known."""
    known = [each for each in needs if each is not None]
    return (max(known, default=0), sum(known)) if len(known) == len(needs) else None


def _is_at_most(one: tuple[int, int] | None, other: tuple[int, int] | None) -> bool:
    return one is not None and other is not None and all(map(le, one, other))
