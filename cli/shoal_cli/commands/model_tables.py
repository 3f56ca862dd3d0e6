"""Tables of a model and of how it is cut: `shoal inspect` and `shoal partition`."""

from collections.abc import Sequence
from operator import itemgetter

from rich.console import Group, RenderableType
from rich.text import Text

from shoal_cli.commands.columns import Columns, ColumnTable, facts_grid
from shoal_cli.commands.tables import format_count, titled
from shoal_cli.local.sizes import shown_shape
from shoal_planner.profile import Profile
from shoal_protocol.partition import MODEL, Edge, Fragment, PartitionDocument, TensorSpec
from shoal_protocol.units import counted, format_bytes


def partition_table(partition: PartitionDocument) -> RenderableType:
    """One row per fragment, then what crosses each boundary, then the balance."""
    title = f"{counted(len(partition.fragments), 'fragment')} of {partition.model_digest[:19]}"
    swappable = any(each.least_bytes < each.resident_bytes for each in partition.fragments)
    columns: Columns[Fragment] = [
        ("nodes", lambda fragment: str(fragment.nodes)),
        ("weights", lambda fragment: format_bytes(fragment.weight_bytes)),
        ("resident", lambda fragment: format_bytes(fragment.resident_bytes)),
        *[("at least", lambda fragment: format_bytes(fragment.least_bytes))] * swappable,
        ("FLOPs", lambda fragment: format_count(fragment.flops)),
        ("digest", lambda fragment: fragment.digest[:19]),
    ]
    fragments = ColumnTable(
        rows=partition.fragments,
        names=[("#", lambda fragment: str(fragment.index))],
        columns=columns,
        spare=("digest", "FLOPs", "at least", "nodes", "weights"),
        numbers={"#", *(heading for heading, _ in columns)} - {"digest"},
    )
    boundaries: ColumnTable[Edge] = ColumnTable(
        rows=partition.edges,
        names=[
            ("from", lambda edge: "inputs" if edge.producer == MODEL else str(edge.producer)),
            ("to", lambda edge: "outputs" if edge.consumer == MODEL else str(edge.consumer)),
        ],
        columns=[
            ("bytes per item", lambda edge: _size(edge.bytes_per_item)),
            ("tensors", lambda edge: ", ".join(edge.tensors)),
        ],
        spare=("tensors",),
        texts=("tensors",),
        wrap=True,
    )
    return Group(
        *(titled(title, fragments), Text()),
        *(titled("Boundaries", boundaries), Text()),
        Text(balance_line(partition.fragments)),
    )


def inspection_table(name: str, profile: Profile) -> RenderableType:
    """What a model is, and what it takes and gives."""
    facts = [
        ("digest", profile.digest),
        ("size", format_bytes(profile.size_bytes)),
        ("parameters", format_count(profile.parameters)),
        ("opset", str(profile.opset)),
        ("nodes", str(len(profile.nodes))),
        ("FLOPs per item", format_count(profile.flops)),
    ]
    tensors: ColumnTable[tuple[str, TensorSpec]] = ColumnTable(
        rows=[
            *(("input", each) for each in profile.inputs),
            *(("output", each) for each in profile.outputs),
        ],
        names=[("", itemgetter(0)), ("name", lambda row: row[1].name)],
        columns=[
            ("type", lambda row: row[1].dtype),
            ("shape", lambda row: shown_shape(row[1])),
        ],
        spare=("shape",),
        texts=("type", "shape"),
        wrap=True,
    )
    return Group(titled(name, facts_grid(facts)), Text(), titled("Tensors", tensors))


def balance_line(fragments: Sequence[Fragment]) -> str:
    """How even a cut is: the largest fragment against the mean, 1.00 being perfect."""
    parts = [f"largest fragment {format_bytes(max(f.resident_bytes for f in fragments))} resident"]
    parts.append(f"weights {_ratio([f.weight_bytes for f in fragments])} of the mean")
    flops = [f.flops for f in fragments]
    known = [count for count in flops if count is not None]
    if len(known) == len(flops):
        parts.append(f"FLOPs {_ratio(known)} of the mean")
    return "balance: " + ", ".join(parts)


def _size(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else format_bytes(size_bytes)


def _ratio(sizes: Sequence[int]) -> str:
    mean = sum(sizes) / len(sizes)
    return f"{max(sizes) / mean:.2f}x" if mean else "1.00x"
