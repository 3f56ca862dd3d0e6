"""What ONNX Runtime does with a node of half precision: it has few kernels for float16 on
processors, and computes in single precision where it has none. `halves.json` has what
`hack/halves.py` has asked of it.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from math import prod
from typing import Any, Final

import onnx
from onnx import TensorProto

from shoal_compiler.nodes import integer_of, subgraphs
from shoal_compiler.shaped import Shaped, Unknown
from shoal_compiler.workspaces.workspace import FLOAT_BYTES
from shoal_planner.half_forms import ONE_NODE
from shoal_planner.profile import Halves

_MADE_OF: Final = {ONE_NODE: Halves.TAKEN, "HardSigmoid": Halves.ROUNDED}
"""Of what is made of several nodes: what is one node that has a kernel, and what ends in such."""
_FOR_ANY_VERSION: Final = 1
"""Of the sets of operators that are not numbered on."""


def halves_of(
    node: onnx.NodeProto, type_of: Callable[[str], int], opsets: Mapping[str, int]
) -> Halves:
    """How a node takes what is of half precision; `type_of` gives the type of elements."""
    takes = any(type_of(name) == TensorProto.FLOAT16 for name in node.input if name)
    if node.op_type == "Cast":
        to = integer_of(node, "to", 0)
        if takes and to == TensorProto.FLOAT:
            return Halves.WIDENED
        if to == TensorProto.FLOAT16 and type_of(node.input[0]) == TensorProto.FLOAT:
            return Halves.NARROWED
    if not takes:
        return Halves.NONE
    if node.op_type == "Cast" or next(iter(subgraphs(node)), None) is not None:
        return Halves.KEPT
    if made_of(node, opsets) is not None:
        return _MADE_OF.get(node.op_type, Halves.CONVERTED)
    return Halves.TAKEN if has_kernel(node, opsets) else Halves.CONVERTED


def neighbours(node: onnx.NodeProto, opsets: Mapping[str, int]) -> tuple[str, ...]:
    """Of what a node takes and gives, what says whether it stands alone among nodes that are
    converted: the runtime looks at the first of any number of inputs or outputs of one kind."""
    try:
        schema = onnx.defs.get_schema(node.op_type, _version(node, opsets), node.domain)
    except onnx.defs.SchemaError:
        return (*node.input, *node.output)
    takes, gives = (
        [each for each in names[: len(formal)] if each]
        for names, formal in ((node.input, schema.inputs), (node.output, schema.outputs))
    )
    return (*takes, *gives)


def made_of(node: onnx.NodeProto, opsets: Mapping[str, int]) -> float | None:
    """If there is neither a kernel for halves nor one node of single precision in its place: what
    those nodes have besides what goes in, in tensors as large as what comes out."""
    version = _version(node, opsets)
    for first, last, more in _table()["made_of"].get(node.op_type, ()) if not node.domain else ():
        if first <= version and (last is None or version <= last):
            return float(more)
    return None


def made_of_bytes(shaped: Shaped, more: float) -> int:
    """What that takes; nothing where the size is not known."""
    try:
        return int(more * FLOAT_BYTES * prod(shaped.output(0)))
    except Unknown:
        return 0


def has_kernel(node: onnx.NodeProto, opsets: Mapping[str, int]) -> bool:
    """Whether the runtime has one for halves."""
    name = f"{node.domain}.{node.op_type}" if _is_other(node.domain) else node.op_type
    version = _version(node, opsets)
    return any(
        first <= version and (last is None or version <= last)
        for first, last in _table()["kernels"].get(name, ())
    )


def _version(node: onnx.NodeProto, opsets: Mapping[str, int]) -> int:
    if _is_other(node.domain):
        return opsets.get(node.domain, _FOR_ANY_VERSION)
    return opsets.get("", opsets.get("ai.onnx", _FOR_ANY_VERSION))


def _is_other(domain: str) -> bool:
    return domain not in ("", "ai.onnx")


@cache
def _table() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(files("shoal_compiler").joinpath("halves.json").read_text())
    return read
