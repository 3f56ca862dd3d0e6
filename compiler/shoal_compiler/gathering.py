"""Rows of tables that a device reads from the file itself, where it runs a fragment in blocks.

A table that is mapped comes into memory in windows, one around each row that is read. Where an item
reads a few small rows all over a table, that is most of it, and a hundred times what the rows take.
So in blocks the `Gather` is left out: the device reads the rows, and the block takes them as an
input. As a whole, a fragment maps its tables: that is fastest, and what is read stays.

The rows must be known before a block begins. So what computes them from the inputs of the fragment
comes first, and is a block of its own. That is done where it is cheap.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import onnx

from shoal_compiler.costs import WINDOW_BYTES
from shoal_compiler.graph import Graph
from shoal_compiler.models import PieceModel
from shoal_compiler.nodes import all_nodes, gathers_rows, is_standard
from shoal_compiler.order import CHEAP
from shoal_planner.pieces import Piece
from shoal_planner.profile import NodeProfile, Profile, Role
from shoal_protocol.blocks import Gathered
from shoal_protocol.row_readers import ELEMENTS

LEAST_SAVED_BYTES: Final = 1 << 20
"""Of what windows take: saving less is not worth it."""
_PAGE_BYTES: Final = 4096
"""An item that reads more rows than a table has pages reads most of it anyway, sooner if it is
mapped."""
_INDEX_BYTES: Final = 64
"""What is needed for each row while rows are read: its index, and where it goes, in order."""
_TYPES: Final = frozenset(ELEMENTS)


class Tables:
    """Which nodes of a graph read tables that devices may read rows of."""

    def __init__(self, graph: Graph, node_roles: Sequence[Role]) -> None:
        self._graph = graph
        self._roles = node_roles
        nodes = list(all_nodes(graph.nodes))
        self._readers = Counter(name for node in nodes for name in node.input)
        self._readers.update(each.name for each in graph.outputs)
        self._gathered = Counter(node.input[0] for node in graph.nodes if gathers_rows(node))

    def gathered_bytes(self, index: int, touched_bytes: int, made_bytes: int | None) -> int:
        """Memory for the rows that the node `index` reads, `made_bytes`, while a device reads them
        itself; 0: it had better not, for the windows around them, `touched_bytes`, are little more,
        or it is not known in time which they are."""
        node = self._graph.nodes[index]
        if not gathers_rows(node) or made_bytes is None or self._roles[index] is not Role.COMPUTE:
            return 0
        table = self._graph.weights.get(node.input[0])
        if table is None or not _has_whole_bytes(table.tensor) or table.bytes == 0:
            return 0
        if self._graph.path(node):
            return 0  # where its branch is not taken, the indices may be none of the table
        if self._readers[node.input[0]] > self._gathered[node.input[0]]:
            return 0  # it is read as a whole besides
        rows = made_bytes * table.tensor.dims[0] // table.bytes
        taken = made_bytes + _INDEX_BYTES * rows
        if touched_bytes - taken < max(LEAST_SAVED_BYTES, taken):
            return 0
        suits = rows * _PAGE_BYTES <= table.bytes and self._is_cheap(node.input[1])
        return taken if suits else 0

    def _is_cheap(self, name: str) -> bool:
        """Whether a tensor is an input, or takes next to nothing to be made of inputs."""
        waiting, seen = [name], set[str]()
        while waiting:
            needed = waiting.pop()
            maker = self._graph.producers.get(needed)
            if needed in seen or maker is None:
                if needed in self._graph.sparse or self._weight_bytes(needed) > WINDOW_BYTES:
                    return False
                continue
            seen.add(needed)
            if not is_standard(self._graph.nodes[maker], *CHEAP):
                return False
            waiting.extend(self._graph.reads[maker])
        maker = self._graph.producers.get(name)
        return name not in self._graph.weights and (
            maker is None or self._roles[maker] is Role.COMPUTE
        )

    def _weight_bytes(self, name: str) -> int:
        weight = self._graph.weights.get(name)
        return 0 if weight is None else weight.bytes


def _has_whole_bytes(table: onnx.TensorProto) -> bool:
    return bool(table.dims) and _type_name(table.data_type) in _TYPES


def _type_name(data_type: int) -> str:
    kinds = onnx.TensorProto.DataType
    if data_type not in kinds.values():
        return ""
    return kinds.Name(onnx.TensorProto.DataType.ValueType(data_type)).lower()


def gathers_of(
    graph: Graph, profile: Profile, piece: Piece, places: Collection[str]
) -> dict[int, Gathered]:
    """What devices read themselves, by the positions of the nodes that they do the work of: where
    the tables are in files of the piece, `places`."""
    nodes = {position: profile.nodes[position] for position in piece.nodes}
    return {
        position: _gathered(graph.nodes[node.source])
        for position, node in nodes.items()
        if node.gathers and all(name in places for name in node.weights)
    }


def without(
    gathers: Mapping[int, Gathered], profile: Profile, piece: Piece, whole: PieceModel
) -> tuple[Piece, PieceModel]:
    """A piece, and the model of it, without these nodes and their tables: it takes the rows, and
    gives the indices that it makes."""
    tables = {each.table for each in gathers.values()}
    nodes = tuple(each for each in piece.nodes if each not in gathers)
    weights = tuple(name for name in piece.weights if name not in tables)
    made = {name for position in nodes for name in profile.nodes[position].outputs}
    given = dict.fromkeys(each.indices for each in gathers.values() if each.indices in made)
    rows = [profile.tensors[each.rows].spec for each in gathers.values()]
    indices = [
        profile.tensors[name].spec
        for name in given
        if all(name != spec.name for spec in whole.outputs)
    ]
    inputs, outputs = (*whole.inputs, *rows), (*whole.outputs, *indices)
    return (
        replace(piece, nodes=nodes, weights=weights),
        replace(whole, inputs=inputs, outputs=outputs),
    )


def _gathered(node: onnx.NodeProto) -> Gathered:
    return Gathered(table=node.input[0], indices=node.input[1], rows=node.output[0])


def read_bytes(graph: Graph, profile: Profile, gathered: Gathered) -> int:
    """What a device reads of a file for the rows of an item: whole pages."""
    table = graph.weights[gathered.table]
    row = table.bytes // table.tensor.dims[0]
    rows = (profile.tensors[gathered.rows].bytes or 0) // row
    return rows * -(-row // _PAGE_BYTES) * _PAGE_BYTES


def indices_first(graph: Graph, profile: Profile, indices: Collection[str]) -> tuple[Profile, int]:
    """The profile of a graph with those nodes first that `indices` are made with, behind the ones
    that depend on no input; and how many that are, none if no node makes any."""
    first, waiting = set[int](), [name for name in indices if name in graph.producers]
    while waiting:
        maker = graph.producers.get(waiting.pop())
        if maker is not None and maker not in first:
            first.add(maker)
            waiting.extend(graph.reads[maker])

    def place(node: NodeProfile) -> int:
        return 0 if node.role is Role.CONSTANT else 2 - (node.source in first)

    nodes = tuple(sorted(profile.nodes, key=place))
    count = sum(node.role is Role.CONSTANT or node.source in first for node in nodes)
    return replace(profile, nodes=nodes), count if first else 0


def read_before(
    gathers: Iterable[Gathered], blocks: Iterable[Collection[str]]
) -> Iterator[tuple[Gathered, ...]]:
    """For each block, by what they take, the rows that are read before it: it is the first that
    takes them."""
    waiting = {each.rows: each for each in gathers}
    for takes in blocks:
        yield tuple(waiting.pop(name) for name in takes if name in waiting)
