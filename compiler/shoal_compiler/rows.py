"""Nodes that work row by row: which rows they read for some rows of what they give.

Rows are along the first axis in space of images, `[items, channels, rows, columns]`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import onnx
from onnx import helper, numpy_helper

from shoal_compiler.graph import Weight
from shoal_compiler.nodes import integer_of, integers_of, is_standard, text_of
from shoal_compiler.shaped import Dims
from shoal_compiler.tensor_types import MADE_UP_AXIS, Axes

ROW_AXIS: Final = 2
_IMAGE_AXES: Final = 4
_UNARY: Final = (
    "Abs Cast Ceil Celu Clip Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity LeakyRelu Log "
    "Mish Neg Reciprocal Relu Round Selu Sigmoid Sign Softplus Softsign Sqrt Tanh ThresholdedRelu"
)
_OF_SEVERAL: Final = "Add Div Max Mean Min Mul PRelu Pow Sub Sum Where"
_ONE_BY_ONE: Final = frozenset(f"{_UNARY} {_OF_SEVERAL}".split(" "))
"""Each element follows from those at its place."""
_BY_CHANNEL: Final = ("BatchNormalization", "DequantizeLinear", "QuantizeLinear")
_WEIGHTS: Final = {"Conv": 1, "ConvTranspose": 1, "QLinearConv": 3}
"""Their places."""
_KERNELS: Final = ("AveragePool", "Conv", "MaxPool", "QLinearConv")
_SPREADING: Final = ("ConvTranspose", "DepthToSpace", "Resize", "Upsample")
_SIZES: Final = 3
"""The input of a Resize that says how large the image becomes, in place of scales before it."""
_NEAREST: Final = {("asymmetric", "floor")} | {
    (f"{which}half_pixel", f"round_prefer_{to}")
    for which in ("", "pytorch_")
    for to in ("floor", "ceil")
}
"""Ways to choose the nearest row that repeat each, where there are a whole number of times as
many."""

Pads = tuple[int, int, int, int]
"""Rows before an image, columns, rows behind it, columns."""


class Rows(NamedTuple):
    """From where on, and up to where."""

    start: int
    end: int

    @property
    def number(self) -> int:
        return self.end - self.start

    def joined(self, other: "Rows") -> "Rows":
        """What is in either, and what is between them."""
        return Rows(min(self.start, other.start), max(self.end, other.end))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWise:
    """How a node works. It reads the inputs at `places` by rows, and all others as a whole. For a
    row of its output it needs `kernel` rows, which begin a `stride` further on for the next one.

    One that `spreads` gives so many rows for each: a row adds to `kernel` rows, which begin so much
    further on for the next one, and of which as many are left out as there are `pads`.
    """

    places: tuple[int, ...]
    kernel: int = 1
    stride: int = 1
    spreads: int = 1
    pads: Pads = (0, 0, 0, 0)
    rounds_up: bool = False
    """Where strides do not end with the image."""

    def lacking(self, rows: int) -> int:
        """How many rows fewer it gives than one for each stride, of an image that has so many fewer
        than whole strides; below zero: more."""
        if self.spreads > 1:
            return rows * self.spreads
        return -1 - (self.beyond - rows) // self.stride

    def around(self, before: int, behind: int) -> tuple[int, int]:
        """How many rows more it needs, at either end of what it reads, for so many more of what it
        gives."""
        above = self.pads[0]
        if self.spreads > 1:
            ahead = (before + self.kernel - 1 - above) // self.spreads
            return max(0, ahead), (behind - 1 + above) // self.spreads + 1
        after = (behind - 1) * self.stride + self.kernel - above
        return before * self.stride + above, max(0, after)

    @property
    def beyond(self) -> int:
        """Of an image with so many rows added it gives one row for each whole stride, and one."""
        more = self.stride - 1 if self.rounds_up else 0
        return self.pads[0] + self.pads[2] - self.kernel + more

    def needs(self, rows: Rows, height: int) -> Rows:
        """What it needs of inputs with so many rows, for some rows of its output."""
        start, end = self._reach(rows)
        return Rows(max(0, start), min(height, end))

    def padded(self, rows: Rows, height: int) -> Pads:
        """What is to be added to those."""
        start, end = self._reach(rows)
        return max(0, -start), self.pads[1], max(0, end - height), self.pads[3]

    def _reach(self, rows: Rows) -> tuple[int, int]:
        start = rows.start * self.stride - self.pads[0]
        return start, (rows.end - 1) * self.stride - self.pads[0] + self.kernel


class Images:
    """What is known of a graph's images. Of some the model alone says how many rows they have, of
    others an input does. The rows of two of those are taken for as many only where they follow from
    the same: else one may have a single row, for all of the other, with some input.

    Nodes are to be learnt in the order of the graph.
    """

    def __init__(
        self,
        weights: Mapping[str, Weight],
        sizes: Mapping[str, Dims],
        axes: Callable[[str], Axes | None],
    ) -> None:
        """`sizes` are those for some inputs, `axes` what the graph alone says of a tensor."""
        self._weights = weights
        self._sizes = sizes
        self._axes = axes
        self._sources: dict[str, str] = {}

    def height(self, name: str) -> int | None:
        """Rows of an image, for the inputs of which there are `sizes`; None: it is none."""
        sizes, axes = self._sizes.get(name), self._axes(name)
        if name in self._weights or sizes is None or axes is None:
            return None
        if len(sizes) != _IMAGE_AXES or len(axes) != _IMAGE_AXES:
            return None
        rows = axes[ROW_AXIS]
        said = not isinstance(rows, int) or rows == sizes[ROW_AXIS]
        return sizes[ROW_AXIS] if said and all(sizes) else None

    def source(self, name: str) -> str:
        """From what the rows of an image follow; empty: the model says how many there are."""
        rows = (self._axes(name) or ())[ROW_AXIS]
        if isinstance(rows, int):
            return ""
        named = rows is not None and not rows.startswith(MADE_UP_AXIS)
        return self._sources.get(name, f"{rows}" if named else f"of {name}")

    def learn(self, node: onnx.NodeProto) -> RowWise | None:
        """How a node works row by row; None: it does not, or nothing is known of it."""
        how = self.row_wise(node)
        if how is not None:
            self._sources[node.output[0]] = self.source(node.input[how.places[0]])
        return how

    def row_wise(self, node: onnx.NodeProto) -> RowWise | None:
        """What is to be learnt of it."""
        outputs = [name for name in node.output if name]
        height = self.height(outputs[0]) if len(outputs) == 1 else None
        if height is None or not node.input:
            return None
        if is_standard(node, *_ONE_BY_ONE):
            return self._one_by_one(node, height)
        if is_standard(node, *_KERNELS):
            return self._by_kernel(node, height)
        if is_standard(node, *_SPREADING):
            return self._spreading(node, height)
        apart = is_standard(node, "Concat") or is_standard(node, *_BY_CHANNEL)
        if not apart or integer_of(node, "axis", 1) != 1 or integer_of(node, "block_size", 0):
            return None
        read = node.input if node.op_type == "Concat" else node.input[:1]
        alike = self._are_alike(read) and self.height(read[0]) == height
        return RowWise(places=tuple(range(len(read)))) if alike else None

    def _are_alike(self, names: Sequence[str]) -> bool:
        """Whether they have as many rows as each other, whatever goes in."""
        if any(self.height(name) is None for name in names):
            return False
        return len({(self.height(name), self.source(name)) for name in names}) == 1

    def _one_by_one(self, node: onnx.NodeProto, height: int) -> RowWise | None:
        places = []
        for place, name in enumerate(node.input):
            if self.height(name) == height:
                places.append(place)
            elif name and not self._is_alike_in_rows(name):
                return None
        alike = places and self._are_alike([node.input[place] for place in places])
        return RowWise(places=tuple(places)) if alike else None

    def _is_alike_in_rows(self, name: str) -> bool:
        """Whether what is read is the same for each row."""
        weight = self._weights.get(name)
        axes = self._axes(name) if weight is None else tuple(weight.tensor.dims)
        return axes is not None and (len(axes) <= 1 or axes[-2] == 1)

    def _by_kernel(self, node: onnx.NodeProto, height: int) -> RowWise | None:
        taken, axes = self.height(node.input[0]), self._axes(node.input[0])
        kernel = self._kernel(node)
        strides = integers_of(node, "strides") or [1, 1]
        dilations = integers_of(node, "dilations") or [1, 1]
        if taken is None or axes is None or not all(map(_are_two, (kernel, strides, dilations))):
            return None
        reach = [(size - 1) * step + 1 for size, step in zip(kernel, dilations, strict=True)]
        pads = _pads(node, reach, strides, axes[ROW_AXIS:])
        if pads is None:
            return None
        # Where the model says how many rows there are, an exact band has no row that is not whole.
        rounds_up = bool(integer_of(node, "ceil_mode", 0) and self.source(node.input[0]))
        how = RowWise(
            places=(0,), kernel=reach[0], stride=strides[0], pads=pads, rounds_up=rounds_up
        )
        return how if (taken + how.beyond) // how.stride + 1 == height else None

    def _spreading(self, node: onnx.NodeProto, height: int) -> RowWise | None:
        """A node that gives several rows for one."""
        match node.op_type:
            case "ConvTranspose":
                how = self._transposed(node)
            case "DepthToSpace":
                how = _repeated(integer_of(node, "blocksize", 1))
            case _:
                how = self._resized(node)
        taken = self.height(node.input[0])
        if how is None or taken is None or taken * how.spreads != height:
            return None
        return how

    def _transposed(self, node: onnx.NodeProto) -> RowWise | None:
        kernel, pads = self._kernel(node), integers_of(node, "pads") or [0] * 4
        strides = integers_of(node, "strides") or [1, 1]
        dilations = integers_of(node, "dilations") or [1, 1]
        more = integers_of(node, "output_padding") or [0, 0]
        said = text_of(node, "auto_pad") not in ("", "NOTSET") or integers_of(node, "output_shape")
        if said or not all(map(_are_two, (kernel, strides, dilations))) or strides[0] == 1:
            return None
        if len(pads) != _IMAGE_AXES or len(more) != _IMAGE_AXES - ROW_AXIS or min(pads) < 0:
            return None
        reach = (kernel[0] - 1) * dilations[0] + 1
        if reach - pads[0] - pads[2] + more[0] != strides[0]:
            return None
        top, left, bottom, right = pads
        return RowWise(
            places=(0,), kernel=reach, spreads=strides[0], pads=(top, left, bottom, right)
        )

    def _resized(self, node: onnx.NodeProto) -> RowWise | None:
        """With scales that the model says, rows a whole number of times."""
        old, place = len(node.input) < _SIZES, min(_SIZES, len(node.input)) - 1
        scales = self._four_floats(node.input[place])
        if any(node.input[_SIZES:]) or integers_of(node, "axes") or scales[:ROW_AXIS] != [1, 1]:
            return None
        if not scales[ROW_AXIS].is_integer() or (times := int(scales[ROW_AXIS])) < 2:
            return None
        mode = text_of(node, "mode") or "nearest"
        where = text_of(node, "coordinate_transformation_mode") or "half_pixel"
        to = text_of(node, "nearest_mode") or "round_prefer_floor"
        if mode == "nearest" and (old or (where, to) in _NEAREST):
            return _repeated(times)
        # Places between rows are floats: a band's are the very same for powers of two alone.
        if mode == "linear" and where == "half_pixel" and not old and times.bit_count() == 1:
            pads = (times + 1) // 2, 0, times // 2, 0
            return RowWise(places=(0,), kernel=2 * times, spreads=times, pads=pads)
        return None

    def _four_floats(self, name: str) -> list[float]:
        """What the model says of each axis of an image; empty: it does not."""
        weight = self._weights.get(name)
        if weight is None or list(weight.tensor.dims) != [_IMAGE_AXES]:
            return []
        if weight.tensor.data_type != onnx.TensorProto.FLOAT:
            return []
        return [float(each) for each in numpy_helper.to_array(weight.loaded())]

    def _kernel(self, node: onnx.NodeProto) -> list[int]:
        """Empty where it is not known."""
        place = _WEIGHTS.get(node.op_type, len(node.input))
        weight = self._weights.get(next(iter(node.input[place:]), ""))
        sizes = [] if weight is None else list(weight.tensor.dims[ROW_AXIS:])
        return integers_of(node, "kernel_shape") or sizes


def _repeated(times: int) -> RowWise:
    """A node that makes so many rows of each."""
    return RowWise(places=(0,), kernel=times, spreads=times)


def _are_two(sizes: Sequence[int]) -> bool:
    """Whether they are of rows and of columns, in a model that is not malformed."""
    return len(sizes) == _IMAGE_AXES - ROW_AXIS and min(sizes) > 0


def _pads(
    node: onnx.NodeProto, reach: Sequence[int], strides: Sequence[int], taken: Axes
) -> Pads | None:
    """What is added to an image of these rows and columns; None: it depends on the input."""
    how = text_of(node, "auto_pad")
    if how in ("", "NOTSET"):
        match integers_of(node, "pads"):
            case []:
                return 0, 0, 0, 0
            case [top, left, bottom, right] as pads if min(pads) >= 0:
                return top, left, bottom, right
        return None
    if how not in ("VALID", "SAME_UPPER", "SAME_LOWER"):
        return None
    ends = []
    for size, kernel, stride in zip(taken, reach, strides, strict=True):
        if how == "VALID":
            ends.append((0, 0))
        elif isinstance(size, int) or stride == 1:
            there = size if isinstance(size, int) else kernel
            more = max(0, (-(-there // stride) - 1) * stride + kernel - there)
            less = more // 2
            ends.append((less, more - less) if how == "SAME_UPPER" else (more - less, less))
        else:
            return None
    (top, bottom), (left, right) = ends
    return top, left, bottom, right


def set_pads(node: onnx.NodeProto, pads: Pads) -> None:
    """Say what is added to an image."""
    kept = [each for each in node.attribute if each.name not in ("auto_pad", "pads")]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("pads", pads)])
