"""What the whole model keeps in single precision, though its nodes are of half precision, fragments
and blocks keep so, too: between them and inside.

ONNX Runtime converts halves before and after nodes that it has no kernel for, and leaves two such
conversions in a row out. At the end of a fragment it could not: what crosses would be rounded,
where the whole model rounds nothing, and results would differ. So it crosses in single precision,
and the fragment has conversions for that, which the runtime leaves out in turn. A node that the
whole model converts only for what is around it (`Halves.SINGLE`) is written in single precision.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx
from onnx import TensorProto, helper

from shoal_compiler.graph import Graph, read_names, rename
from shoal_compiler.halves import has_kernel
from shoal_compiler.nodes import is_standard, subgraphs
from shoal_compiler.tensor_types import dtype_name
from shoal_compiler.wire import LARGE
from shoal_planner.half_forms import converted_alone, kept_single, widened_from_halves
from shoal_planner.pieces import Piece
from shoal_planner.profile import Halves, NodeProfile, Profile, TensorProfile


def outputs_apart(graph: Graph) -> Graph:
    """A graph whose outputs of half precision that nodes read, too, are given by nodes of their
    own: what makes such an output gives it to the others as it is."""
    halves = {
        each.name
        for each in graph.outputs
        if each.type.tensor_type.elem_type == TensorProto.FLOAT16 and each.name not in graph.guards
    }
    halves &= {name for names in graph.reads for name in names}
    made = {name: each for name, each in graph.producers.items() if name in halves}
    halves = {name for name, each in made.items() if _may_be_single(graph, graph.nodes[each])}
    if not halves:
        return graph
    taken = _names(graph)
    names = {name: _free(name, taken) for name in sorted(halves)}
    nodes = list[onnx.NodeProto]()
    for node in graph.nodes:
        nodes.append(each := _renamed(node, names))
        each.output[:] = [names.get(name, name) for name in node.output]
        nodes += [
            helper.make_node("Identity", [names[name]], [name])
            for name in node.output
            if name in names
        ]
    return replace(graph, nodes=tuple(nodes))


def _may_be_single(graph: Graph, node: onnx.NodeProto) -> bool:
    """Whether the runtime may have what a node gives in single precision."""
    if next(iter(subgraphs(node)), None) is not None:
        return False
    return is_standard(node, "Cast") or not has_kernel(node, graph.opsets)


def with_single(graph: Graph, profile: Profile) -> Profile:
    """The profile of a whole model with what it keeps in single precision. Nodes with large weights
    of half precision stay as they are: the runtime would hold these in single precision for good.
    So does what depends on a branch: it is inside of an If."""
    if all(each.halves is Halves.NONE for each in profile.nodes):
        return profile
    written = {
        at
        for at in converted_alone(profile)
        if not any(
            name in profile.half_weights and profile.weights[name] >= LARGE
            for name in profile.nodes[at].weights
        )
        and graph.guards.keys().isdisjoint(profile.nodes[at].outputs)
    }
    halves = dict.fromkeys(written, Halves.SINGLE)
    halves |= dict.fromkeys(widened_from_halves(profile), Halves.KEPT)
    nodes = tuple(
        replace(node, halves=halves.get(at, node.halves)) for at, node in enumerate(profile.nodes)
    )
    profile = replace(profile, nodes=nodes)
    kept = kept_single(profile) - graph.guards.keys()
    tensors = {
        name: _sent_single(each) if name in kept else each for name, each in profile.tensors.items()
    }
    return replace(profile, tensors=tensors)


def _sent_single(tensor: TensorProfile) -> TensorProfile:
    return replace(
        tensor,
        spec=replace(tensor.spec, dtype=dtype_name(TensorProto.FLOAT)),
        bytes=tensor.computed_bytes,
        sent_single=True,
    )


def in_single(
    graph: Graph, profile: Profile, piece: Piece, nodes: Sequence[onnx.NodeProto]
) -> list[onnx.NodeProto]:
    """The nodes of a piece, which takes and gives what the model keeps in single precision so."""
    tensors = profile.tensors
    sent = {
        name
        for name in (*piece.takes, *piece.gives)
        if name in tensors and tensors[name].sent_single
    }
    known = {
        name: profile.nodes[position]
        for position in piece.nodes
        for name in profile.nodes[position].outputs
    }
    forked = _forked(profile, piece, known)
    is_plain = all(each.halves is not Halves.SINGLE for each in known.values())
    if not sent and not forked and is_plain:
        return list(nodes)
    made = {name for node in nodes for name in node.output}
    rounded = {
        name for each in profile.nodes if each.halves is Halves.WIDENED for name in each.inputs
    }
    singles = {name: name for name in sent - made}
    writer = _Writer(profile, sent, rounded, forked, _names(graph), singles)
    for node in nodes:
        writer.write(node, known.get(next(filter(None, node.output), "")))
    return writer.nodes


def _forked(profile: Profile, piece: Piece, known: Mapping[str, NodeProfile]) -> frozenset[str]:
    """What the model makes single precision of, and the piece gives to others, where something else
    takes the halves: the whole model has it as it was before it became these."""
    read = Counter(name for each in piece.nodes for name in profile.nodes[each].inputs)
    read.update(piece.gives)
    given = set(piece.gives) - {each.name for each in profile.outputs}
    return frozenset(
        name
        for name in given & known.keys()
        if (node := known[name]).halves is Halves.WIDENED
        and any(
            half in known and known[half].halves.is_converted and read[half] > 1
            for half in node.inputs
        )
    )


@dataclass(slots=True)
class _Writer:
    """Writes nodes one after the other. `halves` are the names of what is `sent` as halves,
    `singles` those of halves in single precision, by the names in the model; `rounded` are halves
    of which the model itself makes single precision, `forked` what it makes of them and others
    take in other fragments."""

    profile: Profile
    sent: Collection[str]
    rounded: Collection[str]
    forked: Collection[str]
    taken: set[str]
    singles: dict[str, str]
    halves: dict[str, str] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def write(self, node: onnx.NodeProto, known: NodeProfile | None) -> None:
        """A node, with the conversions before and after it. Of one that a branch holds nothing is
        known: it takes what it reads as it is in the model."""
        halves = Halves.KEPT if known is None else known.halves
        names = {
            name: self._taken(name, halves)
            for name in dict.fromkeys(read_names(node))
            if self._is_half(name)
        }
        node = _renamed(node, {name: other for name, other in names.items() if name != other})
        if halves is Halves.NARROWED and node.output[0] in self.sent:
            self.nodes.append(helper.make_node("Identity", node.input, node.output))
            return
        if halves is Halves.NARROWED and node.output[0] not in self.rounded:
            self.singles[node.output[0]] = node.input[0]
        self.nodes.append(node)
        for place, name in enumerate(node.output):
            if name in self.forked:
                node.output[place] = made = _free(name, self.taken)
                self.nodes.append(helper.make_node("Max", [made], [name]))  # as `_given`
            elif halves is Halves.SINGLE and self._is_half(name):
                node.output[place] = self._given_single(name)
            elif name in self.sent:
                node.output[place] = self._given(name)

    def _taken(self, name: str, halves: Halves) -> str:
        is_taken_single = self.singles.get(name) == name
        if halves is Halves.SINGLE or (halves is Halves.WIDENED and is_taken_single):
            return self._as_single(name)
        return self._as_half(name)

    def _as_single(self, name: str) -> str:
        if name not in self.singles:
            self.singles[name] = self._cast(self._as_half(name), name, TensorProto.FLOAT)
        return self.singles[name]

    def _as_half(self, name: str) -> str:
        if name not in self.sent:
            return name
        if name not in self.halves:
            self.halves[name] = self._cast(name, name, TensorProto.FLOAT16)
        return self.halves[name]

    def _given_single(self, name: str) -> str:
        """What a node in single precision gives in the place of halves."""
        if name in self.sent:
            self.singles[name] = name
            return name
        self.singles[name] = made = _free(name, self.taken)
        self.nodes.append(helper.make_node("Cast", [made], [name], to=TensorProto.FLOAT16))
        return made

    def _given(self, name: str) -> str:
        """What a node gives as halves that leaves in single precision: as a copy, of one input
        that is the largest. A conversion that makes an output the runtime would not leave out."""
        self.halves[name] = made = _free(name, self.taken)
        self.singles[name] = self._cast(made, name, TensorProto.FLOAT)
        self.nodes.append(helper.make_node("Max", [self.singles[name]], [name]))
        return made

    def _cast(self, source: str, name: str, to: int) -> str:
        made = _free(name, self.taken)
        self.nodes.append(helper.make_node("Cast", [source], [made], to=to))
        return made

    def _is_half(self, name: str) -> bool:
        if name in self.profile.tensors:
            return self.profile.tensors[name].is_half
        return name in self.profile.half_weights


def _renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """A node that reads others in the place of some names, also in the graphs inside it."""
    graph = onnx.GraphProto(node=[node])
    rename(graph, names)
    return graph.node[0]


def _names(graph: Graph) -> set[str]:
    return {name for node in graph.nodes for name in (*node.output, *read_names(node))}


def _free(name: str, taken: set[str]) -> str:
    """A name that no other tensor has."""
    number = 1
    while (found := f"{name}/{number}") in taken:
        number += 1
    taken.add(found)
    return found
