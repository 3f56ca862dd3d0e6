"""The blocks of a fragment: a fragment is a model, so it is profiled, cut and built as one.

What is known of the fragment's nodes is taken from the model's profile, and costs nothing again.
The roles of nodes, and with them the order and the cuts, are found anew: a shape that the fragment
is sent is an input here, not something that can be made again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import onnx

from shoal_compiler.gathering import (
    gathers_of,
    indices_first,
    read_before,
    read_bytes,
    without,
)
from shoal_compiler.graph import Graph
from shoal_compiler.joins import find_joins
from shoal_compiler.models import PieceModel, make_model, value_info
from shoal_compiler.nodes import integer_of
from shoal_compiler.order import choose_order, roles
from shoal_compiler.weight_files import Place
from shoal_planner.arena import more_of_table_bytes
from shoal_planner.blocks import block_costs, choose_blocks
from shoal_planner.pieces import Piece
from shoal_planner.profile import Profile
from shoal_planner.segments import Layout
from shoal_protocol.blocks import Block, Gathered, Join, least_bytes

GAIN: Final = 10
"""Blocks are to save at least one part in so many of the fragment's resident bytes."""
_QUANTISING: Final = frozenset(("QuantizeLinear", "DequantizeLinear"))


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a fragment, `blocks.bin`, and the outputs that they give in parts; all empty
    where blocks gain nothing. Of tables the device reads `row_bytes` for each item."""

    blocks: tuple[Block, ...] = ()
    content: bytes = b""
    joins: tuple[Join, ...] = ()
    row_bytes: int = 0


def make_blocks(
    graph: Graph, profile: Profile, piece: Piece, whole: PieceModel, places: Mapping[str, Place]
) -> Blocks:
    """Cut the fragment of a piece, which `whole` is the model of, into blocks where they save
    enough. `places` are where its large weights are."""
    segment = piece.segment
    large = sum(profile.weights[name] for name in places)
    if segment.activation_bytes is None or large * GAIN < segment.resident_bytes:
        return Blocks()
    if any(spec.dtype == "string" for spec in (*whole.inputs, *whole.outputs)):
        return Blocks()  # values between blocks are the runtime's own, which it makes of no text
    own = as_model(graph, profile, piece, whole, places)
    chosen = choose_blocks(own.layout, own.first)
    if not chosen.cuts and not own.gathers:
        return Blocks()
    blocks = own.blocks(chosen.cuts, chosen.emptied)
    gains = least_bytes(blocks.blocks) * GAIN <= segment.resident_bytes * (GAIN - 1)
    if not gains:
        return Blocks()
    return replace(blocks, row_bytes=sum(read_bytes(graph, profile, each) for each in own.gathers))


@dataclass(frozen=True, slots=True)
class FragmentModel:
    """A fragment as a model of its own, in the normal form that `graph.normalise` gives, which
    takes what the device `gathers`. The `first` nodes of its layout make the indices for that."""

    graph: Graph
    layout: Layout
    places: Mapping[str, Place]
    joins: tuple[Join, ...] = ()
    gathers: tuple[Gathered, ...] = ()
    first: int = 0

    def blocks(self, cuts: tuple[int, ...], emptied: frozenset[int] = frozenset()) -> Blocks:
        """The blocks that cuts of the fragment's own profile make; `emptied` are those before which
        the arena is emptied."""
        blocks, content = [], bytearray()
        pieces = self.layout.pieces(cuts)
        costs = block_costs(self.layout, pieces, emptied)
        gathers = read_before(self.gathers, (part.takes for part in pieces))
        for index, (part, cost, read) in enumerate(zip(pieces, costs, gathers, strict=True)):
            model = make_model(self.graph, self.layout.profile, part, self.places).model
            skeleton = model.SerializeToString(deterministic=True)
            block = Block(
                model_offset=len(content),
                model_bytes=len(skeleton),
                takes=part.takes,
                gives=part.gives,
                held_bytes=cost.held_bytes,
                weight_bytes=cost.weight_bytes,
                working_bytes=cost.working_bytes,
                beside_bytes=cost.beside_bytes,
                empties_arena=index in emptied,
                dequantises=dequantises(model.graph),
                gathers=read,
            )
            blocks.append(block)
            content += skeleton
        more = more_of_table_bytes(least_bytes(blocks))
        counted = (replace(each, working_bytes=each.working_bytes + more) for each in blocks)
        return Blocks(tuple(counted), bytes(content), self.joins)


def dequantises(graph: onnx.GraphProto) -> bool:
    """Whether the runtime would copy quantised weights, in another order: nothing but weights is
    quantised, or a product of floats has such weights, as a cut leaves it that parts a product from
    what dequantises its other operand."""
    weights = {each.name for each in graph.initializer}
    nodes = [node for node in graph.node if node.op_type in _QUANTISING]
    made = {node.output[0]: node.input[0] in weights for node in nodes if _is_dequantising(node)}
    products = (node for node in graph.node if _is_fused_product(node))
    return bool(made) and (
        (len(made) == len(nodes) and all(made.values()))
        or any(made.get(node.input[1]) and node.input[0] not in made for node in products)
    )


def _is_dequantising(node: onnx.NodeProto) -> bool:
    return node.op_type == "DequantizeLinear"


def _is_fused_product(node: onnx.NodeProto) -> bool:
    return node.op_type == "MatMul" or (
        node.op_type == "Gemm" and not integer_of(node, "transB", 0)
    )


def as_model(
    graph: Graph, profile: Profile, piece: Piece, whole: PieceModel, places: Mapping[str, Place]
) -> FragmentModel:
    """The fragment of a piece as a model, without its joins. A block drops the rows that it read
    when it has run."""
    joins = find_joins(graph, profile, piece)
    parts = {join.output: join.parts for join in joins.values()}
    whole = replace(
        whole,
        outputs=tuple(
            profile.tensors[name].spec if spec.name in parts else spec
            for spec in whole.outputs
            for name in parts.get(spec.name, (spec.name,))
        ),
    )
    piece = replace(piece, nodes=tuple(each for each in piece.nodes if each not in joins))
    gathers = gathers_of(graph, profile, piece, places)
    piece, whole = without(gathers, profile, piece, whole)
    indices = {each.indices for each in gathers.values()}
    own_graph = _graph(graph, profile, piece, whole)
    own, first = indices_first(own_graph, _profile(own_graph, profile, piece, whole), indices)
    inside = frozenset(own.weights) - places.keys()
    layout = Layout(
        own,
        inside,
        row_items=1,
        rows={each.rows: profile.nodes[at].gathers for at, each in gathers.items()},
        leaving=frozenset(name for names in parts.values() for name in names),
    )
    return FragmentModel(
        own_graph, layout, places, tuple(joins.values()), tuple(gathers.values()), first
    )


def _graph(graph: Graph, profile: Profile, piece: Piece, whole: PieceModel) -> Graph:
    """The fragment in the normal form that `shoal_compiler.graph.normalise` gives."""
    return replace(
        graph,
        nodes=tuple(graph.nodes[profile.nodes[position].source] for position in piece.nodes),
        inputs=tuple(value_info(spec) for spec in whole.inputs),
        outputs=tuple(value_info(spec) for spec in whole.outputs),
        weights={name: graph.weights[name] for name in piece.weights if name in graph.weights},
        sparse={name: graph.sparse[name] for name in piece.weights if name in graph.sparse},
        declared={},
    )


def _profile(graph: Graph, profile: Profile, piece: Piece, whole: PieceModel) -> Profile:
    node_roles = roles(graph)
    known = [profile.nodes[position] for position in piece.nodes]
    names = [spec.name for spec in whole.inputs]
    names += [name for node in known for name in node.outputs]
    return replace(
        profile,
        inputs=whole.inputs,
        outputs=whole.outputs,
        nodes=tuple(
            replace(known[index], source=index, role=node_roles[index])
            for index in choose_order(graph, node_roles)
        ),
        tensors={name: profile.tensors[name] for name in names},
        weights={name: profile.weights[name] for name in piece.weights},
    )
