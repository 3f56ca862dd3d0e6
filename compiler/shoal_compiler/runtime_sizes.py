"""Sizes that ONNX Runtime gives where onnx's inference has others (measured, 1.31 and opsets 7 to
22): of what is scaled, pooled, convolved backwards, or sliced from the end to the beginning.

A rule gives the sizes of axes of the first output, as far as they follow from those of the first
input and from values that are known; or the most that they are, where onnx has less (`_MOST`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx

from shoal_compiler.nodes import attribute_of, integer_of, integers_of
from shoal_compiler.safety import MAX_ELEMENTS
from shoal_compiler.tensor_types import Axes, axes_of

_SHAPES: Final = {"ConstantOfShape": 0, "Expand": 1, "Reshape": 1}
"""Which input of a node is a shape of what it gives."""

Values = Mapping[str, npt.NDArray[np.generic]]

# The inputs of a Slice that say where it ends, and in what steps.
_ENDS: Final = 2
_STEPS: Final = 4
_TO_THE_END: Final = (np.iinfo(np.int32).max, np.iinfo(np.int64).max)
"""As the end of a slice: all that there is, whatever the direction."""


def sizes_as_run(
    node: onnx.NodeProto, axes: Axes, inferred: Axes, values: Values
) -> Mapping[int, int]:
    """The sizes by axis, where onnx has `inferred` those of its output; nothing where the node is
    none of these, or makes no sense."""
    rule = None if node.domain not in ("", "ai.onnx") else _RULES.get(node.op_type)
    if rule is None:
        return {}
    try:
        found = rule(node, axes, values)
        if node.op_type in _MOST:
            known = ((axis, size, inferred[axis]) for axis, size in found.items())
            found = {axis: min(size, less) for axis, size, less in known if isinstance(less, int)}
    except (ArithmeticError, LookupError, ValueError):
        return {}
    return {axis: size for axis, size in found.items() if 0 <= size <= MAX_ELEMENTS}


def values_as_run(node: onnx.NodeProto, values: Values) -> dict[str, npt.NDArray[np.generic]]:
    """What a node reads, said so that onnx's reference means what the runtime does."""
    read = dict(values)
    if node.op_type != "Slice" or _input(node, _STEPS) not in values:
        return read
    sizes = np.array(values[node.input[0]].shape)
    starts, ends = (np.asarray(values[node.input[place]], np.int64) for place in (1, _ENDS))
    places = values[node.input[3]] if node.input[3] else np.arange(len(starts))
    backwards = np.asarray(values[node.input[_STEPS]], np.int64) < 0
    read[node.input[1]] = np.maximum(starts, -sizes[places])
    to_the_end = backwards & np.isin(ends, _TO_THE_END)
    read[node.input[_ENDS]] = np.where(to_the_end, np.iinfo(np.int64).min, ends)
    return read


def rank_by_length(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto]) -> int | None:
    """The rank of what is made in a shape that is computed: as long as the shape is."""
    place = _SHAPES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if place is None:
        return None
    shape, data = (_axes(types, _input(node, at)) for at in (place, 0))
    if shape is None or len(shape) != 1 or not isinstance(length := shape[0], int):
        return None
    if node.op_type != "Expand":
        return length
    return None if data is None else max(length, len(data))


def _scaled(node: onnx.NodeProto, axes: Axes, values: Values) -> Mapping[int, int]:
    """It multiplies in single precision, and rounds down: 10 by 1.3 is 13, not 12."""
    name = _input(node, 2 if node.op_type == "Resize" and len(node.input) > 2 else 1)
    given = values[name] if name else attribute_of(node, "scales").floats
    scales = np.asarray(given, np.float32)
    places = [each % len(axes) for each in integers_of(node, "axes")] or range(len(axes))
    if len(places) != len(scales):
        return {}
    sizes = {place: axes[place] for place in places}
    return {
        place: int(np.float32(size) * scale)
        for (place, size), scale in zip(sizes.items(), scales, strict=True)
        if isinstance(size, int)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """A window along one axis: how large and how far from the next, and what pads the image."""

    kernel: int
    stride: int
    dilation: int
    before: int
    after: int

    def padded(self, mode: bytes, size: int) -> "_Window":
        """The same, where the padding follows from the size."""
        if mode == b"VALID":
            return replace(self, before=0, after=0)
        if mode not in (b"SAME_UPPER", b"SAME_LOWER"):
            return self
        needed = ((size - 1) // self.stride) * self.stride + self.kernel - size
        before = needed // 2 if mode == b"SAME_UPPER" else (needed + 1) // 2
        return replace(self, before=before, after=needed - before)

    def places(self, size: int, *, up: bool) -> int:
        """In how many places it is. Rounded up, none is in the padding behind the image."""
        last = size + self.before + self.after - self.dilation * (self.kernel - 1) - 1
        if not up:
            return int(last / self.stride) + 1
        count = -(-last // self.stride) + 1
        return count - ((count - 1) * self.stride >= size + self.before)


def _pooled(node: onnx.NodeProto, axes: Axes, values: Values) -> Mapping[int, int]:
    del values
    kernel = integers_of(node, "kernel_shape")
    strides, dilations = (
        integers_of(node, name) or [1] * len(kernel) for name in ("strides", "dilations")
    )
    pads = integers_of(node, "pads") or [0] * 2 * len(kernel)
    mode = attribute_of(node, "auto_pad").s
    found = {}
    for place, size in enumerate(axes[2:]):
        if isinstance(size, int):
            window = _Window(
                kernel=kernel[place],
                stride=strides[place],
                dilation=dilations[place],
                before=pads[place],
                after=pads[place + len(kernel)],
            )
            up = bool(integer_of(node, "ceil_mode", 0))
            found[place + 2] = window.padded(mode, size).places(size, up=up)
    return found


def _transposed(node: onnx.NodeProto, axes: Axes, values: Values) -> Mapping[int, int]:
    """Where the padding follows from sizes, `output_padding` adds nothing beyond the strides."""
    del values
    mode = attribute_of(node, "auto_pad").s
    if mode not in (b"SAME_UPPER", b"SAME_LOWER") or integers_of(node, "output_shape"):
        return {}
    strides = integers_of(node, "strides") or [1] * len(axes[2:])
    sizes = zip(axes[2:], strides, strict=True)
    return {
        place: size * stride
        for place, (size, stride) in enumerate(sizes, 2)
        if isinstance(size, int)
    }


def _sliced(node: onnx.NodeProto, axes: Axes, values: Values) -> Mapping[int, int]:
    """From the end to the beginning; forwards onnx does as the runtime."""
    starts, ends, steps = (values[node.input[place]].tolist() for place in (1, _ENDS, _STEPS))
    places = values[node.input[3]].tolist() if node.input[3] else range(len(starts))
    found = {}
    for place, start, end, step in zip(places, starts, ends, steps, strict=True):
        if step < 0 and isinstance(size := axes[place], int):
            first = min(max(start + size * (start < 0), 0), size - 1)
            last = min(max(end + size * (end < 0), -1), size) if end not in _TO_THE_END else -1
            found[place % len(axes)] = max(0, -((last - first) // -step))
    return found


def _input(node: onnx.NodeProto, place: int) -> str:
    return node.input[place] if place < len(node.input) else ""


def _axes(types: Mapping[str, onnx.TypeProto], name: str) -> Axes | None:
    return axes_of(types[name]) if name in types else None


_RULES: Final[Mapping[str, Callable[[onnx.NodeProto, Axes, Values], Mapping[int, int]]]] = {
    "AveragePool": _pooled,
    "ConvTranspose": _transposed,
    "LpPool": _pooled,
    "MaxPool": _pooled,
    "Resize": _scaled,
    "Slice": _sliced,
    "Upsample": _scaled,
}
_MOST: Final = frozenset(("ConvTranspose",))
