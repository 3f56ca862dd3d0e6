"""What to change in a model that takes or gives what is no tensor of a type that is sent."""

from typing import Final

import onnx

_KINDS: Final = {
    "sequence_type": "make it one tensor with ConcatFromSequence, or several with SequenceAt",
    "optional_type": "take what is in it with OptionalGetElement",
    "sparse_tensor_type": "make it dense",
}
_MAPS: Final = (
    "leave out the ZipMap in front of it (skl2onnx: options={'zipmap': False}), "
    "which gives its tensor"
)
_COMPLEX: Final = (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128)


def remedy(kind: onnx.TypeProto) -> str:
    """What to change in a model of which an input or output is of this type."""
    if "map_type" in (kind.WhichOneof("value"), kind.sequence_type.elem_type.WhichOneof("value")):
        return _MAPS
    if kind.WhichOneof("value") != "tensor_type":
        return _KINDS.get(str(kind.WhichOneof("value")), "make it a tensor")
    if kind.tensor_type.elem_type in _COMPLEX:
        return "keep real and imaginary parts on an axis of their own"
    return "let the model cast it, from or to float, float16 or an integer of 8 bits or more"
