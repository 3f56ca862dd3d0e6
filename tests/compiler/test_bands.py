"""Runs of nodes with large activations, in bands of rows."""

import tempfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from chaining import run_chained, run_whole
from compiler.test_resident_estimate import measured
from shoal_compiler.cutting import Cut
from shoal_compiler.profile import Source
from shoal_compiler.rows import Images
from shoal_planner.least_limit import smallest_limit
from shoal_planner.segments import Layout

Floats = np.ndarray[Any, np.dtype[np.float32]]
KIB = 1 << 10
WHOLE = 1 << 30


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_compiler.profile.SLICE_BYTES", (WHOLE, 8 * KIB))


class Image:
    """A model of one image, node by node. Each is named by what it gives."""

    def __init__(self, channels: int, rows: int | str, columns: int, seed: int = 0) -> None:
        self.channels = {"x": channels}
        self.nodes: list[onnx.NodeProto] = []
        self._chance = np.random.default_rng(seed)
        self._weights: list[onnx.TensorProto] = []
        self._input: list[int | str] = ["n", channels, rows, columns]

    def add(self, operator: str, *reads: str, channels: int = 0, **how: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, reads, [name], **how))
        self.channels[name] = channels or self.channels[reads[0]]
        return name

    def constant(self, value: Any) -> str:
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def weight(self, *dims: int) -> str:
        value = self._chance.standard_normal(dims, np.float32) / np.float32(prod(dims[1:]) ** 0.5)
        return self.constant(value)

    def convolved(self, read: str, channels: int, kernel: Sequence[int], **how: Any) -> str:
        depth = self.channels[read] // how.get("group", 1)
        weight = self.weight(channels, depth, *kernel)
        return self.add("Conv", read, weight, channels=channels, **how)

    def gated(self, read: str) -> str:
        """Squeeze and excitation: each channel times what follows from all of the image."""
        pooled = self.add("GlobalAveragePool", read)
        gate = self.add("Sigmoid", self.convolved(pooled, self.channels[read], [1, 1]))
        return self.add("Mul", read, gate)

    def joined(self, read: str, operator: str) -> str:
        """With what a few nodes make of it."""
        wide = self.convolved(read, 12, [3, 1], pads=[1, 0, 1, 0])
        narrow = self.convolved(wide, self.channels[read], [1, 1])
        if operator == "Concat":
            return self.add(operator, read, narrow, channels=2 * self.channels[read], axis=1)
        return self.add(operator, read, narrow)

    def save(self, path: Path, output: str) -> None:
        graph = helper.make_graph(
            self.nodes,
            "image",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, self._input)],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
            self._weights,
        )
        opsets = [helper.make_opsetid("", 17)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


def item(sizes: Sequence[int]) -> dict[str, Floats]:
    return {"x": np.random.default_rng(1).standard_normal(sizes, np.float32)}


def given(of: Mapping[str, Any], name: str) -> Floats:
    return np.asarray(of[name], np.float32)


def in_bands(path: Path, sizes: Sequence[int]) -> Source:
    """In as fine ones as there are; without any where none help."""
    return list(Source.open(path).fitted({"x": sizes}).slicings())[-1]


def bands(source: Source) -> int:
    """Joined along rows."""
    return sum(
        node.op_type == "Concat" and helper.get_node_attr_value(node, "axis") == 2
        for node in source.graph.nodes
    )


def pads(kernel: Sequence[int]) -> st.SearchStrategy[dict[str, Any]]:
    """What is added at the edges, each end by itself or as an operator works it out."""
    each = st.tuples(*(st.integers(0, size - 1) for size in (*kernel, *kernel)))
    named = st.sampled_from(["VALID", "SAME_UPPER", "SAME_LOWER"])
    return st.builds(lambda ends: {"pads": ends}, each) | st.builds(
        lambda how: {"auto_pad": how}, named
    )


@st.composite
def images(draw: st.DrawFn) -> tuple[Image, str, list[int]]:
    sizes = [draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(16, 90)), 17]
    made, last = Image(*sizes[1:]), "x"
    for _ in range(draw(st.integers(2, 9))):
        kernel = [draw(st.integers(1, 5)), draw(st.integers(1, 3))]
        how = {"strides": [draw(st.sampled_from([1, 1, 1, 2, 3])), 1], **draw(pads(kernel))}
        match draw(st.sampled_from(["conv", "depthwise", "max", "mean", "gate", "one", "join"])):
            case "conv":
                if "pads" in how:
                    how["dilations"] = [draw(st.integers(1, 2)), 1]
                last = made.convolved(last, draw(st.integers(1, 24)), kernel, **how)
            case "depthwise":
                channels = made.channels[last]
                last = made.convolved(last, channels, kernel, group=channels, **how)
            case "max":
                last = made.add("MaxPool", last, kernel_shape=kernel, **how)
            case "mean":
                how["count_include_pad"] = draw(st.integers(0, 1))
                last = made.add("AveragePool", last, kernel_shape=kernel, **how)
            case "gate":
                last = made.gated(last)
            case "one":
                last = made.add(draw(st.sampled_from(["Relu", "Sigmoid", "HardSwish"])), last)
            case "join":
                last = made.joined(last, draw(st.sampled_from(["Add", "Mul", "Concat"])))
    return made, last, sizes


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@hypothesis.given(drawn=images())
def test_an_image_gives_in_bands_what_it_gives_whole(drawn: tuple[Image, str, list[int]]) -> None:
    made, output, sizes = drawn
    with tempfile.TemporaryDirectory() as place:
        path, store = Path(place) / "model.onnx", Path(place) / "store"
        made.save(path, output)
        feeds = item(sizes)
        try:
            want = given(run_whole(path, feeds), output)
        except Exception:  # a kernel is larger than what is left of the image
            assume(False)
        source = in_bands(path, sizes)
        assume(bands(source))
        profile = source.profile({"x": sizes})
        assert [name for name, each in profile.tensors.items() if each.sizes is None] == []
        cut = Cut(source, profile, Layout(profile).legal[::7])
        cut.write(store)
        got = given(run_chained(store, cut.document, feeds), output)
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max(initial=1))


def wide(rows: int | str = 64) -> tuple[Image, str]:
    """Like the first layers of MobileNetV2: 8 KiB go in, 4 KiB come out, 384 KiB lie between."""
    made = Image(2, rows, 16)
    expanded = made.add("Relu", made.convolved("x", 48, [1, 1]))
    depthwise = made.convolved(expanded, 48, [3, 3], group=48, pads=[1] * 4, strides=[2, 2])
    return made, made.convolved(made.add("Relu", depthwise), 4, [1, 1])


def test_a_model_in_bands_is_cut_for_less_than_its_largest_node(tmp_path: Path) -> None:
    made, output = wide()
    made.save(tmp_path / "model.onnx", output)
    sources = list(Source.open(tmp_path / "model.onnx").fitted({"x": [1, 2, 64, 16]}).slicings())
    whole, banded = (
        smallest_limit(Layout(each.profile({"x": [1, 2, 64, 16]}))) for each in sources
    )
    assert whole - banded > 256 * KIB


@pytest.mark.parametrize("items", [1, 3])
def test_how_many_rows_there_are_is_known_where_only_the_number_of_items_is_open(
    tmp_path: Path, items: int
) -> None:
    made, output = wide()
    path, store = tmp_path / "model.onnx", tmp_path / "store"
    made.save(path, output)
    source = in_bands(path, [1, 2, 64, 16])
    assert bands(source) == 1
    cut = Cut(source, source.profile({"x": [1, 2, 64, 16]}), ())
    cut.write(store)
    feeds = item([items, 2, 64, 16])
    want = given(run_whole(path, feeds), output)
    got = given(run_chained(store, cut.document, feeds), output)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_an_image_whose_rows_an_input_changes_is_in_bands_too(tmp_path: Path) -> None:
    made, output = wide("rows")
    made.save(tmp_path / "model.onnx", output)
    assert bands(in_bands(tmp_path / "model.onnx", [1, 2, 64, 16])) == 1


def test_a_quantised_image_is_in_bands_too(tmp_path: Path) -> None:
    """Of integers all is the very same."""
    made = Image(2, 64, 16)
    scale, zero = made.constant(np.float32(0.05)), made.constant(np.uint8(7))
    kernel = made.constant(np.random.default_rng(0).integers(0, 255, (48, 2, 3, 3), np.uint8))
    small = made.add("QuantizeLinear", "x", scale, zero)
    reads = (small, scale, zero, kernel, scale, zero, scale, zero)
    large = made.add("QLinearConv", *reads, pads=[1, 1, 1, 1], channels=48)
    pooled = made.add("MaxPool", large, kernel_shape=[4, 4], strides=[4, 4])
    output = made.add("DequantizeLinear", pooled, scale, zero)
    path, store, sizes = tmp_path / "model.onnx", tmp_path / "store", [1, 2, 64, 16]
    made.save(path, output)
    source = in_bands(path, sizes)
    assert bands(source) == 1
    assert sum(node.op_type == "QLinearConv" for node in source.graph.nodes) > 1
    profile = source.profile({"x": sizes})
    cut = Cut(source, profile, Layout(profile).legal)
    cut.write(store)
    want, got = run_whole(path, item(sizes)), run_chained(store, cut.document, item(sizes))
    np.testing.assert_array_equal(got[output], want[output])


MALFORMED: dict[str, tuple[int, dict[str, Any]]] = {
    "a stride of nothing": (2, {"kernel_shape": [3, 3], "strides": [0, 1]}),
    "a stride of rows alone": (2, {"kernel_shape": [3, 3], "strides": [1]}),
    "holes of nothing": (2, {"kernel_shape": [3, 3], "dilations": [0, 1]}),
    "an empty kernel": (2, {"kernel_shape": [0, 3]}),
    "a kernel of three axes": (2, {"kernel_shape": [3, 3, 3]}),
    "three ends": (2, {"kernel_shape": [3, 3], "pads": [1, 1, 1]}),
    "an end that takes away": (2, {"kernel_shape": [3, 3], "pads": [-1, 0, 3, 0]}),
    "no weight": (1, {}),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_convolution_is_left_to_the_runtime(kind: str) -> None:
    reads, how = MALFORMED[kind]
    node = helper.make_node("Conv", ["x", "w"][:reads], ["y"], **how)
    sizes = {name: (1, 2, 64, 16) for name in "xy"}
    assert Images({}, sizes, sizes.get).row_wise(node) is None


def test_what_the_model_gives_or_others_read_ends_a_run(tmp_path: Path) -> None:
    """The pooled image is of all its rows, so these are there once."""
    made = Image(2, 64, 16)
    expanded = made.add("Relu", made.convolved("x", 48, [1, 1]))
    narrow = made.convolved(made.gated(expanded), 2, [1, 1])
    made.save(tmp_path / "model.onnx", narrow)
    source = in_bands(tmp_path / "model.onnx", [1, 2, 64, 16])
    joined = [node.output[0] for node in source.graph.nodes if node.op_type == "Concat"]
    assert expanded not in joined, "in bands it would be there twice"
    pooled = next(each for each in source.graph.nodes if each.op_type == "GlobalAveragePool")
    assert pooled.input[0] == expanded


@pytest.mark.parametrize("rows", [512, "rows"])
def test_a_fragment_in_bands_takes_no_more_than_its_estimate(
    rows: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Image(3, rows, 512)
    expanded = made.add("Relu", made.convolved("x", 32, [3, 3], pads=[1] * 4))
    output = made.convolved(expanded, 4, [3, 3], pads=[1] * 4, strides=[2, 2])
    path, store, sizes = tmp_path / "model.onnx", tmp_path / "store", [1, 3, 512, 512]
    made.save(path, output)
    monkeypatch.setattr("shoal_compiler.profile.SLICE_BYTES", (WHOLE, 8 << 20))
    resident = []
    for source in Source.open(path).fitted({"x": sizes}).slicings():
        cut = Cut(source, source.profile({"x": sizes}), ())
        cut.write(store)
        (fragment,) = cut.document.fragments
        folder = store / "fragments" / fragment.digest.removeprefix("sha256:")
        resident.append(fragment.resident_bytes)
        assert measured(folder, item(sizes), tmp_path) <= fragment.resident_bytes
    whole, banded = resident
    assert banded < 0.5 * whole
