"""Types of tensors as onnx writes them: how large elements are, what is said of axes, and what of
that is to count."""

from copy import deepcopy
from typing import Final

import onnx
from onnx import TensorProto, helper

_TYPE = TensorProto
BITS: Final[dict[int, int]] = {
    _TYPE.FLOAT6E2M3: 6,
    _TYPE.FLOAT6E3M2: 6,
    _TYPE.UINT4: 4,
    _TYPE.INT4: 4,
    _TYPE.FLOAT4E2M1: 4,
    _TYPE.UINT2: 2,
    _TYPE.INT2: 2,
    **dict.fromkeys((_TYPE.UINT8, _TYPE.INT8, _TYPE.BOOL), 8),
    **dict.fromkeys((_TYPE.FLOAT8E4M3FN, _TYPE.FLOAT8E4M3FNUZ, _TYPE.FLOAT8E5M2), 8),
    **dict.fromkeys((_TYPE.FLOAT8E5M2FNUZ, _TYPE.FLOAT8E8M0), 8),
    **dict.fromkeys((_TYPE.UINT16, _TYPE.INT16, _TYPE.FLOAT16, _TYPE.BFLOAT16), 16),
    **dict.fromkeys((_TYPE.FLOAT, _TYPE.INT32, _TYPE.UINT32), 32),
    **dict.fromkeys((_TYPE.DOUBLE, _TYPE.INT64, _TYPE.UINT64, _TYPE.COMPLEX64), 64),
    _TYPE.COMPLEX128: 128,
}
"""Of an element, by its type."""
Axes = tuple[int | str | None, ...]

MADE_UP_AXIS: Final = "unk__"
"""How names of axes begin that onnx gives to sizes which follow from no other."""


def bits_of(data_type: int) -> int | None:
    """Bits of one element; None for strings, and for unknown types."""
    return BITS.get(data_type)


def dtype_name(data_type: int) -> str:
    """ONNX's name of an element type, in lower case."""
    if data_type not in TensorProto.DataType.values():
        return "undefined"
    return TensorProto.DataType.Name(TensorProto.DataType.ValueType(data_type)).lower()


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
