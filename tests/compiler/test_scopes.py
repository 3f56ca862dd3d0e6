"""A graph inside of a node may have names that the graph around it has for something else."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from compiler.cut_everywhere import assert_same_as_whole
from made_models import Made, weight

LOOP = """g (float[N,16] x) => (float[N,16] y) {
    r = Loop (count, always, x) < body = b (int64 i, bool go, float[N,16] v)
            => (bool on, float[N,16] w) {
        on = Identity(go)  s = Tanh(v)  h = MatMul(s, W)  w = Add(h, v) } >
    t = Relu(x)  s = Shape(t)  h = Tanh(t)  flat = Reshape(h, flat_shape)
    back = Reshape(flat, s)  y = Add(back, r) }"""
SCAN = """g (float[N,16] x) => (float[N,16] y, float[16] last) {
    last, each = Scan <num_scan_inputs = 1, body = b (float[16] p, float[16] row)
            => (float[16] sum, float[16] out) {
        h = Mul(row, row)  sum = Add(p, h)  out = Tanh(sum) }> (zero, x)
    sum = MatMul(x, W)  h = Relu(sum)  y = Add(h, each) }"""
NESTED = """g (float[N,16] x) => (float[N,16] y) {
    r = If (always) <
        then_branch = one () => (float[N,16] q) {
            h = MatMul(x, W)
            q = If (always) < then_branch = a () => (float[N,16] h2) { t = Neg(h)  h2 = Tanh(t) },
                         else_branch = b () => (float[N,16] t) { t = Relu(h) } > },
        else_branch = two () => (float[N,16] t) { h = Neg(x)  t = Tanh(h) } >
    t = Relu(x)  h = Tanh(t)  y = Add(h, r) }"""
WEIGHTS: dict[str, npt.NDArray[Any]] = {
    "W": weight(16, 16),
    "count": np.array(2, np.int64),
    "always": np.array(True),
    "zero": np.zeros(16, np.float32),
    "flat_shape": np.array([-1], np.int64),
}


@pytest.mark.parametrize("text", [LOOP, SCAN, NESTED], ids=["Loop", "Scan", "If"])
def test_what_is_made_inside_may_be_called_like_what_comes_later(text: str, tmp_path: Path) -> None:
    weights = {name: each for name, each in WEIGHTS.items() if name in text}
    made = Made(text=text, weights=weights, shapes={"x": (2, 16)})
    planned = made.inputs()
    assert_same_as_whole(made.save(tmp_path), planned, [{"x": np.negative(planned["x"])}])
