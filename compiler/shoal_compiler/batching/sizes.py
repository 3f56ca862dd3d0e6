"""Small integers, some of which count items: what operators make of them.

Each rule returns None where its inputs are no small vectors; then the rules for rows apply.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Final

import onnx

from shoal_compiler.batching.values import (
    COUNT,
    MAX_ELEMENTS,
    MULTIPLE,
    Application,
    Element,
    Value,
    elements_of,
    grows,
    integers_of,
)


def _elements_of_vector(value: Value | None) -> tuple[Element, ...] | None:
    return elements_of(value) if value is not None and value.rank == 1 else None


def _vector(elements: Sequence[Element]) -> Value | None:
    if len(elements) > MAX_ELEMENTS:
        return None
    return Value(rank=1, first=len(elements), elements=tuple(elements))


def _scalar(element: Element) -> Value:
    return Value(rank=0, elements=(element,))


def _shape(node: Application) -> Value | None:
    value = node.input(0)
    if value is None or value.rank is None:
        return None
    sizes: list[Element] = [None] * value.rank
    if value.rank:
        sizes[value.axis] = COUNT if value.rows else value.first
    return _vector(sizes[node.integer("start", 0) : node.integer("end", value.rank)])


def _size_gather(node: Application) -> Value | None:
    data, at = _elements_of_vector(node.input(0)), node.input(1)
    picked = integers_of(at)
    if data is None or at is None or picked is None:
        return None
    if any(not -len(data) <= each < len(data) for each in picked):
        return None
    return _scalar(data[picked[0]]) if at.rank == 0 else _vector([data[each] for each in picked])


def _size_slice(node: Application) -> Value | None:
    data = _elements_of_vector(node.input(0))
    if data is None:
        return None
    starts, ends = node.known(1, "starts"), node.known(2, "ends")
    steps = node.known(4) or (1,)
    if starts is None or ends is None or len(starts) != 1:
        return None
    return _vector(data[starts[0] : ends[0] : steps[0]])


def _size_concat(node: Application) -> Value | None:
    parts = [_elements_of_vector(each) for each in node.inputs]
    if any(part is None for part in parts):
        return None
    return _vector([element for part in parts for element in part or ()])


def _size_reshape(node: Application) -> Value | None:
    """Squeeze, Unsqueeze and Reshape between a number and a vector of one."""
    data = elements_of(node.input(0))
    if data is None or len(data) != 1:
        return None
    rank = node.inferred[0].rank
    return _vector(data) if rank == 1 else _scalar(data[0]) if rank == 0 else None


def _size_copy(node: Application) -> Value | None:
    value = node.input(0)
    if value is None or value.elements is None:
        return None
    integers = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
    if node.node.op_type == "Cast" and node.integer("to", 0) not in integers:
        return None
    return value


def _size_product(node: Application) -> Value | None:
    """A count times fixed sizes grows as it does."""
    parts = [elements_of(each) for each in node.inputs]
    if any(part is None or len(part) != 1 for part in parts):
        return None
    elements = [element for part in parts for element in part or ()]
    integers = [each for each in elements if isinstance(each, int)]
    growing = [each for each in elements if grows(each)]
    product: Element = None
    if len(growing) == 1 and not any(isinstance(each, float) for each in elements):
        product = growing[0] if elements.count(1) == len(elements) - 1 else MULTIPLE
    elif growing:
        return None
    elif len(integers) == len(elements):
        product = prod(integers)
    vectors = any(each is not None and each.rank == 1 for each in node.inputs)
    return _vector([product]) if vectors else _scalar(product)


SIZES: Final[Mapping[str, Callable[[Application], Value | None]]] = {
    "Shape": _shape,
    "Gather": _size_gather,
    "Slice": _size_slice,
    "Concat": _size_concat,
    "Squeeze": _size_reshape,
    "Unsqueeze": _size_reshape,
    "Reshape": _size_reshape,
    "Identity": _size_copy,
    "Cast": _size_copy,
    "Mul": _size_product,
}

ELEMENTWISE: Final = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Cast", "Ceil"),
    *("Celu", "Clip", "Cos", "Cosh", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid"),
    *("HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not"),
    *("Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh"),
    *("Softplus", "Softsign", "Sqrt", "Tan", "Tanh", "ThresholdedRelu"),
    *("Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal"),
    *("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul"),
    *("Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor"),
)


def with_first(node: Application, made: Value) -> Value:
    """What is the same for every number of items, with the size of its first axis where that
    follows from the inputs': inference knows it only where it knows all sizes."""
    if made.first is not None or not made.rank:
        return made
    given = [each for each in node.inputs if each is not None]
    kind = node.node.op_type
    if kind == "Slice" and given and min(integers_of(node.input(3)) or (0,)) > 0:
        return replace(made, first=given[0].first)
    if kind == "Gather" and len(given) == 2 and given[1].rank and not node.integer("axis", 0):
        return replace(made, first=given[1].first)
    if kind in ELEMENTWISE and all(each.rank is not None for each in given):
        firsts = {each.first for each in given if each.rank == made.rank}
        return replace(made, first=1) if firsts == {1} else made
    return made
