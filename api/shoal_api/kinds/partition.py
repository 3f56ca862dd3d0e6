"""Partition: how a Model is cut into fragments."""

from typing import Final

from shoal_api.fields import (
    COLUMNS,
    COUNT,
    DIGEST,
    FRAGMENT,
    MAX_FRAGMENTS,
    REFERENCE,
    TENSOR_NAME,
    Condition,
    Reference,
    Resource,
    Status,
    aspects,
    bytes_of,
    optional,
    printed,
    records,
    size,
)
from shoal_api.rules import at_most_one, immutable
from shoal_api.schema import Object, member, record
from shoal_api.shapes import Choice, Items, Whole
from shoal_protocol.choices import Cutting
from shoal_protocol.seen_sizes import MOST_AXES, MOST_TENSORS
from shoal_protocol.units import Bytes


@record()
class OutgrownFragment:
    """A fragment that took more than any device of its pool has."""

    fragment: int = member(FRAGMENT, "Its place in topological order.", example=3)
    need_bytes: int = member(
        COUNT, "What it was measured to take, at least.", unit="bytes", example=73400320
    )


@record()
class SeenShape:
    """How large items were seen to have a tensor inside the model."""

    tensor: str = member(TENSOR_NAME, "The tensor's name.", example="frames_out")
    shape: tuple[int, ...] = member(
        Items(of=Whole(minimum=0, maximum=1 << 40), max_items=MOST_AXES),
        "Its shape, along each axis the largest.",
        example=[1, 256, 2260],
    )


SEEN: Final = Items(of=Object(SeenShape), max_items=MOST_TENSORS, key="tensor")
OUTGROWN: Final = Items(of=Object(OutgrownFragment), max_items=MAX_FRAGMENTS)


@record(
    at_most_one("fragments", "maxFragmentSize", "cuts", "cutting"),
    at_most_one("cutting", "outgrown"),
    at_most_one("cutting", "seen"),
    immutable("modelRef"),
)
class PartitionSpec:
    """How a model is cut; with none of fragments, maxFragmentSize, cuts and cutting, into as few
    fragments as the smallest device holds, anew between jobs where budgets have changed."""

    model_ref: Reference = member(
        REFERENCE, "The Model to cut. Cannot be changed.", example={"name": "ppocr-rec"}
    )
    fragments: int | None = member(
        Whole(minimum=1, maximum=MAX_FRAGMENTS),
        "So many fragments, as even as the graph allows.",
        default=None,
        example=3,
    )
    max_fragment_size: Bytes | None = member(
        bytes_of("1Mi", "16Ti", "16Mi"),
        "As few fragments as possible, none of which needs more memory than this.",
        unit="bytes",
        default=None,
        example="16Mi",
    )
    cuts: tuple[str, ...] | None = member(
        Items(of=TENSOR_NAME, max_items=MAX_FRAGMENTS - 1, min_items=1),
        "Cut where these tensors are made.",
        default=None,
        example=["layer2_out", "layer3_out"],
    )
    cutting: Cutting | None = member(
        Choice(Cutting),
        "Planned: the first Placement of this Partition chooses the cuts together with the "
        "devices, for its objective; others place the fragments that this makes. A cut that is "
        "finished stays unless another one gains more than a tenth.",
        default=None,
        example="Planned",
    )
    seen: tuple[SeenShape, ...] = member(
        SEEN,
        "The cut is for these, where sizes follow from what inputs hold and not from their shapes. "
        "A job writes them into the Partition that it has made, when items have shown them and "
        "taken more memory than devices have.",
        default=[],
        example=[{"tensor": "frames_out", "shape": [1, 256, 2260]}],
    )
    outgrown: tuple[OutgrownFragment, ...] = member(
        OUTGROWN,
        "Fragments that are divided where that helps most, one after the other: in two, a part of "
        "such a one in four. Each is counted in the cut that those before it have made. "
        "A job writes them into the Partition that it has made, when devices have measured that a "
        "fragment takes more than they have.",
        default=[],
        example=[{"fragment": 3, "needBytes": 73400320}],
    )


@record()
class FragmentStatus:
    """One fragment."""

    index: int = member(FRAGMENT, "Its place in topological order.", example=0)
    digest: str = member(DIGEST, "Its name in the fragment store.", example="sha256:" + "0c1f" * 16)
    weight_bytes: int = member(COUNT, "Its weights.", unit="bytes", example=3565158)
    resident_bytes: int = member(
        COUNT, "What a device needs above its floor to run it.", unit="bytes", example=14680064
    )
    least_bytes: int | None = size("What a device needs at least, to run it in blocks.", 4194304)
    flops: int | None = member(
        COUNT,
        "Operations per item; absent where a shape is unknown.",
        default=None,
        example=280000000,
    )
    inputs: tuple[str, ...] = member(
        Items(of=TENSOR_NAME, max_items=256), "Tensors that it takes.", default=[], example=["x"]
    )
    outputs: tuple[str, ...] = member(
        Items(of=TENSOR_NAME, max_items=256),
        "Tensors that it makes.",
        default=[],
        example=["layer2_out"],
    )
    successors: tuple[int, ...] = member(
        Items(of=FRAGMENT, max_items=MAX_FRAGMENTS),
        "Fragments that take its outputs.",
        default=[],
        example=[1],
    )


@record()
class PartitionColumns:
    """A Partition in one line."""

    fragments: str | None = printed("How many fragments.", "3")
    largest: str | None = printed("What the largest fragment needs on a device.", "14 MiB")


@record()
class PartitionStatus(Status):
    """The fragments that were cut."""

    conditions: tuple[Condition, ...] = aspects("Cut, Ready.")
    fragments: tuple[FragmentStatus, ...] = records(FragmentStatus, MAX_FRAGMENTS, "The fragments.")
    boundary_bytes: int | None = size(
        "What one item sends between fragments; absent where a shape is unknown.", 1474560
    )
    columns: PartitionColumns | None = optional(PartitionColumns, COLUMNS)


@record()
class Partition(Resource):
    """A Model cut into fragments. A job makes one when it names a Model only."""

    spec: PartitionSpec = member(Object(PartitionSpec), "What is wanted.")
    status: PartitionStatus | None = optional(PartitionStatus, "What is.")
