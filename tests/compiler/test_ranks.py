"""How many axes a tensor has is said only where that is the same for all inputs."""

from pathlib import Path

import numpy as np
import pytest

from compiler.cut_everywhere import assert_same_as_whole
from made_models import W2, Made, W
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_planner.segments import Layout
from shoal_protocol.partition import PartitionDocument, TensorSpec

ROWS = np.ones((2, 3, 16), np.float32)


def specs(document: PartitionDocument) -> dict[str, TensorSpec]:
    """What crosses and what is given, by name."""
    inputs = (each for fragment in document.fragments for each in fragment.inputs)
    return {each.name: each for each in (*inputs, *document.outputs)}


def cut(made: Made, folder: Path, *items: dict[str, np.ndarray]) -> dict[str, TensorSpec]:
    """Cut everywhere for the first item: it and the others give what the whole model gives."""
    path = made.save(folder)
    assert_same_as_whole(path, items[0], items[1:])
    profile = profile_model(path, {name: value.shape for name, value in items[0].items()})
    return specs(cut_model(path, profile, Layout(profile).legal, None))


def test_what_a_squeeze_gives_has_as_many_axes_as_the_item_says(tmp_path: Path) -> None:
    made = Made(
        text="""g (float[N,1,16] x) => (float y) {
            a = MatMul(x, W) s = Squeeze(a) b = Relu(s) c = MatMul(b, W2) y = Tanh(c) }""",
        weights={"W": W, "W2": W2},
    )
    found = cut(made, tmp_path, {"x": ROWS[:, :1]}, {"x": ROWS[:1, :1]})
    assert [found[name].shape for name in ("a", "s", "b", "c", "y")] == [("N", 1, 16)] + [None] * 4


def test_an_input_whose_shape_the_model_does_not_say_may_have_any(tmp_path: Path) -> None:
    made = Made(
        text="""g (float x) => (float y) {
            a = MatMul(x, W) b = Relu(a) s = Shape(b) r = Reshape(b, s) y = Tanh(r) }""",
        weights={"W": W},
    )
    model = made.proto()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    assert_same_as_whole(path, {"x": ROWS[0]}, [{"x": ROWS}])
    profile = profile_model(path, {"x": (3, 16)})
    found = specs(cut_model(path, profile, Layout(profile).legal, None))
    assert {each.shape for each in found.values()} == {None}
    assert profile.tensors["b"].sizes == (3, 16), "memory is reckoned with the planned item"


@pytest.mark.parametrize(
    ("body", "output"),
    [
        ("s = Shape(x) t = Slice(s, one, two) u = Concat<axis = 0>(t, rest) b = Reshape(a, u)", 3),
        ("s = Shape(x) t = Slice(s, two, three) b = Expand(a, t)", 3),
        (
            """n = Constant<value_int = 2>() go = Constant<value = bool {1}>()
            b = Loop(n, go, a) <body = step (int64 i, bool g, float[K,L,16] v)
                => (bool g2, float[K,L,16] w) { g2 = Identity(g) w = Neg(v) }>""",
            3,
        ),
    ],
    ids=["a computed shape", "a shape to expand to", "a loop"],
)
def test_a_rank_that_sizes_do_not_change_is_said(body: str, output: int, tmp_path: Path) -> None:
    made = Made(
        text=f"""g (float[N,M,16] x) => (float[P,Q,R] y) {{
            a = MatMul(x, W) {body} c = Neg(b) y = Tanh(c) }}""",
        weights={
            "W": W,
            "one": np.array([1]),
            "two": np.array([2]),
            "three": np.array([3]),
            "rest": np.array([-1, 16]),
        },
    )
    found = cut(made, tmp_path, {"x": ROWS}, {"x": ROWS[:1]})
    shapes = [found[name].shape for name in ("b", "c", "y")]
    assert [None if each is None else len(each) for each in shapes] == [output] * 3
