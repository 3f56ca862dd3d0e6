"""Runs of nodes in bands whose edges the model computes."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st

from chaining import run_chained, run_whole
from compiler.test_bands import Floats, Image, bands, given, in_bands, item, small_limit
from shoal_compiler.cutting import Cut
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


WAYS = [
    {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_floor"},
    {"mode": "linear"},
]


def _resized(draw: st.DrawFn, made: Image, last: str) -> str:
    scales = made.constant(np.array([1, 1, draw(st.integers(2, 3)), 1], np.float32))
    how: dict[str, Any] = draw(st.sampled_from(WAYS))
    return made.add("Resize", last, "", scales, **how)


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
        cut = Cut(source, profile, Layout(profile).legal[::7])
        cut.write(store)
        for rows in (sizes[2], *others):
            feeds = item([*sizes[:2], rows, sizes[3]])
            if (want := whole(path, feeds, output)) is None:
                continue
            got = given(run_chained(store, cut.document, feeds), output)
            assert got.shape == want.shape
            largest = np.abs(want).max(initial=1)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * largest)
