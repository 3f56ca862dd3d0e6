"""Models of one layer, for tests of what is parted of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from compiler.test_slicing import profiled
from shoal_planner.profile import Profile

MICROSOFT = "com.microsoft"


@dataclass(frozen=True, slots=True)
class Layer:
    """A node that makes `y` of `x` and weights, some of which `before` makes; `w` is the one to be
    parted, with those of `with_it`."""

    node: onnx.NodeProto
    x: np.ndarray
    weights: dict[str, np.ndarray]
    with_it: Sequence[str] = ()
    before: Sequence[onnx.NodeProto] = ()
    opset: int = 17


def integers(*shape: int, kind: type = np.uint8, seed: int = 0) -> np.ndarray:
    limits = np.iinfo(kind)
    return np.random.default_rng(seed).integers(
        limits.min // 2, limits.max // 2, shape, dtype=kind, endpoint=True
    )


def scales(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).uniform(0.01, 0.02, shape).astype(np.float32)


def profile_of(layer: Layer, folder: Path, kind: int = TensorProto.FLOAT) -> Profile:
    """Its profile, and the layer in the folder; `kind` is the type of its output."""
    x = helper.np_dtype_to_tensor_dtype(layer.x.dtype)
    graph = helper.make_graph(
        [*layer.before, layer.node],
        "g",
        [helper.make_tensor_value_info("x", x, layer.x.shape)],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(value, each) for each, value in layer.weights.items()],
    )
    graph.output[0].type.tensor_type.elem_type = kind
    opsets = [helper.make_opsetid("", layer.opset), helper.make_opsetid(MICROSOFT, 1)]
    return profiled(helper.make_model(graph, opset_imports=opsets, ir_version=9), folder)
