"""Transposed convolutions in parts, of their channels or of their groups."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from compiler.layers import Layer, profile_of
from compiler.test_slicing import LIMIT, cut_everywhere, small_limit
from made_models import weight
from shoal_compiler.profile import Source, profile_model

__all__ = ["small_limit"]


def transposed(x: np.ndarray, w: np.ndarray, *, bias: bool = False, **attributes: Any) -> Layer:
    opset = attributes.pop("opset", 17)
    channels = w.shape[1] * attributes.get("group", 1)
    reads = ["x", "w", "b"] if bias else ["x", "w"]
    weights = {"w": w, "b": weight(channels)} if bias else {"w": w}
    node = helper.make_node("ConvTranspose", reads, ["y"], **attributes)
    return Layer(node, x, weights, ["b"] if bias else [], opset=opset)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    in_space = draw(st.integers(1, 2))
    groups = draw(st.sampled_from([1, 2, 3, 8]))
    depth, channels = draw(st.integers(1, 20)), draw(st.integers(20, 60))
    size = [draw(st.integers(2, 5)) for _ in range(in_space)]
    attributes: dict[str, Any] = {"group": groups, "opset": draw(st.sampled_from([7, 9, 11, 17]))}
    attributes["strides"] = [draw(st.integers(1, 3)) for _ in range(in_space)]
    match draw(st.sampled_from(["", "pads", "dilations", "output_padding", "SAME_UPPER"])):
        case "pads":
            attributes["pads"] = [draw(st.integers(0, 1)) for _ in range(2 * in_space)]
        case "dilations":
            attributes["dilations"] = [2] * in_space
        case "output_padding":
            attributes["output_padding"] = [each - 1 for each in attributes["strides"]]
        case "SAME_UPPER":
            attributes["auto_pad"] = "SAME_UPPER"
    x = weight(draw(st.integers(1, 2)), groups * depth, *[6, 7][:in_space])
    kernel = weight(groups * depth, channels, *size)
    return transposed(x, kernel, bias=draw(st.booleans()), **attributes)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(layer=layers())
def test_a_transposed_convolution_in_parts_gives_what_it_gives_whole(layer: Layer) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder, whole = Path(place), layer.weights["w"].nbytes
        profile = profile_of(layer, folder)
        parts = [size for name, size in profile.weights.items() if name.startswith("w.")]
        if whole > 2 * LIMIT:
            groups = next(each.i for each in layer.node.attribute if each.name == "group")
            assert len(parts) > 1
            assert max(parts) <= max(LIMIT, whole // groups if groups > 1 else 0)
        assert sum(parts) in (0, whole)
        cut_everywhere(folder, profile, layer.x)


def test_one_that_makes_much_more_than_it_gives_is_parted_for_that(tmp_path: Path) -> None:
    """Of a kernel of four by four, at every second place, it makes four times its output."""
    layer = transposed(weight(1, 2, 9, 9), weight(2, 30, 4, 4), strides=[2, 2])
    assert layer.weights["w"].nbytes < LIMIT
    profile = profile_of(layer, tmp_path)
    parts = [each for each in profile.nodes if each.operator == "ConvTranspose"]
    whole = 4 * 9 * 9 * 30 * 4 * 4
    assert len(parts) > 1
    assert sum(sum(each.workspaces) for each in parts) == whole
    assert max(sum(each.workspaces) for each in parts) <= 2 * LIMIT
    cut_everywhere(tmp_path, profile, layer.x)
    model = onnx.load(tmp_path / "model.onnx")
    for axis in model.graph.input[0].type.tensor_type.shape.dim[2:]:
        axis.dim_param = "n"
    onnx.save(model, tmp_path / "model.onnx")
    assert len(profile_model(tmp_path / "model.onnx").nodes) == 1, (
        "nothing is known of what it makes"
    )
    fitted = Source.open(tmp_path / "model.onnx").fitted({"x": (1, 2, 9, 9)})
    assert len(fitted.graph.nodes) == len(profile.nodes)


@pytest.mark.parametrize(
    ("size", "attributes"),
    [((2, 2), {"strides": [2, 2]}), ((4, 4), {"strides": [2, 2], "group": 2})],
)
def test_one_that_gains_nothing_stays_whole(
    tmp_path: Path, size: tuple[int, int], attributes: dict[str, Any]
) -> None:
    """What it makes is no more than its output, or of one group after the other."""
    layer = transposed(weight(1, 2, 20, 20), weight(2, 20, *size), **attributes)
    assert len(profile_of(layer, tmp_path).nodes) == 1


def test_groups_that_the_input_does_not_have_are_left_to_the_runtime_to_refuse(
    tmp_path: Path,
) -> None:
    layer = transposed(weight(1, 20, 20), weight(20, 400, 3), group=3)
    assert set(profile_of(layer, tmp_path).weights) == {"w"}
