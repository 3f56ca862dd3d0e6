"""Outputs of a fragment that devices join from parts, where it runs in blocks.

A layer in parts (`slicing`) ends in a Concat. As an output of a fragment, as the logits of a
language model are, the whole is as large as all parts together, and both would be there. So blocks
give the parts, and the device writes each into the whole as soon as it is made.
"""

from collections import Counter
from typing import Final

import onnx

from shoal_compiler.graph import Graph
from shoal_compiler.nodes import integer_of, is_standard
from shoal_planner.pieces import Piece
from shoal_planner.profile import NodeProfile, Profile, Role
from shoal_protocol.blocks import Join

LEAST_BYTES: Final = 1 << 20
"""Of an output that is worth it."""


def find_joins(graph: Graph, profile: Profile, piece: Piece) -> dict[int, Join]:
    """The joins of a piece, by the positions of the nodes whose place they take."""
    nodes = {position: profile.nodes[position] for position in piece.nodes}
    readers = Counter(name for node in nodes.values() for name in dict.fromkeys(node.inputs))
    readers.update(piece.gives)
    made = {name for node in nodes.values() if node.role is Role.COMPUTE for name in node.outputs}
    joins = {}
    for position, node in nodes.items():
        if graph.path(graph.nodes[node.source]):
            continue  # in a branch
        join = _join(graph.nodes[node.source], node, profile)
        if join is None or join.output not in piece.gives or readers[join.output] > 1:
            continue
        if made.issuperset(join.parts) and all(readers[name] == 1 for name in join.parts):
            joins[position] = join
    return joins


def _join(node: onnx.NodeProto, known: NodeProfile, profile: Profile) -> Join | None:
    """What a Concat of different parts, whose sizes are known, does."""
    parts = tuple(node.input)
    if not is_standard(node, "Concat") or not parts:
        return None
    (output,) = known.outputs
    spec, size = profile.tensors[output].spec, profile.tensors[output].bytes or 0
    if spec.shape is None or size < LEAST_BYTES or spec.dtype == "string":
        return None
    axis = integer_of(node, "axis", 0)
    axis += len(spec.shape) * (axis < 0)
    sizes = tuple(_size(name, axis, profile) for name in parts)
    known_sizes = tuple(each for each in sizes if each)
    if len(set(parts)) < len(parts) or len(known_sizes) < len(sizes):
        return None
    return Join(output=output, axis=axis, parts=parts, sizes=known_sizes)


def _size(name: str, axis: int, profile: Profile) -> int | None:
    """Of a part, along the axis; None: it differs from item to item, or there is none."""
    shape = profile.tensors[name].spec.shape if name in profile.tensors else None
    size = shape[axis] if shape is not None and 0 <= axis < len(shape) else None
    return size if isinstance(size, int) else None
