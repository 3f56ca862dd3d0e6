"""A checked model in one normal form, which profiling and cutting share.

Functions are written out. Every constant of the top level, and every large one inside a sub-graph,
is an initializer of the graph: some exporters keep all weights in `Constant` nodes, where a device
could not map them from a file. Initializers that are listed as inputs too are constants: a fragment
has no caller who would override them, and who gives the model a value for one is told so. What no
output needs is left out.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
import onnx
from onnx import numpy_helper

from shoal_compiler.errors import ModelRefused
from shoal_compiler.functions import written_out
from shoal_compiler.nodes import all_nodes, is_standard, node_label, subgraphs, tensors_of
from shoal_compiler.safety import CheckedModel, Range, byte_size
from shoal_compiler.wire import LARGE

MIN_IR_VERSION: Final = 4
"""Before it, every initializer had to be an input as well."""


@dataclass(frozen=True, slots=True)
class Weight:
    """An initializer. `tensor` is without contents where `contents` says which file has them.

    `whole` is the initializer of which it is a part, where the graph reads that one too.
    """

    tensor: onnx.TensorProto
    contents: Range | None
    whole: str = ""

    @property
    def bytes(self) -> int:
        """Size of the contents."""
        return self.contents.length if self.contents else byte_size(self.tensor)

    def loaded(self) -> onnx.TensorProto:
        """The tensor with its contents in memory, as raw bytes; for small ones."""
        if self.contents is None and (
            self.tensor.HasField("raw_data") or self.tensor.data_type == onnx.TensorProto.STRING
        ):
            return self.tensor
        if self.contents is None:
            return numpy_helper.from_array(numpy_helper.to_array(self.tensor), self.tensor.name)
        loaded = onnx.TensorProto(
            name=self.tensor.name, data_type=self.tensor.data_type, dims=self.tensor.dims
        )
        loaded.raw_data = read_range(self.contents)
        return loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A branch on which a node depends: of the If whose first output is `key`, that which runs
    where the condition is as `taken` says."""

    key: str
    condition: str
    taken: bool


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The normal form. A node's index in `nodes` is its `source` in the profile."""

    nodes: tuple[onnx.NodeProto, ...]
    inputs: tuple[onnx.ValueInfoProto, ...]
    outputs: tuple[onnx.ValueInfoProto, ...]
    weights: Mapping[str, Weight]
    sparse: Mapping[str, onnx.SparseTensorProto]
    declared: Mapping[str, onnx.TypeProto]
    opsets: Mapping[str, int]
    ir_version: int
    fixed: tuple[str, ...] = ()
    """Inputs that have an initializer, which a caller of ONNX may override."""
    inferred: Mapping[str, onnx.TypeProto] = field(default_factory=dict)
    """Types of tensors that were inferred before something else made them, by which they are not
    any more."""
    opened: frozenset[str] = frozenset()
    """The first outputs of the Ifs whose branches' nodes are among the others (`branches`)."""
    guards: Mapping[str, tuple[Guard, ...]] = field(default_factory=dict)
    """The branches on which the maker of a tensor depends, from the outermost one on."""

    together: frozenset[str] = frozenset()
    """What nodes give before which no cut makes sense: they are small, and many."""

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """How messages call the nodes; unique."""
        names = [node_label(node, index) for index, node in enumerate(self.nodes)]
        seen = Counter(names)
        return tuple(
            name if seen[name] == 1 else f"{name} at {index}" for index, name in enumerate(names)
        )

    @cached_property
    def values_read(self) -> tuple[tuple[str, ...], ...]:
        """What each node reads, with what its sub-graphs capture; each name once."""
        return tuple(tuple(dict.fromkeys(read_names(node))) for node in self.nodes)

    @cached_property
    def reads(self) -> tuple[tuple[str, ...], ...]:
        """The same, with the conditions of the branches on which a node depends."""
        return tuple(
            tuple(dict.fromkeys((*names, *(each.condition for each in self.path(node)))))
            for node, names in zip(self.nodes, self.values_read, strict=True)
        )

    def path(self, node: onnx.NodeProto) -> tuple[Guard, ...]:
        """The branches on which a node depends, from the outermost one on."""
        return self.guards.get(next(filter(None, node.output), ""), ())

    @cached_property
    def producers(self) -> Mapping[str, int]:
        """The node that makes each tensor."""
        return {
            name: index for index, node in enumerate(self.nodes) for name in node.output if name
        }


def read_range(place: Range) -> bytes:
    """A range of a file, in memory."""
    pieces = []
    with place.path.open("rb") as file:
        for start, end in place.strips():
            file.seek(start)
            pieces.append(file.read(end - start))
    return b"".join(pieces)


def normalise(model: CheckedModel) -> Graph:
    """Bring a checked model into the normal form. Raises `ModelRefused`."""
    proto = written_out(model.proto)
    graph = proto.graph
    weights = {each.name: Weight(each, model.contents(each)) for each in graph.initializer}
    sparse = {each.values.name: each for each in graph.sparse_initializer}
    names = Counter(each.name for each in graph.initializer)
    names.update(each.values.name for each in graph.sparse_initializer)
    name, times = next(iter(names.most_common(1)), ("", 0))
    if times > 1:
        raise ModelRefused(
            "has two initializers of one name, and it is not known which one counts: remove one",
            tensor=name,
        )
    hoist = _Hoist(model, weights, _definitions(graph))
    nodes = [node for node in graph.node if not hoist.constant(node)]
    for node in nodes:
        hoist.inside(node)
    for node in all_nodes(nodes):
        _write_out(node)
    nodes = _without_copies(graph, nodes, weights, hoist.definitions)
    inputs = tuple(each for each in graph.input if each.name not in weights | sparse)
    listed = (each.name for each in graph.input if each.name in weights | sparse)
    normal = Graph(
        nodes=tuple(nodes),
        inputs=inputs,
        # One that is listed twice is one: results have names.
        outputs=tuple({each.name: each for each in graph.output}.values()),
        weights=weights,
        sparse=sparse,
        declared={each.name: each.type for each in (*graph.value_info, *graph.output)},
        opsets={each.domain: each.version for each in proto.opset_import},
        ir_version=proto.ir_version,
        fixed=tuple(listed) if proto.ir_version >= MIN_IR_VERSION else (),
    )
    _check_names(normal)
    kept = live(nodes, {each.name for each in graph.output})
    return replace(
        normal, nodes=tuple(node for node, each in zip(nodes, kept, strict=True) if each)
    )


def _without_copies(
    graph: onnx.GraphProto,
    nodes: Sequence[onnx.NodeProto],
    weights: Mapping[str, Weight],
    definitions: Mapping[str, int],
) -> list[onnx.NodeProto]:
    """The nodes without those that give an initializer another name, as exporters write where
    several layers have one weight. What read the other name reads the initializer."""
    given = {each.name for each in graph.output}
    given.update(
        each.name for node in all_nodes(nodes) for inner in subgraphs(node) for each in inner.output
    )
    # An initializer may be listed as an input, too. Where another graph has one of the names for
    # something else, what reads the copy there would read that.
    listed = {each.name for each in graph.input} & {each.name for each in graph.initializer}
    once = {name for name, times in definitions.items() if times == 1 + (name in listed)}
    names: dict[str, str] = {}
    kept = []
    for node in nodes:
        copies = is_standard(node, "Identity") and len(node.input) == len(node.output) == 1
        source = names.get(node.input[0], node.input[0]) if copies else ""
        is_plain = source in weights and node.output[0] not in given
        if is_plain and once.issuperset((source, node.output[0])):
            names[node.output[0]] = source
        else:
            kept.append(node)
    rename(graph, names)
    return kept


def _write_out(node: onnx.NodeProto) -> None:
    """Write out what onnx's inference takes for something else than its specification and the
    runtime, where it is not said: that an STFT gives one side."""
    if is_standard(node, "STFT") and all(each.name != "onesided" for each in node.attribute):
        node.attribute.append(onnx.helper.make_attribute("onesided", 1))


def _definitions(graph: onnx.GraphProto) -> Counter[str]:
    """How often each name is defined, in all scopes."""
    counts = Counter(defined(graph))
    for node in graph.node:
        for inner in subgraphs(node):
            counts.update(_definitions(inner))
    return counts


@dataclass(slots=True)
class _Hoist:
    """Moves constants out of nodes and sub-graphs, into the graph's initializers."""

    model: CheckedModel
    weights: dict[str, Weight]
    definitions: Counter[str]
    numbers: Counter[str] = field(default_factory=Counter)
    """The number of the newest tensor that was moved and renamed, by its name of before."""

    def constant(self, node: onnx.NodeProto) -> bool:
        """Make a `Constant` of the top level an initializer; False: it is something else."""
        tensor = constant_tensor(node)
        if tensor is None:
            return False
        tensor.name = node.output[0]
        if tensor.name in self.weights:
            raise ModelRefused("is defined twice", tensor=tensor.name)
        self.weights[tensor.name] = Weight(tensor, self.model.contents(tensor))
        return True

    def inside(self, node: onnx.NodeProto) -> None:
        """Move large constants of sub-graphs out; load any other large tensor of an attribute."""
        for attribute in node.attribute:
            for tensor in tensors_of(attribute):
                contents = self.model.contents(tensor)
                if contents is not None:
                    tensor.CopyFrom(Weight(tensor, contents).loaded())
        for graph in subgraphs(node):
            self._from_graph(graph)

    def _from_graph(self, graph: onnx.GraphProto) -> None:
        fixed = {each.name for each in (*graph.input, *graph.output)}
        moved: dict[str, str] = {}
        kept_tensors = []
        for tensor in graph.initializer:
            if tensor.name in fixed or not self._move(tensor, moved):
                contents = self.model.contents(tensor)
                kept_tensors.append(Weight(tensor, contents).loaded() if contents else tensor)
        kept_nodes = []
        for node in graph.node:
            constant = constant_tensor(node)
            if constant is not None and node.output[0] not in fixed:
                constant.name = node.output[0]
                if self._move(constant, moved):
                    continue
            kept_nodes.append(node)
        kept = onnx.GraphProto(initializer=kept_tensors, node=kept_nodes)
        del graph.initializer[:], graph.node[:]
        graph.initializer.extend(kept.initializer)
        graph.node.extend(kept.node)
        rename(graph, moved)
        for node in graph.node:
            self.inside(node)

    def _move(self, tensor: onnx.TensorProto, moved: dict[str, str]) -> bool:
        weight = Weight(tensor, self.model.contents(tensor))
        if weight.bytes < LARGE or tensor.data_type == onnx.TensorProto.STRING:
            return False
        old = new = tensor.name
        while new in self.weights or self.definitions[new] > (new == old):
            self.numbers[old] += 1
            new = f"{old}.{self.numbers[old]}"
        tensor.name = moved[old] = new
        self.definitions[new] = 1
        self.weights[new] = weight
        return True


def constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The value of a `Constant` node as a tensor; None for other nodes, and for sparse values."""
    if not is_standard(node, "Constant") or not node.attribute:
        return None
    attribute = node.attribute[0]
    if attribute.name == "value":
        return attribute.t
    if attribute.name in ("value_string", "value_strings"):
        values = [attribute.s] if attribute.name == "value_string" else list(attribute.strings)
        dims = [] if attribute.name == "value_string" else [len(values)]
        return onnx.TensorProto(data_type=onnx.TensorProto.STRING, dims=dims, string_data=values)
    numbers: dict[str, np.ndarray] = {
        "value_float": np.array(attribute.f, np.float32),
        "value_floats": np.array(attribute.floats, np.float32),
        "value_int": np.array(attribute.i, np.int64),
        "value_ints": np.array(attribute.ints, np.int64),
    }
    found = numbers.get(attribute.name)
    return None if found is None else numpy_helper.from_array(found)


def rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename what nodes read, in a graph and in those inside it, except where it is shadowed."""
    if not names:
        return
    for node in graph.node:
        for position, name in enumerate(node.input):
            node.input[position] = names.get(name, name)
        for inner in subgraphs(node):
            hidden = set(defined(inner))
            rename(inner, {old: new for old, new in names.items() if old not in hidden})


def defined(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (each.name for each in graph.input)
    yield from (each.name for each in graph.initializer)
    for sparse in graph.sparse_initializer:
        yield sparse.values.name
    for node in graph.node:
        yield from node.output


def read_names(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node reads: its inputs, and what its sub-graphs take from around them."""
    yield from filter(None, node.input)
    for graph in subgraphs(node):
        inside = set(defined(graph))
        for inner in graph.node:
            yield from (name for name in read_names(inner) if name not in inside)
        # A branch may give a tensor of the graph around it as its own output.
        yield from (each.name for each in graph.output if each.name not in inside and each.name)


def live(nodes: list[onnx.NodeProto], needed: set[str]) -> list[bool]:
    """Which nodes some output depends on."""
    producer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    found = [False] * len(nodes)
    waiting = list(needed)
    while waiting:
        index = producer.get(waiting.pop())
        if index is not None and not found[index]:
            found[index] = True
            waiting.extend(read_names(nodes[index]))
    return found


def _check_names(graph: Graph) -> None:
    """Every tensor is made once, and every tensor that is read is made."""
    made = {each.name for each in graph.inputs} | set(graph.weights) | set(graph.sparse)
    if len(made) != len(graph.inputs) + len(graph.weights) + len(graph.sparse):
        raise ModelRefused("has two inputs or initializers of one name")
    outputs = [each.name for each in graph.outputs]
    for node, label in zip(graph.nodes, graph.labels, strict=True):
        for name in filter(None, node.output):
            if name in made:
                raise ModelRefused("makes a tensor that is made elsewhere", node=label, tensor=name)
            made.add(name)
    readers = [*zip(graph.labels, graph.reads, strict=True), ("the graph's outputs", outputs)]
    for label, names in readers:
        missing = [name for name in names if name not in made]
        if missing:
            raise ModelRefused("needs a tensor that nothing makes", node=label, tensor=missing[0])
