"""What is reckoned for graphs inside nodes, against what a process like an agent's takes."""

from pathlib import Path

import numpy as np
import pytest

from compiler.test_resident_estimate import MIB, measured
from made_models import Made, weight
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model

WIDE = weight(1024, 1024)
HANDED_ON = Made(
    text="""g (float[N,1024] x) => (float[N,1024] y) {
        n = Constant<value_int = 3>() go = Constant<value = bool {1}>()
        a, _w = Loop (n, go, x, W) < body = one (
            int64 i, bool c, float[N,1024] v, float[1024,1024] w)
            => (bool c2, float[N,1024] v2, float[1024,1024] w2) {
                c2 = Identity(c) m = MatMul(v, w) v2 = Tanh(m) w2 = Identity(w) } >
        b, _w2 = Loop (n, go, a, W2) < body = two (
            int64 i, bool c, float[N,1024] v, float[1024,1024] w)
            => (bool c2, float[N,1024] v2, float[1024,1024] w2) {
                c2 = Identity(c) m = MatMul(v, w) v2 = Tanh(m) w2 = Identity(w) } >
        y = Tanh(b) }""",
    weights={"W": WIDE, "W2": WIDE.T.copy()},
    shapes={"x": (2, 1024)},
)
"""Two loops, as TensorFlow's converters write recurrent layers: their weights are handed on."""
LARGE_INSIDE = Made(
    text="""g (float[N,1024] x) => (float[N,1024] y) {
        total = ReduceSum<keepdims = 0>(x) zero = Constant<value_float = 0.0>()
        positive = Greater(total, zero)
        a = If (positive) <
            then_branch = one () => (float[N,1024] p) {
                p1 = Concat<axis = 1>(x, x, x, x, x, x, x, x) p2 = Exp(p1) p3 = Abs(p2)
                p = Slice(p3, from, to, axis) },
            else_branch = two () => (float[N,1024] q) {
                q1 = Concat<axis = 1>(x, x, x, x, x, x, x, x) q2 = Abs(q1) q3 = Exp(q2)
                q = Slice(q3, from, to, axis) } >
        y = Tanh(a) }""",
    weights={
        "from": np.array([0], np.int64),
        "to": np.array([1024], np.int64),
        "axis": np.array([1], np.int64),
    },
    shapes={"x": (256, 1024)},
)
"""Branches that take 24 MiB to make 1."""


LARGE_FURTHER_INSIDE = Made(
    text="""g (float[N,1024] x) => (float[N,1024] y) {
        total = ReduceSum<keepdims = 0>(x) zero = Constant<value_float = 0.0>()
        positive = Greater(total, zero) negative = Less(total, zero)
        a = If (positive) <
            then_branch = one () => (float[N,1024] p) { p = Neg(x) },
            else_branch = two () => (float[N,1024] q) {
                q = If (negative) <
                    then_branch = three () => (float[N,1024] r) {
                        r1 = Concat<axis = 1>(x, x, x, x, x, x, x, x) r2 = Exp(r1) r3 = Abs(r2)
                        r = Slice(r3, from, to, axis) },
                    else_branch = four () => (float[N,1024] s) {
                        s1 = Concat<axis = 1>(x, x, x, x, x, x, x, x) s2 = Abs(s1) s3 = Exp(s2)
                        s = Slice(s3, from, to, axis) } > } >
        y = Tanh(a) }""",
    weights=LARGE_INSIDE.weights,
    shapes=LARGE_INSIDE.shapes,
)
"""The same in a branch of a branch."""


def _branch(name: str, nodes: int) -> str:
    chain = " ".join(f"{name}{at} = Tanh({name}{at - 1})" for at in range(1, nodes))
    return f"= {name}_graph () => (float[N,64] {name}{nodes - 1}) {{ {name}0 = Tanh(x) {chain} }}"


LONG_INSIDE = Made(
    text=f"""g (float[N,64] x) => (float[N,64] y) {{
        total = ReduceSum<keepdims = 0>(x) zero = Constant<value_float = 0.0>()
        positive = Greater(total, zero)
        a = If (positive) < then_branch {_branch("p", 1500)}, else_branch {_branch("q", 1500)} >
        y = Tanh(a) }}""",
    weights={},
    shapes={"x": (4, 64)},
)
"""Branches of many nodes, all of which the runtime keeps open."""


WORKING_INSIDE = Made(
    text="""g (float[N,4,64] x) => (float[1,4,256] y) {
        total = ReduceSum<keepdims = 0>(x) zero = Constant<value_float = 0.0>()
        positive = Greater(total, zero)
        a = If (positive) <
            then_branch = one () => (float[1,4,256] p) {
                none, p = LSTM<hidden_size = 256>(x, W, R) },
            else_branch = two () => (float[1,4,256] q) {
                nor, q1 = LSTM<hidden_size = 256>(x, W, R) q = Neg(q1) } >
        y = Tanh(a) }""",
    weights={"W": weight(1, 1024, 64), "R": weight(1, 1024, 256)},
    shapes={"x": (1024, 4, 64)},
)
"""A recurrent layer that works in 16 MiB, as speech models have them for either sampling rate."""


GIVEN_INSIDE = Made(
    text="""g (float[N,64,128,128] x) => (float[N,64,128,128] a) {
        total = ReduceSum<keepdims = 0>(x) zero = Constant<value_float = 0.0>()
        positive = Greater(total, zero)
        a = If (positive) <
            then_branch = one () => (float[N,64,128,128] p) { p = Tanh(x) },
            else_branch = two () => (float[N,64,128,128] q) { q = Exp(x) } > }""",
    weights={},
    shapes={"x": (4, 64, 128, 128)},
)
"""16 MiB that come in, and as much that either branch gives: it is what the node gives."""


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(HANDED_ON, id="handed on"),
        pytest.param(LARGE_INSIDE, id="large inside"),
        pytest.param(LARGE_FURTHER_INSIDE, id="large further inside"),
        pytest.param(LONG_INSIDE, id="long inside"),
        pytest.param(WORKING_INSIDE, id="working inside"),
        pytest.param(GIVEN_INSIDE, id="given inside"),
    ],
)
def test_what_bodies_take_is_reckoned_with(made: Made, tmp_path: Path) -> None:
    path, item = made.save(tmp_path), made.inputs()
    profile = profile_model(path, {name: value.shape for name, value in item.items()})
    (fragment,) = cut_model(path, profile, (), tmp_path).fragments
    folder = tmp_path / "fragments" / fragment.digest.removeprefix("sha256:")
    peak = measured(folder, item, tmp_path)
    print(f"{fragment.resident_bytes / MIB:.1f} MiB reckoned, {peak / MIB:.1f} MiB measured")
    assert peak <= fragment.resident_bytes < 2 * peak


def test_what_a_loop_hands_on_keeps_its_size(tmp_path: Path) -> None:
    profile = profile_model(HANDED_ON.save(tmp_path), {"x": (2, 1024)})
    assert profile.tensors["a"].bytes == 2 * 1024 * 4
