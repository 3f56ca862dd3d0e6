"""What an item with an itinerary has with it: at each stage all that this one or a later one takes,
and the results that were made. A function of the partition document alone."""

from collections.abc import Iterator
from typing import Final

from shoal_protocol.items import ITEM_BYTES
from shoal_protocol.partition import MODEL, Edge, PartitionDocument

_STAGES: Final = 16
_UNSUITABLE: Final = {"string", "bfloat16", "undefined"}
"""Types that one frame cannot carry as they are."""


def carried(document: PartitionDocument) -> tuple[tuple[str, ...], ...]:
    """Names of the tensors with which an item enters each stage; at the end, the results."""
    return tuple(
        tuple(dict.fromkeys(name for edge in _edges_at(document, stage) for name in edge.tensors))
        for stage in range(len(document.fragments) + 1)
    )


def is_light(document: PartitionDocument) -> bool:
    """Whether items may have an itinerary: what they have with them is little, and known."""
    if len(document.fragments) > _STAGES or _has_namesakes(document):
        return False
    specs = [*document.inputs, *(spec for each in document.fragments for spec in each.outputs)]
    if any(spec.dtype in _UNSUITABLE for spec in specs):
        return False
    for stage in range(len(document.fragments) + 1):
        sizes = [edge.bytes_per_item for edge in _edges_at(document, stage)]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes) or sum(known) > ITEM_BYTES:
            return False
    return True


def _edges_at(document: PartitionDocument, stage: int) -> Iterator[Edge]:
    """The edges from before a stage to it or behind it."""
    for edge in document.edges:
        behind = edge.consumer >= stage or (edge.consumer == MODEL and edge.producer != MODEL)
        if edge.producer < stage and behind:
            yield edge


def _has_namesakes(document: PartitionDocument) -> bool:
    """Whether two stages make tensors of one name."""
    makers: dict[str, int] = {}
    return any(
        makers.setdefault(name, edge.producer) != edge.producer
        for edge in document.edges
        for name in edge.tensors
    )
