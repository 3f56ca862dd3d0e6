"""Nodes that work row by row: which rows they read for some rows of what they give.

Rows are along the first axis in space of images, `[items, channels, rows, columns]`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import onnx

from shoal_compiler.graph import Weight
from shoal_compiler.nodes import integer_of, integers_of, is_standard, text_of
from shoal_compiler.shaped import Dims
from shoal_compiler.tensor_types import Axes

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
_KERNELS: Final = {"Conv": 1, "QLinearConv": 3}
"""With the place of the weight."""
_POOLS: Final = ("AveragePool", "MaxPool")


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
    row of its output it needs `kernel` rows, which begin a `stride` further on for the next one."""

    places: tuple[int, ...]
    kernel: int = 1
    stride: int = 1
    pads: Pads = (0, 0, 0, 0)

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
    """What is known of a graph's images, if the model alone says how many rows they have."""

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

    def height(self, name: str) -> int | None:
        """Rows of an image; None: it is none, or has another number of them for other inputs."""
        sizes, axes = self._sizes.get(name), self._axes(name)
        if name in self._weights or sizes is None or axes is None:
            return None
        if len(sizes) != _IMAGE_AXES or len(axes) != _IMAGE_AXES:
            return None
        return sizes[ROW_AXIS] if sizes[ROW_AXIS] == axes[ROW_AXIS] and all(sizes) else None

    def row_wise(self, node: onnx.NodeProto) -> RowWise | None:
        """How a node works row by row; None: it does not, or nothing is known of it."""
        outputs = [name for name in node.output if name]
        height = self.height(outputs[0]) if len(outputs) == 1 else None
        if height is None or not node.input:
            return None
        if is_standard(node, *_ONE_BY_ONE):
            return self._one_by_one(node, height)
        if is_standard(node, *_POOLS, *_KERNELS):
            return self._by_kernel(node, height)
        apart = is_standard(node, "Concat") or is_standard(node, *_BY_CHANNEL)
        if not apart or integer_of(node, "axis", 1) != 1 or integer_of(node, "block_size", 0):
            return None
        read = node.input if node.op_type == "Concat" else node.input[:1]
        alike = all(self.height(name) == height for name in read)
        return RowWise(places=tuple(range(len(read)))) if alike else None

    def _one_by_one(self, node: onnx.NodeProto, height: int) -> RowWise | None:
        places = []
        for place, name in enumerate(node.input):
            if self.height(name) == height:
                places.append(place)
            elif name and not self._is_alike_in_rows(name):
                return None
        return RowWise(places=tuple(places)) if places else None

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
        if pads is None or (taken + pads[0] + pads[2] - reach[0]) // strides[0] + 1 != height:
            return None
        return RowWise(places=(0,), kernel=reach[0], stride=strides[0], pads=pads)

    def _kernel(self, node: onnx.NodeProto) -> list[int]:
        """Empty where it is not known."""
        place = _KERNELS.get(node.op_type, len(node.input))
        weight = self._weights.get(next(iter(node.input[place:]), ""))
        sizes = [] if weight is None else list(weight.tensor.dims[ROW_AXIS:])
        return integers_of(node, "kernel_shape") or sizes


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
        elif isinstance(size, int):
            more = max(0, (-(-size // stride) - 1) * stride + kernel - size)
            less = more // 2
            ends.append((less, more - less) if how == "SAME_UPPER" else (more - less, less))
        else:
            return None
    (top, bottom), (left, right) = ends
    return top, left, bottom, right
