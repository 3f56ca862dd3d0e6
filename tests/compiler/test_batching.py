"""Which fragments may run several items at once: what is said is held against ONNX Runtime."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from chaining import Tensors, arriving, manifest, run_chained, run_whole
from made_models import W2, Made, W
from random_graphs import WIDTH, models
from real_models import MODELS, find
from shoal_agent.execution.joining import Counted, join, likeness, split
from shoal_compiler.batching.proof import batching_of
from shoal_compiler.cutting import cut_model
from shoal_compiler.profile import profile_model
from shoal_planner.cuts import CutRequest, Refusal, choose_cuts
from shoal_planner.segments import Layout
from shoal_protocol.manifest import BATCHED
from shoal_protocol.partition import Fragment, PartitionDocument

IMAGE = {"x": (1, 4, 8, 8)}
C = np.random.default_rng(0).standard_normal((4, 4, 3, 3)).astype(np.float32)
ONES = np.ones(4, np.float32)

BATCHED_MODELS = {
    "a perceptron": Made(
        text="""g (float[N,16] x) => (float[N,16] y) { a = MatMul(x, W) b = Relu(a)
            y = Gemm<alpha = 0.5>(b, W2) }""",
        weights={"W": W, "W2": W2},
        shapes={"x": (1, 16)},
    ),
    "a convolution, normalised for inference": Made(
        text="""g (float[N,4,H,H] x) => (float[N,4,H2,H2] y) {
            a = Conv<pads = [1, 1, 1, 1]>(x, C) b = BatchNormalization(a, one, one, one, one)
            c = MaxPool<kernel_shape = [2, 2]>(b) d = GlobalAveragePool(c) y = Mul(c, d) }""",
        weights={"C": C, "one": ONES},
        shapes=IMAGE,
    ),
    "heads of attention": Made(
        text="""g (float[N,S,16] x) => (float[N,S,16] y)
            <int64 zero = {0}, int64 one = {1}, int64[1] first = {0}, int64[1] heads = {4},
             int64[1] wide = {-1}> {
            s = Shape(x) n0 = Gather(s, zero) n = Unsqueeze(n0, first) l0 = Gather(s, one)
            l = Unsqueeze(l0, first) apart = Concat<axis = 0>(n, l, heads, heads)
            q0 = Reshape(x, apart) q = Transpose<perm = [0, 2, 1, 3]>(q0)
            k = Transpose<perm = [0, 2, 3, 1]>(q0) p0 = MatMul(q, k) p = Softmax<axis = -1>(p0)
            v0 = MatMul(p, q) v = Transpose<perm = [0, 2, 1, 3]>(v0)
            together = Concat<axis = 0>(n, l, wide) r = Reshape(v, together)
            h = MatMul(r, W) y = Add(h, x) }""",
        weights={"W": W},
        shapes={"x": (1, 5, 16)},
    ),
    "items moved to another axis and back": Made(
        text="""g (float[N,S,3,16] x) => (float[N,S,16] y)
            <int64[1] a0 = {0}, int64[1] a1 = {1}, int64[1] a2 = {2}, int64[1] end = {99}> {
            t = Transpose<perm = [2, 0, 1, 3]>(x) q0 = Slice(t, a0, a1, a0) q = Squeeze(q0, a0)
            k0 = Slice(t, a2, end, a0) k = Squeeze(k0, a0) y = Mul(q, k) }""",
        shapes={"x": (1, 5, 3, 16)},
    ),
    "rows of several lines for each item": Made(
        text="""g (float[N,S,16] x) => (float[N,S,16] y) <int64[2] flat = {-1, 16}> {
            s = Shape(x) r = Reshape(x, flat) h = MatMul(r, W) y = Reshape(h, s) }""",
        weights={"W": W},
        shapes={"x": (2, 5, 16)},
    ),
    "a token beside each item's": Made(
        text="""g (float[N,S,16] x) => (float[N,T,16] y)
            <int64[1] zero = {0}, int64[1] one = {1}, int64[1] last = {16}> {
            s = Shape(x) n = Slice(s, zero, one) shape = Concat<axis = 0>(n, one, last)
            token = Expand(W0, shape) y = Concat<axis = 1>(token, x) }""",
        weights={"W0": W[:1].reshape(1, 1, 16)},
        shapes={"x": (1, 5, 16)},
    ),
}

MIXING_MODELS = {
    "softmax along the items": "y = Softmax<axis = 0>(x)",
    "normalised by the batch": (
        "y, m, v = BatchNormalization<training_mode = 1>(x, wide, wide, wide, wide)"
    ),
    "reshaped to a fixed number": "y = Reshape(x, fixed)",
    "reshaped with items inside": "y = Reshape(x, inside)",
    "the mean of all": "m = ReduceMean<keepdims = 1>(x) y = Sub(x, m)",
    "the mean of the items": "m = ReduceMean<axes = [0], keepdims = 1>(x) y = Sub(x, m)",
    "sorted across items": "a, y = TopK<axis = 0>(x, one)",
    "counted up across items": "y = CumSum(x, zero)",
    "transposed": "t = Transpose(x) y = MatMul(x, t)",
    "the last item for all": "last = Gather(x, minus) y = Add(x, last)",
    "items in another order": "y = Slice(x, minus1, far, zero1, minus1)",
    "divided by their number": """s = Shape(x) n = Slice(s, zero1, one1) f = Cast<to = 1>(n)
        y = Div(x, f)""",
    "a weight for each place": "y = Mul(x, places)",
    "quantised by the range of all": "y0, s, z = DynamicQuantizeLinear(x) y = Cast<to = 1>(y0)",
    "joined to others": "y = Concat<axis = 0>(x, x)",
    "turned into features": "t = Transpose(x) y = Relu(t)",
    "one for all": "y = ReduceMax<axes = [0], keepdims = 0>(x)",
    "turned to nowhere": "y = Transpose<perm = [5, 6]>(x)",
    "a slice without a step": """s = Shape(x) n = Slice(s, zero1, one1, zero1, zero1)
        y = Reshape(x, n)""",
    "stretched over the items": """s = Shape(x) n = Slice(s, zero1, one1) m = Mul(n, two1)
        sizes = Concat<axis = 0>(m, wide1) y = Resize<mode = "linear">(x, , , sizes)""",
    "by chance": "r = RandomNormalLike(x) y = Add(x, r)",
    "a branch for all": """s = ReduceSum<keepdims = 0>(x) c = Greater(s, half)
        y = If<then_branch = t () => (float[N,16] a) { a = Relu(x) },
               else_branch = e () => (float[N,16] b) { b = Neg(x) }>(c)""",
}
_CONSTANTS = """<int64[2] fixed = {1, 16}, int64[2] inside = {16, -1}, int64 zero = {0},
    int64[1] one = {1}, int64[1] zero1 = {0}, int64[1] one1 = {1}, int64 minus = {-1},
    int64[1] minus1 = {-1}, int64[1] far = {-99}, float half = {0.5}, int64[1] two1 = {2},
    int64[1] wide1 = {16}>"""


def mixing(text: str) -> Made:
    weights = {"wide": np.ones(16, np.float32), "places": W[:2]}
    return Made(
        text=f"g (float[N,16] x) => (float[N,16] y) {_CONSTANTS} {{ {text} }}",
        weights={name: value for name, value in weights.items() if name in text},
        shapes={"x": (1, 16)},
    )


def check_batch(path: Path, items: Sequence[Tensors], counted: Counted) -> None:
    """One run gives what the items give alone, to the precision of the order of sums."""
    alone = [run_whole(path, item) for item in items]
    shapes = {name: value.shape for name, value in alone[0].items()}
    together = split(run_whole(path, join(items, counted)), len(items), shapes, counted)
    for one, batched in zip(alone, together, strict=True):
        for name, value in one.items():
            wanted, got = value.astype(np.float64), batched[name].astype(np.float64)
            scale = 1e-4 * float(np.abs(wanted).max(initial=1))
            np.testing.assert_allclose(got, wanted, 1e-4, scale, err_msg=name)


def check_chain(store: Path, document: PartitionDocument, items: Sequence[Tensors]) -> int:
    """Every fragment that may gives for a batch what it gives for the items alone; how many do."""
    made: list[dict[int, Tensors]] = [{} for _ in items]
    for item, each in zip(items, made, strict=True):
        run_chained(store, document, item, each)
    for fragment in document.fragments:
        if (counted := counted_of(store, fragment)) is not None:
            taken = [arriving(document, each, fragment.index) for each in made]
            first = likeness(taken[0], counted)
            assert first is not None
            alike = [each for each in taken if likeness(each, counted) == first]
            folder = store / "fragments" / fragment.digest.removeprefix("sha256:")
            check_batch(folder / "model.onnx", alike, counted)
    return sum(fragment.batches for fragment in document.fragments)


def counted_of(store: Path, fragment: Fragment) -> Counted | None:
    counted = manifest(store, fragment.digest).get(BATCHED)
    assert (counted is not None) == fragment.batches
    assert counted is None or isinstance(counted, dict)
    return counted


def batches(made: Made) -> bool:
    return batching_of(made.proto(), {}).counts is not None


@pytest.mark.parametrize("made", BATCHED_MODELS.values(), ids=list(BATCHED_MODELS))
@pytest.mark.parametrize("count", [2, 3])
def test_items_that_do_not_meet_are_computed_at_once(
    made: Made, count: int, tmp_path: Path
) -> None:
    assert batches(made)
    check_batch(made.save(tmp_path), [made.inputs(seed) for seed in range(count)], {})


@pytest.mark.parametrize("text", MIXING_MODELS.values(), ids=list(MIXING_MODELS))
def test_items_that_meet_are_computed_one_by_one(text: str) -> None:
    assert not batches(mixing(text))


def test_only_an_open_first_axis_takes_several_items() -> None:
    shapes: list[list[str | int | None] | None] = [["N", 16], [None, 16], [1, 16], None]
    for shape, open_ended in zip(shapes, (True, True, False, False), strict=True):
        model = mixing("y = Relu(x)").proto()
        model.graph.input[0].CopyFrom(
            helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)
        )
        assert (batching_of(model, {}).counts is not None) == open_ended


def test_text_is_computed_one_by_one() -> None:
    model = mixing("y = Identity(x)").proto()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.STRING
    assert batching_of(model, {}).counts is None


def test_sizes_that_are_sent_to_the_next_fragment_count_items(tmp_path: Path) -> None:
    made = Made(
        text="""g (float[N,S,16] x) => (float[N,S,16] y) <int64[2] flat = {-1, 16}> {
            s = Shape(x) r = Reshape(x, flat) h = MatMul(r, W) t = Relu(h) y = Reshape(t, s) }""",
        weights={"W": W},
        shapes={"x": (2, 5, 16)},
    )
    profile = profile_model(made.save(tmp_path), made.shapes)
    counted: list[Counted | None] = []
    for cut in Layout(profile).legal:
        document = cut_model(tmp_path / "model.onnx", profile, (cut,), tmp_path / "store")
        items = [made.inputs(seed) for seed in range(3)]
        assert check_chain(tmp_path / "store", document, items) == 2
        counted += [counted_of(tmp_path / "store", each) for each in document.fragments]
    assert {"s": [0]} in counted


@pytest.mark.parametrize(
    "name",
    [
        *("ppocr_rec", "minilm_l6"),
        *(pytest.param(name, marks=pytest.mark.minutes) for name in ("ppocr_det", "ppocr_cls")),
    ],
)
def test_real_models_compute_several_items_at_once(name: str, tmp_path: Path) -> None:
    model, path = MODELS[name], find(name)
    profile = profile_model(path, model.shapes())
    cuts = choose_cuts(profile, CutRequest(fragments=3))
    assert not isinstance(cuts, Refusal)
    document = cut_model(path, profile, cuts, tmp_path)
    assert check_chain(tmp_path, document, [model.inputs(21 * seed) for seed in range(3)]) == 3


def test_a_model_with_a_state_computes_items_one_by_one(tmp_path: Path) -> None:
    model, path = MODELS["silero_vad_op15"], find("silero_vad_op15")
    document = cut_model(path, profile_model(path, model.shapes()), (), tmp_path)
    assert not document.fragments[0].batches


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(made=models(), data=st.data())
def test_whatever_a_graph_computes_a_batch_gives_what_items_give_alone(
    made: onnx.ModelProto, data: st.DataObject
) -> None:
    names = [each.name for each in made.graph.input]
    count, length = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 2))
    random = np.random.default_rng(count)
    items = [
        {name: random.uniform(-1, 1, (length, WIDTH)).astype(np.float32) for name in names}
        for _ in range(count)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(made, path)
        profile = profile_model(path, {name: (length, WIDTH) for name in names})
        legal = Layout(profile).legal
        cuts = (data.draw(st.sampled_from(legal)),) if legal else ()
        document = cut_model(path, profile, cuts, Path(folder) / "store")
        check_chain(Path(folder) / "store", document, items)
