"""The branches of an If that hold large weights are cut as all nodes are, and run as before."""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chaining import Tensors, run_chained, run_whole
from compiler.test_resident_estimate import measured
from made_models import Made, weight
from random_branches import WIDTH, branching_models
from real_models import MODELS, find
from shoal_compiler import branches
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import Source, profile_model
from shoal_planner.cuts import CutRequest, choose_cuts
from shoal_planner.profile import Profile
from shoal_planner.segments import Layout

MIB = 1 << 20


def layers(branch: str, count: int, past: str = "") -> str:
    """Layers of a decoder in a branch; `past`: each reads what earlier steps have left."""
    text, last = "", "x"
    for at in range(count):
        each = f"{branch}{at}"
        text += f"{each}a = MatMul({last}, A{at}) {each}b = Relu({each}a) "
        if past:
            text += f"{each}c = Add({each}b, {past}) "
        text += f"{each}d = MatMul({each}{'c' if past else 'b'}, B{at}) "
        last = f"{each}d"
    return text + f"{branch} = Tanh({last})"


def merged(count: int, width: int, given: tuple[str, str] = ("p", "q")) -> Made:
    """A decoder that is there twice, in the branches of one If, with the same weights. `given`:
    what the branches call what they give."""
    one, two = given
    return Made(
        text=f"""g (float[N,{width}] x, float[N,{width}] past, bool with_past) =>
                 (float[N,{width}] y) {{
            y = If (with_past) <
                then_branch = one () => (float[N,{width}] {one}) {{ {layers(one, count, "past")} }},
                else_branch = two () => (float[N,{width}] {two}) {{ {layers(two, count)} }} > }}""",
        weights={
            f"{name}{at}": weight(width, width, seed=seed)
            for seed, (name, at) in enumerate(itertools.product("AB", range(count)))
        },
        shapes={"x": (4, width), "past": (4, width)},
    )


def items(made: Made) -> list[dict[str, Any]]:
    return [{**made.inputs(), "with_past": np.array(each)} for each in (False, True)]


def shapes(item: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in item.items()}


def cuts_of(profile: Profile, fragments: int) -> tuple[int, ...]:
    cuts = choose_cuts(profile, CutRequest(fragments=fragments))
    assert isinstance(cuts, tuple), cuts
    return cuts


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(made=branching_models(), data=st.data())
def test_random_cuts_inside_of_branches_equal_the_whole(
    made: onnx.ModelProto, data: st.DataObject
) -> None:
    feeds = {
        name: np.random.default_rng(seed).uniform(-1, 1, (3, WIDTH)).astype(np.float32)
        for seed, name in enumerate(("x", "z"))
    }
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(branches, "LEAST_BYTES", 0)
        path, store = Path(folder) / "model.onnx", Path(folder) / "store"
        onnx.save(made, path)
        profile = profile_model(path, shapes(feeds))
        assert any(inner.op_type == "If" for inner in made.graph.node)
        legal = Layout(profile).legal
        cuts = data.draw(st.sets(st.sampled_from(legal), max_size=4)) if legal else set[int]()
        document = cut_model(path, profile, sorted(cuts), store)
        for p, q in itertools.product((False, True), repeat=2):
            item = {**feeds, "p": np.array(p), "q": np.array(q)}
            got = run_chained(store, document, item)
            for name, value in run_whole(path, item).items():
                np.testing.assert_array_equal(got[name], value, err_msg=f"{name}, {p}, {q}")


def test_a_decoder_in_two_branches_is_cut_like_one_and_stored_once(tmp_path: Path) -> None:
    made = merged(6, 512)
    path = made.save(tmp_path)
    profile = profile_model(path, shapes(made.inputs()))
    document = cut_model(path, profile, cuts_of(profile, 4), tmp_path)
    sizes = [each.weight_bytes for each in document.fragments]
    assert max(sizes) <= 3 * MIB, sizes
    assert sum(sizes) == sum(each.nbytes for each in made.weights.values())
    for item in items(made):
        got, whole = run_chained(tmp_path, document, item), run_whole(path, item)
        np.testing.assert_array_equal(got["y"], whole["y"])


@pytest.mark.parametrize("given", [("y", "y"), ("y", "q"), ("p", "y")])
def test_branches_may_call_what_they_give_as_the_if_does(
    given: tuple[str, str], tmp_path: Path
) -> None:
    made = merged(2, 1024, given)
    path = made.save(tmp_path)
    profile = profile_model(path, shapes(made.inputs()))
    document = cut_model(path, profile, cuts_of(profile, 2), tmp_path)
    for item in items(made):
        got, whole = run_chained(tmp_path, document, item), run_whole(path, item)
        np.testing.assert_array_equal(got["y"], whole["y"])


def test_what_is_reckoned_covers_either_branch(tmp_path: Path) -> None:
    made = merged(6, 512)
    path = made.save(tmp_path)
    profile = profile_model(path, shapes(made.inputs()))
    document = cut_model(path, profile, cuts_of(profile, 2), tmp_path)
    for item in items(made):
        kept: dict[int, Tensors] = {}
        run_chained(tmp_path, document, item, kept)
        for fragment in document.fragments:
            taken = {
                name: kept[edge.producer][name]
                for edge in document.into(fragment.index)
                for name in edge.tensors
            }
            folder = tmp_path / "fragments" / fragment.digest.removeprefix("sha256:")
            peak = measured(folder, taken, tmp_path)
            assert 0.7 < peak / fragment.resident_bytes <= 1


def test_the_branch_that_is_not_taken_is_sent_empty(tmp_path: Path) -> None:
    made = merged(3, 512)
    path = made.save(tmp_path)
    profile = profile_model(path, shapes(made.inputs()))
    document = cut_model(path, profile, cuts_of(profile, 3), tmp_path)
    for item in items(made):
        kept: dict[int, dict[str, np.ndarray]] = {}
        run_chained(tmp_path, document, item, kept)  # type: ignore[arg-type]
        empty = {name[0]: value.size == 0 for name, value in kept[0].items()}
        assert empty == {"p": not item["with_past"], "q": bool(item["with_past"])}


GUARDING = Made(
    text="""g (float[N,512] x) => (float[N,512] y) {
        size = Shape<start = 0, end = 1>(x) four = Constant<value = int64[1] {4}>()
        fits = Equal(size, four)
        y = If (fits) <
            then_branch = one () => (float[N,512] p) {
                shape = Constant<value = int64[2] {8, 256}>()
                back = Constant<value = int64[2] {4, 512}>()
                a = Reshape(x, shape) b = MatMul(a, W) c = Reshape(b, back) p = MatMul(c, V) },
            else_branch = two () => (float[N,512] q) { q = MatMul(x, V) } > }""",
    weights={"W": weight(256, 256), "V": weight(512, 512)},
    shapes={"x": (4, 512)},
)
"""A branch that fails where it is not to run: it reshapes an item of four rows."""


@pytest.mark.parametrize("rows", [4, 7])
def test_no_node_runs_that_would_not_have_run(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branches, "LEAST_BYTES", MIB)
    path = GUARDING.save(tmp_path)
    profile = profile_model(path, {"x": (rows, 512)})
    layout = Layout(profile)
    item = {"x": np.ones((rows, 512), np.float32)}
    for cut in layout.legal:
        document = cut_model(path, profile, (cut,), tmp_path / str(cut))
        got = run_chained(tmp_path / str(cut), document, item)
        np.testing.assert_array_equal(got["y"], run_whole(path, item)["y"])
    assert len(layout.legal) >= 3


def test_small_branches_stay_inside_of_their_if(tmp_path: Path) -> None:
    made = merged(2, 64)
    graph = Source.open(made.save(tmp_path)).graph
    assert [node.op_type for node in graph.nodes] == ["If"]


@pytest.mark.real
def test_a_model_for_two_sampling_rates_is_cut_and_hears_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branches, "LEAST_BYTES", MIB)
    path = find("silero_vad")
    inputs = MODELS["silero_vad"].inputs(0)
    profile = profile_model(path, shapes(inputs))
    document = cut_model(path, profile, cuts_of(profile, 3), tmp_path)
    assert len(document.fragments) == 3
    for rate, samples in ((16000, 512), (8000, 256)):
        sound = np.random.default_rng(rate).uniform(-0.1, 0.1, (1, samples)).astype(np.float32)
        item = {**inputs, "input": sound, "sr": np.array(rate)}
        got = run_chained(tmp_path, document, item)
        for name, value in run_whole(path, item).items():
            assert np.allclose(got[name], value, rtol=1e-5, atol=1e-6), name
