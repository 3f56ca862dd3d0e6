"""Along which axis of its weight an Einsum is parted: one whose label is in the result too, and in
no other operand. No sum is over it, so parts of the weight give parts of the result."""

from dataclasses import dataclass
from typing import Final

import onnx

from shoal_compiler.nodes import text_of
from shoal_compiler.parting import Parting

_REST: Final = "..."
"""All axes that have no label."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """The weight by the position of its input, the axis of it, and that axis in the result."""

    weight: int
    axis: int
    joined: int


def labelled(node: onnx.NodeProto, parting: Parting, most_bytes: int) -> Labelled | None:
    """How a product is parted whose weight is over some size; None: it cannot be.
    Of several axes the first is taken that makes parts small enough, since it is read in one
    piece, else the longest."""
    left, arrow, result = text_of(node, "equation").replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(node.input) or len(terms) < 2 or (_REST in left and not arrow):
        return None
    if not arrow:  # it has what one operand alone has, in the order of the alphabet
        result = "".join(sorted(each for each in {*left} - {","} if left.count(each) == 1))
    for place, term in enumerate(terms):
        constant = parting.constant(node.input[place])
        if constant is None or constant.weight.bytes <= most_bytes:
            continue
        labels = [each.replace(_REST, "") for each in (*terms, result)]
        repeated = any(len(set(each)) < len(each) for each in labels)
        if _REST in term or repeated or len(term) != len(constant.dims):
            return None
        other = {*"".join(terms[:place] + terms[place + 1 :])}
        dims, size = constant.dims, constant.weight.bytes
        axes = [axis for axis, each in enumerate(term) if each in result and each not in other]
        small = [axis for axis in axes if size <= most_bytes * dims[axis]]
        axis = next(iter(small or sorted(axes, key=lambda each: -dims[each])), None)
        if axis is not None:
            return Labelled(place, axis, _place(result, term[axis]))
    return None


def _place(result: str, label: str) -> int:
    """The axis with a label; from the end where axes without labels are before it."""
    place = result.index(label)
    return place - len(result) if _REST in result[:place] else place
