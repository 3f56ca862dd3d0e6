"""The roles of a graph's nodes, and the one order that cuts are positions in.

Role CONSTANT nodes come first. Of the others, COMPUTE nodes are in the order of the file (if that
is a topological one) or in depth-first order from the outputs, whichever lets fewer tensors cross
the positions between nodes; both keep a branch together. A SHAPE node comes directly after the
last node that it needs: a shape is taken where its tensor is, not where somebody asks for it.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import Final

import onnx

from shoal_compiler.errors import ModelRefused
from shoal_compiler.graph import Graph
from shoal_compiler.nodes import subgraphs
from shoal_compiler.wire import LARGE
from shoal_planner.profile import Role

# Run twice they give different values: never repeated.
RANDOM: Final = frozenset(
    {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike"}
    | {"RandomUniform", "RandomUniformLike"}
)
READS_SHAPE_ONLY: Final = frozenset({"Shape", "Size"})
# What shapes, positions and masks are computed with. Each takes time linear in the size of what it
# reads and gives, so repeating it is never dearer than sending its result.
_ARITHMETIC: Final = (
    "Abs Add And Ceil Clip CumSum Div Equal Floor Greater GreaterOrEqual Less LessOrEqual Max Min "
    "Mod Mul Neg Not Or Pow Reciprocal ReduceMax ReduceMin ReduceProd ReduceSum Round Sign Sqrt "
    "Sub Xor"
)
_MOVEMENT: Final = (
    "Cast CastLike Concat ConstantOfShape Expand EyeLike Flatten Gather GatherElements GatherND "
    "Identity Range Reshape ScatterElements ScatterND Slice Split Squeeze Tile Transpose Trilu "
    "Unsqueeze Where"
)
CHEAP: Final = frozenset(f"{_ARITHMETIC} {_MOVEMENT}".split(" "))


def roles(graph: Graph) -> tuple[Role, ...]:
    """The role of each node of `graph.nodes`."""
    fixed = set(graph.weights) | set(graph.sparse)
    tensor_roles: dict[str, Role] = dict.fromkeys(fixed, Role.CONSTANT)
    # A lookup in a table of weights is work: repeating it would copy the table.
    large = {name for name, weight in graph.weights.items() if weight.bytes >= LARGE}
    found: dict[int, Role] = {}
    for index in file_order(graph):
        node = graph.nodes[index]
        reads = graph.values_read[index]
        role = _role(node, {tensor_roles.get(name, Role.COMPUTE) for name in reads})
        if role is Role.SHAPE and not large.isdisjoint(reads):
            role = Role.COMPUTE
        found[index] = role
        tensor_roles.update((name, role) for name in node.output)
    return tuple(found[index] for index in range(len(graph.nodes)))


def _role(node: onnx.NodeProto, reads: set[Role]) -> Role:
    standard = node.domain in ("", "ai.onnx")
    if node.op_type in RANDOM or any(True for _ in subgraphs(node)):
        return Role.COMPUTE
    if reads <= {Role.CONSTANT}:
        return Role.CONSTANT
    if standard and node.op_type in READS_SHAPE_ONLY:
        return Role.SHAPE
    if standard and node.op_type in CHEAP and Role.COMPUTE not in reads:
        return Role.SHAPE
    return Role.COMPUTE


def file_order(graph: Graph) -> tuple[int, ...]:
    """A topological order, as near to the file's as can be. Raises `ModelRefused` for a cycle."""
    missing = [0] * len(graph.nodes)
    consumers: list[list[int]] = [[] for _ in graph.nodes]
    for index, names in enumerate(graph.reads):
        for name in names:
            if name in graph.producers:
                missing[index] += 1
                consumers[graph.producers[name]].append(index)
    ready = [index for index, count in enumerate(missing) if count == 0]
    order = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for consumer in consumers[index]:
            missing[consumer] -= 1
            if missing[consumer] == 0:
                heapq.heappush(ready, consumer)
    if len(order) < len(graph.nodes):
        stuck = next(index for index, count in enumerate(missing) if count)
        raise ModelRefused("depends on its own output", node=graph.labels[stuck])
    return tuple(order)


def depth_first_order(graph: Graph) -> tuple[int, ...]:
    """Each node directly behind the last of what it needs, from the outputs down."""
    order: list[int] = []
    seen = [False] * len(graph.nodes)
    roots = [graph.producers[each.name] for each in graph.outputs if each.name in graph.producers]
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        index, ready = stack.pop()
        if ready:
            order.append(index)
            continue
        if seen[index]:
            continue
        seen[index] = True
        stack.append((index, True))
        needs = [graph.producers[name] for name in graph.reads[index] if name in graph.producers]
        stack.extend((need, False) for need in reversed(needs) if not seen[need])
    return tuple(order)


def choose_order(graph: Graph, node_roles: Sequence[Role]) -> tuple[int, ...]:
    """The order that `Profile.nodes` has. Branches of which one runs stay side by side."""
    bases = [file_order(graph)]
    if not graph.guards:
        bases.append(depth_first_order(graph))
    candidates = [_arranged(graph, node_roles, base) for base in bases]
    return min(candidates, key=lambda order: _crossings(graph, node_roles, order))


def _arranged(graph: Graph, node_roles: Sequence[Role], base: Sequence[int]) -> tuple[int, ...]:
    """Constants first, and each SHAPE node as early as it can be."""
    order = [index for index in base if node_roles[index] is Role.CONSTANT]
    made = {name for index in order for name in graph.nodes[index].output}
    made |= {each.name for each in graph.inputs} | set(graph.weights) | set(graph.sparse)
    waiting: dict[str, list[int]] = {}
    missing: dict[int, int] = {}
    for index in base:
        if node_roles[index] is Role.SHAPE:
            needs = [name for name in graph.reads[index] if name not in made]
            missing[index] = len(needs)
            for name in needs:
                waiting.setdefault(name, []).append(index)
    first = [index for index, count in missing.items() if count == 0]
    for root in (*first, *(index for index in base if node_roles[index] is Role.COMPUTE)):
        due = [root]
        while due:
            index = due.pop()
            order.append(index)
            for name in graph.nodes[index].output:
                for shape in waiting.get(name, ()):
                    missing[shape] -= 1
                due.extend(shape for shape in waiting.get(name, ()) if missing[shape] == 0)
    return tuple(order)


def _crossings(graph: Graph, node_roles: Sequence[Role], order: Sequence[int]) -> int:
    """How many tensors cross, over all positions: the lives of what COMPUTE nodes make, added."""
    place = {index: position for position, index in enumerate(order)}
    last = last_uses(graph, place)
    return sum(
        last.get(name, place[index]) - place[index]
        for index in order
        if node_roles[index] is Role.COMPUTE
        for name in graph.nodes[index].output
    )


def last_uses(graph: Graph, place: Mapping[int, int]) -> dict[str, int]:
    """The position of the last node that reads each tensor."""
    last: dict[str, int] = {}
    for index, names in enumerate(graph.reads):
        for name in names:
            last[name] = max(last.get(name, 0), place[index])
    return last
