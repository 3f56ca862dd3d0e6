"""Functions of a model's own, written out as ONNX Runtime takes them."""

from pathlib import Path

import numpy as np

from compiler.cut_everywhere import assert_same_as_whole
from made_models import W2, Made, W, X

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
