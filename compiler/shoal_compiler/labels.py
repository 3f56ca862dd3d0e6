"""Along which axis of its weight an Einsum is parted: one whose label is in the result too, and in
no other operand. No sum is over it, so parts of the weight give parts of the result."""

from dataclasses import dataclass

import onnx

from shoal_compiler.parting import Parting


@dataclass(frozen=True, slots=True)
class Labelled:
    """The weight by the position of its input, the axis of it, and that axis in the result."""

    weight: int
    axis: int
    joined: int


def labelled(node: onnx.NodeProto, parting: Parting, most_bytes: int) -> Labelled | None:
    """How a product of two operands is parted whose weight is over some size; None: it cannot be.
    Of several axes the first is taken that makes parts small enough, since it is read in one
    piece, else the longest."""
    equation = next((each.s.decode() for each in node.attribute if each.name == "equation"), "")
    left, _, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2 or len(node.input) != 2 or "." in equation:
        return None
    for place, term in enumerate(terms):
        constant = parting.constant(node.input[place])
        if constant is None or constant.weight.bytes <= most_bytes:
            continue
        if len(term) != len(constant.dims) or any(len(set(e)) < len(e) for e in (*terms, result)):
            return None
        other, dims, size = terms[1 - place], constant.dims, constant.weight.bytes
        axes = [axis for axis, each in enumerate(term) if each in result and each not in other]
        small = [axis for axis in axes if size <= most_bytes * dims[axis]]
        axis = next(iter(small or sorted(axes, key=lambda each: -dims[each])), None)
        return None if axis is None else Labelled(place, axis, result.index(term[axis]))
    return None
