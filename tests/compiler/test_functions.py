"""Functions of a model's own, written out as ONNX Runtime takes them."""

from pathlib import Path

import numpy as np
import pytest

from compiler.cut_everywhere import assert_same_as_whole
from made_models import W2, Made, W, X
from shoal_compiler.errors import ModelRefused
from shoal_compiler.profile import profile_model

DEFAULTS = Made(
    text="""g (float[N,16] x, bool go) => (float[N,16] y) {
        a = local.leak(x) b = MatMul(a, W) c = local.leak<slope = 0.5>(b)
        d = If (go) < then_branch = yes () => (float[N,16] p) { p = local.leak(c) },
                      else_branch = no () => (float[N,16] q) { q = Neg(c) } >
        e = local.pass_on(d) f = MatMul(e, W2) y = local.pass_on<steep = 0.75>(f) }""",
    functions="""
        <domain: "local", opset_import: ["": 17]>
        leak <slope: float = 0.25> (v) => (r) { r = LeakyRelu<alpha: float = @slope>(v) }
        <domain: "local", opset_import: ["": 17, "local": 1]>
        pass_on <steep> (v) => (r) {
            s = local.leak(v) n = Neg(s) r = local.leak<slope: float = @steep>(n) }""",
    weights={"W": W, "W2": W2},
    shapes=X,
    feeds={"go": np.array(True)},
)


def test_an_attribute_that_a_call_leaves_out_has_its_default(tmp_path: Path) -> None:
    assert_same_as_whole(DEFAULTS.save(tmp_path), DEFAULTS.inputs())


def older(body: str) -> Made:
    """A model of opset 18 with a function of opset 17."""
    return Made(
        text="""g (float[N,16] x) => (float[N,16] y) {
            a = local.older(x) b = MatMul(a, W) y = local.older(b) }""",
        functions=f"""<domain: "local", opset_import: ["": 17]> older (v) => (r) {{ {body} }}""",
        weights={"W": W},
        shapes=X,
        opset=18,
    )


def test_a_function_of_an_older_opset_is_written_out_where_its_operators_are_the_same(
    tmp_path: Path,
) -> None:
    made = older("s = ReduceSum<keepdims = 1>(v) r = Add(s, v)")
    assert_same_as_whole(made.save(tmp_path), made.inputs())


def test_a_function_of_other_operators_is_refused_with_its_name_and_both_opsets(
    tmp_path: Path,
) -> None:
    path = older("s = ReduceMean<keepdims = 1, axes = [1]>(v) r = Add(s, v)").save(tmp_path)
    with pytest.raises(ModelRefused, match=r"older .*ai\.onnx 17, the model 18"):
        profile_model(path)


def test_a_function_that_nothing_calls_may_be_of_any_opset(tmp_path: Path) -> None:
    made = older("r = ReduceMean<keepdims = 1, axes = [1]>(v)")
    model = made.proto()
    for node in model.graph.node:
        if node.domain:
            node.domain, node.op_type = "", "Relu"
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    assert_same_as_whole(path, made.inputs())


OVERLOADS = """
    <domain: "local", opset_import: ["": 20], overload: "one"> f (v) => (r) { r = Relu(v) }
    <domain: "local", opset_import: ["": 20], overload: "two"> f (v) => (r) { r = Tanh(v) }"""


def overloaded() -> Made:
    return Made(
        text="""g (float[N,16] x) => (float[N,16] y) {
            a = local.f:one(x) b = MatMul(a, W) y = local.f:two(b) }""",
        functions=OVERLOADS,
        weights={"W": W},
        shapes=X,
        opset=20,
        ir_version=10,
    )


def test_overloads_of_a_function_are_functions_of_their_own(tmp_path: Path) -> None:
    made = overloaded()
    assert_same_as_whole(made.save(tmp_path), made.inputs())


def test_a_function_that_is_defined_twice_is_named(tmp_path: Path) -> None:
    model = overloaded().proto()
    model.functions.append(model.functions[0])
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelRefused, match=r"defines function local\.f:one twice"):
        profile_model(path)
