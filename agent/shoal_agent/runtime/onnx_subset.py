"""Walks through ONNX models, of whose messages `onnx_subset.proto` declares what an agent needs."""

from collections.abc import Iterator

from shoal_protocol.onnx_subset_pb2 import Graph, Tensor


def tensors(graph: Graph) -> Iterator[Tensor]:
    """The initializers of a graph and of the graphs inside it."""
    yield from graph.initializer
    for inner in inner_graphs(graph):
        yield from tensors(inner)


def tables(graph: Graph) -> Iterator[Tensor]:
    """The initializers, as `tensors`, of which items read some rows."""
    read = {node.input[0] for node in graph.node if node.op_type == "Gather"}
    yield from (tensor for tensor in graph.initializer if tensor.name in read)
    for inner in inner_graphs(graph):
        yield from tables(inner)


def reads_rows(graph: Graph) -> bool:
    """Whether a graph, or one inside it, has a table of which items read some rows."""
    return any(tables(graph))


def inner_graphs(graph: Graph) -> Iterator[Graph]:
    """The graphs in attributes of a graph's nodes."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g
            yield from attribute.graphs
