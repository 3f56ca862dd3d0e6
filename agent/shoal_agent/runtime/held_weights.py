"""Weights that a prepared model goes on to dequantise at each run.

ONNX Runtime makes one operator of a product and of what dequantises its weights. With 8 bits that
takes up to four times as long, packed or not, and all weights are made floats in each run, outside
of the arena. With fewer bits, packed ones take a tenth to a half of the time. So where a model has
weights of 8 bits, what dequantises them is made a result of it as well while it is optimised: then
nothing is made of that and a product. What else is quantised is fused as ever.
"""

from collections.abc import Collection
from typing import Final

from shoal_protocol.onnx_subset_pb2 import Graph, Model, Node

_DEQUANTISES: Final = "DequantizeLinear"
_PRODUCTS: Final = ("MatMul", "Gemm")
_FEW_BITS: Final = frozenset((21, 22, 23, 25, 26))
"""Of the types of tensors in onnx.proto: integers of 4 and 2 bits, and floats of 4."""


def hold(model: Model) -> frozenset[str]:
    """Change a model before it is optimised; the names of the results that it has besides."""
    graph = model.graph
    given = {value.name for value in graph.output}
    held = frozenset(name for name in _dequantised(graph) if name not in given)
    for name in sorted(held):
        graph.output.add(name=name)
    return held


def release(model: Model, held: frozenset[str]) -> None:
    """Change a model that was optimised: it has its own results alone. The runtime may have given
    a product a node of its own for what is held."""
    graph = model.graph
    read = {name for node in graph.node for name in node.input}
    for value in [each for each in graph.output if each.name in held]:
        graph.output.remove(value)
    for node in [each for each in graph.node if held.issuperset(each.output)]:
        if read.isdisjoint(node.output):
            graph.node.remove(node)


def _dequantised(graph: Graph) -> list[str]:
    """Weights of 8 bits or more that products of floats take dequantised."""
    weights = {each.name for each in graph.initializer if each.data_type not in _FEW_BITS}
    made = {node.output[0]: node for node in graph.node if node.op_type == _DEQUANTISES}
    return [
        node.input[1]
        for node in graph.node
        if node.op_type in _PRODUCTS and node.input[0] not in made and _has(node, made, weights)
    ]


def _has(product: Node, made: dict[str, Node], weights: Collection[str]) -> bool:
    dequantising = made.get(product.input[1])
    return dequantising is not None and dequantising.input[0] in weights
