"""What crosses the ends of spans of consecutive fragments, for each item."""

from functools import cached_property
from typing import NamedTuple

from shoal_protocol.frame_sizes import INLINE_BYTES
from shoal_protocol.partition import MODEL, Edge, PartitionDocument


class Border(NamedTuple):
    """Bytes into a span and out of it, where None says that nothing crosses there; and in how many
    transfers. An edge of unknown size counts as empty."""

    coming: int | None
    going: int | None
    transfers: int

    @property
    def size_bytes(self) -> int:
        return (self.coming or 0) + (self.going or 0)


class Borders:
    """Of all spans of a document."""

    def __init__(self, document: PartitionDocument) -> None:
        self._document = document
        self._from: dict[int, list[Border]] = {}

    def of(self, start: int, end: int) -> Border:
        """Of the fragments `[start, end)`."""
        if start not in self._from:
            self._from[start] = self._starting(start)
        return self._from[start][end - start - 1]

    @cached_property
    def into(self) -> list[tuple[Edge, ...]]:
        """The edges into each fragment."""
        return [self._document.into(fragment.index) for fragment in self._document.fragments]

    @cached_property
    def out_of(self) -> list[tuple[Edge, ...]]:
        """The edges out of each fragment."""
        return [self._document.out_of(fragment.index) for fragment in self._document.fragments]

    def _starting(self, start: int) -> list[Border]:
        """For the spans that begin at `start`, by end: one more fragment turns the edges into it
        from border into inside, or adds to what comes in; its own edges go out."""
        coming: dict[Edge, int] = {}
        going: dict[Edge, int] = {}
        borders: list[Border] = []
        for index in range(start, len(self._document.fragments)):
            for edge in self.into[index]:
                if edge.producer < start:
                    coming[edge] = edge.bytes_per_item or 0
                else:
                    del going[edge]
            going.update((edge, edge.bytes_per_item or 0) for edge in self.out_of[index])
            borders.append(
                Border(
                    sum(coming.values()) if coming else None,
                    sum(going.values()) if going else None,
                    sum(map(_is_transfer, (*coming, *going))),
                )
            )
        return borders


def _is_transfer(edge: Edge) -> bool:
    """Small inputs and results of a model travel with the instruction, and with its reply."""
    return MODEL not in {edge.producer, edge.consumer} or (edge.bytes_per_item or 0) > INLINE_BYTES
