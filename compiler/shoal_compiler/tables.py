"""Tables that are dequantised or cast as a whole, and of which rows are gathered then.

The runtime makes numbers of all of such a table in each run, four or two times what it has on the
disk. The rows are gathered first here, and no others become numbers: the same, to the bit. What
else reads the table as numbers still has it so.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from math import prod
from typing import Final

import onnx
from onnx import TensorProto

from shoal_compiler.graph import Graph, live
from shoal_compiler.nodes import all_nodes, gathers_rows, is_standard
from shoal_compiler.parting import unlike

LEAST_BYTES: Final = 1 << 20
"""Of a table for which that is worth a change."""
_GATHERED: Final = frozenset(
    (TensorProto.INT8, TensorProto.UINT8, TensorProto.FLOAT16, TensorProto.FLOAT)
)


def gather_first(graph: Graph) -> Graph:
    """The graph with all such tables read by rows."""
    outputs = {each.name for each in graph.outputs}
    makers = {
        node.output[0]: node
        for node in graph.nodes
        if _is_by_itself(graph, node) and node.output[0] not in outputs
    }
    if not makers:
        return graph
    taken = {each.name for each in graph.inputs} | graph.weights.keys() | graph.sparse.keys()
    names = set()
    for node in all_nodes(graph.nodes):
        taken.update((*node.input, *node.output))
        names.add(node.name)
    nodes: list[onnx.NodeProto] = []
    for node in graph.nodes:
        maker = makers.get(node.input[0]) if gathers_rows(node) else None
        nodes.extend([node] if maker is None else _rows_first(node, maker, taken, names))
    kept = live(nodes, outputs)
    return replace(graph, nodes=tuple(node for node, each in zip(nodes, kept, strict=True) if each))


def _is_by_itself(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether a node makes numbers of a large initializer, of each element by itself."""
    if not is_standard(node, "DequantizeLinear", "Cast") or not node.input:
        return False
    table = graph.weights.get(node.input[0])
    if table is None or table.bytes < LEAST_BYTES or table.tensor.data_type not in _GATHERED:
        return False
    others = (graph.weights.get(name) for name in node.input[1:] if name)
    return all(each is not None and prod(each.tensor.dims) == 1 for each in others)


def _rows_first(
    gather: onnx.NodeProto, maker: onnx.NodeProto, taken: set[str], names: set[str]
) -> Iterator[onnx.NodeProto]:
    rows, made = deepcopy(gather), deepcopy(maker)
    rows.input[0] = maker.input[0]
    rows.output[0] = made.input[0] = unlike(f"{gather.output[0]}.rows", taken)
    made.output[0] = gather.output[0]
    made.name = unlike(f"{gather.name or gather.output[0]}.numbers", names)
    # Of one scale for all it says nothing, and the rows may have fewer axes than the table.
    attributes = [each for each in made.attribute if each.name != "axis"]
    del made.attribute[:]
    made.attribute.extend(attributes)
    yield rows
    yield made
