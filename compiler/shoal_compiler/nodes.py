"""What a node says, as onnx writes it: which operator it is, its attributes, the graphs in it, and
how messages call it."""

from collections.abc import Iterable, Iterator

import onnx


def is_standard(node: onnx.NodeProto, *operators: str) -> bool:
    """Whether a node is one of these operators of ONNX itself."""
    return node.op_type in operators and node.domain in ("", "ai.onnx")


def attribute_of(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    """An attribute; where the node has none of that name, one that says nothing."""
    return next((each for each in node.attribute if each.name == name), onnx.AttributeProto())


def integer_of(node: onnx.NodeProto, name: str, default: int) -> int:
    """An attribute that is an integer."""
    return next((each.i for each in node.attribute if each.name == name), default)


def integers_of(node: onnx.NodeProto, name: str) -> list[int]:
    """An attribute that is a list of integers; empty where there is none."""
    return list(attribute_of(node, name).ints)


def text_of(node: onnx.NodeProto, name: str) -> str:
    """An attribute that is text; empty where there is none."""
    return attribute_of(node, name).s.decode(errors="replace")


def gathers_rows(node: onnx.NodeProto) -> bool:
    """Whether a node takes whole rows of its first input."""
    return is_standard(node, "Gather") and integer_of(node, "axis", 0) == 0


def tensors_of(attribute: onnx.AttributeProto) -> Iterator[onnx.TensorProto]:
    """The tensors in an attribute."""
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs in a node's attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes and those of their sub-graphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from all_nodes(graph.node)


def node_label(node: onnx.NodeProto, index: int) -> str:
    """How messages call a node: by its name, which need not be there, nor be unique; else by what
    it gives, which is the same in every form of a model, as its place is not."""
    called = node.name or next(filter(None, node.output), f"#{index}")
    return f"{called} ({node.op_type})"
