"""Sizes are those that ONNX Runtime gives, where onnx infers others."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

from chaining import run_whole
from compiler.cut_everywhere import assert_same_as_whole
from made_models import Made
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_planner.segments import Layout

LONG_MAX, INT_MAX, LONG_MIN = 2**63 - 1, 2**31 - 1, -(2**63)
AXES = st.tuples(st.integers(1, 12), st.integers(1, 12))


def made_of(body: str, **weights: np.ndarray) -> Made:
    """A model of images of 10 by 9, with the operator in its middle."""
    return Made(
        text=f"""g (float[N,2,10,9] x) => (float[N,2,h,w] y) {{
            a = Relu(x) b = {body} c = Neg(b) y = Tanh(c) }}""",
        weights=weights,
        shapes={"x": (1, 2, 10, 9)},
        opset=13,
    )


MODELS = {
    "scaled by 1.3": (
        made_of(
            'Resize<mode = "linear">(a, , scales)', scales=np.array([1, 1, 1.3, 1.3], np.float32)
        ),
        (13, 11),
    ),
    "pooled, the last window in the padding": (
        made_of(
            "MaxPool<kernel_shape = [2, 2], strides = [2, 2], pads = [1, 1, 1, 1],"
            " ceil_mode = 1>(a)"
        ),
        (6, 5),
    ),
    "pooled, the last window behind the image": (
        made_of("AveragePool<kernel_shape = [1, 1], strides = [2, 2], ceil_mode = 1>(a)"),
        (5, 5),
    ),
    "convolved backwards, with more added than the strides have room for": (
        made_of(
            'ConvTranspose<auto_pad = "SAME_UPPER", strides = [2, 3], output_padding = [1, 1]>'
            "(a, w)",
            w=np.ones((2, 2, 3, 4), np.float32),
        ),
        (20, 27),
    ),
    "convolved backwards, with a kernel that is smaller than the strides": (
        made_of(
            'ConvTranspose<auto_pad = "SAME_LOWER", strides = [3, 3], output_padding = [1, 1]>'
            "(a, w)",
            w=np.ones((2, 2, 1, 2), np.float32),
        ),
        (29, 27),
    ),
    "turned round": (
        made_of(
            "Slice(a, starts, ends, axes, steps)",
            starts=np.array([-1, 20]),
            ends=np.array([INT_MAX, LONG_MAX]),
            axes=np.array([3, 2]),
            steps=np.array([-1, -2]),
        ),
        (5, 9),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_crosses_and_what_is_given_has_the_size_that_the_runtime_makes(
    name: str, tmp_path: Path
) -> None:
    made, size = MODELS[name]
    path = made.save(tmp_path)
    assert_same_as_whole(path, made.inputs())
    for shapes in (made.shapes, {}):
        profile = profile_model(path, shapes)
        document = cut_model(path, profile, Layout(profile).legal, None)
        specs = [each for fragment in document.fragments[1:] for each in fragment.inputs]
        specs += document.outputs
        for spec in specs:
            if spec.name in {"b", "c", "y"}:
                assert spec.shape is not None
                for axis, made_size in zip(spec.shape[2:], size, strict=True):
                    assert not isinstance(axis, int) or axis == made_size, "devices refuse it"
        known = profile.tensors["b"].sizes
        assert known == ((1, 2, *size) if shapes else None)


def test_a_shape_that_is_turned_round_is_followed(tmp_path: Path) -> None:
    made = Made(
        text="""g (float[N,2,10,9] x) => (float[a,b,c,d] y) {
            s = Shape(x) t = Slice(s, starts, ends, axes, steps) p = Relu(x)
            q = Reshape(p, t) r = Neg(q) y = Tanh(r) }""",
        weights={
            "starts": np.array([-1]),
            "ends": np.array([INT_MAX]),
            "axes": np.array([0]),
            "steps": np.array([-1]),
        },
        shapes={"x": (1, 2, 10, 9)},
    )
    path = made.save(tmp_path)
    assert_same_as_whole(path, made.inputs())
    assert profile_model(path, made.shapes).tensors["y"].sizes == (9, 10, 2, 1)


SCALES = st.integers(2, 30).map(lambda tenths: tenths / 10)
POOLS = st.fixed_dictionaries(
    {
        "kernel_shape": st.tuples(st.integers(1, 4), st.integers(1, 4)),
        "strides": st.tuples(st.integers(1, 4), st.integers(1, 4)),
        "ceil_mode": st.sampled_from([0, 1]),
    },
    optional={
        "auto_pad": st.sampled_from(["SAME_UPPER", "SAME_LOWER", "VALID"]),
        "dilations": st.tuples(st.integers(1, 2), st.integers(1, 2)),
    },
)
BOUNDS = st.integers(-15, 15) | st.sampled_from([INT_MAX, LONG_MAX, LONG_MIN])
STEPS = st.sampled_from([1, 2, -1, -2, 3])


@st.composite
def nodes(draw: st.DrawFn) -> tuple[onnx.NodeProto, dict[str, np.ndarray]]:
    """A node that scales, pools or slices two axes of `x`, and its constants."""

    def pair(values: st.SearchStrategy[Any]) -> np.ndarray:
        return np.array(draw(st.tuples(values, values)))

    kind = draw(st.sampled_from(["Resize", "Slice", "MaxPool", "AveragePool", "LpPool"]))
    if kind == "Resize":
        constants = {"scales": np.array([1, 1, *pair(SCALES)], np.float32)}
        return helper.make_node(kind, ["x", "", "scales"], ["y"], mode="linear"), constants
    if kind == "Slice":
        constants = {"starts": pair(st.integers(-15, 15)), "ends": pair(BOUNDS)}
        constants |= {"axes": np.array([2, -1]), "steps": pair(STEPS)}
        return helper.make_node(kind, ["x", *constants], ["y"]), constants
    options: dict[str, Any] = draw(POOLS)
    if "auto_pad" not in options:
        wide = st.tuples(*(st.integers(0, size - 1) for size in options["kernel_shape"] * 2))
        options["pads"] = draw(wide)
    return helper.make_node(kind, ["x"], ["y"], **options), {}


@settings(max_examples=150, deadline=None)
@given(node=nodes(), size=AXES)
def test_sizes_of_what_is_scaled_pooled_or_sliced_are_those_of_the_runtime(
    node: tuple[onnx.NodeProto, dict[str, np.ndarray]],
    size: tuple[int, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    made, constants = node
    graph = helper.make_graph(
        [made],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, *size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 19)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    path = tmp_path_factory.mktemp("sizes") / "model.onnx"
    onnx.save(model, path)
    try:
        made_size = run_whole(path, {"x": np.zeros((1, 1, *size), np.float32)})["y"].shape
    except (runtime.Fail, runtime.InvalidArgument, runtime.RuntimeException):
        reject()
    assert profile_model(path).tensors["y"].sizes == made_size
