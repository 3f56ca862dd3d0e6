"""Blocked layouts of convolutions, carried across the borders of models.

ONNX Runtime computes convolutions in a blocked layout (`com.microsoft.nchwc`). It optimises each
model by itself, so that a value which crosses a border is reordered before it and after it. Worse,
it does not bring an *input* into the layout for a sum's sake: the sum at the end of a residual unit
is not fused with its convolution, its result has the plain layout, and so has the next sum. Of the
155 convolutions of ResNet-152 in 16 blocks, 37 lost their sums so, and the whole took 10 % longer.

1. `mark` puts a pooling of one element after such an input. It changes no value, and it computes
   in the layout; so what reads it can, too.
2. After the optimisation, `unmark` takes it out: what is left is one reordering of the input.
3. `join` leaves out the reorderings on both sides of a border, where no block needs the plain
   layout. The shape is the same: marked inputs have a multiple of 16 channels, which is every
   processor's block or a multiple of it.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from shoal_agent.runtime.onnx_subset import inner_graphs
from shoal_protocol.onnx_subset_pb2 import Graph, Model, Node, ValueInfo

_MARK: Final = "shoal_layout_mark_"
_FLOAT: Final = 1
_INTS: Final = 7
_CHANNELS: Final = 16
_FOLLOWING: Final = (
    *("Conv", "Add", "Sum", "Mul", "Relu", "LeakyRelu", "Sigmoid", "Tanh", "Concat"),
    *("BatchNormalization", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool"),
)
"""Operators that ONNX Runtime computes in the layout if their inputs have it."""


def mark(model: Model) -> frozenset[str]:
    """Change a model before it is optimised; the names of the inputs that are marked."""
    graph = model.graph
    if any(inner_graphs(graph)) or all(node.op_type != "Conv" for node in graph.node):
        return frozenset()
    marked = [value.name for value in graph.input if _may_follow(value, graph)]
    nodes = list(graph.node)
    del graph.node[:]
    for index, name in enumerate(marked):
        mark = graph.node.add(op_type="MaxPool", name=f"{_MARK}{index}")
        _rename(nodes, name, mark.name)
        mark.input.append(name)
        mark.output.append(mark.name)
        mark.attribute.add(name="kernel_shape", ints=[1, 1], type=_INTS)
    graph.node.extend(nodes)
    return frozenset(marked)


def unmark(model: Model) -> None:
    """Change a marked model after it was optimised."""
    for node in [each for each in model.graph.node if each.name.startswith(_MARK)]:
        _replace(model.graph, node, node.output[0], node.input[0])
    for given in _nodes_that_reorder(model.graph, "ReorderOutput"):
        for taken in _nodes_that_reorder(model.graph, "ReorderInput"):
            if taken.output[0] == given.input[0] and not _is_output(model.graph, given.output[0]):
                _replace(model.graph, given, given.output[0], taken.input[0])


def join(
    models: Sequence[Model], marked: Sequence[frozenset[str]], results: Collection[str]
) -> None:
    """Change the optimised blocks of a fragment, in order. `marked` are the inputs of each that
    were, and `results` the values that the fragment gives."""
    for giver in models:
        for given in _nodes_that_reorder(giver.graph, "ReorderOutput"):
            name = given.output[0]
            takers = [
                (each.graph, name in names)
                for each, names in zip(models, marked, strict=True)
                if any(value.name == name for value in each.graph.input)
            ]
            needed = name in results or not takers
            if needed or not _is_only_given(giver.graph, given):
                continue
            if all(may and _is_only_reordered(graph, name) for graph, may in takers):
                _replace(giver.graph, given, given.input[0], name)
                for graph, _ in takers:
                    for taken in _readers(graph, name):
                        _replace(graph, taken, taken.output[0], name)


def _is_only_given(graph: Graph, given: Node) -> bool:
    """Whether a graph computes what it reorders at its end, and needs the result nowhere else."""
    source, name = given.input[0], given.output[0]
    return (
        _is_output(graph, name)
        and not _readers(graph, name)
        and not _is_output(graph, source)
        and any(source in node.output for node in graph.node)
    )


def _is_only_reordered(graph: Graph, name: str) -> bool:
    return all(_reorders(node, "ReorderInput") for node in _readers(graph, name))


def _may_follow(value: ValueInfo, graph: Graph) -> bool:
    """Whether an input may have the layout, and what reads it can make use of that."""
    kind = value.type.tensor_type
    readers = {node.op_type for node in _readers(graph, value.name)}
    return (
        kind.elem_type == _FLOAT
        and len(kind.shape.dim) == 4
        and kind.shape.dim[1].dim_value > 0
        and kind.shape.dim[1].dim_value % _CHANNELS == 0
        and bool(readers)
        and readers.issubset(_FOLLOWING)
    )


def _readers(graph: Graph, name: str) -> list[Node]:
    return [node for node in graph.node if name in node.input]


def _is_output(graph: Graph, name: str) -> bool:
    return any(value.name == name for value in graph.output)


def _reorders(node: Node, kind: str) -> bool:
    """Whether it reorders between the blocked layout and the plain one with channels first."""
    last = any(each.name == "channels_last" and each.i for each in node.attribute)
    return node.op_type == kind and not last


def _nodes_that_reorder(graph: Graph, kind: str) -> list[Node]:
    return [node for node in graph.node if _reorders(node, kind)]


def _replace(graph: Graph, node: Node, old: str, new: str) -> None:
    """Take a node out of a graph, and call one value by the name of another."""
    graph.node.remove(node)
    _rename(graph.node, old, new)


def _rename(nodes: Iterable[Node], old: str, new: str) -> None:
    for node in nodes:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name == old:
                    names[index] = new
