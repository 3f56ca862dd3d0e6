"""Convolutions of integers in windows of their input."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from chaining import run_chained, run_whole
from compiler.layers import integers, scales
from compiler.test_resident_estimate import measured
from shoal_compiler.cutting import Cut
from shoal_compiler.profile import Source
from shoal_planner.segments import Layout

LIMIT = 8 << 10


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_compiler.profile.SLICE_BYTES", (LIMIT,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """One convolution; `taken` is the shape of the input that is planned for."""

    operator: str
    kernel: Sequence[int]
    taken: Sequence[int]
    attributes: dict[str, Any]
    signed: bool = False
    opset: int = 17

    def image(self, sizes: Sequence[int]) -> np.ndarray:
        return integers(*sizes, kind=np.int8 if self.signed else np.uint8, seed=sum(sizes))

    def save(self, path: Path) -> None:
        """All axes but the channels may be of any size."""
        kind = np.int8 if self.signed else np.uint8
        weights = {
            "w": integers(*self.kernel, kind=np.int8),
            "zero": np.array(7, kind),
            "none": np.zeros(self.kernel[0], np.int8),
            "one": scales().reshape(()),
            "each": scales(self.kernel[0]),
            "b": integers(self.kernel[0], kind=np.int32) // (1 << 20),
        }
        reads, gives = ["x", "w", "zero"], TensorProto.INT32
        if self.operator == "QLinearConv":
            reads = ["x", "one", "zero", "w", "each", "none", "one", "zero", "b"]
            gives = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        graph = helper.make_graph(
            [helper.make_node(self.operator, reads, ["y"], **self.attributes)],
            "g",
            [
                helper.make_tensor_value_info(
                    "x",
                    helper.np_dtype_to_tensor_dtype(np.dtype(kind)),
                    ["n", self.taken[1], *("dhw"[-len(self.taken[2:]) :])],
                )
            ],
            [helper.make_empty_tensor_value_info("y")],
            [
                numpy_helper.from_array(value, name)
                for name, value in weights.items()
                if name in reads
            ],
        )
        graph.output[0].type.tensor_type.elem_type = gives
        opsets = [helper.make_opsetid("", self.opset)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


def fitted(path: Path, taken: Sequence[int]) -> Source:
    return Source.open(path).fitted({"x": taken})


def operators(source: Source) -> list[str]:
    return [node.op_type for node in source.graph.nodes]


@st.composite
def convolutions(draw: st.DrawFn) -> Convolution:
    in_space = draw(st.integers(1, 3))
    groups, depth = draw(st.sampled_from([(1, 6), (2, 3), (4, 1)]))
    channels = groups * draw(st.integers(1, 6))
    size = [draw(st.integers(1, 5)) for _ in range(in_space)]
    taken = [draw(st.integers(60, 300)), draw(st.integers(9, 12)), draw(st.integers(9, 10))]
    attributes: dict[str, Any] = {"group": groups}
    attributes["strides"] = [draw(st.integers(1, 3)) for _ in range(in_space)]
    attributes["dilations"] = [draw(st.integers(1, 2)) for _ in range(in_space)]
    match draw(st.sampled_from(["", "pads", "VALID", "SAME_UPPER", "SAME_LOWER"])):
        case "pads":
            attributes["pads"] = [draw(st.integers(0, 3)) for _ in range(2 * in_space)]
        case "SAME_UPPER" | "SAME_LOWER" as how:
            attributes |= {"auto_pad": how, "dilations": [1] * in_space}
        case "VALID":
            attributes["auto_pad"] = "VALID"
    return Convolution(
        operator=draw(st.sampled_from(["ConvInteger", "QLinearConv"])),
        kernel=[channels, depth, *size],
        taken=[draw(st.integers(1, 2)), groups * depth, *taken[:in_space]],
        attributes=attributes,
        signed=draw(st.booleans()),
        opset=draw(st.sampled_from([11, 13, 17])),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=convolutions(), length=st.integers(15, 400), items=st.integers(1, 3))
def test_an_item_of_any_length_gives_in_windows_what_it_gives_whole(
    made: Convolution, length: int, items: int
) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        path, store = folder / "model.onnx", folder / "store"
        made.save(path)
        source = fitted(path, made.taken)
        assume("Pad" in operators(source))
        profile = source.profile({"x": made.taken})
        assert [name for name, each in profile.tensors.items() if each.sizes is None] == []
        cut = Cut(source, profile, Layout(profile).legal)
        cut.write(store)
        for sizes in (made.taken, [items, made.taken[1], length, *made.taken[3:]]):
            feeds = {"x": made.image(sizes)}
            want = run_whole(path, feeds)["y"]
            got = run_chained(store, cut.document, feeds)["y"]
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)


SOUND = Convolution(
    operator="ConvInteger", kernel=[16, 16, 11], taken=[1, 16, 3000], attributes={"pads": [5, 5]}
)
PICTURE = Convolution(
    operator="QLinearConv",
    kernel=[8, 16, 3, 3],
    taken=[2, 16, 200, 20],
    attributes={"strides": [2, 1]},
)


@pytest.mark.parametrize("made", [SOUND, PICTURE])
@pytest.mark.parametrize("limit", [LIMIT, 4 * LIMIT])
def test_a_convolution_in_windows_works_in_what_a_part_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Convolution, limit: int
) -> None:
    path = tmp_path / "model.onnx"
    made.save(path)

    def works_in() -> int:
        profile = fitted(path, made.taken).profile({"x": made.taken})
        return max(sum(each.workspaces) for each in profile.nodes)

    assert works_in() <= 2 * LIMIT
    monkeypatch.setattr("shoal_compiler.profile.SLICE_BYTES", (limit,))
    assert limit / 2 < works_in() <= 2 * limit
    monkeypatch.setattr("shoal_compiler.profile.SLICE_BYTES", (1 << 30,))
    assert works_in() > 8 * LIMIT


def test_a_convolution_is_in_windows_where_an_item_was_seen_to_be_long(tmp_path: Path) -> None:
    """Where sizes follow from nothing that is known, nothing is said of what it works in."""
    path = tmp_path / "model.onnx"
    SOUND.save(path)
    assert operators(Source.open(path)) == ["ConvInteger"]
    assert operators(Source.open(path).fitted({}, {"x": (1, 16, 30)})) == ["ConvInteger"]
    assert "Pad" in operators(Source.open(path).fitted({}, {"x": (1, 16, 3000)}))


def quantised_layers(path: Path, taken: Sequence[int | str]) -> None:
    """A convolution of integers, and what makes numbers of its sums."""
    graph = helper.make_graph(
        [
            helper.make_node("ConvInteger", ["x", "w"], ["t"], pads=[5, 5]),
            helper.make_node("Cast", ["t"], ["u"], to=TensorProto.FLOAT),
            helper.make_node("Relu", ["u"], ["v"]),
            helper.make_node("ReduceMax", ["v"], ["y"], axes=[2]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, taken)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(integers(32, 64, 11), "w")],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


@pytest.mark.parametrize(
    ("taken", "given"),
    [
        ([1, 64, 3000], (1, 32, 3000)),
        (["n", 64, 3000], ("n", 32, 3000)),
        (["n", 64, "m"], ("n", 32)),
    ],
)
def test_what_is_known_of_axes_behind_a_convolution_is_known_behind_its_windows(
    tmp_path: Path, taken: Sequence[int | str], given: Sequence[int | str | None]
) -> None:
    quantised_layers(tmp_path / "model.onnx", taken)
    source = fitted(tmp_path / "model.onnx", [1, 64, 3000])
    assert "Pad" in operators(source)
    shape = source.profile({"x": [1, 64, 3000]}).tensors["t"].spec.shape
    assert shape is not None
    assert shape[: len(given)] == tuple(given)


def test_a_fragment_with_windows_takes_no_more_than_its_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, store, taken = tmp_path / "model.onnx", tmp_path / "store", [1, 64, 60_000]
    quantised_layers(path, taken)
    resident = []
    for limit in (1 << 30, 1 << 20):
        monkeypatch.setattr("shoal_compiler.profile.SLICE_BYTES", (limit,))
        source = Source.open(path)
        cut = Cut(source, source.profile(), ())
        cut.write(store)
        (fragment,) = cut.document.fragments
        folder = store / "fragments" / fragment.digest.removeprefix("sha256:")
        resident.append(fragment.resident_bytes)
        assert measured(folder, {"x": integers(*taken)}, tmp_path) <= fragment.resident_bytes
    whole, windows = resident
    assert windows < 0.7 * whole


WHOLE = {
    "a kernel of one element, which spreads nothing out": replace(
        SOUND, kernel=[16, 16, 1], attributes={}
    ),
    "a kernel of which a window would have most twice": replace(
        SOUND, kernel=[2, 1000, 9], taken=[1, 1000, 12], attributes={}
    ),
    "edges that follow from the length": replace(
        SOUND, attributes={"auto_pad": "SAME_UPPER", "strides": [2]}
    ),
    "an operator set without what it takes": replace(SOUND, opset=10),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_gains_nothing_or_cannot_be_in_windows_stays_whole(tmp_path: Path, name: str) -> None:
    path, made = tmp_path / "model.onnx", WHOLE[name]
    made.save(path)
    assert "Gather" not in operators(fitted(path, made.taken))


@pytest.mark.parametrize("inputs", [["x"], ["x", "y"]])
def test_a_malformed_convolution_is_left_to_the_runtime_to_refuse(
    tmp_path: Path, inputs: list[str]
) -> None:
    path = tmp_path / "model.onnx"
    SOUND.save(path)
    model = onnx.load(path)
    del model.graph.node[0].input[:]
    model.graph.node[0].input.extend(inputs)
    model.graph.node.insert(0, helper.make_node("Identity", ["x"], ["y"]))
    model.graph.node[1].output[0] = "z"
    model.graph.output[0].name = "z"
    onnx.save(model, path)
    assert "Pad" not in operators(fitted(path, SOUND.taken))


def test_a_large_convolution_is_in_windows_and_those_in_parts_of_channels(tmp_path: Path) -> None:
    path, store = tmp_path / "model.onnx", tmp_path / "store"
    made = replace(SOUND, kernel=[200, 16, 11])
    made.save(path)
    source = fitted(path, made.taken)
    assert operators(source).count("Pad") == 1
    assert operators(source).count("ConvInteger") == 7, "of 32 channels each"
    cut = Cut(source, source.profile({"x": made.taken}), ())
    cut.write(store)
    feeds = {"x": made.image(made.taken)}
    got = run_chained(store, cut.document, feeds)["y"]
    np.testing.assert_array_equal(got, run_whole(path, feeds)["y"])
