"""Runs of nodes in bands whose edges the model computes."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from chaining import run_chained, run_whole
from compiler.test_bands import KIB, Floats, Image, bands, given, in_bands, item, small_limit
from shoal_compiler.cutting import Cut
from shoal_compiler.graph import Weight
from shoal_compiler.profile import Source
from shoal_compiler.rows import Images
from shoal_planner.least_limit import smallest_limit
from shoal_planner.segments import Layout

__all__ = ["small_limit"]
Layer = Callable[[st.DrawFn, Image, str], str]


def _convolved(draw: st.DrawFn, made: Image, last: str) -> str:
    size = draw(st.sampled_from([1, 3, 5]))
    if not draw(st.integers(0, 4)):
        return made.convolved(last, draw(st.integers(1, 12)), [size, 1])
    ends: dict[str, Any] = {"pads": [size // 2, 0, size // 2, 0]}
    if draw(st.booleans()):
        ends = {"auto_pad": "SAME_UPPER"}
    return made.convolved(last, draw(st.integers(1, 12)), [size, 1], **ends)


def _halved(draw: st.DrawFn, made: Image, last: str) -> str:
    size, before = draw(st.sampled_from([(3, 1), (7, 3), (2, 0), (1, 0), (4, 1), (3, 0)]))
    behind = draw(st.sampled_from([before, max(0, before - 1), before + 1]))
    how: dict[str, Any] = {"strides": [2, 1], "pads": [before, 0, behind, 0]}
    return made.convolved(last, draw(st.integers(1, 12)), [size, 1], **how)


def _pooled(draw: st.DrawFn, made: Image, last: str) -> str:
    operator, ceil = draw(st.sampled_from(["MaxPool", "AveragePool"])), draw(st.integers(0, 1))
    size, before = draw(st.sampled_from([(2, 0), (3, 0), (3, 1)]))
    how: dict[str, Any] = {"kernel_shape": [size, 1], "pads": [before, 0, before, 0]}
    return made.add(operator, last, strides=[2, 1], ceil_mode=ceil, **how)


def _transposed(draw: st.DrawFn, made: Image, last: str) -> str:
    channels, (size, before) = draw(st.integers(1, 12)), draw(st.sampled_from([(2, 0), (4, 1)]))
    weight = made.weight(made.channels[last], channels, size, 1)
    how: dict[str, Any] = {"strides": [2, 1], "pads": [before, 0, before, 0]}
    return made.add("ConvTranspose", last, weight, channels=channels, **how)


WAYS: list[dict[str, Any]] = [
    {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_floor"},
    {"mode": "linear"},
]


def _resized(draw: st.DrawFn, made: Image, last: str) -> str:
    scales = made.constant(np.array([1, 1, draw(st.integers(2, 3)), 1], np.float32))
    return made.add("Resize", last, "", scales, **draw(st.sampled_from(WAYS)))


def _activated(draw: st.DrawFn, made: Image, last: str) -> str:
    return made.add(draw(st.sampled_from(["Relu", "Sigmoid", "HardSwish"])), last)


def _joined(draw: st.DrawFn, made: Image, last: str) -> str:
    return made.joined(last, draw(st.sampled_from(["Add", "Mul", "Concat"])))


def _met(draw: st.DrawFn, made: Image, last: str) -> str:
    other = draw(st.sampled_from(list(made.channels)))
    channels = made.channels[last] + made.channels[other]
    return made.add("Concat", other, last, channels=channels, axis=1)


LAYERS: Sequence[Layer] = [
    _convolved,
    _convolved,
    _halved,
    _pooled,
    _transposed,
    _resized,
    _activated,
    _joined,
    _met,
]


@st.composite
def images(draw: st.DrawFn) -> tuple[Image, str, list[int]]:
    """In models that make rows more and fewer, and join what has as many again. Some say how many
    there are, of most an input does."""
    sizes = [1, draw(st.integers(1, 3)), 12 * draw(st.integers(2, 8)), 11]
    rows: int | str = "rows" if draw(st.integers(0, 3)) else sizes[2]
    made = Image(sizes[1], rows, sizes[3])
    last = "x"
    for layer in draw(st.lists(st.sampled_from(LAYERS), min_size=2, max_size=10)):
        last = layer(draw, made, last)
    return made, last, sizes


def whole(path: Path, feeds: Mapping[str, Floats], output: str) -> Floats | None:
    """What the model gives; nothing, where it takes no image of such a size."""
    try:
        return given(run_whole(path, feeds), output)
    except Exception:
        return None


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@hypothesis.given(drawn=images(), others=st.lists(st.integers(1, 90), max_size=3))
def test_an_image_of_any_size_gives_in_bands_what_it_gives_whole(
    drawn: tuple[Image, str, list[int]], others: list[int]
) -> None:
    made, output, sizes = drawn
    with tempfile.TemporaryDirectory() as place:
        path, store = Path(place) / "model.onnx", Path(place) / "store"
        made.save(path, output)
        assume(whole(path, item(sizes), output) is not None)
        source = in_bands(path, sizes)
        assume(bands(source))
        profile = source.profile({"x": sizes})
        assert [name for name, each in profile.tensors.items() if each.sizes is None] == []
        cut = Cut(source, profile, Layout(profile).legal[::60])
        cut.write(store)
        for rows in (sizes[2], *others):
            feeds = item([*sizes[:2], rows, sizes[3]])
            if (want := whole(path, feeds, output)) is None:
                continue
            got = given(run_chained(store, cut.document, feeds), output)
            assert got.shape == want.shape
            largest = np.abs(want).max(initial=1)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize("rows", [1, 2, 5, 200])
def test_an_image_may_have_fewer_rows_than_there_are_bands(rows: int, tmp_path: Path) -> None:
    made = Image(2, "rows", 16)
    wide = made.add("Relu", made.convolved("x", 48, [3, 3], pads=[1] * 4))
    output = made.convolved(wide, 2, [1, 1])
    path, store = tmp_path / "model.onnx", tmp_path / "store"
    made.save(path, output)
    source = in_bands(path, [1, 2, 64, 16])
    assert sum(node.op_type == "Relu" for node in source.graph.nodes) > 5
    cut = Cut(source, source.profile({"x": [1, 2, 64, 16]}), ())
    cut.write(store)
    feeds = item([1, 2, rows, 16])
    got = given(run_chained(store, cut.document, feeds), output)
    np.testing.assert_allclose(got, given(run_whole(path, feeds), output), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [9, 10, 48, 64, 65])
def test_no_band_begins_where_kernels_find_no_whole_row(rows: int, tmp_path: Path) -> None:
    made = Image(2, "rows", 16)
    wide = made.add("Relu", made.convolved("x", 48, [5, 1]))
    output = made.convolved(wide, 2, [5, 1])
    path, store = tmp_path / "model.onnx", tmp_path / "store"
    made.save(path, output)
    source = in_bands(path, [1, 2, 64, 16])
    assert sum(node.op_type == "Relu" for node in source.graph.nodes) > 5
    cut = Cut(source, source.profile({"x": [1, 2, 64, 16]}), ())
    cut.write(store)
    feeds = item([1, 2, rows, 16])
    got = given(run_chained(store, cut.document, feeds), output)
    np.testing.assert_allclose(got, given(run_whole(path, feeds), output), rtol=0, atol=1e-5)


def test_what_stands_between_others_is_in_bands_with_what_reads_it(tmp_path: Path) -> None:
    """Like a pyramid: what is large is made first, and added to what is made large at the end."""
    made = Image(4, "rows", 16)
    large = made.convolved("x", 48, [1, 1])
    small = made.convolved("x", 8, [1, 1], strides=[8, 8])
    pooled = made.add("AveragePool", small, kernel_shape=[2, 2], strides=[2, 2])
    sizes = made.constant(np.array([1, 1, 2, 2], np.float32))
    seen = made.add("Resize", pooled, "", sizes, **WAYS[0])
    mixed = made.convolved(made.add("Add", small, seen), 48, [1, 1])
    back = made.add(
        "Resize", mixed, "", made.constant(np.array([1, 1, 8, 8], np.float32)), **WAYS[0]
    )
    output = made.convolved(made.add("Add", large, back), 2, [1, 1])
    made.save(tmp_path / "model.onnx", output)
    whole, *_, banded = (
        Source.open(tmp_path / "model.onnx").fitted({"x": [1, 4, 64, 16]}).slicings()
    )
    assert not any(output in node.output for node in banded.graph.nodes if node.op_type == "Conv")
    assert not any(large in node.output for node in banded.graph.nodes)
    limits = [
        smallest_limit(Layout(each.profile({"x": [1, 4, 64, 16]}))) for each in (whole, banded)
    ]
    assert limits[0] - limits[1] > 256 * KIB


@pytest.mark.parametrize(
    ("other", "alike"), [("rows", True), ("others", False), (None, False), (64, False)]
)
def test_rows_that_two_inputs_say_are_not_taken_for_as_many(
    other: int | str | None, alike: bool
) -> None:
    """One may have a single row, for all of the other, with the next item."""
    axes = {"x": (1, 2, "rows", 16), "y": (1, 2, other, 16), "z": (1, 2, None, 16)}
    images = Images({}, {name: (1, 2, 64, 16) for name in axes}, axes.get)
    assert (images.row_wise(helper.make_node("Add", ["x", "y"], ["z"])) is not None) == alike


MALFORMED: dict[str, tuple[str, dict[str, Any]]] = {
    "strides of nothing": ("ConvTranspose", {"kernel_shape": [2, 2], "strides": [0, 2]}),
    "a kernel of one axis": ("ConvTranspose", {"kernel_shape": [2], "strides": [2, 2]}),
    "three ends": ("ConvTranspose", {"kernel_shape": [4, 4], "strides": [2, 2], "pads": [1] * 3}),
    "an end that adds": (
        "ConvTranspose",
        {"kernel_shape": [1, 1], "strides": [2, 2], "pads": [-1, 0, 0, 0]},
    ),
    "one end more": (
        "ConvTranspose",
        {"kernel_shape": [2, 2], "strides": [2, 2], "output_padding": [0]},
    ),
    "blocks of nothing": ("DepthToSpace", {"blocksize": 0}),
    "no scales": ("Resize", {}),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_node_that_makes_rows_more_is_left_to_the_runtime(kind: str) -> None:
    operator, how = MALFORMED[kind]
    node = helper.make_node(operator, ["x", "w"], ["y"], **how)
    sizes = {"x": (1, 2, 32, 16), "y": (1, 2, 64, 16)}
    assert Images({}, sizes, sizes.get).row_wise(node) is None


@pytest.mark.parametrize(
    "scales",
    [
        np.array([1, 1, 2, 2], np.int64),
        np.array([1, 1, 2, 2], object).astype(str),
        np.array([1, 1, 2], np.float32),
        np.array([[1, 1, 2, 2]], np.float32),
        np.array([1, 2, 2, 2], np.float32),
        np.array([1, 1, np.nan, 2], np.float32),
        np.array([1, 1, np.inf, 2], np.float32),
        np.array([1, 1, -2, 2], np.float32),
    ],
)
def test_malformed_scales_are_left_to_the_runtime(scales: np.ndarray[Any, Any]) -> None:
    """So are those that make something else of an image than its rows more."""
    weight = Weight(numpy_helper.from_array(scales, "w"), None)
    node = helper.make_node("Resize", ["x", "", "w"], ["y"], **WAYS[0])
    sizes = {"x": (1, 2, 32, 16), "y": (1, 2, 64, 16)}
    assert Images({"w": weight}, sizes, sizes.get).row_wise(node) is None


@pytest.mark.parametrize(("times", "is_taken"), [(2, True), (3, False), (4, True)])
def test_rows_between_others_are_made_in_bands_where_their_places_are_exact(
    times: int, is_taken: bool
) -> None:
    """A third of a row is rounded otherwise far down an image than at the top of a band."""
    scales = Weight(numpy_helper.from_array(np.array([1, 1, times, 1], np.float32), "w"), None)
    node = helper.make_node("Resize", ["x", "", "w"], ["y"], mode="linear")
    sizes = {"x": (1, 2, 32, 16), "y": (1, 2, 32 * times, 16)}
    assert (Images({"w": scales}, sizes, sizes.get).row_wise(node) is not None) == is_taken
