"""Operators of other kinds: choosing, normalising, sums of several, resizing, searching."""

from collections.abc import Mapping
from math import prod
from typing import Final

from onnx import TensorProto

from shoal_compiler.shaped import Dims, Shaped
from shoal_compiler.tensor_types import bits_of
from shoal_compiler.workspaces.workspace import THREADS, Rule, Workspace, floats, numbers

_INDEX_BYTES: Final = 8
_INTERPOLATED_BYTES: Final = 48
_SAMPLE_BYTES: Final = 56
_REGION_BYTES: Final = 40
_BRANCH_BYTES: Final = 192
"""What the kernels keep for each value, position or element that the rules below count."""


def _where(shaped: Shaped) -> Workspace:
    """It selects from each operand before it joins the two. Halves are made numbers before, bytes
    stay bytes."""
    condition = shaped.input(0)
    chosen = tuple(prod(_joined(condition, shaped.input(place))) for place in (1, 2))
    is_bytes = shaped.type(1) == TensorProto.UINT8
    return Workspace(chosen) if is_bytes else numbers(shaped, *chosen, place=1)


def _joined(one: Dims, two: Dims) -> Dims:
    longest = max(len(one), len(two))
    padded = ((1,) * (longest - len(each)) + each for each in (one, two))
    return tuple(map(max, *padded))


def _times_its_output(times: int) -> Rule:
    """Operators that are made of several nodes."""
    return lambda shaped: numbers(shaped, *[prod(shaped.output(0))] * times)


def _times_its_input(times: int) -> Rule:
    return lambda shaped: floats(*[prod(shaped.input(0))] * times)


def _only_of_halves(shaped: Shaped) -> Workspace:
    """There is no kernel for halves: several nodes take its place."""
    halves = shaped.type(0) == TensorProto.FLOAT16
    return floats(prod(shaped.output(0))) if halves else Workspace()


def _of_a_sum(shaped: Shaped) -> Workspace:
    """What is added makes a sum, which is there by itself."""
    return floats(prod(shaped.output(0))) if shaped.has(1) else _only_of_halves(shaped)


def _skipping(shaped: Shaped) -> Workspace:
    """Of halves, all that goes in and what comes out is there as numbers, too."""
    halves = shaped.type(0) == TensorProto.FLOAT16
    rows = prod(shaped.input(0))
    return floats(rows, prod(shaped.input(1)), rows) if halves else Workspace()


def _along_an_axis(shaped: Shaped) -> Workspace:
    """Where that is not the last one, what goes in and what comes out are turned. Halves become
    numbers in one place, and are worked on in another."""
    sizes = shaped.output(0)
    axis = shaped.integer("axis", -1)
    if (axis + 1) % len(sizes) and prod(sizes[axis % len(sizes) + 1 :]) > 1:
        return numbers(shaped, prod(sizes), prod(sizes))
    return _only_of_halves(shaped)


def _of_several(shaped: Shaped) -> Workspace:
    """Two are joined, and the third with what came of that."""
    return numbers(shaped, *[prod(shaped.output(0))] * min(2, max(0, len(shaped.node.input) - 2)))


def _local_response(shaped: Shaped) -> Workspace:
    """The squares of one item, with channels more on both sides, and what they come to."""
    _, channels, *places = sizes = shaped.input(0)
    return floats(prod(sizes), (channels + shaped.integer("size", 1)) * prod(places))


# ---- beside the arena ----------------------------------------------------------------------------


def _resize(shaped: Shaped) -> Workspace:
    """Against aliases, it is resized along one axis after the other. What a cubic one has
    interpolated along rows is kept, for one channel after the other."""
    rows, across = shaped.input(0)[:-1], shaped.output(0)[-1]
    if shaped.integer("antialias"):
        return floats(prod(rows) * across, prod(shaped.output(0)))
    if shaped.text("mode") != "cubic":
        return Workspace()
    return Workspace(beside_bytes=_INTERPOLATED_BYTES * rows[-1] * across)


def _sampled(shaped: Shaped) -> Workspace:
    """From where each position of one item has its value, if that is between four."""
    if shaped.text("mode") in ("nearest", "bicubic", "cubic") or len(shaped.output(0)) != 4:
        return Workspace()
    return Workspace(beside_bytes=_SAMPLE_BYTES * prod(shaped.output(0)[2:]))


def _regions(shaped: Shaped) -> Workspace:
    """From where a region has its values, for each thread: it may be the whole picture."""
    samples = prod(shaped.output(0)[2:]) * shaped.integer("sampling_ratio") ** 2
    samples = samples or prod(shaped.input(0)[2:])
    return Workspace(beside_bytes=THREADS * _REGION_BYTES * samples)


def _grid(shaped: Shaped) -> Workspace:
    return floats(beside=4 * prod(shaped.output(0)))


def _determinant(shaped: Shaped) -> Workspace:
    return floats(beside=2 * prod(shaped.input(0)[-2:]))


def _transform(shaped: Shaped) -> Workspace:
    return _of_a_row(shaped.input(0)[shaped.integer("axis", 1)])


def _frames(shaped: Shaped) -> Workspace:
    """One after the other. Of one side there are half as many numbers, and one more."""
    given = shaped.output(0)[-2]
    return _of_a_row(2 * (given - 1) if shaped.integer("onesided", 1) else given)


def _of_a_row(length: int) -> Workspace:
    """Where its length is no power of two, it is made longer."""
    return floats(16 * length if length & (length - 1) else 0, beside=2 * length)


def _largest(shaped: Shaped) -> Workspace:
    """Each thread sorts the positions of a row."""
    sizes = shaped.input(0)
    row = sizes[shaped.integer("axis", -1)]
    threads = min(THREADS, prod(sizes) // max(1, row))
    return Workspace(beside_bytes=threads * _INDEX_BYTES * row)


def _scattered(shaped: Shaped) -> Workspace:
    """A copy of all positions."""
    return Workspace(beside_bytes=_INDEX_BYTES * prod(shaped.input(1)))


def _by_positions(shaped: Shaped) -> Workspace:
    """Where each slice begins."""
    return Workspace(beside_bytes=_INDEX_BYTES * prod(shaped.input(1)[:-1]))


# ---- as much as values may ask for ---------------------------------------------------------------


def _given(shaped: Shaped, beside_bytes: int, *most: int) -> Workspace:
    """With what outputs may take, those whose sizes are not known; as they may leave, there is a
    copy of each."""
    pairs = zip(most, shaped.outputs, strict=False)  # of what is asked for
    unknown = [size for size, known in pairs if known is None]
    return Workspace(tuple(unknown), max(beside_bytes, sum(unknown)))


def _not_zero(shaped: Shaped) -> Workspace:
    """As if none were."""
    sizes = shaped.input(0)
    positions = _INDEX_BYTES * max(1, len(sizes)) * prod(sizes)
    return _given(shaped, positions, positions)


def _unique(shaped: Shaped) -> Workspace:
    """As if all were different: a sorted tree of them."""
    sizes = shaped.input(0)
    axes = [each.i for each in shaped.node.attribute if each.name == "axis"]
    number = sizes[axes[0]] if axes else prod(sizes)
    tree = _BRANCH_BYTES * number + _INDEX_BYTES * prod(sizes)
    return _given(shaped, tree, _taken(shaped), *[_INDEX_BYTES * number] * 3)


def _compressed(shaped: Shaped) -> Workspace:
    """As if all was kept."""
    return _given(shaped, 0, _taken(shaped))


def _taken(shaped: Shaped) -> int:
    return prod(shaped.input(0)) * (bits_of(shaped.type(0)) or 64) // 8


RULES: Final[Mapping[str, Rule]] = {
    "Where": _where,
    **dict.fromkeys(("HardSwish", "Mish", "Swish"), _times_its_output(1)),
    "GroupNormalization": _times_its_output(2),
    "MeanVarianceNormalization": _times_its_output(3),
    "Bernoulli": _times_its_output(2),
    **dict.fromkeys(("CenterCropPad", "QLinearAveragePool"), _times_its_input(1)),
    "SoftmaxCrossEntropyLoss": _times_its_input(3),
    **dict.fromkeys(("Gelu", "QuickGelu"), _only_of_halves),
    **dict.fromkeys(("BiasGelu", "FastGelu"), _of_a_sum),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), _skipping),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _along_an_axis),
    **dict.fromkeys(("Sum", "Mean", "Max", "Min"), _of_several),
    "LRN": _local_response,
    "Resize": _resize,
    "GridSample": _sampled,
    "RoiAlign": _regions,
    "AffineGrid": _grid,
    "Det": _determinant,
    "DFT": _transform,
    "STFT": _frames,
    "TopK": _largest,
    "ScatterElements": _scattered,
    **dict.fromkeys(("GatherND", "ScatterND"), _by_positions),
    "NonZero": _not_zero,
    "Unique": _unique,
    "Compress": _compressed,
}
