"""Parts of constants: of initializers, and of what a node dequantises or casts.

A part's content is a range of the file that the whole is in, or strips of it where the axis is not
the first: nothing is read.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx
from onnx import numpy_helper

from shoal_compiler.graph import Graph, Weight
from shoal_compiler.safety import Range, all_nodes, bits_of, integer_of, is_standard


@dataclass(frozen=True, slots=True)
class Constant:
    """What a layer reads that is known: an initializer, or what `maker` makes of it."""

    weight: Weight
    maker: onnx.NodeProto | None

    @property
    def dims(self) -> Sequence[int]:
        return self.weight.tensor.dims

    @property
    def only_axis(self) -> int:
        """The first axis that is more than one long."""
        return next((axis for axis, size in enumerate(self.dims) if size > 1), len(self.dims) - 1)


class Parting:
    """A graph's constants, and parts of them under names that nothing has."""

    def __init__(self, graph: Graph, readers: Mapping[str, int]) -> None:
        self.weights = dict(graph.weights)
        self.readers = readers
        self.makers = {name: node for node in graph.nodes for name in node.output}
        self._taken = {*graph.sparse, *graph.weights, *(each.name for each in graph.inputs)}
        self._names: set[str] = set()
        self._parts: dict[tuple[str, int, int, int], str] = {}
        for node in all_nodes(graph.nodes):
            self._taken.update((*node.input, *node.output))
            self._names.add(node.name)

    def constant(self, name: str) -> Constant | None:
        """What a node reads by that name, if it is known."""
        if (weight := self.weights.get(name)) is not None:
            return Constant(weight, None)
        maker = self.makers.get(name)
        if maker is None or not is_standard(maker, "DequantizeLinear", "Cast"):
            return None
        inputs = [self.weights.get(each) for each in maker.input if each]
        if not inputs or inputs[0] is None or None in inputs:
            return None
        if self.readers[name] > 1 or self.readers[maker.input[0]] > 1:
            return None
        return Constant(inputs[0], maker)

    def can_cut(self, constant: Constant, axis: int) -> bool:
        """Whether a constant can be parted along an axis."""
        if has_split_bytes(constant.weight):
            return False
        maker = constant.maker
        if maker is None or maker.op_type == "Cast":
            return True
        scales = [self.weights[each] for each in maker.input[1:] if each]
        return all(self._along(constant, each, axis) is not None for each in scales)

    def _along(self, constant: Constant, scale: Weight, axis: int) -> int | None:
        """The axis along which the scale, or the zero point, of a constant is parted with it; -1:
        it is not; None: nothing can be parted."""
        assert constant.maker is not None
        rank, dims = len(constant.dims), scale.tensor.dims
        if has_split_bytes(scale):
            return None
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
        self, name: str, axis: int, start: int, end: int, number: int
    ) -> tuple[str, list[onnx.NodeProto]]:
        """The name of a part of a constant, `[start, end)` along an axis, and the node that makes
        it, if there is one."""
        if (known := self._parts.get((name, axis, start, end))) is not None:
            return known, []
        constant = self.constant(name)
        assert constant is not None
        maker = constant.maker
        if maker is None:
            part = self._parts[name, axis, start, end] = self.fresh(f"{name}.{number}")
            self.weights[part] = _part(constant.weight, part, axis, start, end)
            return part, []
        node = deepcopy(maker)
        node.name = self.name(maker, number)
        node.input[0], _ = self.cut(maker.input[0], axis, start, end, number)
        for place, scale in enumerate(maker.input[1:], 1):
            along = self._along(constant, self.weights[scale], axis) if scale else -1
            assert along is not None
            if along >= 0:
                node.input[place], _ = self.cut(scale, along, start, end, number)
        node.output[0] = self.fresh(f"{name}.{number}")
        return node.output[0], [node]

    def drop(self, name: str) -> None:
        """Forget the initializer of a constant that is in parts."""
        if (constant := self.constant(name)) is not None:
            del self.weights[constant.weight.tensor.name]

    def integers(self, name: str) -> list[int] | None:
        """The values of an initializer that is a shape."""
        weight = self.weights.get(name)
        if weight is None or weight.tensor.data_type != onnx.TensorProto.INT64:
            return None
        return [int(each) for each in numpy_helper.to_array(weight.loaded()).reshape(-1)]

    def add_integers(self, name: str, values: Sequence[int]) -> str:
        """The name of a new initializer."""
        name = self.fresh(name)
        tensor = numpy_helper.from_array(np.array(values, np.int64), name)
        self.weights[name] = Weight(tensor, None)
        return name

    def name(self, node: onnx.NodeProto, number: int) -> str:
        """A name for a part of a node."""
        return _unlike(f"{node.name or node.output[0]}.{number}", self._names)

    def fresh(self, name: str) -> str:
        """A name for a tensor."""
        return _unlike(name, self._taken)


def _unlike(name: str, taken: set[str]) -> str:
    """A name that nothing has, near to the one given."""
    while name in taken:
        name = f"{name}'"
    taken.add(name)
    return name


def has_split_bytes(weight: Weight) -> bool:
    """Whether elements are no whole number of bytes."""
    return (bits_of(weight.tensor.data_type) or 1) % 8 != 0


def channel_bytes(weight: Weight, axis: int) -> int:
    """Bytes of a channel that lie together in the weight."""
    return weight.bytes // prod(weight.tensor.dims[: axis + 1])


def _part(weight: Weight, name: str, axis: int, start: int, end: int) -> Weight:
    """The channels `[start, end)` of a weight, along an axis."""
    dims = list(weight.tensor.dims)
    rows, channel = prod(dims[:axis]), channel_bytes(weight, axis)
    stride = channel * dims[axis]
    dims[axis] = end - start
    tensor = onnx.TensorProto(name=name, data_type=weight.tensor.data_type, dims=dims)
    strip = channel * (end - start)
    if weight.contents is None:
        content = weight.loaded().raw_data
        tensor.raw_data = b"".join(
            content[row * stride + start * channel :][:strip] for row in range(rows)
        )
        return Weight(tensor, None)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    place = weight.contents
    assert place.strip == 0, "a weight is parted once"
    contents = Range(
        place.path,
        place.offset + start * channel,
        strip * rows,
        strip=strip if rows > 1 else 0,
        stride=stride if rows > 1 else 0,
    )
    return Weight(tensor, contents)
