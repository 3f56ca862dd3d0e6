"""Types of tensors as onnx writes them: what they say of axes, and what of that is to count."""

from copy import deepcopy
from typing import Final

import onnx
from onnx import helper

Axes = tuple[int | str | None, ...]

MADE_UP_AXIS: Final = "unk__"
"""How names of axes begin that onnx gives to sizes which follow from no other."""


def axes_of(kind: onnx.TypeProto) -> Axes | None:
    """The axes of a tensor type; None: not even its rank is known."""
    if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None

    def axis(dimension: onnx.TensorShapeProto.Dimension) -> int | str | None:
        if dimension.HasField("dim_value"):
            return dimension.dim_value if dimension.dim_value >= 0 else None
        return dimension.dim_param if dimension.dim_param not in ("", "?") else None

    return tuple(axis(dimension) for dimension in kind.tensor_type.shape.dim)


def named(kind: onnx.TypeProto) -> onnx.TypeProto:
    """A tensor's type without the names of axes that inference had to make up: in another graph
    they are those of others."""
    plain = deepcopy(kind)
    for dimension in plain.tensor_type.shape.dim if kind.tensor_type.HasField("shape") else ():
        if dimension.dim_param.startswith(MADE_UP_AXIS):
            dimension.Clear()
    return plain


def without_sizes(kind: onnx.TypeProto) -> onnx.TypeProto:
    """Type and rank only: sizes seen for one set of inputs, or declared once, may not hold."""
    plain = deepcopy(kind)
    if kind.HasField("tensor_type"):
        for dimension in plain.tensor_type.shape.dim:
            dimension.Clear()
    return plain


def drop_disputed(
    kind: onnx.TypeProto, seen: onnx.TypeProto | None, declared: onnx.TypeProto | None
) -> None:
    """Take out of a tensor's type the sizes that it has otherwise where it was `seen`, or as the
    model has `declared` it: not both are right, and devices refuse what is not as is said. A rank
    that the model declares otherwise is a claim that the runtime, too, does not insist on."""
    for other in (seen, declared):
        known, said = axes_of(kind), None if other is None else axes_of(other)
        if known is None or said is None:
            continue
        if len(known) != len(said):
            if other is seen:
                kind.tensor_type.ClearField("shape")
            continue
        for dimension, axis, size in zip(kind.tensor_type.shape.dim, known, said, strict=True):
            if isinstance(axis, int) and isinstance(size, int) and axis != size:
                dimension.Clear()


def says_rank(kind: onnx.TypeProto | None) -> bool:
    """Whether a type says of how many axes it is; one that is no tensor's has none."""
    return kind is not None and (not kind.HasField("tensor_type") or axes_of(kind) is not None)


def of_rank(kind: onnx.TypeProto, rank: int | None) -> onnx.TypeProto:
    """A type that says nothing but its elements' and its rank, if that is known."""
    if not kind.HasField("tensor_type"):
        return kind
    sizes = None if rank is None else [None] * rank
    return helper.make_tensor_type_proto(kind.tensor_type.elem_type, sizes)
