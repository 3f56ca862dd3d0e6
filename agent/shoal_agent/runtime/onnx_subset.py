"""Walks through ONNX models, of whose messages `onnx_subset.proto` declares what an agent needs."""

from collections.abc import Iterator, Sequence

from shoal_protocol.onnx_subset_pb2 import Graph, Node, Tensor
from shoal_protocol.row_readers import ROW_READERS


def tensors(graph: Graph) -> Iterator[Tensor]:
    """The initializers of a graph and of the graphs inside it."""
    yield from graph.initializer
    for inner in inner_graphs(graph):
        yield from tensors(inner)


def tables(graph: Graph) -> Iterator[Tensor]:
    """The initializers, as `tensors`, of which items read some rows."""
    read = {node.input[place] for node in graph.node for place in table_places(node)}
    yield from (tensor for tensor in graph.initializer if tensor.name in read)
    for inner in inner_graphs(graph):
        yield from tables(inner)


def table_places(node: Node) -> Sequence[int]:
    """The inputs of a node of which items read some rows."""
    reader = ROW_READERS.get(node.op_type)
    return [] if reader is None else [each for each in reader.tables if each < len(node.input)]


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
