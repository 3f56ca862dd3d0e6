"""How coarsely a model rounds: by the coarsest floating-point numbers that it has.

A model that was made half precision rounds each value to one of 2048 numbers between a power of two
and the next, and where it rounds depends on how it is run: ONNX Runtime computes several nodes in
single precision one after the other and rounds at their end, and a cut between them makes it round
there. Each of two results may have been rounded to the number on the other side of what is true, so
they may be two units apart, in proportion to the largest number of the tensor: sums round as their
largest parts do.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import onnx
from onnx import TensorProto

from shoal_compiler.nodes import all_nodes, subgraphs, tensors_of
from shoal_compiler.safety import open_model

_APART: Final = 2
_UNITS: Final[dict[int, float]] = {TensorProto.FLOAT16: 2.0**-10, TensorProto.BFLOAT16: 2.0**-7}


def apart_by_rounding(model: Path) -> float:
    """By what part of its largest number a result may differ from another one that is rounded
    otherwise; 0: the model's numbers are of single precision, or finer. Raises `ModelRefused`."""
    found = _types(open_model(model).proto)
    return _APART * max((_UNITS.get(each, 0.0) for each in found), default=0.0)


def _types(proto: onnx.ModelProto) -> Iterator[int]:
    nodes = list(all_nodes(proto.graph.node))
    for function in proto.functions:
        nodes.extend(all_nodes(function.node))
    for graph in (proto.graph, *(inner for node in nodes for inner in subgraphs(node))):
        yield from (each.data_type for each in graph.initializer)
        for value in (*graph.input, *graph.value_info, *graph.output):
            yield value.type.tensor_type.elem_type
    for node in nodes:
        for attribute in node.attribute:
            yield from (each.data_type for each in tensors_of(attribute))
            if node.op_type == "Cast" and attribute.name == "to":
                yield attribute.i
