"""Recurrent layers of both directions, as one layer for each.

Further a recurrent layer cannot be parted: each step reads all that the one before has made. Each
direction computes what it computes beside the other, to the bit.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Final

import onnx

from shoal_compiler.parting import Parting

_INPUTS: Final[Mapping[tuple[str, str], Sequence[int]]] = {
    ("", "LSTM"): (1, 2, 3, 5, 6, 7),
    ("", "GRU"): (1, 2, 3, 5),
    ("", "RNN"): (1, 2, 3, 5),
    ("com.microsoft", "DynamicQuantizeLSTM"): (1, 2, 3, 5, 6, 7, 8, 9, 10, 11),
}
"""The inputs whose first axis is the direction."""
_WEIGHTS: Final = (1, 2)
_OUTPUT_AXES: Final = (1, 0, 0)
_DIRECTIONS: Final = (b"forward", b"reverse")
_MANY_WAYS: Final = frozenset(("layout", "activation_alpha", "activation_beta"))
"""Attributes with which axes are others, or what is of which direction is not plain."""


def in_directions(
    parting: Parting, node: onnx.NodeProto, most_bytes: int
) -> list[onnx.NodeProto] | None:
    """The nodes that replace a layer of both directions with more than `most_bytes` of weights;
    None: the node is no such layer."""
    places = _places(node)
    if not places or not _can_cut(parting, node, places, most_bytes):
        return None
    directions = [_direction(parting, node, places, number) for number in range(len(_DIRECTIONS))]
    for place in _WEIGHTS:
        parting.drop(node.input[place])
    made = [each for nodes in directions for each in nodes]
    outputs = zip(node.output, *(nodes[-1].output for nodes in directions), strict=True)
    for (whole, *parts), axis in zip(outputs, _OUTPUT_AXES, strict=False):
        if whole:
            made.append(onnx.helper.make_node("Concat", parts, [whole], axis=axis))
    return made


def _places(node: onnx.NodeProto) -> list[int]:
    """The inputs that have something for each direction; none: it is no layer of both."""
    attributes = {each.name: each for each in node.attribute}
    direction = attributes.get("direction")
    if direction is None or direction.s != b"bidirectional" or attributes.keys() & _MANY_WAYS:
        return []
    known = _INPUTS.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type), ())
    return [place for place in known if place < len(node.input) and node.input[place]]


def _can_cut(
    parting: Parting, node: onnx.NodeProto, places: Sequence[int], most_bytes: int
) -> bool:
    """Whether a layer's weights are large and its own, and all that is for each direction can be
    parted."""
    times = Counter(node.input)
    if not set(_WEIGHTS) <= set(places) or any(times[node.input[each]] > 1 for each in _WEIGHTS):
        return False
    constants = {place: parting.constant(node.input[place]) for place in places}
    size = 0
    for place in _WEIGHTS:
        weight = constants[place]
        if weight is None or weight.weight.contents is None:
            return False
        if parting.readers[weight.name] > 1:
            return False
        size += weight.weight.bytes
    return size > most_bytes and all(
        each is None or (each.dims[:1] == [len(_DIRECTIONS)] and parting.can_cut(each, 0, 1))
        for each in constants.values()
    )


def _direction(
    parting: Parting, node: onnx.NodeProto, places: Sequence[int], number: int
) -> list[onnx.NodeProto]:
    """One direction; the layer is the last node, after those that make its inputs."""
    layer = deepcopy(node)
    layer.name = parting.name(node, number)
    for each in layer.attribute:
        if each.name == "direction":
            each.s = _DIRECTIONS[number]
        if each.name == "activations":
            half = len(each.strings) // len(_DIRECTIONS)
            each.strings[:] = list(each.strings)[number * half :][:half]
    made = []
    for place in places:
        name = node.input[place]
        if parting.constant(name) is not None:
            layer.input[place], makers = parting.cut(name, 0, number, number + 1, number)
            made.extend(makers)
        else:  # the model computes it
            index = parting.add_integers(f"{name}.index", [number])
            layer.input[place] = parting.fresh(f"{name}.{number}")
            taken = layer.input[place]
            made.append(onnx.helper.make_node("Gather", [name, index], [taken], axis=0))
    for place, output in enumerate(node.output):
        layer.output[place] = parting.fresh(f"{output}.{number}") if output else ""
    return [*made, layer]
