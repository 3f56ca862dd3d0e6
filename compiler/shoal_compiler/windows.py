"""Convolutions of integers that spread much out, in windows of their input.

To the runtime such a convolution is a product of matrices, for which it spreads out the whole input
of an item: as many times as the kernel is long. Parts of its channels would each spread out as
much. So windows are gathered of the input along its first axis in space, each what some elements of
the output need, and they become items of one call, which are spread out one after the other. Each
sum is made as in the whole, and of integers: results are the very same.

How long a window is follows from sizes that are known when a model is cut; how many there are, from
the item. So an item of any length gives what it gives as a whole.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import onnx
from onnx import helper

from shoal_compiler.graph import Graph
from shoal_compiler.nodes import integer_of, integers_of, is_standard, text_of
from shoal_compiler.parting import KnownShapes, Parting
from shoal_compiler.tensor_types import named

_WEIGHTS: Final = {"ConvInteger": 1, "QLinearConv": 3}
_ZERO: Final = 2
"""The input that is the zero point of the first: what is at the edges."""
_OPSET: Final = 11
"""The first in which integers can be padded, and there is a `Range`."""
_LEAST_AXES: Final = 3
_ONE_BY_ONE: Final = 4
"""With more axes than that, all groups are spread out at once."""
_PRODUCT_BYTES: Final = 5
"""Of an element that a quantised convolution gives: its sum, and what that is rounded to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """What of a convolution a window has: `length` elements of its output along the first axis in
    space, and what they read. `kernel` is with its holes, `taken` and `given` are channels."""

    length: int
    kernel: int
    stride: int
    pads: Sequence[int]
    taken: int
    given: int

    @property
    def reach(self) -> int:
        """Elements of the input."""
        return (self.length - 1) * self.stride + self.kernel


def in_windows(graph: Graph, most_bytes: int, shapes: KnownShapes) -> Graph:
    """The graph with every convolution of integers that works in more than `most_bytes` in windows
    that work in about as much at most, as far as `shapes` are known."""
    if graph.opsets.get("", graph.opsets.get("ai.onnx", 0)) < _OPSET:
        return graph
    windows = {
        place: window
        for place, node in enumerate(graph.nodes)
        if is_standard(node, *_WEIGHTS) and (window := _window(graph, node, most_bytes, shapes))
    }
    if not windows:
        return graph
    parting = Parting(graph, {}, shapes)
    nodes: list[onnx.NodeProto] = []
    for place, node in enumerate(graph.nodes):
        window = windows.get(place)
        nodes.extend([node] if window is None else _in_windows(parting, node, window))
    given = (graph.nodes[place].output[0] for place in windows)
    types = {name: named(kind) for name in given if (kind := shapes().types.get(name))}
    return replace(graph, nodes=tuple(nodes), weights=parting.weights, inferred=types)


def _window(
    graph: Graph, node: onnx.NodeProto, most_bytes: int, shapes: KnownShapes
) -> _Window | None:
    """The windows of a node; None: it stays whole."""
    weight = graph.weights.get(next(iter(node.input[_WEIGHTS[node.op_type] :]), ""))
    if weight is None or len(weight.tensor.dims) < _LEAST_AXES or not node.output:
        return None
    kernel, pads = weight.tensor.dims, _pads(node, weight.tensor.dims[2:])
    strides = integers_of(node, "strides") or [1] * len(kernel[2:])
    output = shapes().sizes.get(node.output[0], ())
    if pads is None or len(output) != len(kernel):
        return None
    if prod(kernel[2:]) == 1 and {*strides} == {1} and not any(pads):
        return None  # nothing is spread out
    groups, length = integer_of(node, "group", 1), output[2]
    each = prod(output[3:]) * prod(kernel[1:]) * (groups if len(kernel) > _ONE_BY_ONE else 1)
    if node.op_type == "QLinearConv":
        each += prod(output[3:]) * kernel[0] * _PRODUCT_BYTES
    if each * length <= most_bytes:
        return None
    reach = (kernel[2] - 1) * (integers_of(node, "dilations") or [1])[0] + 1
    length = -(-length // -(-length // max(1, most_bytes // each)))
    length = max(length, -(-reach // strides[0]))  # else windows have most of what they read twice
    if length >= output[2]:
        return None
    return _Window(
        length=length,
        kernel=reach,
        stride=strides[0],
        pads=pads,
        taken=kernel[1] * groups,
        given=kernel[0],
    )


def _pads(node: onnx.NodeProto, kernel: Sequence[int]) -> list[int] | None:
    """What is added before all axes in space and behind them; None: that depends on the input."""
    how = text_of(node, "auto_pad")
    none = [0] * len(kernel)
    if how in ("", "NOTSET"):
        return integers_of(node, "pads") or none + none
    if how == "VALID":
        return none + none
    if any(each > 1 for each in integers_of(node, "strides") + integers_of(node, "dilations")):
        return None
    more = [size - 1 for size in kernel]
    less = [each // 2 for each in more]
    rest = [each - half for each, half in zip(more, less, strict=True)]
    return less + rest if how == "SAME_UPPER" else rest + less


class _Adding:
    """Nodes that replace a convolution, as they are added."""

    def __init__(self, parting: Parting, node: onnx.NodeProto, in_space: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._parting = parting
        self._node = node
        self._in_space = in_space

    def __call__(
        self, operator: str, *reads: str | int | Sequence[int], **how: int | list[int]
    ) -> str:
        """The name of what the new node gives. It reads tensors, and integers."""
        number = len(self.nodes) + 1
        output = self._parting.fresh(f"{self._node.output[0]}.{number}")
        inputs = [
            each if isinstance(each, str) else self._parting.add_integers(f"{output}.{place}", each)
            for place, each in enumerate(reads)
        ]
        name = self._parting.name(self._node, number)
        node = helper.make_node(operator, inputs, [output], name=name)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in how.items())
        self.nodes.append(node)
        return output

    def shape(self, of: str, *sizes: str | list[int]) -> str | list[int]:
        """Sizes, and behind them those that a tensor has along all axes in space but the first."""
        if self._in_space > 1:
            all_of = self("Shape", of)
            beside = self("Slice", all_of, [_LEAST_AXES], [_LEAST_AXES + self._in_space])
            sizes = (*sizes, beside)
        return sizes[0] if len(sizes) == 1 else self("Concat", *sizes, axis=0)


def _in_windows(parting: Parting, node: onnx.NodeProto, window: _Window) -> list[onnx.NodeProto]:
    """The nodes that replace one."""
    taken, in_space = node.input[0], len(window.pads) // 2
    beside = range(4, in_space + 3)
    before, behind = window.pads[0], window.pads[in_space]
    add = _Adding(parting, node, in_space)

    # Where windows begin, and how long what is padded is from there: one more than the last begin.
    length = add("Gather", add("Shape", taken), 2)
    end = add("Add", length, before + behind - window.kernel + 1)
    begins = add("Range", 0, end, window.length * window.stride)
    number = add("Shape", begins)
    places = add("Add", add("Reshape", begins, [-1, 1]), add("Range", 0, window.reach, 1))

    # The axes are windows, items, channels, places, and what is beside.
    gathered = add("Gather", _padded(add, node, window), places, axis=2)
    turned = add("Transpose", gathered, perm=[2, 0, 1, 3, *beside])
    items = add("Reshape", turned, add.shape(taken, [-1, window.taken, window.reach]))
    made = _convolved(parting, node, items, window)
    add.nodes.append(made)
    given = made.output[0]
    apart = add("Reshape", given, add.shape(given, number, [-1, window.given, window.length]))
    turned = add("Transpose", apart, perm=[1, 2, 0, 3, *beside])
    places = add("Mul", number, window.length)
    joined = add("Reshape", turned, add.shape(given, [-1, window.given], places))

    # The last window has read on behind the end.
    several = (
        end if window.stride == 1 else add("Div", add("Add", end, window.stride - 1), window.stride)
    )
    add("Slice", joined, [0], add("Reshape", several, [1]), [2])
    add.nodes[-1].output[0] = node.output[0]
    return add.nodes


def _padded(add: _Adding, node: onnx.NodeProto, window: _Window) -> str:
    """The input with what the first kernel reads before it, and what the last window does behind
    it. That is the zero point: other axes have the same at their edges."""
    in_space = len(window.pads) // 2
    pads = [0] * 2 * (in_space + 2)
    pads[2] = window.pads[0]
    pads[in_space + 4] = window.pads[in_space] + (window.length - 1) * window.stride
    return add("Pad", node.input[0], pads, *filter(None, node.input[_ZERO : _ZERO + 1]))


def _convolved(
    parting: Parting, node: onnx.NodeProto, items: str, window: _Window
) -> onnx.NodeProto:
    """The convolution of windows, which have their edges along the first axis in space already."""
    made = deepcopy(node)
    made.name = parting.name(node, 0)
    made.input[0], made.output[0] = items, parting.fresh(f"{node.output[0]}.windows")
    pads = list(window.pads)
    pads[0] = pads[len(pads) // 2] = 0
    kept = [each for each in node.attribute if each.name not in ("auto_pad", "pads")]
    del made.attribute[:]
    made.attribute.extend([*kept, helper.make_attribute("pads", pads)])
    return made
