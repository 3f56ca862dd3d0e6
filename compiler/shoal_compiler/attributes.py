"""What the runtime holds of a node's attributes: of trees and labels they are the model.

Measured (1.31), while a model is opened and from then on: the model's own form, the runtime's, and
what the kernel makes of it.
"""

from collections.abc import Iterator
from math import prod
from typing import Final

import onnx

NUMBER_BYTES: Final = 12
INTEGER_BYTES: Final = 28
TEXT_BYTES: Final = 64
"""Of each, besides its letters."""
TABLES: Final = 1.6
"""Trees and tables of labels take so much more of each value: they are laid out anew."""
FLAT_TREES: Final = 2.6
"""`TreeEnsemble` is laid out as its forerunners have it first, and anew from that."""
LITTLE_BYTES: Final = 64 << 10


def attribute_bytes(node: onnx.NodeProto) -> int:
    """Bytes that are held for a node's attributes; none where they are few."""
    held = sum(_bytes_of(node))
    if held < LITTLE_BYTES:
        return 0
    if node.op_type == "TreeEnsemble":
        return round(held * FLAT_TREES)
    return round(held * (TABLES if node.op_type.startswith(("TreeEnsemble", "Label")) else 1))


def _bytes_of(node: onnx.NodeProto) -> Iterator[int]:
    for attribute in node.attribute:
        yield NUMBER_BYTES * len(attribute.floats) + INTEGER_BYTES * len(attribute.ints)
        yield sum(TEXT_BYTES + len(each) for each in attribute.strings)
        if node.domain == "ai.onnx.ml" and attribute.HasField("t"):
            yield INTEGER_BYTES * prod(attribute.t.dims)
            yield sum(TEXT_BYTES + len(each) for each in attribute.t.string_data)
