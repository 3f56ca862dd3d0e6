"""A model for benches: layers of equal width, each a product and a Relu."""

from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LAYERS: Final = 12


def save_layers(path: Path, rows: int | str, width: int) -> None:
    """Write it, from `x` to `y`, both float32[rows, width]; a word for `rows` is a free size."""
    chance = np.random.default_rng(1)
    nodes, weights, last = [], [], "x"
    for layer in range(LAYERS):
        weight = chance.standard_normal((width, width)).astype(np.float32) / width**0.5
        weights.append(numpy_helper.from_array(weight, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [f"m{layer}"]))
        last = "y" if layer == LAYERS - 1 else f"r{layer}"
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [last]))
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, width]) for name in ("x", "y")
    ]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
