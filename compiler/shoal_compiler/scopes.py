"""Names that a graph inside of a node has for what the graph around it has for something else.

The runtime takes them where the node stands before the other tensor is there. That is so in a
model's own order and not in every piece: a shape is taken where its tensor is (`order`), and what
another fragment makes is an input. So such tensors get names of their own.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Final

import onnx

from shoal_compiler.graph import Graph, defined
from shoal_compiler.nodes import all_nodes, is_standard, subgraphs
from shoal_compiler.parting import unlike

_CAPTURING: Final = ("If", "Loop", "Scan", "SequenceMap")
"""Those of other sets take models of their own, whose names they know."""


def set_apart(graph: Graph) -> Graph:
    """The graph whose nodes have other names inside of them for what they make there, where it has
    the names itself."""
    outer = {name for node in graph.nodes for name in node.output if name}
    outer |= graph.weights.keys() | graph.sparse.keys() | {each.name for each in graph.inputs}
    if not any(_clashes(node, outer) for node in graph.nodes):
        return graph
    inside = (each for node in all_nodes(graph.nodes) for each in subgraphs(node))
    taken = outer | {name for each in inside for name in defined(each)}
    nodes = tuple(
        _apart(node, outer, taken) if _clashes(node, outer) else node for node in graph.nodes
    )
    return replace(graph, nodes=nodes)


def _clashes(node: onnx.NodeProto, outer: set[str]) -> bool:
    if not is_standard(node, *_CAPTURING):
        return False
    inside = (each for graph in subgraphs(node) for each in all_nodes(graph.node))
    return any(not outer.isdisjoint(each.output) for each in inside)


def _apart(node: onnx.NodeProto, outer: set[str], taken: set[str]) -> onnx.NodeProto:
    made = deepcopy(node)
    for graph in subgraphs(made):
        _rename(graph, {}, outer, taken)
    return made


def _rename(
    graph: onnx.GraphProto, names: Mapping[str, str], outer: set[str], taken: set[str]
) -> None:
    """Give what a graph makes names that are not in `outer`, and to what it reads those of `names`,
    except where it hides them."""
    hidden = set(defined(graph))
    made = {name for node in graph.node for name in node.output}
    names = {old: new for old, new in names.items() if old not in hidden}
    names |= {name: unlike(name, taken) for name in sorted(made & outer)}
    for value in (*graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for inner in subgraphs(node):
            _rename(inner, names, outer if is_standard(node, *_CAPTURING) else set(), taken)
