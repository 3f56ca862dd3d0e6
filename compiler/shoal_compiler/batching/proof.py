"""Whether a fragment may run several items at once, joined along the first axis of its tensors.

It may where each item's part of every output depends on that item's part of every input alone. That
is proved operator by operator (`rules`), from what the graph says: an operator without a
rule, or used in another way than its rule covers, leaves the fragment to run items one by one.

A tensor is one of three things, whatever the inputs hold:

- *rows*: its first axis has the items' parts, one after the other, of equal lengths;
- *counts*: a few integers, some of which grow with the number of items, as the size of a first axis
  does. A batch has their sum over its items;
- *the same* for every number of items: weights, other sizes, and what is computed from these.

Items of a batch have equal shapes, and one of these shapes has run alone before. So what a batch
computes wrongly, where the proof allows two readings (an axis of size 1 that would be broadcast),
is an error of the runtime, and never another result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import onnx
from onnx import numpy_helper

from shoal_compiler.batching.rules import applied
from shoal_compiler.batching.values import MAX_ELEMENTS, Application, Element, Mixes, Value, grows
from shoal_compiler.shapes import INFERENCE_FAILS
from shoal_compiler.tensor_types import axes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """What a fragment's tensors are. `counts`: the positions of integers that grow with the number
    of items, by input or output that is no rows; None: its items run one by one. `outputs` are what
    other fragments may take."""

    counts: Mapping[str, tuple[int, ...]] | None
    outputs: Mapping[str, Value]


_FOLLOWED: Final = (onnx.TensorProto.INT32, onnx.TensorProto.INT64, onnx.TensorProto.FLOAT)
_ONE_BY_ONE: Final = Batching(counts=None, outputs={})


def batching_of(model: onnx.ModelProto, known: Mapping[str, Value]) -> Batching:
    """The proof for one fragment. `known` is what earlier fragments say of their outputs."""
    try:
        values = {each.name: _given(each, known) for each in model.graph.input}
        if not any(value.rows for value in values.values()):
            return _ONE_BY_ONE
        values |= {each.name: _weight(each) for each in model.graph.initializer}
        values |= {
            each.values.name: Value(rank=len(each.dims), first=each.dims[0] if each.dims else None)
            for each in model.graph.sparse_initializer
        }
        ranks = _inferred(model)
        versions = {each.domain or "ai.onnx": each.version for each in model.opset_import}
        for node in model.graph.node:
            values |= _outputs(node, values, ranks, versions)
        counts = {
            each.name: positions
            for each in (*model.graph.input, *model.graph.output)
            if (positions := _positions(values[each.name])) is not None
        }
    except (Mixes, LookupError, ValueError):  # a node that makes no sense is for the runtime
        return _ONE_BY_ONE
    return Batching(
        counts=counts, outputs={each.name: values[each.name] for each in model.graph.output}
    )


def _given(info: onnx.ValueInfoProto, known: Mapping[str, Value]) -> Value:
    """What an input of a fragment is. Raises `Mixes`."""
    if (value := known.get(info.name)) is not None:
        return value
    kind = info.type.tensor_type
    if not kind.HasField("shape") or kind.elem_type == onnx.TensorProto.STRING:
        raise Mixes(f"{info.name} is text, or of unknown shape")
    axes = axes_of(info.type)
    if not axes or isinstance(axes[0], int):
        raise Mixes(f"the first axis of {info.name} is fixed")
    return Value(rank=len(axes), rows=True)


def _positions(value: Value) -> tuple[int, ...] | None:
    """Where an input or output counts items; None: it has rows. Raises `Mixes`."""
    if value.rows and value.axis == 0:
        return None
    if value.elements is None:
        raise Mixes("an input or output is neither rows nor counts")
    return tuple(at for at, element in enumerate(value.elements) if grows(element))


def _weight(tensor: onnx.TensorProto) -> Value:
    first = tensor.dims[0] if tensor.dims else None
    elements: tuple[Element, ...] | None = None
    is_read = tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.data_type in _FOLLOWED
    if is_read and len(tensor.dims) <= 1 and (first is None or first <= MAX_ELEMENTS):
        elements = tuple(numpy_helper.to_array(tensor).reshape(-1).tolist())
    return Value(rank=len(tensor.dims), first=first, elements=elements)


def _inferred(model: onnx.ModelProto) -> Mapping[str, Value]:
    """Rank and fixed first axis of what nodes make, as the same for every number of items."""
    try:
        graph = onnx.shape_inference.infer_shapes(model).graph
    except INFERENCE_FAILS:
        return {}
    found = {}
    for each in graph.value_info:
        if (axes := axes_of(each.type)) is not None:
            first = axes[0] if axes and isinstance(axes[0], int) else None
            found[each.name] = Value(rank=len(axes), first=first)
    return found


def _outputs(
    node: onnx.NodeProto,
    values: Mapping[str, Value],
    inferred: Mapping[str, Value],
    versions: Mapping[str, int],
) -> dict[str, Value]:
    """What a node makes, by name. Raises `Mixes`."""
    try:
        inputs = tuple(values[name] if name else None for name in node.input)
    except KeyError as error:
        raise Mixes(f"{error} is made by nothing that is known") from error
    shapes = tuple(inferred.get(name, Value(rank=None)) for name in node.output)
    domain = node.domain or "ai.onnx"
    version = versions.get(domain, 1)
    made: Sequence[Value] = applied(
        Application(node=node, domain=domain, version=version, inputs=inputs, inferred=shapes)
    )
    return {name: value for name, value in zip(node.output, made, strict=True) if name}
