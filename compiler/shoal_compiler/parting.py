"""Parts of constants: of initializers, and of what nodes quantise, cast or transpose.

A part's content is a range of the file that the whole is in, or strips of it where the axis is not
the first: nothing is read.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import numpy as np
import onnx
from onnx import numpy_helper

from shoal_compiler.graph import Graph, Weight
from shoal_compiler.nodes import all_nodes, integer_of, integers_of, is_standard
from shoal_compiler.safety import Range
from shoal_compiler.shaped import Dims
from shoal_compiler.shapes import Shapes
from shoal_compiler.tensor_types import bits_of

_MAKERS: Final = ("QuantizeLinear", "DequantizeLinear", "Cast", "Transpose")
_MOST_MAKERS: Final = 4
"""One after the other."""
_SLICES_BY_INPUTS: Final = 10
"""Before this opset, what a Slice takes is said by attributes."""
_SAYS_PARTS: Final = 18
"""From this opset on, a Split says of how many parts."""
_AXES_FROM_THE_END: Final = 11
"""Before this opset, onnx infers nothing of a Concat whose axis counts from there."""

KnownShapes = Callable[[], Shapes]
"""Of what the model computes, as far as they are known; asked for seldom, since it is not free."""


@dataclass(frozen=True, slots=True)
class Constant:
    """What a layer reads that is known: an initializer, or what `maker` makes of a `source`, which
    is known. `axes` are those of the initializer, in the order that they are read in."""

    weight: Weight
    axes: Sequence[int]
    maker: onnx.NodeProto | None = None
    source: "Constant | None" = None

    @property
    def name(self) -> str:
        """Of the initializer."""
        return self.weight.tensor.name

    @property
    def dims(self) -> Sequence[int]:
        return [self.weight.tensor.dims[axis] for axis in self.axes]

    @property
    def only_axis(self) -> int:
        """The first axis that is more than one long."""
        return next((axis for axis, size in enumerate(self.dims) if size > 1), len(self.axes) - 1)


class Parting:
    """A graph's constants, and parts of them under names that nothing has."""

    def __init__(self, graph: Graph, readers: Mapping[str, int], shapes: KnownShapes) -> None:
        self.weights = dict(graph.weights)
        self.readers = readers
        self._shapes = shapes
        self.tables: set[str] = set()
        """Initializers that are needed whole beside their parts."""
        self._dropped: set[str] = set()
        self.makers = {name: node for node in graph.nodes for name in node.output}
        self._taken = {*graph.sparse, *graph.weights, *(each.name for each in graph.inputs)}
        self._names: set[str] = set()
        self._parts: dict[tuple[str, int, int, int, int], str] = {}
        self._opset = graph.opsets.get("", graph.opsets.get("ai.onnx", 0))
        self._integers: dict[int | tuple[int, ...], str] = {}
        self._joined: dict[tuple[str, ...], str] = {}
        for node in all_nodes(graph.nodes):
            self._taken.update((*node.input, *node.output))
            self._names.add(node.name)

    def rank(self, name: str) -> int | None:
        """The number of axes of what the model computes; None: it is not known."""
        axes = self._shapes().axes(name)
        return None if axes is None else len(axes)

    def sizes(self, name: str) -> Dims | None:
        """Those of what the model computes; None: they are not known."""
        return self._shapes().sizes.get(name)

    def constant(self, name: str, makers: int = _MOST_MAKERS) -> Constant | None:
        """What a node reads by that name, if it is known, and `makers` at most have made it."""
        if (weight := self.weights.get(name)) is not None:
            return Constant(weight, range(len(weight.tensor.dims)))
        maker = self.makers.get(name)
        if maker is None or not is_standard(maker, *_MAKERS) or not maker.input or not makers:
            return None
        source = self.constant(maker.input[0], makers - 1)
        if source is None or self.readers[name] > 1:
            return None
        if any(each not in self.weights for each in maker.input[1:] if each):
            return None
        order = _order(maker, len(source.axes))
        if sorted(order) != list(range(len(source.axes))):
            return None
        return Constant(source.weight, [source.axes[axis] for axis in order], maker, source)

    def can_cut(self, constant: Constant, axis: int, step: int, *, packed: int = 1) -> bool:
        """Whether a constant can be parted along an axis, into multiples of a step."""
        if constant.maker is None or constant.source is None:
            return has_whole_bytes(constant.weight, axis, step)
        if packed > 1:
            return False
        if not self.can_cut(constant.source, _axis_before(constant, axis), step):
            return False
        scales = [self.weights[each] for each in constant.maker.input[1:] if each]
        places = [(each, self._along(constant, each, axis)) for each in scales]
        return all(
            along is not None and (along < 0 or has_whole_bytes(each, along, step))
            for each, along in places
        )

    def _along(self, constant: Constant, scale: Weight, axis: int) -> int | None:
        """The axis along which the scale, or the zero point, of a constant is parted with it; -1:
        it is not; None: nothing can be parted."""
        assert constant.maker is not None
        rank, dims = len(constant.dims), scale.tensor.dims
        if prod(dims) == 1:
            return -1
        if rank == 0:
            return None
        if integer_of(constant.maker, "block_size", 0):
            fits = len(dims) == rank and dims[axis] == constant.dims[axis]
            return axis if fits else None
        if integer_of(constant.maker, "axis", 1) % rank != axis:
            return -1
        return 0 if list(dims) == [constant.dims[axis]] else None

    def cut(
        self, name: str, axis: int, start: int, end: int, number: int, *, packed: int = 1
    ) -> tuple[str, list[onnx.NodeProto]]:
        """The name of a part of a constant, `[start, end)` along an axis, and the node that makes
        it, if there is one. `packed`: so many are one behind the other along the axis, and the part
        has that of each; of initializers only."""
        if (known := self._parts.get((name, axis, start, end, packed))) is not None:
            return known, []
        constant = self.constant(name)
        assert constant is not None
        maker = constant.maker
        if maker is None:
            part = self._parts[name, axis, start, end, packed] = self.fresh(f"{name}.{number}")
            self.weights[part] = replace(
                part_of(constant.weight, part, axis, start, end, packed),
                whole=name if name in self.tables else "",
            )
            return part, []
        assert packed == 1
        node = deepcopy(maker)
        node.name = self.name(maker, number)
        before = _axis_before(constant, axis)
        node.input[0], makers = self.cut(maker.input[0], before, start, end, number)
        for place, scale in enumerate(maker.input[1:], 1):
            along = self._along(constant, self.weights[scale], axis) if scale else -1
            assert along is not None
            if along >= 0:
                node.input[place], _ = self.cut(scale, along, start, end, number)
        node.output[0] = self.fresh(f"{name}.{number}")
        return node.output[0], [*makers, node]

    def slice(self, name: str, start: int, end: int, axis: int = 1) -> onnx.NodeProto:
        """The node that takes `[start, end)` along an axis, by default some channels, of what the
        model computes."""
        part = self.fresh(f"{name}.{start}")
        node = onnx.helper.make_node("Slice", [name], [part], name=unlike(part, self._names))
        for key, value in (("starts", start), ("ends", end), ("axes", axis)):
            if self._opset < _SLICES_BY_INPUTS:
                node.attribute.append(onnx.helper.make_attribute(key, [value]))
            else:
                node.input.append(self.add_integers(f"{part}.{key}", [value]))
        return node

    @property
    def can_slice_between(self) -> bool:
        """Whether what is taken of a tensor may follow from what the model computes."""
        return self._opset >= _SLICES_BY_INPUTS

    def slice_between(self, name: str, start: str, end: str, axis: int) -> onnx.NodeProto:
        """The node that takes what is between two places, of one element each, along an axis."""
        part = self.fresh(f"{name}.{start}")
        along = self.add_integers(f"{part}.axes", [axis])
        called = unlike(part, self._names)
        return onnx.helper.make_node("Slice", [name, start, end, along], [part], name=called)

    def split(self, name: str, number: int) -> onnx.NodeProto:
        """The node that takes so many equal parts of a list."""
        parts = [self.fresh(f"{name}.{each}") for each in range(number)]
        node = onnx.helper.make_node("Split", [name], parts, name=unlike(name, self._names))
        if self._opset >= _SAYS_PARTS:
            node.attribute.append(onnx.helper.make_attribute("num_outputs", number))
        return node

    def axis_of(self, name: str, axis: int) -> int:
        """An axis of what the model computes, as a Concat may say it."""
        if axis >= 0 or self._opset >= _AXES_FROM_THE_END:
            return axis
        rank = self.rank(name)
        return axis if rank is None else axis % rank

    def drop(self, name: str) -> None:
        """A constant is in parts now: its initializer is not needed but as a table."""
        if (constant := self.constant(name)) is not None:
            self._dropped.add(constant.name)

    def left(self) -> dict[str, Weight]:
        """The initializers that are needed still."""
        gone = self._dropped - self.tables
        return {name: each for name, each in self.weights.items() if name not in gone}

    def integers(self, name: str) -> list[int] | None:
        """The values of an initializer that is a shape."""
        weight = self.weights.get(name)
        if weight is None or weight.tensor.data_type != onnx.TensorProto.INT64:
            return None
        return [int(each) for each in numpy_helper.to_array(weight.loaded()).reshape(-1)]

    def add_integers(self, name: str, values: int | Sequence[int]) -> str:
        """The name of an initializer with these values, or this one value without an axis: `name`,
        or of one that was added before."""
        key = values if isinstance(values, int) else tuple(values)
        if (known := self._integers.get(key)) is not None:
            return known
        name = self._integers[key] = self.fresh(name)
        tensor = numpy_helper.from_array(np.array(values, np.int64), name)
        self.weights[name] = Weight(tensor, None)
        return name

    def joined(self, name: str, sizes: tuple[str, ...]) -> tuple[str, list[onnx.NodeProto]]:
        """The name of a shape, these sizes one after the other, and the node that makes it, unless
        one does already: most parts of a layer have the same shape."""
        if (known := self._joined.get(sizes)) is not None:
            return known, []
        name = self._joined[sizes] = self.fresh(name)
        return name, [onnx.helper.make_node("Concat", sizes, [name], axis=0)]

    def name(self, node: onnx.NodeProto, number: int) -> str:
        """A name for a part of a node."""
        return unlike(f"{node.name or node.output[0]}.{number}", self._names)

    def fresh(self, name: str) -> str:
        """A name for a tensor."""
        return unlike(name, self._taken)


def unlike(name: str, taken: set[str]) -> str:
    """A name that nothing has, near to the one given."""
    while name in taken:
        name = f"{name}'"
    taken.add(name)
    return name


def _order(maker: onnx.NodeProto, rank: int) -> Sequence[int]:
    """The axes of what a maker reads in the order that they have in what it makes."""
    if maker.op_type != "Transpose":
        return range(rank)
    return integers_of(maker, "perm") or range(rank)[::-1]


def _axis_before(constant: Constant, axis: int) -> int:
    """Which axis of what the maker reads is this one."""
    assert constant.source is not None
    return list(constant.source.axes).index(constant.axes[axis])


def has_whole_bytes(weight: Weight, axis: int, step: int) -> bool:
    """Whether parts of a weight, that are multiples of a step along an axis, are whole bytes."""
    bits = bits_of(weight.tensor.data_type)
    return bits is not None and bits * step * prod(weight.tensor.dims[axis + 1 :]) % 8 == 0


def part_of(weight: Weight, name: str, axis: int, start: int, end: int, packed: int = 1) -> Weight:
    """The channels `[start, end)` of each of those that are packed in a weight, along an axis."""
    dims = list(weight.tensor.dims)
    bits = (bits_of(weight.tensor.data_type) or 0) * prod(dims[axis + 1 :])
    rows, first, strip = prod(dims[:axis]) * packed, bits * start // 8, bits * (end - start) // 8
    stride = bits * (dims[axis] // packed) // 8
    dims[axis] = (end - start) * packed
    tensor = onnx.TensorProto(name=name, data_type=weight.tensor.data_type, dims=dims)
    if weight.contents is None:
        content = weight.loaded().raw_data
        tensor.raw_data = b"".join(content[row * stride + first :][:strip] for row in range(rows))
        return Weight(tensor, None)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    place = weight.contents
    assert place.strip == 0, "a weight is parted once"
    contents = Range(
        place.path,
        place.offset + first,
        strip * rows,
        strip=strip if rows > 1 else 0,
        stride=stride if rows > 1 else 0,
    )
    return Weight(tensor, contents)
