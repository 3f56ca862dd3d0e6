"""Layers that are larger than every budget, held in as small parts as devices ask for."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from chaining import run_chained, run_whole
from cli.local.workbench import cut_within
from made_models import DENSE, Made, weight
from shoal_cli.local.cut_search import PreparationRefused
from shoal_compiler.profile import Source
from shoal_planner.least_limit import smallest_limit
from shoal_planner.segments import Layout

MIB = 1 << 20


def test_a_layer_that_is_larger_than_every_budget_is_held_in_parts(tmp_path: Path) -> None:
    path = DENSE.save(tmp_path)
    store = tmp_path / "store"
    assert len(cut_within(path, store, 24).fragments) == 1
    document = cut_within(path, store, 8)
    assert all(each.least_bytes <= 8 * MIB for each in document.fragments)
    feeds = DENSE.inputs()
    want = run_whole(path, feeds)["y"].astype(np.float32)
    got = run_chained(store, document, feeds)["y"].astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    with pytest.raises(PreparationRefused, match=r"node .+\.\d+ \(MatMul\) needs .* by itself"):
        cut_within(path, store, 2)


def test_a_layer_of_four_bits_is_held_in_as_small_parts_as_its_numbers_ask_for(
    tmp_path: Path,
) -> None:
    """In parts of 1 MiB, each would be made 8 MiB of numbers."""
    model = FOUR_BITS.proto()
    model.opset_import.add(domain="com.microsoft", version=1)
    model.graph.node[0].domain = "com.microsoft"
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    document = cut_within(path, tmp_path / "store", 10)
    assert all(each.least_bytes <= 10 * MIB for each in document.fragments)
    feeds = FOUR_BITS.inputs()
    got = run_chained(tmp_path / "store", document, feeds)["y"].astype(np.float32)
    want = run_whole(path, feeds)["y"].astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_a_convolution_of_integers_that_spreads_much_out_does_so_a_window_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It spreads 33 MiB out, of 2 MiB that it reads, and gives 1."""
    path, store = tmp_path / "model.onnx", tmp_path / "store"
    chance = np.random.default_rng(0)
    kernel = chance.integers(0, 255, (8, 64, 17), np.uint8, endpoint=True)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("ConvInteger", ["x", "w"], ["y"], pads=[8, 8])],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, [1, 64, 32000])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.INT32, [1, 8, 32000])],
        [onnx.numpy_helper.from_array(kernel, "w")],
    )
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    with monkeypatch.context() as patch:
        patch.setattr("shoal_compiler.profile.SLICE_BYTES", (1 << 30,))
        with pytest.raises(PreparationRefused, match=r"ConvInteger\) needs 4.* by itself"):
            cut_within(path, store, 44)
    document = cut_within(path, store, 24)
    assert all(each.least_bytes <= 24 * MIB for each in document.fragments)
    feeds = {"x": chance.integers(0, 255, (1, 64, 32000), np.uint8, endpoint=True)}
    want, got = run_whole(path, feeds), run_chained(store, document, feeds)
    np.testing.assert_array_equal(got["y"], want["y"])


def test_a_transposed_convolution_is_parted_for_what_it_makes_before_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes 32 MiB of products, and 8 of them, with 0.06 MiB of weights."""
    made = Made(
        text="""agraph (float[1, 32, 128, 128] x) => (float[1, 32, 256, 256] y) {
            y = ConvTranspose <strides = [2, 2], pads = [1, 1, 1, 1]> (x, W)
        }""",
        weights={"W": weight(32, 32, 4, 4)},
        shapes={"x": (1, 32, 128, 128)},
    )
    path, store = made.save(tmp_path), tmp_path / "store"
    with monkeypatch.context() as patch:
        patch.setattr("shoal_compiler.profile.SLICE_BYTES", (1 << 30,))
        with pytest.raises(PreparationRefused, match=r"ConvTranspose\) needs .* by itself"):
            cut_within(path, store, 48)
    document = cut_within(path, store, 40)
    assert all(each.least_bytes <= 40 * MIB for each in document.fragments)
    feeds = made.inputs()
    want = run_whole(path, feeds)["y"].astype(np.float32)
    got = run_chained(store, document, feeds)["y"].astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_a_refusal_says_the_least_of_what_parts_of_any_size_need(tmp_path: Path) -> None:
    """No cut parts what a sequence crosses, and each part of its layer is a node more in there."""
    path = across().save(tmp_path)
    with pytest.raises(PreparationRefused) as refused:
        cut_within(path, tmp_path / "store", 8)
    source = Source.open(path)
    least = [smallest_limit(Layout(each.profile())) for each in source.slicings()]
    assert least[0] < least[-1], "with the finest parts it needs more"
    assert refused.value.need_bytes == min(least)
    cut_within(path, tmp_path / "store", -(-min(least) // MIB))


def across() -> Made:
    """A layer of 15.3 MiB, beside a sequence that crosses all."""
    return Made(
        text="agraph (float[1, 2000] x) => (float[1, 2000] y) {\n"
        "  i = Constant <value = int64 {0}> ()\n  s = SequenceConstruct (x, x)\n"
        "  t = SequenceAt (s, i)\n  u = MatMul (t, W)\n  v = SequenceInsert (s, u)\n"
        "  y = ConcatFromSequence <axis = 0> (v)\n}",
        weights={"W": weight(2000, 2000)},
    )


FOUR_BITS = Made(
    text="""g (float[1, 512] x) => (float[1, 8192] y) {
        t = MatMulNBits<K = 512, N = 8192, bits = 4, block_size = 32>(x, W, s) y = Relu(t) }""",
    weights={
        "W": np.random.default_rng(0).integers(0, 255, (8192, 16, 16)).astype(np.uint8),
        "s": np.full(8192 * 16, 0.01, np.float32),
    },
    shapes={"x": (1, 512)},
)
