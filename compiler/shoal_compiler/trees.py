"""How deep the decision trees of a node are.

ONNX Runtime builds trees by recursion when it loads a model: a chain of 20,000 tests overflows its
stack and kills the process. Trained trees are a few dozen levels deep, some hundreds at most.
"""

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Final

import onnx

from shoal_compiler.errors import ModelRefused

MAX_TREE_DEPTH: Final = 1000


def check_trees(node: onnx.NodeProto, label: str) -> None:
    """Raise `ModelRefused` if a tree of the node is deeper than `MAX_TREE_DEPTH`, or has a cycle.
    Nodes without trees pass."""
    values = {each.name: each for each in node.attribute}
    if "nodes_truenodeids" not in values or "nodes_falsenodeids" not in values:
        return
    order = TopologicalSorter(dict(enumerate(_children(values))))
    try:
        order.prepare()
    except CycleError as error:
        raise ModelRefused("has a decision tree that contains itself", node=label) from error
    depth = 0
    while order.is_active():
        if depth > MAX_TREE_DEPTH:
            raise ModelRefused(
                f"has a decision tree of more than {MAX_TREE_DEPTH} levels, which the runtime "
                "cannot load; train it with a smaller maximum depth",
                node=label,
            )
        depth += 1
        order.done(*order.get_ready())


def _children(values: Mapping[str, onnx.AttributeProto]) -> list[list[int]]:
    """For each tree node, the indexes of the tree nodes below it."""

    def ints(name: str) -> Sequence[int]:
        return values[name].ints if name in values else []

    below: list[list[int]]
    pairs = zip(ints("nodes_truenodeids"), ints("nodes_falsenodeids"), strict=False)
    if "nodes_nodeids" in values:
        keys = list(zip(ints("nodes_treeids"), ints("nodes_nodeids"), strict=False))
        places = {key: index for index, key in enumerate(keys)}
        modes = values["nodes_modes"].strings if "nodes_modes" in values else []
        below = [
            [] if mode == b"LEAF" else [places.get((tree, each), -1) for each in pair]
            for (tree, _), mode, pair in zip(keys, modes, pairs, strict=False)
        ]
    else:  # TreeEnsemble, since version 5 of ai.onnx.ml: the numbers are indexes
        leafs = zip(ints("nodes_trueleafs"), ints("nodes_falseleafs"), strict=False)
        below = [
            [index for index, is_leaf in zip(pair, flags, strict=True) if not is_leaf]
            for pair, flags in zip(pairs, leafs, strict=False)
        ]
    return [[each for each in pair if 0 <= each < len(below)] for pair in below]
