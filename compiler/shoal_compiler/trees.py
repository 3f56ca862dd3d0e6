"""How deep the decision trees of a node are.

ONNX Runtime builds trees by recursion when it loads a model: a chain of 20,000 tests overflows its
stack and kills the process. Trained trees are a few dozen levels deep, some hundreds at most.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import onnx

from shoal_compiler.errors import ModelRefused

MAX_TREE_DEPTH: Final = 1000


def check_trees(node: onnx.NodeProto, label: str) -> None:
    """Raise `ModelRefused` if a tree of the node is deeper than `MAX_TREE_DEPTH`, or has a cycle.
    Nodes without trees pass."""
    values = {each.name: each for each in node.attribute}
    if "nodes_truenodeids" not in values or "nodes_falsenodeids" not in values:
        return
    count, above, below = _edges(values)
    order = np.argsort(above, kind="stable")
    below = below[order]
    # What is below node n is `below[first[n]:first[n + 1]]`.
    first = np.searchsorted(above[order], np.arange(count + 1))
    waiting = np.bincount(below, minlength=count)
    level = np.flatnonzero(waiting == 0)
    left = count
    for _ in range(MAX_TREE_DEPTH + 1):
        left -= len(level)
        if not len(level):
            break
        level = _next_level(level, first, below, waiting)
    if len(level):
        raise ModelRefused(
            f"has a decision tree of more than {MAX_TREE_DEPTH} levels, which the runtime "
            "cannot load; train it with a smaller maximum depth",
            node=label,
        )
    if left:
        raise ModelRefused("has a decision tree that contains itself", node=label)


def _next_level(
    level: np.ndarray, first: np.ndarray, below: np.ndarray, waiting: np.ndarray
) -> np.ndarray:
    """The tree nodes below a level of which all that is above them was visited."""
    counts = first[level + 1] - first[level]
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    found, times = np.unique(below[np.repeat(first[level], counts) + offsets], return_counts=True)
    waiting[found] -= times
    ready: np.ndarray = found[waiting[found] == 0]
    return ready


def _edges(values: Mapping[str, onnx.AttributeProto]) -> tuple[int, np.ndarray, np.ndarray]:
    """How many tree nodes there are, and which index is above which."""
    sides = [_ints(values, f"nodes_{side}nodeids") for side in ("true", "false")]
    count = min(len(each) for each in sides)
    if "nodes_nodeids" in values:
        trees, ids = _ints(values, "nodes_treeids"), _ints(values, "nodes_nodeids")
        modes = values["nodes_modes"].strings if "nodes_modes" in values else []
        count = min(count, len(trees), len(ids), len(modes))
        inner = np.fromiter((each != b"LEAF" for each in modes[:count]), bool, count)
        inners = [inner, inner]
        sides = [_places(trees[:count], ids[:count], each[:count]) for each in sides]
    else:  # TreeEnsemble, since version 5 of ai.onnx.ml: the numbers are indexes
        leafs = [_ints(values, f"nodes_{side}leafs") for side in ("true", "false")]
        count = min(count, *(len(each) for each in leafs))
        inners = [each[:count] == 0 for each in leafs]
    above = np.concatenate([np.flatnonzero(each) for each in inners])
    below = np.concatenate([side[:count][each] for side, each in zip(sides, inners, strict=True)])
    known = (below >= 0) & (below < count)
    return count, above[known], below[known]


def _ints(values: Mapping[str, onnx.AttributeProto], name: str) -> np.ndarray:
    numbers = values[name].ints if name in values else []
    return np.fromiter(numbers, np.int64, len(numbers))


def _places(trees: np.ndarray, ids: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where the node `wanted[i]` of the tree `trees[i]` is; -1: nowhere."""
    count = len(ids)
    # Numbers of both in one: those of nodes by their rank, since any number may be one.
    _, ranks = np.unique(np.concatenate([ids, wanted]), return_inverse=True)
    _, groves = np.unique(trees, return_inverse=True)
    keys = groves * (2 * count + 1) + ranks[:count]
    sought = groves * (2 * count + 1) + ranks[count:]
    # Of nodes of the same number the last counts.
    order = np.argsort(keys, kind="stable")
    at = np.searchsorted(keys[order], sought, side="right") - 1
    found = order[np.maximum(at, 0)] if count else order
    return np.where((at >= 0) & (keys[found] == sought), found, -1)
