"""Convolutions in groups, and those that add something, in parts that read slices."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from compiler.layers import MICROSOFT, Layer, integers, profile_of, scales
from compiler.test_slicing import LIMIT, cut_everywhere, small_limit
from made_models import weight

__all__ = ["small_limit"]

ZERO = np.array(100, np.uint8)


def groups(number: int, channels: int, depth: int, opset: int = 17, **attributes: Any) -> Layer:
    return Layer(
        helper.make_node("Conv", ["x", "w", "b"], ["y"], group=number, **attributes),
        weight(2, number * depth, 5, 6),
        {"w": weight(channels, depth, 3, 3), "b": weight(channels)},
        ["b"],
        opset=opset,
    )


LAYERS = {
    "several groups in a part": groups(8, 200, 20),
    "a group in each part": groups(4, 200, 60),
    "several parts of a group": groups(2, 200, 60),
    "every channel by itself": groups(2000, 2000, 1, pads=[1, 1, 1, 1]),
    "two for each channel": groups(1000, 2000, 1),
    "before slices had inputs": groups(4, 200, 60, opset=9),
    "along one axis": Layer(
        helper.make_node("Conv", ["x", "w"], ["y"], group=2, strides=[2]),
        weight(1, 120, 9),
        {"w": weight(200, 60, 5)},
    ),
    "along three axes": Layer(
        helper.make_node("Conv", ["x", "w"], ["y"], group=2),
        weight(1, 40, 4, 4, 4),
        {"w": weight(100, 20, 3, 3, 3)},
    ),
    "quantised": Layer(
        helper.make_node(
            "QLinearConv",
            ["x", "one", "zero", "w", "s", "z", "one", "zero", "b"],
            ["y"],
            group=2,
        ),
        integers(1, 60, 5, 6, seed=1),
        {
            "one": scales(),
            "zero": ZERO,
            "w": integers(200, 30, 3, 3, kind=np.int8),
            "s": scales(200),
            "z": np.zeros(200, np.int8),
            "b": integers(200, kind=np.int32) // (1 << 20),
        },
        ["s", "z", "b"],
    ),
    "of integers": Layer(
        helper.make_node("ConvInteger", ["x", "w", "zero", "z"], ["y"], group=2),
        integers(1, 60, 5, 6, seed=1),
        {"w": integers(200, 30, 3, 3), "zero": ZERO, "z": ZERO},
    ),
    "with an activation": Layer(
        helper.make_node(
            "FusedConv", ["x", "w"], ["y"], domain=MICROSOFT, activation="Relu", group=2
        ),
        weight(1, 120, 5, 6),
        {"w": weight(100, 60, 3, 3)},
    ),
    "that adds something": Layer(
        helper.make_node(
            "FusedConv", ["x", "w", "b", "t"], ["y"], domain=MICROSOFT, activation="Relu"
        ),
        weight(1, 100, 5, 6),
        {"w": weight(100, 100, 1, 1), "b": weight(100)},
        ["b"],
        [helper.make_node("Neg", ["x"], ["t"])],
    ),
    "of a dequantised weight": Layer(
        helper.make_node("Conv", ["x", "v"], ["y"], group=2),
        weight(1, 120, 5, 6),
        {"w": integers(200, 60, 3, 3, kind=np.int8), "s": scales(200)},
        ["s"],
        [helper.make_node("DequantizeLinear", ["w", "s"], ["v"], axis=0)],
    ),
}
KINDS = {"quantised": TensorProto.UINT8, "of integers": TensorProto.INT32}


@pytest.mark.parametrize("name", LAYERS)
def test_a_convolution_of_groups_is_parted(tmp_path: Path, name: str) -> None:
    layer = LAYERS[name]
    profile = profile_of(layer, tmp_path, KINDS.get(name, TensorProto.FLOAT))
    parted = {each.partition(".")[0] for each in profile.weights if each.endswith(".0")}
    assert parted >= {"w", *layer.with_it}
    parts = [size for each, size in profile.weights.items() if each.startswith("w.")]
    assert len(parts) > 1
    assert max(parts) <= LIMIT
    assert sum(parts) == layer.weights["w"].nbytes
    cut_everywhere(tmp_path, profile, layer.x)


def test_parts_of_one_group_read_one_slice(tmp_path: Path) -> None:
    profile = profile_of(LAYERS["several parts of a group"], tmp_path)
    operators = [each.operator for each in profile.nodes]
    assert operators.count("Slice") == 2 < operators.count("Conv")
